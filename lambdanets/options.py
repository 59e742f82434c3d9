"""Options that several commands share, and checks of their values."""

from pathlib import Path
from typing import Any

import torch
import tyro

from lambdanets.typed import LARGEST_IMAGE

LARGEST = 1_000_000_000  # limit for numbers of a configuration without a range of their own
BENCHES = Path("runs/bench")  # default folder of measurements; the documents do not use it


def optional(metavar: str) -> Any:
    """Return the tyro argument of an option whose help describes its default, instead of printing "None"."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


def chosen_device(name: str | None) -> torch.device:
    """Return the device with this name; without a name the GPU if there is one, otherwise the CPU."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}; use cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported: use cpu, cuda or cuda:1")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: torch finds no CUDA GPU on this machine; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r}: torch finds {torch.cuda.device_count()} CUDA GPUs; the first is cuda:0")
    return device


def check_numbers(config: Any, where: str = "", **ranges: tuple[float, float]) -> None:
    """Raise a ValueError if a number of a dataclass (also inside a tuple) is out of range, infinite or NaN.

    Args:
        config: the dataclass.
        where: prefix of the field names in messages, such as "schedule.".
        ranges: smallest and largest value by field name; -LARGEST and LARGEST for other fields.
    """
    ranges = {"seed": (-(2**63), 2**63 - 1)} | ranges
    for name, given in vars(config).items():
        low, high = ranges.get(name, (-LARGEST, LARGEST))
        for number in given if isinstance(given, tuple) else (given,):
            if isinstance(number, int | float) and not isinstance(number, bool) and not low <= number <= high:
                raise ValueError(f"{where}{name} must be between {low:,} and {high:,}, got {str(number)[:40]}")


def check_image_size(size: int | None, name: str) -> None:
    """Raise a ValueError if an image size is too large for any machine; `name` is the option for the message."""
    if size is not None and not 1 <= size <= LARGEST_IMAGE:
        gigabytes = 12 * size**2 // 10**9
        more = f": one image of that size takes {gigabytes:,} GB in float32" if 0 < gigabytes < 10**6 else ""
        raise ValueError(f"{name} must be between 1 and {LARGEST_IMAGE:,} pixels, got {str(size)[:40]}{more}")


def check_positive(**numbers: float | None) -> None:
    """Raise a ValueError if a number is not None and not above 0; the keywords are the names of the options."""
    for name, number in numbers.items():
        if number is not None and number <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be more than 0, got {number:g}")

"""What the options of several commands share."""

from pathlib import Path
from typing import Any

import torch
import tyro

from lambdanets.typed import LARGEST_IMAGE

LARGEST = 1_000_000_000  # any number of a configuration that has no range of its own
BENCHES = Path("runs/bench")  # measurements, unless --output says where; the documents are made from none of these


def optional(metavar: str) -> Any:
    """For an option whose default depends on others: its help says what the default is, "None" would not."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


def chosen_device(name: str | None) -> torch.device:
    """The device of that name; without a name a GPU if there is one."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}; use cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported: use cpu, cuda or cuda:1")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: torch finds no CUDA GPU here; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {name!r}: torch finds {torch.cuda.device_count()} CUDA GPUs here, cuda:0 is the first"
        )
    return device


def check_numbers(config: Any, where: str = "", **ranges: tuple[float, float]) -> None:
    """Refuse numbers of a dataclass, also in tuples, that are outside of their range, infinite, or NaN.

    Args:
        config: the dataclass.
        where: what precedes the names of its fields in a message: "schedule.".
        ranges: least and largest value by the name of the field; without one it is -LARGEST and LARGEST.
    """
    ranges = {"seed": (-(2**63), 2**63 - 1)} | ranges
    for name, given in vars(config).items():
        low, high = ranges.get(name, (-LARGEST, LARGEST))
        for number in given if isinstance(given, tuple) else (given,):
            if isinstance(number, int | float) and not isinstance(number, bool) and not low <= number <= high:
                raise ValueError(f"{where}{name} is between {low:,} and {high:,}, not {str(number)[:40]}")


def check_image_size(size: int | None, name: str) -> None:
    """Refuse sizes of images that no machine has memory for; `name` is the option."""
    if size is not None and not 1 <= size <= LARGEST_IMAGE:
        gigabytes = 12 * size**2 // 10**9
        more = f": one image of that size takes {gigabytes:,} GB in float32" if 0 < gigabytes < 10**6 else ""
        raise ValueError(f"{name} is between 1 and {LARGEST_IMAGE:,} pixels, not {str(size)[:40]}{more}")


def check_positive(**numbers: float | None) -> None:
    """Refuses numbers that are given and not above 0; they have the names of their options."""
    for name, number in numbers.items():
        if number is not None and number <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be more than 0, got {number:g}")

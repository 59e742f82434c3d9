"""How training images reach the network: read by workers, or resident on the training device."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lambdanets.data.cache import available_memory
from lambdanets.options import chosen_device
from lambdanets.runs import CONFIG
from lambdanets.train.identity import read_identity

if TYPE_CHECKING:
    from lambdanets.train.config import TrainConfig

DEVICE_SHARE = 0.25  # of the free memory of a GPU: the most that "auto" gives to images
DEVICE = "device"  # in run.json, where a run keeps its images on the device


@dataclass(frozen=True)
class DataPath:
    """The choice, and why, for the log."""

    on_device: bool
    note: str = ""  # where there was nothing to choose


def choose_data_path(config: "TrainConfig", estimate: Callable[[], int], why_not: str | None) -> DataPath:
    """Whether images are resident on the device.

    A run that has begun keeps its choice, since the two ways draw other random numbers.

    Args:
        config: `data.cache` says "auto", or what to do.
        estimate: bytes of the decoded images, called only where they matter.
        why_not: why this task cannot have resident images, if so.
    """
    wanted = config.data.cache
    begun = path_of_run(config.out)
    if wanted == DEVICE and why_not:
        raise ValueError(f"data.cache device is not possible, because {why_not}: use --data.cache auto")
    if begun is not None and (wanted == "auto" or (wanted == DEVICE) == begun):
        return DataPath(begun, "Images are kept on the device, as this run began" if begun else "")
    if begun is not None:
        how = "kept its images on the device" if begun else "read its images through workers"
        raise ValueError(
            f"the run in {config.out} {how}, which data.cache {wanted} changes: use --data.cache auto, or another --out"
        )
    device = chosen_device(config.device)
    if wanted not in ("auto", DEVICE) or (wanted == "auto" and device.type != "cuda"):
        return DataPath(False)
    if why_not:
        return DataPath(False, f"Workers read the images, because {why_not}")
    needed, free = estimate(), free_memory(device)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # each decodes all images
    host = available_memory()
    share = DEVICE_SHARE if wanted == "auto" else 1.0
    takes = f"The decoded images take about {gigabytes(needed)}"
    if needed > share * free:
        reason = f"{takes}, more than {share:.0%} of the {gigabytes(free)} of free memory on the device"
    elif host is not None and processes * needed > host:
        times = f" in each of {processes} processes" if processes > 1 else ""
        reason = f"{takes}{times}, more than the {gigabytes(host)} of free memory of this machine"
    else:
        return DataPath(True, f"{takes} and are kept on the device, where batches are augmented")
    if wanted == DEVICE:
        raise ValueError(f"{reason}: use --data.cache none")
    return DataPath(False, f"Workers read the images: {reason[0].lower()}{reason[1:]}")


def path_of_run(folder: Path) -> bool | None:
    """Whether the run in a folder keeps its images on the device; None if there is no run."""
    if not (folder / CONFIG).is_file():
        return None
    identity = read_identity(folder)
    return identity is not None and identity["data"].get("data_path") == DEVICE


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device."""
    if device.type == "cuda":
        index = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
        return torch.cuda.mem_get_info(index)[0]
    return available_memory() or 2**62


def gigabytes(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"

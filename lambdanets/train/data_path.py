"""Choice of the data path: images are read by workers, or kept in the memory of the training device."""

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

DEVICE_SHARE = 0.25  # fraction of the free memory of a GPU that "auto" may use for images
DEVICE = "device"  # key in run.json: whether the run keeps its images on the device


@dataclass(frozen=True)
class DataPath:
    """The choice and its reason, for the log."""

    on_device: bool
    note: str = ""  # empty if there was no choice


def choose_data_path(config: "TrainConfig", estimate: Callable[[], int], why_not: str | None) -> DataPath:
    """Choose whether images are kept in the memory of the device.

    A resumed run keeps its choice, since the two data paths draw different random numbers.

    Args:
        config: `data.cache` is "auto" or the required choice.
        estimate: returns the size of the decoded images in bytes; called only if needed.
        why_not: the reason why this task cannot keep images on the device, if any.
    """
    wanted = config.data.cache
    begun = path_of_run(config.out)
    if wanted == DEVICE and why_not:
        raise ValueError(f"data.cache device is not possible, because {why_not}: use --data.cache auto")
    if begun is not None and (wanted == "auto" or (wanted == DEVICE) == begun):
        return DataPath(begun, "Images are kept on the device, as at the start of this run" if begun else "")
    if begun is not None:
        how = "keeps its images on the device" if begun else "reads its images with workers"
        raise ValueError(
            f"the run in {config.out} {how}, which data.cache {wanted} would change: use --data.cache auto, or another "
            "--out"
        )
    device = chosen_device(config.device)
    if wanted not in ("auto", DEVICE) or (wanted == "auto" and device.type != "cuda"):
        return DataPath(False)
    if why_not:
        return DataPath(False, f"Workers read the images, because {why_not}")
    needed, free = estimate(), free_memory(device)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # each process decodes all images
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
    """Return whether the run in a folder keeps its images on the device; None if there is no run."""
    if not (folder / CONFIG).is_file():
        return None
    identity = read_identity(folder)
    return identity is not None and identity["data"].get("data_path") == DEVICE


def free_memory(device: torch.device) -> int:
    """Return the free memory of a device in bytes."""
    if device.type == "cuda":
        index = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
        return torch.cuda.mem_get_info(index)[0]
    return available_memory() or 2**62


def gigabytes(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"

"""Identity of a run: its id, its classes and labels, and equal settings on all of its processes."""

import hashlib
import json
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from lambdanets.files import read_object, write_json
from lambdanets.models.stored import shorten
from lambdanets.runs import RUN
from lambdanets.train.config import RunConfig
from lambdanets.train.distributed import World
from lambdanets.train.task import Task
from lambdanets.typed import to_json

WORDS = {"examples": "training examples", "images": "training images", "objects": "objects", "bytes": "bytes of text"}
TEACHER = "teacher"  # hashes of weights
EVALUATED = " images"  # after the name of a split


def write_identity(folder: Path, task: Task) -> str:
    """Write run.json with a new random id and the identity of the training data; return the id."""
    identity = {"id": secrets.token_hex(8), "data": to_json(task.identity())}
    write_json(folder / RUN, identity, indent=None)
    return identity["id"]


def read_identity(folder: Path) -> dict[str, Any] | None:
    """Return the content of run.json; None for older runs without it."""
    path = folder / RUN
    if not path.exists():
        return None
    remedy = "restore it, or remove it to resume without checking the classes and labels"
    try:
        found = read_object(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}: {remedy}") from error
    if not isinstance(found.get("id"), str) or not isinstance(found.get("data"), dict):
        raise ValueError(f"{path} does not contain the id and data of a run: {remedy}")
    return found


def labels_digest(*arrays: np.ndarray) -> str:
    """Return a digest of arrays that does not depend on the machine."""
    found = hashlib.blake2b(digest_size=16)
    for array in arrays:
        found.update(np.ascontiguousarray(array).astype("<i8" if array.dtype.kind in "iub" else "<f8").tobytes())
    return found.hexdigest()


def names_digest(names: Iterable[str]) -> str:
    """Return a digest of file names without folders, archives and extensions, since the images may move."""
    stems = (re.split(r"[/:]", name)[-1].partition(".")[0] for name in names)
    return hashlib.blake2b("\n".join(stems).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def data_change(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Describe the first difference between the training data of two identities; None if they are equal."""
    for key in before:
        was, is_now = before[key], now.get(key)
        if was == is_now:
            continue
        if key == TEACHER:
            return "the weights of its teacher changed"
        if isinstance(was, list) and isinstance(is_now, list):
            return class_change(was, is_now)
        if key in WORDS:
            return f"there were {was} {WORDS[key]}, now there are {is_now}"
        return f"the {key} of the training images changed, or their order"
    return None


def class_change(before: list[Any], now: list[Any]) -> str:
    gone, new = ([name for name in one if name not in other] for one, other in ((before, now), (now, before)))
    if gone or new:
        return f"the {len(before)} classes are now {len(now)}; removed: {shorten(gone)}; added: {shorten(new)}"
    number = next(i for i, (was, is_now) in enumerate(zip(before, now, strict=False)) if was != is_now)
    return f"the order of the classes changed: class {number} was {before[number]!r} and is {now[number]!r}"


def check_processes(world: World, task: Task, config: RunConfig) -> None:
    """Raise ValueError on all processes if their settings, numbers of images or classes differ.

    This includes the numbers of evaluated images, because each process evaluates a part of them by position.
    """
    if world.size == 1:
        return
    mine = {key: value for key, value in flat(to_json(config)).items() if key not in config.PER_MACHINE}
    data = {"examples": task.examples, **to_json(task.identity())}
    data |= {f"{split}{EVALUATED}": images for split, images in task.describe().get("evaluated", {}).items()}
    mine |= {f"data: {key}": digest(value) if isinstance(value, list) else value for key, value in data.items()}
    everyone = world.gather(mine)

    def compare() -> None:
        for rank, theirs in enumerate(everyone):
            for key in mine | theirs:
                if theirs.get(key) != mine.get(key):
                    raise ValueError(process_difference(rank, key, theirs.get(key), mine.get(key)))

    world.on_main(compare)


def process_difference(rank: int, key: str, theirs: Any, mine: Any) -> str:
    name = key.removeprefix("data: ")
    if name == "data_path":
        return (
            f"only one of rank 0 and rank {rank} keeps its images on the device: start all processes with --data.cache "
            f"device, or all with none"
        )
    counted = WORDS.get(name) or (name if name.endswith(EVALUATED) else None)
    if name == key:
        found, remedy = f"rank {rank} has {key} {theirs!r} and rank 0 has {mine!r}", "start all of them with the same"
    elif counted:
        found, remedy = f"rank {rank} has {theirs} {counted} and rank 0 has {mine}", "give all machines the same"
    elif name == TEACHER:
        found, remedy = f"rank {rank} and rank 0 have teachers with different weights", "give all machines the same"
    else:
        found, remedy = (
            f"rank {rank} and rank 0 have different training images (their {name} differ)",
            "give all machines the same",
        )
    what = "settings" if name == key else "teacher" if name == TEACHER else "data"
    return f"{found}: {remedy} {what}"


def digest(values: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).hexdigest()


def flat(data: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten nested settings: {"model": {"name": 1}} becomes {"model.name": 1}."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found

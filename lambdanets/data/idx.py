"""idx files, the format of MNIST and Fashion-MNIST: a few bytes of shape, then the numbers; gzipped or not."""

import gzip
import math
from pathlib import Path

import numpy as np

from lambdanets.data.source import ArraySource, no_split

PREFIXES = {"train": "train", "validation": "t10k", "test": "t10k"}
UNSIGNED_BYTE = 8
MAX_BYTES = 4 * 2**30


def idx_files(folder: Path, split: str) -> tuple[Path, Path] | None:
    """Images and labels of a split, if the folder holds them."""
    found = []
    for kind in ("images", "labels"):
        paths = [path for path in folder.glob(f"{PREFIXES[split]}-{kind}*idx?-ubyte*") if path.is_file()]
        if not paths:
            return None
        found.append(min(paths, key=lambda path: (path.suffix == ".gz", path.name)))
    return found[0], found[1]


def read_idx(path: Path) -> np.ndarray:
    """The array of an idx file of unsigned bytes."""
    opened = gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")  # noqa: SIM115
    with opened as file:
        try:
            magic = file.read(4)
            if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] != UNSIGNED_BYTE or not 1 <= magic[3] <= 4:
                raise ValueError(f"{path} is not an idx file of bytes: it starts with {magic!r}")
            shape = np.frombuffer(file.read(4 * magic[3]), ">u4").astype(int).tolist()
            if len(shape) < magic[3] or math.prod(shape) > MAX_BYTES:
                raise ValueError(f"{path}: a shape of {shape} is incomplete or more than {MAX_BYTES:,} bytes")
            data = file.read(math.prod(shape) + 1)
        except (EOFError, gzip.BadGzipFile, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
    if len(data) != math.prod(shape):
        raise ValueError(f"{path} says {math.prod(shape):,} bytes of data and has {len(data):,} or more")
    return np.frombuffer(data, np.uint8).reshape(shape)


def open_idx(folder: Path, split: str) -> ArraySource:
    files = idx_files(folder, split)
    if files is None:
        raise no_split(folder, split, [name for name in PREFIXES if idx_files(folder, name)])
    images, labels = read_idx(files[0]), read_idx(files[1])
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3) or labels.ndim != 1:
        raise ValueError(
            f"{files[0]} has shape {images.shape} and {files[1]} {labels.shape}: expected images and labels"
        )
    classes = int(labels.max(initial=0)) + 1
    other = idx_files(folder, "train") if split != "train" else None
    if other:
        classes = max(classes, int(read_idx(other[1]).max(initial=0)) + 1)
    return ArraySource(images, labels, [str(i) for i in range(classes)], f"{folder.name}/{split}")

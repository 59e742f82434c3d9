"""idx files, the format of MNIST and Fashion-MNIST: a header with the shape, then the values; gzipped or not."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from lambdanets.data.decode import LIMITS
from lambdanets.data.source import ArraySource, no_split
from lambdanets.data.tars import EXPANSION

PREFIXES = {"train": "train", "validation": "t10k", "test": "t10k"}
UNSIGNED_BYTE = 8
MAX_BYTES = 4 * 2**30
BLOCK = 2**24


def idx_files(folder: Path, split: str) -> tuple[Path, Path] | None:
    """Return the files with images and labels of a split; None if the folder does not contain them."""
    found = []
    for kind in ("images", "labels"):
        paths = [path for path in folder.glob(f"{PREFIXES[split]}-{kind}*idx?-ubyte*") if path.is_file()]
        if not paths:
            return None
        found.append(min(paths, key=lambda path: (path.suffix == ".gz", path.name)))
    return found[0], found[1]


def read_idx(path: Path) -> np.ndarray:
    """Read the array of an idx file of unsigned bytes."""
    packed = path.suffix == ".gz"
    most = min(MAX_BYTES, EXPANSION * path.stat().st_size + 2**26) if packed else MAX_BYTES
    opened = gzip.open(path, "rb") if packed else open(path, "rb")  # noqa: SIM115
    with opened as file:
        try:
            magic = file.read(4)
            if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] != UNSIGNED_BYTE or not 1 <= magic[3] <= 4:
                raise ValueError(f"{path} is not an idx file of unsigned bytes: it starts with {magic!r}")
            header = file.read(4 * magic[3])
            shape = struct.unpack(f">{len(header) // 4}I", header[: len(header) // 4 * 4])
            size = math.prod(shape)
            if len(shape) < magic[3] or not 0 < size <= most or math.prod(shape[1:3]) > LIMITS.pixels:
                raise ValueError(
                    f"{path}: the shape {list(shape)} is incomplete, empty or too large; at most {most:,} bytes and "
                    f"{LIMITS.pixels:,} pixels per image are allowed"
                )
            data = bytearray()  # grows with the data that is read, because the header is not trusted
            while len(data) <= size and (block := file.read(min(BLOCK, size + 1 - len(data)))):
                data += block
        except (EOFError, OSError, zlib.error) as error:  # a BadGzipFile is an OSError
            raise ValueError(f"{path} cannot be read: {error}") from error
    if len(data) != size:
        there = f"{len(data):,}" if len(data) < size else "more"
        raise ValueError(f"{path} has {there} bytes of data, but its header specifies {size:,}")
    array = np.frombuffer(data, np.uint8).reshape(shape)
    array.flags.writeable = False
    return array


def open_idx(folder: Path, split: str) -> ArraySource:
    files = idx_files(folder, split)
    if files is None:
        raise no_split(folder, split, [name for name in PREFIXES if idx_files(folder, name)])
    images, labels = read_idx(files[0]), read_idx(files[1])
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3) or labels.ndim != 1:
        raise ValueError(
            f"{files[0]} has shape {images.shape} and {files[1]} has shape {labels.shape}; expected images [N, H, W] "
            f"or [N, H, W, 3] and labels [N]"
        )
    classes = int(labels.max(initial=0)) + 1
    other = idx_files(folder, "train") if split != "train" else None
    if other:
        classes = max(classes, int(read_idx(other[1]).max(initial=0)) + 1)
    return ArraySource(images, labels, [str(i) for i in range(classes)], f"{folder.name}/{split}")

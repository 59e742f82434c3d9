"""Write a source as tar shards: few large files, which are faster to copy and to read from network storage."""

import io
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from lambdanets.data import order
from lambdanets.data.cache import processors
from lambdanets.data.decode import BrokenImageError, load, open_image, upright
from lambdanets.data.guard import Hashes
from lambdanets.data.shards import SHARDS
from lambdanets.data.source import Source
from lambdanets.files import whole_file, write_text

PREFIXES = {"train": "train", "validation": "val", "test": "test"}
SUFFIXES = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "BMP": "bmp"}


@dataclass(frozen=True)
class Packing:
    """What `pack` does to the images of a source."""

    leave_out: tuple[str, ...] = ()
    """Patterns of names that are not packed, such as n03417042/*."""
    guard: Hashes | None = None
    """Images to exclude, such as those of a validation set, together with their near-duplicates."""
    side: int | None = None
    """Reduce images whose shorter side is longer than this many pixels, and store them as JPEG."""
    quality: int = 90
    """JPEG quality of reduced images, 1 to 95."""

    def packed(self, source: Source, index: int) -> "tuple[bytes, str] | LeftOut":
        """Return the bytes of an image with their file extension, or why it is left out."""
        name = source.name(index)
        if any(fnmatchcase(name, pattern) for pattern in self.leave_out):
            return LeftOut(index, name, "by name", "")
        try:
            data = source.read(index)
            image = Image.fromarray(data) if isinstance(data, np.ndarray) else open_image(data)
            if self.guard is not None and (leak := self.guard.leak(data, image)) is not None:
                return LeftOut(index, name, "guarded", f"{leak[0]}: {leak[1]}")
            if self.side is not None and min(image.size) > self.side:
                return reduced(image, self.side, self.quality), "jpg"
            return encoded(data)
        except (BrokenImageError, OSError) as error:
            return LeftOut(index, name, "unreadable", str(error))


@dataclass(frozen=True)
class LeftOut:
    """An image that is not packed."""

    index: int
    name: str
    why: Literal["by name", "guarded", "unreadable"]
    reason: str


@dataclass(frozen=True)
class Packed:
    """The shards that `pack` wrote, and the images that are not in them."""

    shards: tuple[Path, ...]
    images: int
    left_out: tuple[LeftOut, ...]


def check_target(folder: Path, class_names: tuple[str, ...]) -> None:
    if folder.is_dir() and any(path.name.endswith(SHARDS) for path in folder.iterdir()):
        raise ValueError(f"{folder} already contains shards: choose another folder")
    wrong = next((name for name in class_names if any(c in name for c in "\t\r\n") or not name.strip()), None)
    if wrong is not None:
        raise ValueError(f"the class name {wrong!r} cannot be written to a line of classes.txt: rename its folder")


def pack(
    source: Source,
    folder: Path,
    *,
    split: str = "train",
    images_per_shard: int = 1000,
    seed: int = 0,
    packing: Packing = Packing(),
    done: Callable[[int], object] = lambda images: None,
) -> Packed:
    """Write `folder`/train-00000.tar, ... and classes.txt.

    Images are shuffled once, so that every shard holds all classes. Their bytes stay as they are unless they are
    reduced in size. Images that are unreadable, excluded by name or guarded are left out and returned.
    """
    if images_per_shard < 1:
        raise ValueError(f"images_per_shard must be at least 1, got {images_per_shard}")
    indices = order.permutation(len(source), seed, 0)
    shards: list[Path] = []
    left_out: list[LeftOut] = []
    with ThreadPoolExecutor(processors()) as pool:  # Pillow decodes and encodes without the interpreter lock
        for start in range(0, len(indices), images_per_shard):
            path = folder / f"{PREFIXES[split]}-{start // images_per_shard:05d}.tar"
            chosen = [int(index) for index in indices[start : start + images_per_shard]]
            with whole_file(path) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                found = pool.map(lambda index: packing.packed(source, index), chosen)
                for number, (index, one) in enumerate(zip(chosen, found, strict=True), start):
                    if isinstance(one, LeftOut):
                        left_out.append(one)
                        continue
                    data, suffix = one
                    add(tar, f"{number:08d}.{suffix}", data)
                    if source.labels[index] >= 0:
                        add(tar, f"{number:08d}.cls", str(source.labels[index]).encode())
            shards.append(path)
            done(start + len(chosen))
    if source.class_names:
        write_text(folder / "classes.txt", "".join(f"{i}\t{name}\n" for i, name in enumerate(source.class_names)))
    return Packed(tuple(shards), len(indices) - len(left_out), tuple(left_out))


def reduced(image: Image.Image, side: int, quality: int) -> bytes:
    """Return a JPEG of an image whose shorter side has `side` pixels; the EXIF orientation is applied."""
    image = load(upright(image), "RGB")
    scale = side / min(image.size)
    width, height = (max(1, round(length * scale)) for length in image.size)
    buffer = io.BytesIO()
    image.resize((width, height), Image.Resampling.LANCZOS).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def encoded(data: bytes | np.ndarray) -> tuple[bytes, str]:
    """Return the encoded image and the extension of its actual format."""
    if isinstance(data, np.ndarray):
        buffer = io.BytesIO()
        Image.fromarray(data).save(buffer, "PNG")
        return buffer.getvalue(), "png"
    kind = str(open_image(data).format)
    return data, SUFFIXES.get(kind, kind.lower())


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)  # without owner and time, so that the same images give the same shard
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))

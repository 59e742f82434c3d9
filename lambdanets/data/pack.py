"""Any source as tar shards: few large files, which network disks and copying like."""

import io
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from lambdanets.data import order
from lambdanets.data.broken import Broken
from lambdanets.data.decode import BrokenImageError, open_image
from lambdanets.data.shards import SHARDS
from lambdanets.data.source import Source
from lambdanets.files import whole_file, write_text

PREFIXES = {"train": "train", "validation": "val", "test": "test"}
SUFFIXES = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "BMP": "bmp"}


@dataclass(frozen=True)
class Packed:
    """What was written."""

    shards: tuple[Path, ...]
    images: int
    broken: tuple[Broken, ...]  # left out


def check_target(folder: Path, class_names: tuple[str, ...]) -> None:
    if folder.is_dir() and any(path.name.endswith(SHARDS) for path in folder.iterdir()):
        raise ValueError(f"{folder} has shards already: choose another folder")
    wrong = next((name for name in class_names if any(c in name for c in "\t\r\n") or not name.strip()), None)
    if wrong is not None:
        raise ValueError(f"the class name {wrong!r} does not fit on a line of classes.txt: rename its folder")


def pack(
    source: Source,
    folder: Path,
    *,
    split: str = "train",
    images_per_shard: int = 1000,
    seed: int = 0,
    done: Callable[[int], object] = lambda images: None,
) -> Packed:
    """Writes `folder`/train-00000.tar, ... and classes.txt. The bytes stay as they are; the order is shuffled once, so
    that every shard holds all classes. Unreadable images are left out and returned."""
    if images_per_shard < 1:
        raise ValueError(f"a shard holds at least one image, not {images_per_shard}")
    indices = order.permutation(len(source), seed, 0)
    shards: list[Path] = []
    broken: list[Broken] = []
    for start in range(0, len(indices), images_per_shard):
        path = folder / f"{PREFIXES[split]}-{start // images_per_shard:05d}.tar"
        with whole_file(path) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for number, index in enumerate(indices[start : start + images_per_shard], start):
                try:
                    data, suffix = encoded(source.read(int(index)))
                except (BrokenImageError, OSError) as error:
                    broken.append(Broken(int(index), source.name(int(index)), str(error)))
                    continue
                add(tar, f"{number:08d}.{suffix}", data)
                if source.labels[index] >= 0:
                    add(tar, f"{number:08d}.cls", str(source.labels[index]).encode())
        shards.append(path)
        done(min(start + images_per_shard, len(indices)))
    if source.class_names:
        write_text(folder / "classes.txt", "".join(f"{i}\t{name}\n" for i, name in enumerate(source.class_names)))
    return Packed(tuple(shards), len(indices) - len(broken), tuple(broken))


def encoded(data: bytes | np.ndarray) -> tuple[bytes, str]:
    """The file and its extension by what it is, whatever it was called."""
    if isinstance(data, np.ndarray):
        buffer = io.BytesIO()
        Image.fromarray(data).save(buffer, "PNG")
        return buffer.getvalue(), "png"
    kind = str(open_image(data).format)
    return data, SUFFIXES.get(kind, kind.lower())


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)  # no owner, no time: the same images give the same shard
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))

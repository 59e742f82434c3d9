"""Small data sets on disk."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from lambdanets.data.source import ArraySource


def picture(seed: int, size: tuple[int, int] = (40, 32)) -> Image.Image:
    """Smooth, so that JPEG keeps it, and different for each seed."""
    rough = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(rough).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, format: str = "JPEG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def jpeg(seed: int, size: tuple[int, int] = (40, 32)) -> bytes:
    return encoded(picture(seed, size), quality=90)


def photographed(scene: Image.Image, orientation: int, format: str = "PNG", **options) -> bytes:
    """A file of a scene as a camera stores it, with the EXIF orientation that turns it back; see the EXIF standard."""
    shown = np.asarray(scene)
    stored = {
        1: shown,
        2: shown[:, ::-1],
        3: shown[::-1, ::-1],
        4: shown[::-1],
        5: shown.transpose(1, 0, 2),
        6: np.rot90(shown),
        7: shown[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(shown, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(Image.fromarray(np.ascontiguousarray(stored)), format, exif=exif, **options)


def write_folder(folder: Path, classes: dict[str, int], first: int = 0, size: tuple[int, int] = (40, 32)) -> Path:
    """So many images of each class."""
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            (folder / name / f"{i:03d}.jpg").write_bytes(jpeg(first, size))
            first += 1
    return folder


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def samples(count: int, first: int = 0, classes: int = 3) -> list[tuple[str, bytes]]:
    members = []
    for i in range(first, first + count):
        members += [(f"{i:05d}.jpg", jpeg(i)), (f"{i:05d}.cls", str(i % classes).encode())]
    return members


class Numbered(ArraySource):
    """Images that say which one they are; some are broken."""

    def __init__(self, count: int, broken: Iterable[int] = (), side: int = 8) -> None:
        images = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
        super().__init__(images, np.arange(count) % 3, ["a", "b", "c"], "numbered")
        self.bad = frozenset(broken)

    def read(self, index: int) -> np.ndarray:
        if index in self.bad:
            raise OSError(5, "Input/output error")
        return super().read(index)

"""Cache of decoded images in memory, for small datasets on machines where decoding is slower than training.

Worker processes share the pixels, since they are forked after the cache is filled and never write to it.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image

from lambdanets.data.decode import (
    TRANSPOSED,
    BrokenImageError,
    Limits,
    decode,
    load,
    open_image,
    orientation_of,
    turned,
)
from lambdanets.data.source import ArraySource, Source

Size = tuple[int, int]  # height, width


class CachedSource:
    """A source with decoded images [H, W, channels] in memory for `indices`; other indices are read from the source.

    `stored` maps the size of an image to the size at which it is kept, by default the same; it must treat height and
    width symmetrically. Images are resized with `resample`.
    """

    def __init__(
        self,
        source: Source,
        indices: np.ndarray,
        budget: int,
        limits: Limits,
        exif_orientation: bool,
        *,
        channels: int = 3,
        stored: Callable[[int, int], Size] | None = None,
        resample: Image.Resampling = Image.Resampling.BICUBIC,
    ) -> None:
        self.source, self.limits, self.exif_orientation = source, limits, exif_orientation
        self.channels, self.stored, self.resample = channels, stored, resample
        self.class_names, self.labels = source.class_names, source.labels
        self.shapes = np.full((len(source), 2), -1, np.int32)  # -1: not kept
        self.starts = np.zeros(len(source), np.int64)
        self.reasons: dict[int, str] = {}
        indices = np.unique(indices)
        with ThreadPoolExecutor(processors()) as pool:  # Pillow releases the GIL while decoding
            for index, shape in zip(indices, pool.map(self.shape, indices), strict=True):
                self.shapes[index] = shape
            sizes = self.shapes[indices].astype(np.int64).prod(axis=1) * channels
            total = int(sizes.sum())
            check_room(len(indices), total, budget)
            self.starts[indices] = np.cumsum(sizes) - sizes
            self.pixels = np.empty(total, np.uint8)
            list(pool.map(self.fill, indices))

    def __len__(self) -> int:
        return len(self.source)

    def name(self, index: int) -> str:
        return self.source.name(index)

    def read(self, index: int) -> bytes | np.ndarray:
        if index in self.reasons:
            raise BrokenImageError(self.reasons[index])
        height, width = (int(side) for side in self.shapes[index])
        if height < 0:
            return self.source.read(index)
        start = self.starts[index]
        return self.pixels[start : start + height * width * self.channels].reshape(height, width, self.channels)

    def shape(self, index: int) -> Size:
        """Return (height, width) from the header, before the EXIF orientation; (0, 0) if it cannot be read."""
        try:
            size = header_size(self.source, index, self.limits)
        except (BrokenImageError, OSError) as error:
            self.reasons[int(index)] = str(error)
            return 0, 0
        return self.stored(*size) if self.stored else size

    def fill(self, index: int) -> None:
        if int(index) in self.reasons:
            return
        try:
            data = self.decoded(self.source.read(index))
        except (BrokenImageError, OSError) as error:
            self.reasons[int(index)] = str(error)
            return
        height, width = self.shapes[index]
        place = self.pixels[self.starts[index] : self.starts[index] + int(height) * int(width) * self.channels]
        self.shapes[index] = height, width = data.shape[:2]
        place.reshape(height, width, self.channels)[:] = data if data.ndim == 3 else data[:, :, None]

    def decoded(self, data: bytes | np.ndarray) -> np.ndarray:
        if self.stored is None and self.channels == 3:
            if isinstance(data, np.ndarray):
                return data
            return np.asarray(decode(data, self.limits, exif_orientation=self.exif_orientation))
        image = Image.fromarray(data) if isinstance(data, np.ndarray) else open_image(data, self.limits)
        orientation = orientation_of(image) if self.exif_orientation else 1
        wanted = None
        if self.stored is not None:
            height, width = self.stored(image.height, image.width)
            least = 2 * width, 2 * height
            if orientation in TRANSPOSED:
                height, width = self.stored(image.width, image.height)
            wanted = width, height
            image.draft(image.mode, least)  # decode a JPEG at a lower resolution, which is faster
        image = turned(load(image, "RGB" if self.channels == 3 else "L"), orientation)
        if wanted is not None and image.size != wanted:
            image = image.resize(wanted, self.resample)
        return np.asarray(image)


def header_size(source: Source, index: int, limits: Limits) -> Size:
    """Return the height and width of an image as stored, without decoding it."""
    data = source.read(index)
    if isinstance(data, np.ndarray):
        return data.shape[0], data.shape[1]
    width, height = open_image(data, limits).size
    return height, width


def cached(source: Source, indices: np.ndarray, budget: int, limits: Limits, exif_orientation: bool) -> Source:
    """Return the source with its pixels in memory; the source itself if it is in memory already."""
    if isinstance(source, ArraySource | CachedSource):
        return source
    return CachedSource(source, indices, budget, limits, exif_orientation)


def check_room(images: int, total: int, budget: int) -> None:
    wanted = f"the pixels of {images:,} images take {total / 2**30:.1f} GiB"
    if total > budget:
        raise ValueError(f"{wanted}, more than cache_bytes={budget:,}: raise it, or use cache='none'")
    free = available_memory()
    if free is not None and total > free:
        raise ValueError(f"{wanted}, and {free / 2**30:.1f} GiB of memory are free: use cache='none'")


def available_memory() -> int | None:
    """Return the available memory in bytes; None if the system does not report it."""
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def processors() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

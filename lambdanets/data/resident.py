"""Training images in the memory of the training device: decoded once, then cropped and augmented there in batches.

The device holds uint8 pixels in one flat buffer, and the host sends a few numbers per image, so it has almost no work.
Order, replacement of unreadable images and random numbers are functions of (seed, epoch, position), as in `loader`, but
the random numbers differ from those of the workers.
"""

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lambdanets.data import order
from lambdanets.data.augment import Augment
from lambdanets.data.batch_augment import BatchAugment, crops, largest_crop, random_boxes
from lambdanets.data.broken import Broken, BrokenCount
from lambdanets.data.cache import CachedSource, Size, header_size
from lambdanets.data.decode import LIMITS, BrokenImageError, Limits
from lambdanets.data.loader import REPLACEMENTS, Batch, LoaderOptions, Positions, check_enough
from lambdanets.data.source import Source
from lambdanets.data.transforms import RESAMPLING

SAMPLED = 256  # images whose headers are read to estimate the size of a dataset


def stored_size(height: int, width: int, *, size: Size, augment: Augment) -> Size:
    """Return the size at which an image is stored.

    With random crops, a short side longer than side / sqrt(smallest crop area) is reduced to that length, so that a
    square crop of the smallest area has as many pixels as the network input. Without crops, images are stored at the
    input size.
    """
    if augment.crop_scale is None:
        return size
    most = math.ceil(max(size) / math.sqrt(augment.crop_scale[0]))
    short = min(height, width)
    if short <= most:
        return height, width
    return tuple(most if side == short else max(1, round(side * most / short)) for side in (height, width))  # type: ignore[return-value]


def estimated_bytes(
    source: Source, indices: np.ndarray, size: Size, augment: Augment, channels: int, limits: Limits = LIMITS
) -> int:
    """Estimate the memory of the images on the device in bytes, from the headers of a sample."""
    chosen = indices[np.linspace(0, len(indices) - 1, min(SAMPLED, len(indices))).astype(np.int64)]
    pixels = []
    for index in chosen:
        try:
            pixels.append(math.prod(stored_size(*header_size(source, int(index), limits), size=size, augment=augment)))
        except (BrokenImageError, OSError):
            continue
    return round(float(np.mean(pixels or [0])) * len(indices)) * channels


class ResidentImages:
    """Decoded images of a source in the memory of a device."""

    def __init__(
        self,
        source: Source,
        indices: np.ndarray,
        size: Size,
        augment: Augment,
        device: torch.device,
        budget: int,
        *,
        channels: int = 3,
        exif_orientation: bool = True,
        limits: Limits = LIMITS,
    ) -> None:
        self.source, self.indices, self.size, self.augment = source, indices, size, augment
        kept = CachedSource(
            source,
            indices,
            2**62,  # no limit here; free memory is checked separately
            limits,
            exif_orientation,
            channels=channels,
            stored=partial(stored_size, size=size, augment=augment),
            resample=RESAMPLING[augment.interpolation],
        )
        if kept.pixels.nbytes > budget:
            raise ValueError(
                f"the pixels of {len(indices):,} images take {kept.pixels.nbytes / 2**30:.1f} GiB, and "
                f"{budget / 2**30:.1f} GiB of memory on the device are free: use cache='none'"
            )
        self.reasons = kept.reasons
        shapes = kept.shapes.astype(np.int64).clip(min=1)
        readable = shapes[[int(i) for i in indices if int(i) not in kept.reasons]]
        if not len(readable):
            readable = np.ones((1, 2), np.int64)
        self.tile = largest_crop(readable[:, 0], readable[:, 1], augment)
        self.pixels_PC = torch.from_numpy(kept.pixels).to(device).view(-1, channels)
        self.starts, self.heights, self.widths = (
            torch.from_numpy(array).to(device)
            for array in (kept.starts // channels, shapes[:, 0].copy(), shapes[:, 1].copy())
        )

    def cropped(self, examples_B: Tensor, variation: BatchAugment, numbers: Tensor) -> Tensor:
        """Return crops [B, C, H, W] of images of the source at the input size: float32 with values from 0 to 255."""
        heights_B, widths_B = self.heights[examples_B], self.widths[examples_B]
        if self.augment.crop_scale is None:
            zero = torch.zeros_like(heights_B)
            boxes = torch.stack([zero, zero, heights_B, widths_B], 1)
        else:
            drawn = variation.of(numbers, "crop")
            boxes = random_boxes(drawn, heights_B, widths_B, self.augment.crop_scale, self.augment.crop_ratio)
        kind = self.augment.interpolation
        return crops(self.pixels_PC, self.starts[examples_B], widths_B, boxes, self.tile, self.size, kind)


class ResidentLoader:
    """Loads training batches whose `images` are indices of resident images, int64 [B].

    Like `Loader`, it uses the same order and replacements, and raises if too many images are unreadable.
    """

    def __init__(self, images: ResidentImages, options: LoaderOptions) -> None:
        self.images, self.options = images, options
        self.sampler = Positions(images.indices, options, training=True)
        self.count = BrokenCount(options.broken, len(images.indices))
        check_enough(len(images.indices), self.sampler)

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """Iterate over the batches of an epoch, from batch `start_batch` on."""
        first, end = self.sampler.first(epoch), self.sampler.first(epoch + 1)
        options, reasons = self.options, self.images.reasons
        numbers = range(first + start_batch, end)
        tickets = self.sampler.epochs.tickets(
            options.seed, numbers.start, options.batch_size, options.rank, options.world
        )
        for _, batch in zip(numbers, tickets, strict=False):
            examples = self.images.indices[[example for _, _, example in batch]]
            broken: list[Broken] = []
            if reasons:
                examples = np.array([self.readable(int(example), broken) for example in examples])
            gave_up = bool((examples < 0).any())
            new = self.count.add(len(examples), tuple(broken), gave_up)
            chosen = torch.from_numpy(examples)
            yield Batch(chosen, torch.from_numpy(self.images.source.labels[examples]), chosen, new)

    def readable(self, example: int, broken: list[Broken]) -> int:
        """Return the example, or its replacement if it is unreadable; -1 if none was found."""
        index = example
        for attempt in range(REPLACEMENTS):
            if attempt:
                place = order.replacement(len(self.images.indices), self.options.seed, example, attempt)
                index = int(self.images.indices[place])
            if index not in self.images.reasons:
                return index
            broken.append(Broken(index, self.images.source.name(index), self.images.reasons[index]))
        return -1

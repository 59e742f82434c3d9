"""Batches of a source, from any position of any epoch.

Everything about a sample is a function of (seed, epoch, position): the example, its augmentation, and its replacement
if it cannot be read. Workers have no state, so results do not depend on their number or on a resume.
"""

import itertools
import math
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from lambdanets.data import order
from lambdanets.data.broken import Broken, BrokenCount, BrokenImages
from lambdanets.data.cache import cached
from lambdanets.data.decode import LIMITS, BrokenImageError, Limits, open_image
from lambdanets.data.order import Epochs, Remainder, Ticket
from lambdanets.data.source import Source
from lambdanets.data.transforms import Transform
from lambdanets.data.workers import obey_parent_only

REPLACEMENTS = 64  # tries; if half of the images are unreadable, all fail with probability 2^-64


@dataclass(frozen=True)
class LoaderOptions:
    """Options of `Loader`.

    Example:
        >>> from lambdanets.data.loader import LoaderOptions
        >>> options = LoaderOptions(batch_size=64, workers=4, seed=1)
    """

    batch_size: int = 256
    """Images per batch of one process (a micro-batch, if gradients are accumulated)."""
    workers: int = 0
    """Number of worker processes; 0 reads images in this process."""
    seed: int = 0
    """Random seed of order and augmentation."""
    rank: int = 0
    """Rank of this process in distributed training."""
    world: int = 1
    """Number of processes in distributed training."""
    parts: int = 1
    """Micro-batches per optimizer step (gradient accumulation)."""
    remainder: Remainder = "drop"
    """Training images that do not fill the last step of an epoch. "drop": skip them in this epoch; "carry": fill the
    step with the first images of the next epoch."""
    prefetch: int = 4
    """Batches that each worker reads ahead."""
    pin: bool | None = None
    """Use pinned memory, so that copies to the GPU overlap with computation. None: if there is a GPU."""
    cache: Literal["none", "memory"] = "none"
    """"memory": decode every image once and keep the pixels in RAM."""
    cache_bytes: int = 16 * 2**30
    """Largest size of the cache in bytes, per process."""
    broken: BrokenImages = field(default_factory=BrokenImages)
    """Limits at which unreadable images raise TooManyBrokenError."""
    limits: Limits = LIMITS
    """Limits on the size of each image."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.workers < 0 or self.prefetch < 1:
            raise ValueError(
                f"workers must be at least 0 and prefetch at least 1, got {self.workers} and {self.prefetch}"
            )
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank must be at least 0 and below world {self.world}, got {self.rank}")


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of a `Loader`. It unpacks as `images, labels, indices = batch`.

    Attributes:
        images: uint8 [B, C, H, W] in the channels-last memory format, for `transforms.normalize`.
        labels: int64 [B], -1 for images without a label.
        indices: int64 [B], indices in the source.
        broken: unreadable images that were first found in this batch.
        gave_up: whether no replacement was found for an unreadable image.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor
    broken: tuple[Broken, ...] = ()
    gave_up: bool = False

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.images, self.labels, self.indices))

    def __len__(self) -> int:
        return len(self.labels)

    def pin_memory(self) -> "Batch":
        pinned = (self.images.pin_memory(), self.labels.pin_memory(), self.indices.pin_memory())
        return Batch(*pinned, self.broken, self.gave_up)


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seed Python's `random` with these numbers and restore its state afterwards."""
    before = random.getstate()
    random.seed(order.mix(*numbers))
    try:
        yield
    finally:
        random.setstate(before)


class Examples(Dataset):
    """The dataset of the workers: reads the batch of a list of tickets."""

    def __init__(
        self, source: Source, transform: Transform, indices: np.ndarray, options: LoaderOptions, training: bool
    ) -> None:
        self.source, self.transform, self.indices = source, transform, indices
        self.options, self.training = options, training

    def __getitems__(self, tickets: list[Ticket]) -> Batch:
        stacked: Tensor | None = None
        examples: list[int] = []
        broken: list[Broken] = []
        gave_up = False
        for epoch, position, example in tickets:
            found = self.sample(epoch, position, example, broken)
            if found is not None:
                if stacked is None:
                    stacked = empty_bytes((len(tickets), *found[0].shape))
                stacked.numpy()[len(examples)] = found[0]
                examples.append(found[1])
            gave_up |= found is None and self.training
        if stacked is None:
            none = torch.empty(0, dtype=torch.int64)
            return Batch(torch.empty(0, 0, 0, 0, dtype=torch.uint8), none, none, tuple(broken), gave_up)
        labels = torch.from_numpy(self.source.labels[examples])
        return Batch(
            stacked[: len(examples)].permute(0, 3, 1, 2), labels, torch.tensor(examples), tuple(broken), gave_up
        )

    def sample(self, epoch: int, position: int, example: int, broken: list[Broken]) -> tuple[np.ndarray, int] | None:
        """Return the pixels and the index of an example or, in training, of its replacement; None in evaluation if it
        is unreadable, so that no example counts twice."""
        seed = self.options.seed
        for attempt in range(REPLACEMENTS if self.training else 1):
            index = example
            if attempt:
                index = int(self.indices[order.replacement(len(self.indices), seed, example, attempt)])
            try:
                with seeded(seed, epoch, position):
                    return self.transform(self.image(index)), index
            except (BrokenImageError, OSError) as error:
                reason = str(error) if isinstance(error, BrokenImageError) else error.strerror or "cannot be read"
                broken.append(Broken(index, self.source.name(index), reason))
        return None

    def image(self, index: int) -> Image.Image:
        data = self.source.read(index)
        if isinstance(data, np.ndarray):
            return Image.fromarray(data)
        return open_image(data, self.options.limits)


class Positions(Sampler):
    """Yields the tickets of all batches across epochs, so that workers never wait for the end of an epoch."""

    def __init__(self, indices: np.ndarray, options: LoaderOptions, training: bool) -> None:
        self.indices, self.options, self.training = indices, options, training
        self.start = 0  # number of the first batch, counted over all epochs
        self.epochs = Epochs(len(indices), options.batch_size * options.world * options.parts, options.remainder)

    def first(self, epoch: int) -> int:
        """Return the number of the first batch of an epoch."""
        if self.training:
            return self.epochs.first(epoch) * self.options.parts
        options = self.options
        return epoch * order.evaluation_batches(len(self.indices), options.batch_size, options.rank, options.world)

    def __iter__(self) -> Iterator[list[Ticket]]:
        options, indices = self.options, self.indices
        size, rank, world = options.batch_size, options.rank, options.world
        if self.training:
            for batch in self.epochs.tickets(options.seed, self.start, size, rank, world):
                yield [(epoch, position, int(indices[example])) for epoch, position, example in batch]
        batches = self.first(1)
        for number in itertools.count(self.start):
            epoch, batch = divmod(number, batches)
            places = order.evaluation_positions(len(indices), batch, size, rank, world)
            yield [(epoch, position, int(indices[position])) for position in places]


def check_enough(images: int, sampler: Positions) -> None:
    """Raise ValueError if there are fewer training images than a step needs."""
    if images < sampler.epochs.step:
        raise ValueError(
            f"{images} training images are too few for batches of {sampler.options.batch_size} on "
            f"{sampler.options.world} processes: use a smaller batch size"
        )


class Loader:
    """Loads batches of a source.

    Training uses a new order in every epoch and full batches only. Evaluation (`training=False`) reads every example
    exactly once over all processes, in order; the last batch may be smaller, and unreadable images are left out.

    Args:
        source: images and labels, for example from `open_source`.
        transform: converts an image to uint8 [H, W, channels], for example `transforms.training(224)`.
        options: batch size, workers, seed and others; by default `LoaderOptions()`.
        indices: examples to use, for example a split; by default all.
        training: whether to shuffle and to replace unreadable images.

    Raises ValueError if there are fewer training images than a step needs.

    Example:
        >>> from lambdanets.data.loader import Loader, LoaderOptions
        >>> from lambdanets.data.source import open_source
        >>> from lambdanets.data.transforms import training
        >>> loader = Loader(open_source("mnist"), training(28, channels=1), LoaderOptions(batch_size=64))
        >>> images, labels, indices = next(loader.epoch(0))
        >>> images.shape, images.dtype
        (torch.Size([64, 1, 28, 28]), torch.uint8)
    """

    def __init__(
        self,
        source: Source,
        transform: Transform,
        options: LoaderOptions | None = None,
        *,
        indices: np.ndarray | None = None,
        training: bool = True,
    ) -> None:
        options = options or LoaderOptions()
        self.indices = np.arange(len(source)) if indices is None else np.asarray(indices, np.int64)
        if options.cache == "memory":
            turn = getattr(transform, "exif_orientation", False)  # a transform may be a plain function
            source = cached(source, self.indices, options.cache_bytes, options.limits, turn)
        self.source, self.options, self.training = source, options, training
        self.sampler = Positions(self.indices, options, training)
        self.count = BrokenCount(options.broken, len(self.indices))
        self.examples = Examples(source, transform, self.indices, options, training)
        self.running: tuple[int, Iterator[Batch]] | None = None  # number of the next batch, and its iterator
        if training:
            check_enough(len(self.indices), self.sampler)

    def __len__(self) -> int:
        """Return the number of batches of this process in the first epoch; with "carry", later epochs may have one step
        less."""
        return self.sampler.first(1)

    @property
    def broken(self) -> tuple[Broken, ...]:
        """All unreadable images found so far."""
        return tuple(self.count.found.values())

    @cached_property
    def batches(self) -> DataLoader:
        options = self.options
        several: dict[str, Any] = {}
        if options.workers:
            several = dict(prefetch_factor=options.prefetch, persistent_workers=True)
            if sys.platform == "linux":
                several["multiprocessing_context"] = "fork"  # shares the source and the cache without a copy
        return DataLoader(
            self.examples,
            batch_sampler=self.sampler,
            num_workers=options.workers,
            collate_fn=as_it_is,
            worker_init_fn=obey_parent_only,
            pin_memory=torch.cuda.is_available() if options.pin is None else options.pin,
            generator=torch.Generator().manual_seed(options.seed),  # keeps the global generator untouched
            **several,
        )

    def close(self) -> None:
        """Stop the workers; the next epoch starts them again."""
        self.running = None
        self.__dict__.pop("batches", None)

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """Iterate over the batches of an epoch, from batch `start_batch` on.

        Only one iterator can be active: a second call ends the first one.
        """
        first, end = self.sampler.first(epoch), self.sampler.first(epoch + 1)
        if not 0 <= start_batch <= end - first:
            raise ValueError(f"start_batch must be between 0 and {end - first}, got {start_batch}")
        yield from self.numbered(range(first + start_batch, end))

    def stream(self, first: int) -> Iterator[Batch]:
        """Iterate over the batches of all epochs, from number `first` on."""
        return self.numbered(itertools.count(first))

    def numbered(self, numbers: Iterable[int]) -> Iterator[Batch]:
        for number in numbers:
            if self.running is None or self.running[0] != number:
                self.sampler.start = number
                self.running = number, iter(self.batches)
            stream = self.running[1]
            found = next(stream)
            self.running = number + 1, stream
            new = self.count.add(len(found), found.broken, found.gave_up)
            yield replace(found, broken=new)


def empty_bytes(shape: tuple[int, ...]) -> Tensor:
    """Allocate uint8; in a worker directly in shared memory, which saves a copy on the way to the main process."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(math.prod(shape), device="cpu")
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)  # type: ignore[arg-type]


def as_it_is(batch: Any) -> Any:
    return batch

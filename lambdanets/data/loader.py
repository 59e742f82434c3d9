"""Batches, from any batch position of any epoch.

Everything about a sample follows from (seed, epoch, position): which example, which crop, which replacement if it
cannot be read. Workers hold no state, so their number changes nothing, nor does a resume.
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

REPLACEMENTS = 64  # tries; with half of the images broken none is found once in 2^64


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are made."""

    batch_size: int = 256
    """Images in a batch of one process (a micro-batch, under gradient accumulation)."""
    workers: int = 0
    """Processes that read ahead; 0: in this process."""
    seed: int = 0
    rank: int = 0
    world: int = 1
    parts: int = 1
    """Batches of a step, under gradient accumulation."""
    remainder: Remainder = "drop"
    """Training images that do not fill the last step of an epoch. "drop": they are left out of this epoch; "carry":
    the step is filled up with the first images of the next epoch."""
    prefetch: int = 4
    """Batches that each worker reads ahead."""
    pin: bool | None = None
    """Page-locked memory, from which copies to a GPU run beside computation. None: where there is a GPU."""
    cache: Literal["none", "memory"] = "none"
    """"memory": decode every image once and keep its pixels."""
    cache_bytes: int = 16 * 2**30
    """The most that the cache may take, in each process."""
    broken: BrokenImages = field(default_factory=BrokenImages)
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"a batch has at least one image, not {self.batch_size}")
        if self.workers < 0 or self.prefetch < 1:
            raise ValueError(f"workers is at least 0 and prefetch at least 1, not {self.workers} and {self.prefetch}")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} of {self.world} processes: ranks start at 0")


@dataclass(frozen=True, eq=False)
class Batch:
    """Unpacks as `images, labels, indices = batch`."""

    images: Tensor  # uint8 [B, C, H, W], channels last in memory: `transforms.normalize` on the device
    labels: Tensor  # int64 [B]
    indices: Tensor  # int64 [B], into the source
    broken: tuple[Broken, ...] = ()  # new ones, for the log
    gave_up: bool = False  # no replacement was found

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.images, self.labels, self.indices))

    def __len__(self) -> int:
        return len(self.labels)

    def pin_memory(self) -> "Batch":
        pinned = (self.images.pin_memory(), self.labels.pin_memory(), self.indices.pin_memory())
        return Batch(*pinned, self.broken, self.gave_up)


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Python's `random` from these numbers, and afterwards as it was."""
    before = random.getstate()
    random.seed(order.mix(*numbers))
    try:
        yield
    finally:
        random.setstate(before)


class Examples(Dataset):
    """What a worker does: tickets to a batch."""

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
        """Pixels and which example they are; in evaluation a broken one is left out, so that none counts twice."""
        seed = self.options.seed
        for attempt in range(REPLACEMENTS if self.training else 1):
            index = example
            if attempt:
                index = int(self.indices[order.replacement(len(self.indices), seed, example, attempt)])
            try:
                with seeded(seed, epoch, position):
                    return self.transform(self.image(index)), index
            except (BrokenImageError, OSError) as error:
                reason = str(error) if isinstance(error, BrokenImageError) else error.strerror or type(error).__name__
                broken.append(Broken(index, self.source.name(index), reason))
        return None

    def image(self, index: int) -> Image.Image:
        data = self.source.read(index)
        if isinstance(data, np.ndarray):
            return Image.fromarray(data)
        return open_image(data, self.options.limits)


class Positions(Sampler):
    """Tickets of batch after batch, into the next epoch and on: workers never wait for an epoch to end."""

    def __init__(self, indices: np.ndarray, options: LoaderOptions, training: bool) -> None:
        self.indices, self.options, self.training = indices, options, training
        self.start = 0  # the number of the first batch, counted over all epochs
        self.epochs = Epochs(len(indices), options.batch_size * options.world * options.parts, options.remainder)

    def first(self, epoch: int) -> int:
        """The number of the first batch of an epoch."""
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
    """Raise a ValueError if the training images do not fill a step."""
    if images < sampler.epochs.step:
        raise ValueError(
            f"{images} training images do not fill a batch of {sampler.options.batch_size} in each of "
            f"{sampler.options.world} processes: use a smaller batch"
        )


class Loader:
    """Batches of a source.

    Training: a new order in every epoch, full batches only; `options.remainder` says what becomes of the images that
    do not fill the last one. Evaluation (`training=False`): in order, every example
    exactly once over all processes, the last batch may be short, and broken images are left out. `indices` are the
    examples to use (a split); all without it.
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
            turn = getattr(transform, "exif_orientation", False)  # any function is a transform
            source = cached(source, self.indices, options.cache_bytes, options.limits, turn)
        self.source, self.options, self.training = source, options, training
        self.sampler = Positions(self.indices, options, training)
        self.count = BrokenCount(options.broken, len(self.indices))
        self.examples = Examples(source, transform, self.indices, options, training)
        self.running: tuple[int, Iterator[Batch]] | None = None  # the number of the next batch, and where it comes from
        if training:
            check_enough(len(self.indices), self.sampler)

    def __len__(self) -> int:
        """Batches of this process in the first epoch; with "carry" later ones may have a step less."""
        return self.sampler.first(1)

    @property
    def broken(self) -> tuple[Broken, ...]:
        """Every broken image met so far."""
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
            generator=torch.Generator().manual_seed(options.seed),  # or it would draw from the global one
            **several,
        )

    def close(self) -> None:
        """Ends the workers; another epoch starts them again."""
        self.running = None
        self.__dict__.pop("batches", None)

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from a position on. One at a time: a second call ends the first one's iterator."""
        first, end = self.sampler.first(epoch), self.sampler.first(epoch + 1)
        if not 0 <= start_batch <= end - first:
            raise ValueError(f"batch {start_batch} of an epoch of {end - first}")
        yield from self.numbered(range(first + start_batch, end))

    def stream(self, first: int) -> Iterator[Batch]:
        """The batches of all epochs, from number `first` on."""
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
    """uint8; in a worker in shared memory at once, which saves the copy on the way to the main process."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(math.prod(shape), device="cpu")
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)  # type: ignore[arg-type]


def as_it_is(batch: Any) -> Any:
    return batch

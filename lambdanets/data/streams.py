"""Shards read front to back from a web server, for sets that do not fit on the disk.

Shards are dealt to processes and workers; each worker mixes its images in a buffer. The order is a function of (seed,
epoch, number of processes, number of workers): the same run repeats, and a resume reads over what was used. For the
exact order of `Loader`, and for held-out splits, fetch the shards (`open_source` does).
"""

import random
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lambdanets.data import order
from lambdanets.data.broken import Broken, BrokenCount
from lambdanets.data.decode import LIMITS, BrokenImageError, describe, open_image
from lambdanets.data.loader import Batch, LoaderOptions, as_it_is, seeded
from lambdanets.data.remote import expand, opened
from lambdanets.data.shards import MAX_LABEL, is_image_extension, label_numbers, label_text, refuse_pickle, split_name
from lambdanets.data.source import check_labels
from lambdanets.data.split import hashed
from lambdanets.data.strings import printable
from lambdanets.data.transforms import Transform
from lambdanets.data.workers import obey_parent_only

BUFFER = 2048  # encoded images that a worker mixes


@dataclass(frozen=True)
class Encoded:
    """One image of a stream."""

    name: str
    data: bytes
    label: str


class StreamLoader:
    """The batches of a stream, with `Loader`'s interface. `examples` is how many images the shards hold together: a
    stream cannot tell. Indices count positions of the epoch, since a stream has no others."""

    def __init__(
        self,
        urls: str,
        transform: Transform,
        class_names: tuple[str, ...],
        examples: int,
        options: LoaderOptions | None = None,
        *,
        buffer: int = BUFFER,
    ) -> None:
        self.options = options or LoaderOptions()
        parts = self.options.world * max(1, self.options.workers)
        self.urls = expand(urls)
        if len(self.urls) < parts:
            raise ValueError(
                f"{len(self.urls)} shards for {parts} readers (processes times workers): each needs at least one"
            )
        self.batches = order.training_batches(examples, self.options.batch_size, self.options.world)
        if not self.batches:
            raise ValueError(f"{examples} images do not fill a batch of {self.options.batch_size} in each process")
        self.count = BrokenCount(self.options.broken, examples)
        self.transform, self.class_names, self.buffer = transform, class_names, buffer

    def __len__(self) -> int:
        return self.batches

    @property
    def broken(self) -> tuple[Broken, ...]:
        return tuple(self.count.found.values())

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        dataset = StreamBatches(self, epoch, start_batch)
        pin = torch.cuda.is_available() if self.options.pin is None else self.options.pin
        several: dict[str, Any] = {"prefetch_factor": self.options.prefetch} if self.options.workers else {}
        loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=self.options.workers,
            collate_fn=as_it_is,
            pin_memory=pin,
            generator=torch.Generator().manual_seed(self.options.seed),
            worker_init_fn=obey_parent_only,
            **several,
        )
        for batch in loader:
            new = self.count.add(len(batch), batch.broken, batch.gave_up)
            yield Batch(batch.images, batch.labels, batch.indices, new, batch.gave_up)


class StreamBatches(IterableDataset):
    """Worker w of W makes the batches w, w + W, ... of its process: DataLoader takes them in turn."""

    def __init__(self, loader: StreamLoader, epoch: int, start_batch: int) -> None:
        self.loader, self.epoch, self.start_batch = loader, epoch, start_batch

    def __iter__(self) -> Iterator[Batch]:
        loader, options = self.loader, self.loader.options
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        # DataLoader asks worker 0 first, so after a resume worker 0 makes the batch `start_batch`.
        part = (self.start_batch + worker) % workers
        urls = dealt(loader.urls, options.seed, self.epoch, options.rank * workers + part, options.world * workers)
        broken: list[Broken] = []
        images = endless(urls, loader.buffer, order.mix(options.seed, self.epoch, options.rank, part), broken)
        for number in range(part, loader.batches, workers):
            chosen = [next(images) for _ in range(options.batch_size)]
            if number >= self.start_batch:
                yield self.batch(number, chosen, broken)
                broken.clear()

    def batch(self, number: int, chosen: list[Encoded], broken: list[Broken]) -> Batch:
        """A broken image is replaced by the next of its batch: one more from the stream would shift all that follow,
        and only where they are decoded, not where a resume reads over them."""
        options = self.loader.options
        positions = list(order.training_positions(number, options.batch_size, options.rank, options.world))
        pixels, labels = [], []
        for at, position in enumerate(positions):
            for image in chosen[at:] + chosen[:at]:
                try:
                    with seeded(options.seed, self.epoch, position):
                        pixels.append(self.loader.transform(open_image(image.data, options.limits)))
                    labels.append(image.label)
                    break
                except BrokenImageError as error:
                    broken.append(named(image.name, str(error)))
        gave_up = len(pixels) < len(positions)
        numbers = label_numbers(labels, self.loader.class_names)
        check_labels(numbers, self.loader.class_names, self.loader.urls[0])
        numbers = torch.from_numpy(numbers)
        if not pixels:
            return Batch(torch.empty(0, 0, 0, 0, dtype=torch.uint8), numbers, numbers, tuple(broken), gave_up)
        stacked = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
        return Batch(stacked, numbers, torch.tensor(positions[: len(pixels)]), tuple(broken), gave_up)


def named(name: str, reason: str) -> Broken:
    """A stream has no indices: a hash of the name counts each image once."""
    return Broken(hashed(0, name), name, reason)


def dealt(urls: list[str], seed: int, epoch: int, part: int, parts: int) -> list[str]:
    """The shards of one reader in an epoch."""
    return [urls[i] for i in order.permutation(len(urls), seed, epoch)[part::parts]]


def endless(urls: list[str], size: int, seed: int, broken: list[Broken]) -> Iterator[Encoded]:
    """The images of the shards, mixed, again and again: a reader whose shards are short repeats some."""
    turn = 0
    while True:
        found = 0
        for image in shuffled(one_pass(urls, broken), size, order.mix(seed, turn)):
            found += 1
            yield image
        if not found:
            why = broken[-1].reason if broken else "they are empty"
            raise OSError(f"no image could be read from {', '.join(urls[:3])}: {why}")
        turn += 1


def one_pass(urls: list[str], broken: list[Broken]) -> Iterator[Encoded]:
    """A shard that fails is named, and the next one goes on."""
    for url in urls:
        try:
            with opened(url) as stream:
                yield from images_in(stream, url.rpartition("/")[2])
        except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
            broken.append(named(url, describe(error)))


def shuffled(images: Iterable[Encoded], size: int, seed: int) -> Iterator[Encoded]:
    """Drawn from a buffer that the stream refills, and what is left in it at the end."""
    generator = random.Random(seed)
    kept: list[Encoded] = []
    for image in images:
        if len(kept) < size:
            kept.append(image)
            continue
        at = generator.randrange(size)
        kept[at], drawn = image, kept[at]
        yield drawn
    generator.shuffle(kept)
    yield from kept


def images_in(stream: BinaryIO, shard: str) -> Iterator[Encoded]:
    """Neighbours of one key are one image and its label."""
    current, members = None, {}
    with tarfile.open(fileobj=stream, mode="r|*") as tar:
        for info in tar:
            tar.members = []  # type: ignore[attr-defined]
            key, extension = split_name(info.name)
            if not info.isreg() or not extension or Path(key).name.startswith("__"):
                continue
            refuse_pickle(extension, f"{shard}: {printable(info.name)}")
            if key != current:
                yield from encoded_image(shard, current, members)
                current, members = key, {}
            most = LIMITS.bytes if is_image_extension(extension) else MAX_LABEL
            file = tar.extractfile(info)
            if (
                file is not None
                and info.size <= most
                and (is_image_extension(extension) or extension in ("cls", "json"))
            ):
                members[extension] = file.read()
    yield from encoded_image(shard, current, members)


def encoded_image(shard: str, key: str | None, members: dict[str, bytes]) -> Iterator[Encoded]:
    name = printable(f"{shard}:{key}")
    for extension, data in members.items():
        if is_image_extension(extension):
            yield Encoded(name, data, label_text(members, name))
            return

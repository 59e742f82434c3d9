"""Units of work and their images in batches, read ahead by worker processes.

A batch holds images of one unit only, so labels are bit-identical wherever a run was interrupted and however many
processes share the work. Each shard is indexed shortly before it is read, in a process of its own.
"""

import hashlib
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lambdanets.data import remote, shards, tars
from lambdanets.data.decode import LIMITS, BrokenImageError, decoded, open_image
from lambdanets.data.guard import Hashes
from lambdanets.data.loader import as_it_is
from lambdanets.data.source import Source, no_split, open_source
from lambdanets.data.strings import printable
from lambdanets.data.transforms import Transform
from lambdanets.data.workers import obey_parent_only
from lambdanets.pseudo.files import Unit

STRETCH = 1024  # images per unit of a list
AHEAD = 2  # shards that are indexed in advance
PREFETCH = 4


@dataclass(frozen=True)
class Place:
    """The images to label, divided into units of work.

    Attributes:
        where: the path or URL that was opened.
        units: the units of work.
        paths: the tar shards, one per unit; empty for a list.
        source: the images of a list; None for shards.
        listing: the hash of the file names of a list.
    """

    where: str
    units: tuple[Unit, ...]
    paths: tuple[Path, ...] = ()
    source: Source | None = None
    listing: str = ""

    @property
    def kind(self) -> str:
        """ "list" or "shards"."""
        return "list" if self.source is not None else "shards"


def open_place(where: str, split: str = "train", stretch: int = STRETCH) -> Place:
    """Open the images to label. Tar shards are not read yet; anything else is listed and divided into units.

    Args:
        where: a folder of images or shards, a .csv list, a pattern such as `shard-{0..9}.tar`, or a URL of shards.
        split: "train", "validation" or "test".
        stretch: images per unit, unless the images are in shards.

    >>> from pathlib import Path
    >>> from PIL import Image
    >>> from lambdanets.pseudo.units import open_place
    >>> Path("images/somewhere").mkdir(parents=True)
    >>> for number in range(5):
    ...     Image.new("RGB", (8, 8)).save(f"images/somewhere/{number}.png")
    >>> place = open_place("images", stretch=4)
    >>> place.kind, [unit.images for unit in place.units]
    ('list', [4, 1])
    """
    path = Path(where).expanduser()
    given: list[Path] | None = None
    if remote.is_url(where):
        given = remote.fetch_all(where)
    elif path.is_dir():
        given = shards.shard_paths(path) if shards.has_shards(path) else None
    elif where.endswith((*shards.SHARDS, "*", "}")):
        given = shards.shard_paths(path)
    if given is not None:
        groups = shards.by_split(given)
        if split not in groups:
            raise no_split(where, split, sorted(groups))
        chosen = groups[split]
        return Place(where, tuple(Unit(p.name) for p in chosen), tuple(chosen))
    source = open_source(where, split=split)
    names = hashlib.blake2b(digest_size=16)
    for index in range(len(source)):
        names.update(source.name(index).encode() + b"\n")
    firsts = range(0, len(source), stretch)
    units = tuple(Unit(f"images-{f}", f, min(stretch, len(source) - f)) for f in firsts)
    return Place(where, units, source=source, listing=names.hexdigest())


@dataclass(frozen=True)
class Ticket:
    """The images of a batch, for a worker; `error` says why a unit cannot be opened."""

    unit: int
    first: int  # position of the first image in the unit
    last: bool  # whether it is the last batch of the unit
    images: int  # number of images of the whole unit
    path: str = ""
    keys: tuple[str, ...] = ()
    offsets: np.ndarray | None = None
    sizes: np.ndarray | None = None
    indices: range = range(0)
    error: str = ""


@dataclass(frozen=True, eq=False)
class UnlabelledBatch:
    """Images of one unit, preprocessed once for each view of the teachers."""

    unit: int
    last: bool
    images: int
    inputs: tuple[Tensor, ...]  # uint8 [B, C, H, W] each
    positions: np.ndarray  # [B], without unreadable and dropped images
    offsets: np.ndarray | None
    sizes: np.ndarray | None
    broken: tuple[tuple[str, str], ...] = ()
    leaks: tuple[tuple[str, str, str], ...] = ()
    error: str = ""

    def pin_memory(self) -> "UnlabelledBatch":
        return replace(self, inputs=tuple(i.pin_memory() for i in self.inputs))


class UnlabelledDataset(Dataset):
    """Reads the batch of a ticket, in a worker process."""

    def __init__(self, source: Source | None, transforms: Sequence[Transform], guard: Hashes | None) -> None:
        self.source, self.transforms, self.guard = source, transforms, guard

    def __getitems__(self, tickets: list[Ticket]) -> UnlabelledBatch:
        (ticket,) = tickets
        found: list[tuple[np.ndarray, ...]] = []
        positions: list[int] = []
        broken: list[tuple[str, str]] = []
        leaks: list[tuple[str, str, str]] = []
        handle = os.open(ticket.path, os.O_RDONLY) if ticket.path and not ticket.error else None
        try:
            for place in range(len(ticket.keys) or len(ticket.indices)):
                name = self.name(ticket, place)
                try:
                    data = self.read(ticket, place, handle)
                    image = Image.fromarray(data) if isinstance(data, np.ndarray) else open_image(data)
                    if self.guard is not None:
                        leak = self.guard.leak(data, decoded(image))
                        if leak is not None:
                            leaks.append((name, *leak))
                            continue
                    found.append(tuple(transform(image) for transform in self.transforms))
                    positions.append(place)
                except (BrokenImageError, OSError) as error:
                    reason = str(error) if isinstance(error, BrokenImageError) else error.strerror or str(error)
                    broken.append((name, reason))
        finally:
            if handle is not None:
                os.close(handle)
        inputs = tuple(torch.from_numpy(np.stack(rows)).permute(0, 3, 1, 2) for rows in zip(*found, strict=True))
        kept = np.array(positions, np.int64)
        return UnlabelledBatch(
            ticket.unit,
            ticket.last,
            ticket.images,
            inputs,
            kept + ticket.first,
            None if ticket.offsets is None else ticket.offsets[kept],
            None if ticket.sizes is None else ticket.sizes[kept],
            tuple(broken),
            tuple(leaks),
            ticket.error,
        )

    def name(self, ticket: Ticket, place: int) -> str:
        if self.source is not None:
            return self.source.name(ticket.indices[place])
        return printable(f"{os.path.basename(ticket.path)}:{ticket.keys[place]}")

    def read(self, ticket: Ticket, place: int, handle: int | None) -> bytes | np.ndarray:
        if self.source is not None:
            return self.source.read(ticket.indices[place])
        assert handle is not None
        assert ticket.offsets is not None
        assert ticket.sizes is not None
        size = int(ticket.sizes[place])
        if size > LIMITS.bytes:
            raise BrokenImageError(f"{size:,} bytes are more than the limit of {LIMITS.bytes:,}")
        data = os.pread(handle, size, int(ticket.offsets[place]))
        if len(data) < size:
            raise BrokenImageError(f"the shard ends after {len(data):,} of {size:,} bytes")
        return data


class Inline(Executor):
    """An executor that runs tasks in the calling thread."""

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[override]
        future: Future = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def live_with_parent() -> None:
    """Exit when the parent process is gone; an idle process of a pool would wait forever."""
    obey_parent_only()
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def walked(path: Path) -> tuple[str, shards.ShardIndex | str]:
    """Return the path of the uncompressed shard and the index of its images, or why it cannot be read."""
    try:
        unpacked = tars.unpacked(path)
        return str(unpacked), shards.walk(unpacked, path)
    except (ValueError, OSError) as error:
        return str(path), printable(" ".join(str(error).split()))


class Tickets:
    """The batches of the given units, in order."""

    def __init__(self, place: Place, numbers: Sequence[int], batch_size: int, walker: Executor) -> None:
        self.place, self.numbers, self.batch_size, self.walker = place, numbers, batch_size, walker

    def __iter__(self) -> Iterator[list[Ticket]]:
        if self.place.source is not None:
            for number in self.numbers:
                unit = self.place.units[number]
                for first in self.firsts(unit.images):
                    end = min(first + self.batch_size, unit.images)
                    indices = range(unit.first + first, unit.first + end)
                    yield [Ticket(number, first, end == unit.images, unit.images, indices=indices)]
            return
        waiting: deque[tuple[int, Future]] = deque()
        for number in self.numbers:
            waiting.append((number, self.walker.submit(walked, self.place.paths[number])))
            if len(waiting) > AHEAD:
                yield from self.shard(*waiting.popleft())
        while waiting:
            yield from self.shard(*waiting.popleft())

    def firsts(self, images: int) -> range:
        return range(0, images, self.batch_size)

    def shard(self, number: int, future: Future) -> Iterator[list[Ticket]]:
        path, index = future.result()
        if isinstance(index, str):
            yield [Ticket(number, 0, True, 0, path, error=index)]
            return
        offsets, sizes = np.array(index.offsets, np.int64), np.array(index.sizes, np.int64)
        for first in self.firsts(len(index.keys)):
            part = slice(first, first + self.batch_size)
            keys = tuple(index.keys[part])
            last = first + self.batch_size >= len(index.keys)
            yield [Ticket(number, first, last, len(index.keys), path, keys, offsets[part], sizes[part])]


def read_units(
    place: Place,
    numbers: Sequence[int],
    transforms: Sequence[Transform],
    *,
    batch_size: int,
    workers: int = 0,
    guard: Hashes | None = None,
) -> Iterator[UnlabelledBatch]:
    """Yield every image of the given units once, in order, in batches."""
    context = multiprocessing.get_context("fork" if os.name == "posix" else "spawn")
    walker = ProcessPoolExecutor(1, context, initializer=live_with_parent) if workers and place.paths else Inline()
    walker.submit(os.getpid).result()  # fork now, before there are other threads
    try:
        loader = DataLoader(
            UnlabelledDataset(place.source, transforms, guard),
            batch_sampler=Tickets(place, numbers, batch_size, walker),  # type: ignore[arg-type]
            num_workers=workers,
            collate_fn=as_it_is,
            worker_init_fn=obey_parent_only,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(0),
            prefetch_factor=PREFETCH if workers else None,
            multiprocessing_context=context if workers else None,
        )
        yield from loader
    finally:
        walker.shutdown(wait=False, cancel_futures=True)

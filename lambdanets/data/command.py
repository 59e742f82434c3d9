"""`lambdanets data pack | check | speed`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lambdanets.files import write_json
from lambdanets.options import chosen_device, optional

UNEQUAL = 10  # the largest class is so many times the smallest
SHOWN = 20  # lines of each list; --json has all


@dataclass(frozen=True)
class DataPack:
    """Writes tar shards (webdataset's naming) of a folder of class folders, a CSV list, idx files or other shards.

    Bytes stay as they are, every split gets its shards, the order is shuffled once: all classes in every shard.
    The result is what --data.path takes, and what webdataset reads.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Folder, .csv list, idx folder, shards or an embedded set."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """A new folder."""
    images_per_shard: int = 1000
    seed: int = 0
    """Of the order."""

    def run(self) -> int:
        from lambdanets.data.pack import check_target, pack
        from lambdanets.data.source import distinct_splits, notes_on

        sources = distinct_splits(self.source)
        for note in notes_on(sources.values()):
            print(note)
        check_target(self.target, next(iter(sources.values())).class_names)
        broken = []
        for split, source in sources.items():
            with progress(f"packing {split}", len(source)) as done:
                packed = pack(
                    source, self.target, split=split, images_per_shard=self.images_per_shard, seed=self.seed, done=done
                )
            broken += packed.broken
            print(f"{split}: {packed.images:,} images in {len(packed.shards)} shards in {self.target}")
        listing("left out because they cannot be read", [f"{one.name}: {one.reason}" for one in broken])
        return 0


@dataclass(frozen=True)
class DataCheck:
    """Decodes every image on all processors and lists what is unreadable, there twice, or in training and validation
    both (compared by pixels, so a copy in another format counts).

    Exit status 1 if an image is unreadable or leaked, or if the same pixels have two labels.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Folder, .csv list, idx folder, shards or an embedded set; all of its splits are read."""
    workers: int | None = None
    """Threads; by default one for each processor."""
    json: Path | None = None
    """Write everything that was found there."""

    def run(self) -> int:
        from lambdanets.data.check import check
        from lambdanets.data.source import distinct_splits, notes_on, unlabelled_note

        sources = distinct_splits(self.source)
        notes = [unlabelled_note(split, source) for split, source in sources.items() if (source.labels >= 0).any()]
        for note in filter(None, [*notes_on(sources.values()), *notes]):
            print(note)
        with progress("checking", sum(len(source) for source in sources.values())) as done:
            found = check(sources, self.workers, done)
        counts = ", ".join(f"{split} {len(source):,}" for split, source in sources.items())
        first = next(iter(sources))  # where classes are counted
        first = "training" if first == "train" else first
        print(f"{found.images:,} images ({counts}) of {len(next(iter(sources.values())).class_names)} classes")
        listing("unreadable", [f"{one.name}: {one.reason}" for one in found.unreadable])
        listing("in more than one split", [same(group) for group in found.leaked])
        listing("more than once in a split", [same(group) for group in found.duplicates])
        listing("the same pixels with different labels", [same(group) for group in found.contradictions])
        listing(f"classes without a {first} image", list(found.empty_classes))
        listing(f"classes with one {first} image", list(found.single_classes))
        listing("classes without an image of a split", [f"{split}: {name}" for split, name in found.missing_classes])
        sizes = [(name, size) for name, size in found.class_sizes if size]
        if sizes and sizes[0][1] >= UNEQUAL * sizes[-1][1]:
            (most, large), (least, small) = sizes[0], sizes[-1]
            print(f"classes are unequal: {small:,} {first} images of {least}, {large:,} of {most}")
        if self.json:
            write_json(self.json, asdict(found))
        return 1 if found.unreadable or found.leaked or found.contradictions else 0


@dataclass(frozen=True)
class DataSpeed:
    """Images per second of one core, of all workers, and of images that are kept on the training device.

    torchvision's reference loader runs with the same transforms for comparison.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Folder, .csv list or shards."""
    image_size: int = 224
    randaugment_layers: int = 0
    randaugment_magnitude: int = 10
    images: int = 2000
    """How many of the source's images to use."""
    rounds: int = 3
    workers: int = 0
    """Also time all together with so many worker processes, by the clock: on a machine that does nothing else."""
    device: Annotated[str | None, optional("DEVICE")] = None
    """Where images are kept and augmented in batches: cpu or cuda; by default a GPU if there is one."""
    json: Path | None = None
    """Write the figures there."""

    def run(self) -> int:
        import torch

        from lambdanets.data.augment import Augment
        from lambdanets.data.source import open_source
        from lambdanets.data.speed import measure
        from lambdanets.machine import describe

        torch.set_num_threads(1)
        augment = Augment(randaugment_layers=self.randaugment_layers, randaugment_magnitude=self.randaugment_magnitude)
        source = open_source(self.source)
        device = chosen_device(self.device)
        rows = measure(
            source,
            self.image_size,
            augment,
            images=self.images,
            workers=self.workers,
            rounds=self.rounds,
            device=device,
        )
        print(f"{'images per second':32s} {'one core':>10s} {'by the clock':>13s}")
        for row in rows:
            core, clock = ("" if rate is None else f"{rate:,.0f}" for rate in (row.per_core, row.together))
            print(f"{row.name:32s} {core:>10s} {clock:>13s}")
        if self.json:
            result = {"name": "loader", **describe(device), "options": asdict(self) | {"json": None}}
            result["options"]["randaugment_probability"] = augment.randaugment_probability
            result["rows"] = [asdict(row) for row in rows]
            write_json(self.json, result, default=str)
        return 0


@dataclass(frozen=True)
class Data:
    """Data sets: pack them into shards, check them, measure how fast they are read."""

    what: Annotated[
        Annotated[DataPack, tyro.conf.subcommand("pack")]
        | Annotated[DataCheck, tyro.conf.subcommand("check")]
        | Annotated[DataSpeed, tyro.conf.subcommand("speed")],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> int:
        return self.what.run()


def same(group: tuple) -> str:
    labels = (f" (label {place.label})" if place.label >= 0 else "" for place in group)
    return " = ".join(f"{place.split}: {place.name}{label}" for place, label in zip(group, labels, strict=True))


def listing(title: str, lines: list[str]) -> None:
    if lines:
        print(f"{len(lines):,} {title}:")
        print("\n".join(f"  {line}" for line in lines[:SHOWN]))
        if len(lines) > SHOWN:
            print(f"  and {len(lines) - SHOWN:,} more")


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], object]]:
    """A bar on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda images: bar.update(task, completed=images)

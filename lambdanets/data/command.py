"""The commands `lambdanets data pack`, `check` and `speed`."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lambdanets.files import read_lines, write_json
from lambdanets.options import check_image_size, chosen_device, optional

UNEQUAL = 10  # ratio of largest to smallest class that is reported
SHOWN = 20  # lines per list; --json has all


@dataclass(frozen=True)
class DataPack:
    """Write a dataset as tar shards in the layout of webdataset.

    Every split gets its own shards. The order is shuffled once, so each shard holds all classes. `--data.path` and
    webdataset read the result.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A folder of class folders, a .csv list, a folder of idx files, shards, or an embedded dataset."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Folder for the shards; it must not contain shards yet."""
    images_per_shard: int = 1000
    """Images in each shard."""
    seed: int = 0
    """Seed of the shuffle."""
    side: Annotated[int | None, optional("PIXELS")] = None
    """Reduce images whose shorter side is longer than this many pixels, and store them as JPEG. Other images are copied
    unchanged."""
    quality: int = 90
    """JPEG quality of reduced images, 1 to 95."""
    leave_out: tuple[str, ...] = ()
    """Names or patterns of images to leave out, such as 'n03417042/*'; @FILE reads one per line."""
    guard: tuple[str, ...] = ()
    """Validation images, in the forms of SOURCE: identical images and near-duplicates are left out."""
    guard_distance: int = 6
    """Bits of 64 in which the perceptual hashes of near-duplicates may differ; -1 finds identical files only."""

    def run(self) -> int:
        from lambdanets.data.guard import hash_images
        from lambdanets.data.pack import Packing, check_target, pack
        from lambdanets.data.source import distinct_splits, notes_on

        check_image_size(self.side, "--side")
        if not 1 <= self.quality <= 95:
            raise ValueError(f"--quality must be between 1 and 95, got {self.quality}")
        sources = distinct_splits(self.source)
        for note in notes_on(sources.values()):
            print(note)
        check_target(self.target, next(iter(sources.values())).class_names)
        guard = hash_images(self.guard, self.guard_distance) if self.guard else None
        packing = Packing(patterns(self.leave_out), guard, self.side, self.quality)
        left_out = []
        for split, source in sources.items():
            options = {"split": split, "images_per_shard": self.images_per_shard, "seed": self.seed}
            with progress(f"packing {split}", len(source)) as done:
                packed = pack(source, self.target, **options, packing=packing, done=done)
            left_out += packed.left_out
            print(f"{split}: {packed.images:,} images in {len(packed.shards)} shards in {self.target}")
        names = sum(one.why == "by name" for one in left_out)
        if self.leave_out:
            print(f"{names:,} images left out by their name")
        guarded = [f"{one.name} is a copy of {one.reason}" for one in left_out if one.why == "guarded"]
        listing("left out because they are guarded", guarded)
        unreadable = [f"{one.name}: {one.reason}" for one in left_out if one.why == "unreadable"]
        listing("left out because they cannot be read", unreadable)
        return 0


def patterns(words: Iterable[str]) -> tuple[str, ...]:
    """Replace each @FILE by the lines of the file."""
    found: list[str] = []
    for word in words:
        found += read_lines(Path(word[1:]).expanduser()) if word.startswith("@") else [word]
    return tuple(found)


@dataclass(frozen=True)
class DataCheck:
    """Decode every image and list unreadable images, duplicates, and images in both training and validation splits.

    Images are compared by pixels, so copies in another file format count as duplicates. Exit status 1 if an image is
    unreadable or in more than one split, or if the same pixels have different labels.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Dataset: a folder with one folder per class, .csv list, idx folder, shards or mnist. All splits are read."""
    workers: Annotated[int | None, optional("N")] = None
    """Number of threads; by default one per CPU core."""
    json: Annotated[Path | None, optional("FILE")] = None
    """Write the complete result to this JSON file."""

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
        first = next(iter(sources))  # the split whose classes are counted
        first = "training" if first == "train" else first
        print(f"{found.images:,} images ({counts}) in {len(next(iter(sources.values())).class_names)} classes")
        listing("unreadable", [f"{one.name}: {one.reason}" for one in found.unreadable])
        listing("in more than one split", [same(group) for group in found.leaked])
        listing("duplicates within a split", [same(group) for group in found.duplicates])
        listing("duplicates with different labels", [same(group) for group in found.contradictions])
        listing(f"classes without {first} images", list(found.empty_classes))
        listing(f"classes with only one {first} image", list(found.single_classes))
        listing("classes without images in a split", [f"{split}: {name}" for split, name in found.missing_classes])
        sizes = [(name, size) for name, size in found.class_sizes if size]
        if sizes and sizes[0][1] >= UNEQUAL * sizes[-1][1]:
            (most, large), (least, small) = sizes[0], sizes[-1]
            print(f"classes are imbalanced: {small:,} {first} images of {least}, {large:,} of {most}")
        if self.json:
            write_json(self.json, asdict(found))
        return 1 if found.unreadable or found.leaked or found.contradictions else 0


@dataclass(frozen=True)
class DataSpeed:
    """Measure the throughput of data loading: per CPU core, with worker processes, and from device memory.

    torchvision's ImageFolder and DataLoader run with the same transforms for comparison.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Dataset: a folder, .csv list or shards."""
    image_size: int = 224
    """Size of the random crops in pixels."""
    randaugment_layers: int = 0
    """RandAugment operations per image."""
    randaugment_magnitude: int = 10
    """Magnitude of RandAugment."""
    images: int = 2000
    """Number of images of the dataset to use."""
    rounds: int = 3
    """Repetitions; the result is their median."""
    workers: int = 0
    """Also measure wall-clock throughput with this many worker processes; the machine must be idle otherwise."""
    device: Annotated[str | None, optional("DEVICE")] = None
    """Device for images that are kept in its memory and augmented in batches: cpu or cuda; by default a GPU if there is
    one."""
    json: Annotated[Path | None, optional("FILE")] = None
    """Write the results to this JSON file."""

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
        print(f"{'images per second':32s} {'one core':>10s} {'wall clock':>13s}")
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
    """Pack datasets into shards, check them, and measure the throughput of data loading."""

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
    """Show a progress bar on stderr if it is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda images: bar.update(task, completed=images)

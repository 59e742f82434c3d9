"""`lambdanets pseudo label` and `pseudo select`: their options. The work is done in other modules, which need the
extra `lambdanets[train]`."""

import json
import os
import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress as Bar
from rich.progress import TextColumn

from lambdanets.files import RESTART_WAIT, locked
from lambdanets.options import check_numbers, chosen_device, optional
from lambdanets.pseudo.select import Selection
from lambdanets.train.inference.command import Using

if TYPE_CHECKING:
    from lambdanets.pseudo.label import Labelled
    from lambdanets.pseudo.select import Counts

SHOWN_FAILURES = 10
SOFT = 10
CONFIDENT = Selection(threshold=0.3)


@dataclass(frozen=True, kw_only=True)
class Labelling:
    """How images are labelled."""

    soft: bool = False
    """Keep the probabilities of the likeliest classes, to learn from, not only the best class."""
    soft_classes: int = SOFT
    """With --soft: of how many classes."""
    split: Literal["train", "validation", "test"] = "train"
    """Which part of the images, where they have parts."""
    unit: int = 1024
    """Images of a unit of work where they are not in shards."""
    class_names: Annotated[str | None, optional("NAMES")] = None
    """For weights that do not name their classes: a .txt with a name on each line, a data set, or "imagenet"."""
    guard: tuple[str, ...] = ()
    """Places with images that must not be learnt from (validation sets): what is found again is dropped and named."""
    guard_distance: int = 6
    """Bits of 64 that may differ between perceptual hashes of images that look the same; -1: the same files only."""
    max_broken: float = 0.05
    """The fraction of unreadable images from which on a unit is not labelled."""

    def __post_init__(self) -> None:
        if self.soft_classes < 1 or self.unit < 1:
            raise ValueError(f"--soft-classes {self.soft_classes} and --unit {self.unit}: at least 1")
        check_numbers(self, guard_distance=(-1, 64), max_broken=(0, 1))

    def options(self, batch_size: int) -> Any:
        from lambdanets.pseudo.label import LabelOptions

        return LabelOptions(
            soft=self.soft_classes if self.soft else 0,
            split=self.split,
            batch_size=batch_size,
            max_broken=self.max_broken,
            guard=self.guard,
            guard_distance=self.guard_distance,
        )


def own_gpu(using: Using) -> Using:
    """Under torchrun each process has its own."""
    device, local = chosen_device(using.device), os.environ.get("LOCAL_RANK")
    if device.type != "cuda" or device.index is not None or local is None:
        return using
    return replace(using, device=f"cuda:{local}")


@dataclass(frozen=True)
class PseudoLabel:
    """Label images with a teacher, choose among the labels, and write a page about them.

    `torchrun --nproc-per-node 8 -m lambdanets pseudo label ...` shares the work, shard by shard, over any number of
    machines with a common disk. What is interrupted goes on with the same command. The exit status is 1 if some shard
    could not be labelled; the others are kept.
    """

    teacher: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TEACHER")]
    """A run, a .safetensors file, a model folder, NAME@WEIGHTS, timm:NAME@WEIGHTS or torchvision:NAME@WEIGHTS; several,
    with commas between them, are averaged."""
    images: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES")]
    """A folder, tar shards, a .csv list: labels that they may have are not looked at."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """The folder for the labels."""
    labelling: Annotated[Labelling, tyro.conf.arg(name="")] = field(default_factory=Labelling)
    choosing: Annotated[Selection, tyro.conf.arg(name="")] = CONFIDENT
    using: Annotated[Using, tyro.conf.arg(name="")] = field(default_factory=Using)

    def run(self) -> int:
        from lambdanets.data.source import notes_on
        from lambdanets.pseudo.label import label, who
        from lambdanets.pseudo.teacher import open_teachers
        from lambdanets.pseudo.units import open_place

        rank, world = who()
        using = own_gpu(self.using)
        place = open_place(self.images, self.labelling.split, self.labelling.unit)
        for note in notes_on([place.source]) if place.source is not None and not rank else []:
            print(note, file=sys.stderr)
        ensemble = open_teachers(self.teacher, using, self.labelling.class_names)
        options = self.labelling.options(using.batch_size)
        console = Console(stderr=True, highlight=False)
        bar = progress_bar(console, len(range(rank, len(place.units), world)))
        with own_labels(self.out, rank):
            with bar as progress:
                workers = using.loader_workers(sys.maxsize)
                done = label(
                    ensemble, place, self.out, options, workers=workers, rank=rank, world=world, progress=progress
                )
            tell_labelled(done, console, rank, world)
            if done.complete or (self.choosing.partial and world == 1):
                choose(self.out, self.choosing)
        if not done.complete and not done.failed and world > 1:
            print(f"process {rank} is done; the last one chooses among the labels", file=sys.stderr)
        return 1 if done.failed else 0


@dataclass(frozen=True)
class PseudoSelect:
    """Choose again among the labels of `lambdanets pseudo label`, and write the page again: no image is labelled."""

    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="LABELS")]
    """The folder of the labels."""
    choosing: Annotated[Selection, tyro.conf.arg(name="")] = CONFIDENT
    json: bool = False
    """Print the counts as JSON."""

    def run(self) -> int:
        with own_labels(self.out, 0) if self.out.is_dir() else nullcontext():
            counts = choose(self.out, self.choosing, quiet=self.json)
        if self.json:
            print(json.dumps(asdict(counts)))
        return 0


@dataclass(frozen=True)
class Pseudo:
    """Pseudo-labels: label images with a teacher, and select the labels to train on (`lambdanets train cotrain`)."""

    what: Annotated[
        Annotated[PseudoLabel, tyro.conf.subcommand("label")] | Annotated[PseudoSelect, tyro.conf.subcommand("select")],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> int:
        return self.what.run()


def own_labels(folder: Path, rank: int) -> AbstractContextManager[None]:
    """The lock of a folder of labels, which the first process of a command holds for all."""
    if rank:
        return nullcontext()
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return locked(folder, wait=RESTART_WAIT if restarted else 0.0)


def choose(folder: Path, selection: Selection, *, quiet: bool = False) -> "Counts":
    from lambdanets.pseudo.page import write_page
    from lambdanets.pseudo.select import select

    counts = select(folder, selection)
    page = write_page(folder)
    if not quiet:
        empty = sum(not used for used in counts.used)
        print(
            f"{sum(counts.labelled):,} labels, {sum(counts.confident):,} with a confidence of at least "
            f"{selection.threshold:g}; {sum(counts.kept):,} images are kept and {sum(counts.used):,} used, with repeats"
            + (f"; {empty} classes have none" if empty else "")
        )
        print(f"report: {page}")
    return counts


@contextmanager
def progress_bar(console: Console, units: int):
    with Bar(*Bar.get_default_columns(), TextColumn("{task.fields[images]:,} images"), console=console) as bar:
        task = bar.add_task("labelling", total=units, images=0)
        yield lambda images, done: bar.update(task, completed=done, images=images)


def tell_labelled(done: "Labelled", console: Console, rank: int, world: int) -> None:
    """The throughput counts reading, the network and writing; starting does not count."""
    mine = f"process {rank} of {world}: " if world > 1 else ""
    before = f", {done.skipped:,} were done before" if done.skipped else ""
    seen = done.images + done.broken + done.leaks
    print(
        f"{mine}{done.images:,} images labelled in {done.units:,} units{before}: "
        f"{seen / max(done.seconds, 1e-9):,.1f} images/s; {done.broken:,} unreadable, {done.leaks:,} leaks dropped"
    )
    for name, reason in done.failed[:SHOWN_FAILURES]:
        console.print(escape(f"not labelled: {name}: {reason}"), soft_wrap=True)
    if done.failed:
        console.print(
            f"{len(done.failed)} units could not be labelled; the others are kept. Mend these and run the same command "
            f"again, or use what there is: `lambdanets pseudo select --partial`",
            soft_wrap=True,
        )

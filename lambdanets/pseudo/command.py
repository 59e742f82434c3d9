"""The commands `lambdanets pseudo label` and `lambdanets pseudo select`. The modules that they call need the extra
`lambdanets[train]`."""

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
    """Options of labelling."""

    soft: bool = False
    """Store the probabilities of the most likely classes as soft targets, not only the top class."""
    soft_classes: int = SOFT
    """With --soft: number of classes whose probabilities are stored for each image."""
    split: Literal["train", "validation", "test"] = "train"
    """The split to label, if IMAGES has splits."""
    unit: int = 1024
    """Images per label file if IMAGES is not in shards. Each file is labelled by one process and written when it is
    complete; a tar shard always has one label file."""
    class_names: Annotated[str | None, optional("NAMES")] = None
    """Class names for weights without them: a .txt file with one name per line, a .safetensors file whose weights have
    names, a dataset, "imagenet" (WordNet ids such as n01440764) or "imagenet-words" (English names)."""
    guard: tuple[str, ...] = ()
    """Datasets whose validation images must not be trained on: copies of them are dropped and listed in the report."""
    guard_distance: int = 6
    """Two images count as copies if at most this many of the 64 bits of their perceptual hashes differ; -1 finds
    identical files only."""
    max_broken: float = 0.05
    """Maximum fraction of unreadable images in a unit (a shard, or --unit images). A unit with more is not labelled."""

    def __post_init__(self) -> None:
        if self.soft_classes < 1 or self.unit < 1:
            raise ValueError(f"--soft-classes and --unit must be at least 1, got {self.soft_classes} and {self.unit}")
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
    """Return the options with this process's GPU under torchrun, otherwise unchanged."""
    device, local = chosen_device(using.device), os.environ.get("LOCAL_RANK")
    if device.type != "cuda" or device.index is not None or local is None:
        return using
    return replace(using, device=f"cuda:{local}")


@dataclass(frozen=True)
class PseudoLabel:
    """Label images with a teacher network, select the labels to train on, and write a report.

    Run the same command again to resume. `torchrun --nproc-per-node 8 -m lambdanets pseudo label ...` distributes the
    shards over processes, on any number of machines that share a disk. The exit status is 1 if a shard could not be
    labelled; the labels of the others are kept.
    """

    teacher: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TEACHER")]
    """A run folder, a .safetensors file, a model folder, NAME@WEIGHTS, timm:NAME@FILE or torchvision:NAME@FILE. The
    probabilities of several teachers, separated by commas, are averaged."""
    images: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES")]
    """A folder, tar shards, or a .csv list. Existing labels are ignored."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """The folder to write the labels to."""
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
            print(f"process {rank} has finished; the last process selects the labels", file=sys.stderr)
        return 1 if done.failed else 0


@dataclass(frozen=True)
class PseudoSelect:
    """Select again among the labels that `lambdanets pseudo label` wrote, without labelling, and rewrite the report."""

    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="LABELS")]
    """The folder that `lambdanets pseudo label` wrote."""
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
    """Return the lock of a folder of labels, which process 0 holds on behalf of all processes of a command."""
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
            f"{selection.threshold:g}; {sum(counts.kept):,} images selected, {sum(counts.used):,} with repeats"
            + (f"; {empty} classes have no image" if empty else "")
        )
        print(f"report: {page}")
    return counts


@contextmanager
def progress_bar(console: Console, units: int):
    with Bar(*Bar.get_default_columns(), TextColumn("{task.fields[images]:,} images"), console=console) as bar:
        task = bar.add_task("labelling", total=units, images=0)
        yield lambda images, done: bar.update(task, completed=done, images=images)


def tell_labelled(done: "Labelled", console: Console, rank: int, world: int) -> None:
    """Print what this process did. The throughput includes reading, inference and writing, not the start."""
    mine = f"process {rank} of {world}: " if world > 1 else ""
    before = f" ({done.skipped:,} were already labelled)" if done.skipped else ""
    seen = done.images + done.broken + done.leaks
    print(
        f"{mine}{done.images:,} images labelled in {done.units:,} units{before}: "
        f"{seen / max(done.seconds, 1e-9):,.1f} images/s; {done.broken:,} unreadable, {done.leaks:,} leaks dropped"
    )
    for name, reason in done.failed[:SHOWN_FAILURES]:
        console.print(escape(f"not labelled: {name}: {reason}"), soft_wrap=True)
    if done.failed:
        console.print(
            f"{len(done.failed)} units could not be labelled; the labels of the others are kept. Repair these and run "
            f"the same command again, or use the existing labels: `lambdanets pseudo select --partial`",
            soft_wrap=True,
        )

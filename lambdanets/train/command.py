"""`lambdanets train`."""

import functools
import inspect
import operator
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import tyro
from rich.console import Console

from lambdanets.data.embedded import EMBEDDED
from lambdanets.data.remote import is_url
from lambdanets.data.shards import SHARDS
from lambdanets.options import optional
from lambdanets.recipes.imagenet import (
    ROWS_350,
    UNPUBLISHED_350,
    imagenet_90,
    imagenet_350,
    imagenet_350_unpublished,
    mobilenet_350,
)
from lambdanets.recipes.pseudo import PSEUDO_TOP1, cotrain, cotrain_350, distill
from lambdanets.recipes.small import debug, digits, imagenette
from lambdanets.runs import CONFIG, WEIGHTS, read_config, read_stored
from lambdanets.train.config import RunConfig, TrainConfig
from lambdanets.train.plan import RECIPE, names_of
from lambdanets.train.signals import SIGNAL_STATUS
from lambdanets.train.task import Task
from lambdanets.typed import as_before

if TYPE_CHECKING:
    from lambdanets.train.result import Result


@dataclass(frozen=True)
class Recipe:
    """A name of the command line."""

    make: Callable[[], RunConfig]
    title: str

    @property
    def document(self) -> str:
        make = self.make.func if isinstance(self.make, functools.partial) else self.make
        return inspect.getdoc(make) or ""


RECIPES = {
    "digits": Recipe(digits, "4,000 real digits on two CPU cores, in a minute or two"),
    "debug": Recipe(debug, "twenty steps with everything on: does training work here?"),
    "imagenette": Recipe(imagenette, "ten classes of ImageNet at 128 pixels"),
    "cotrain": Recipe(cotrain, "few labels and many images: with the labels of `lambdanets pseudo label`"),
    "distill": Recipe(distill, "photos without labels: learn the predictions of a teacher"),
    "imagenet_90": Recipe(imagenet_90, "the paper's 90-epoch setup: ResNet-50 with lambda layers"),
    "mobilenet_350": Recipe(mobilenet_350, "the paper's MobileNet-v2 with lambda blocks"),
    **{
        row.name: Recipe(
            functools.partial(imagenet_350, row.depth, row.image_size),
            f"the paper's LambdaResNet-{row.depth} at {row.image_size} pixels"
            + (f": top-1 {row.top1}" if row.top1 else ""),
        )
        for row in ROWS_350
    },
    **{
        row.name: Recipe(
            functools.partial(imagenet_350_unpublished, row.network, row.image_size),
            f"{row.network} at {row.image_size} pixels: top-1 {row.top1} in the paper, settings not published",
        )
        for row in UNPUBLISHED_350
    },
    **{
        f"cotrain_350_{depth}_{size}": Recipe(
            functools.partial(cotrain_350, depth, size),
            f"the paper's LambdaResNet-{depth} at {size} pixels with pseudo-labels: top-1 {top1}",
        )
        for (depth, size), top1 in PSEUDO_TOP1.items()
    },
}


@dataclass(frozen=True)
class RunFolder:
    """A run to go on with."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of the run."""


@dataclass(frozen=True)
class Resume(RunFolder):
    """Go on with a run, by its own configuration, from its newest whole checkpoint."""

    def config(self) -> TrainConfig:
        return cast(TrainConfig, read_config(self.run, TrainConfig.COMMAND))


def check_recipe(arguments: Sequence[str], command: list[str], recipes: Iterable[str]) -> None:
    """Refuses a word in the place of the recipe that is none; the parser would list all of them."""
    words = list(arguments)[len(command) : len(command) + 1]
    names = [*recipes, "resume"]
    if list(arguments)[: len(command)] != command or not words or words[0].startswith("-") or words[0] in names:
        return
    close = get_close_matches(words[0], names)
    hint = f"did you mean {' or '.join(close)}?" if close else f"`lambdanets {' '.join(command)} --help` has them all"
    raise ValueError(f"unknown recipe {words[0]!r}: {hint}")


def names_images(word: str) -> bool:
    """Whether a word in the place of the recipe names images: a path that exists, or anything that looks like one.

    Recipes come first: a folder that is called like one is ./NAME.
    """
    if word in RECIPES or word == "resume" or word.startswith("-"):
        return False
    looks = "/" in word or os.sep in word or word.endswith((".csv", *SHARDS, "*", "}")) or word in EMBEDDED
    return looks or is_url(word) or Path(word).expanduser().exists()


def train_command(arguments: Sequence[str] = ()) -> type[Any]:
    """`lambdanets train`: a list of recipes shows their titles, the help of the one in `arguments` all about it."""
    words = list(arguments)
    if words[:1] == ["train"] and len(words) > 1 and names_images(words[1]):
        return train_images_command(words[2:])
    check_recipe(arguments, ["train"], RECIPES)
    kinds: list[Any] = [
        Annotated[
            type(recipe.make()),
            tyro.conf.subcommand(
                name, default=recipe.make(), description=recipe.document if name in arguments else recipe.title
            ),
        ]
        for name, recipe in RECIPES.items()
    ]
    chosen: Any = functools.reduce(operator.or_, kinds) | Annotated[Resume, tyro.conf.subcommand("resume")]

    @dataclass(frozen=True, kw_only=True)
    class TrainRecipe(Train):
        recipe: Annotated[chosen, tyro.conf.arg(name="")]  # pyright: ignore[reportInvalidTypeForm]
        """Where the settings start from."""

    TrainRecipe.__doc__ = Train.__doc__
    return TrainRecipe


def train_images_command(options: Sequence[str]) -> type[Any]:
    """`lambdanets train IMAGES`, which knows the settings that `options` give."""
    names = set(names_of(TrainConfig()))
    written = {word.partition("=")[0][2:].replace("-", "_") for word in options if word.startswith("--")}
    opposite = {name: re.sub(r"(^|\.)([^.]+)$", r"\1no_\2", name) for name in names}  # of a switch
    found = tuple(sorted(name for name in names if {name, opposite[name]} & written))

    @dataclass(frozen=True, kw_only=True)
    class TrainGivenImages(TrainImages):
        given: ClassVar[tuple[str, ...]] = found

    TrainGivenImages.__doc__ = TrainImages.__doc__
    return TrainGivenImages


@dataclass(frozen=True, kw_only=True)
class TrainImages:
    """Train on your own images: a folder with a folder for each class, or one with train/ and val/ of such.

    Network, image size, batch, epochs and all other settings are chosen by rules, and printed with their reasons and
    the time that training will take. Settings that you give stay as they are, and the choices take the place of the
    other defaults below. `lambdanets train RECIPE` has fixed settings.
    """

    given: ClassVar[tuple[str, ...]] = ()

    images: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES", help_behavior_hint="")]
    """A folder, shards, a .csv list, idx files (docs/data.md), or mnist: digits that come with the package."""
    minutes: Annotated[float | None, optional("MINUTES")] = None
    """How long training may take, roughly; by default some minutes on a CPU."""
    resume: bool = False
    """Resume from --out if it has a checkpoint, otherwise start a new run."""
    report: bool = True
    """Write report.html at the end."""
    settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=lambda: TrainConfig(recipe=RECIPE))

    def run(self) -> int:
        from lambdanets.report.page import write_report
        from lambdanets.train.own import choose, run, show_end

        given = {name: functools.reduce(getattr, name.split("."), self.settings) for name in self.given}
        console = Console(highlight=False)
        config = choose(self.images, given, self.minutes, self.resume, console)
        result = run(config, self.resume, console)
        if not result.finished:
            return show_stopped(result, config, console)
        show_end(config, result, write_report(config.out) if self.report else None, console)
        return 0


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a network: `lambdanets train IMAGES` chooses all settings for a folder of images and says why.

    `lambdanets train RECIPE --data.path IMAGES --out RUN` has fixed settings: `lambdanets train RECIPE --help` shows
    what a recipe costs, what to expect of it, and all its settings. On several GPUs:
    `torchrun --nproc-per-node 8 -m lambdanets train RECIPE ...`. Ctrl-C or SIGTERM writes a checkpoint first.
    """

    recipe: Any
    resume: bool = False
    """Go on with the run in --out if it has a checkpoint, otherwise start: one command for every requeue of a job."""
    report: bool = True
    """Write report.html at the end."""
    find_rate: bool = False
    """Do not train: try growing learning rates for 100 steps on weights that are thrown away, suggest one, and write
    find_rate.json and find_rate.svg into --out."""

    def run(self) -> int:
        if self.find_rate:
            return self.suggest_rate()
        again = isinstance(self.recipe, Resume)
        config = self.recipe.config() if isinstance(self.recipe, Resume) else self.recipe
        return train(config, resume=again or self.resume, report=self.report)

    def suggest_rate(self) -> int:
        from lambdanets.train.find_rate import find_rate, show, write

        if self.resume or isinstance(self.recipe, Resume):
            raise ValueError("--find-rate is for new runs: leave resume out")
        found = find_rate(self.recipe.make_task(), self.recipe)
        if int(os.environ.get("RANK", "0")) == 0:
            write(found, self.recipe.out)
            show(found, Console(highlight=False))
        return 0


def train(config: TrainConfig, *, resume: bool = False, report: bool = True, console: Console | None = None) -> int:
    """Trains a classifier and shows how it goes; returns an exit status."""
    from lambdanets.report.page import write_report

    if resume and (config.out / CONFIG).is_file():  # a run keeps its behaviour, also where the defaults have changed
        config = as_before(config, read_stored(config.out).settings)
    return train_task(config.make_task(), config, resume, write_report if report else None, console)


def train_task(
    task: Task,
    config: RunConfig,
    resume: bool,
    report: Callable[[Path], Path] | None,
    console: Console | None,
) -> int:
    """Trains, shows how it goes, and writes a report at the end; returns an exit status."""
    from lambdanets.train.loop import fit
    from lambdanets.train.progress import Watcher

    console = console or Console(highlight=False)
    with Watcher(console) as watcher:
        result = fit(task, config, resume=resume, watch=watcher)
    if not result.main:
        return 0
    if not result.finished:
        return show_stopped(result, config, console)
    if report is not None:
        console.print(f"report: {report(config.out)}", soft_wrap=True)
    console.print(f"weights: {config.out / WEIGHTS}", soft_wrap=True)
    return 0


def show_stopped(result: "Result", config: RunConfig, console: Console) -> int:
    """Say how to go on; returns the exit status."""
    console.print(f"stopped by {result.stopped_by} at step {result.step} of {result.steps}: nothing is lost. Go on:")
    console.print(f"  lambdanets {config.COMMAND} resume {config.out}", soft_wrap=True)
    return SIGNAL_STATUS.get(result.stopped_by or "", 1)

"""`lambdanets train`."""

import functools
import inspect
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast, get_args, get_origin, get_type_hints

import tyro
from rich.console import Console

from lambdanets.data.embedded import EMBEDDED
from lambdanets.data.remote import is_url
from lambdanets.data.shards import SHARDS
from lambdanets.models.packaged import packaged_names
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
from lambdanets.train.plan import CHOSEN, RECIPE, names_of
from lambdanets.train.signals import SIGNAL_STATUS
from lambdanets.train.task import Task
from lambdanets.typed import as_before

if TYPE_CHECKING:
    from lambdanets.train.result import Result


@dataclass(frozen=True)
class Recipe:
    """A recipe of the command line: how to make its configuration, and its title in the list of recipes."""

    make: Callable[[], RunConfig]
    title: str

    @property
    def document(self) -> str:
        make = self.make.func if isinstance(self.make, functools.partial) else self.make
        return re.split(r"\n\n(?:Args|Example):", inspect.getdoc(make) or "")[0]


RECIPES = {
    "digits": Recipe(digits, "4,000 handwritten digits on a CPU, one or two minutes"),
    "debug": Recipe(debug, "twenty steps that test training on this machine"),
    "imagenette": Recipe(imagenette, "ResNet-50 with lambda layers on Imagenette at 128 pixels"),
    "cotrain": Recipe(cotrain, "Imagenette with few labels and the pseudo-labels of `lambdanets pseudo label`"),
    "distill": Recipe(distill, "images without labels: train on the predictions of a teacher network"),
    "imagenet_90": Recipe(imagenet_90, "ImageNet: the paper's ResNet-50 with lambda layers, 90 epochs"),
    "mobilenet_350": Recipe(mobilenet_350, "ImageNet: the paper's MobileNet-v2 with lambda blocks, 350 epochs"),
    **{
        row.name: Recipe(
            functools.partial(imagenet_350, row.depth, row.image_size),
            f"ImageNet: the paper's LambdaResNet-{row.depth} at {row.image_size} pixels"
            + (f", top-1 {row.top1} in the paper" if row.top1 else ""),
        )
        for row in ROWS_350
    },
    **{
        row.name: Recipe(
            functools.partial(imagenet_350_unpublished, row.network, row.image_size),
            f"ImageNet: {row.network} at {row.image_size} pixels, top-1 {row.top1} in the paper, unpublished settings",
        )
        for row in UNPUBLISHED_350
    },
    **{
        f"cotrain_350_{depth}_{size}": Recipe(
            functools.partial(cotrain_350, depth, size),
            f"ImageNet and pseudo-labels: the paper's LambdaResNet-{depth} at {size} pixels, top-1 {top1} in the paper",
        )
        for (depth, size), top1 in PSEUDO_TOP1.items()
    },
}


# Defaults in the help of `lambdanets train FOLDER`
HINTS = {
    **dict.fromkeys(CHOSEN, "chosen from the images"),
    "out": "runs/NAME_OF_FOLDER",
    "data.path": "the folder",
}
# Recipes that `lambdanets train --help` collapses into one line, by the beginning of their names
SERIES = {
    "imagenet_350_": "ImageNet: LambdaResNets by depth and image size",
    "cotrain_350_": "the same with pseudo-labels",
}


@dataclass(frozen=True)
class RunFolder:
    """The run to resume."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""


@dataclass(frozen=True)
class Resume(RunFolder):
    """Resume a run from its newest checkpoint, with the configuration in its folder."""

    def config(self) -> TrainConfig:
        return cast(TrainConfig, read_config(self.run, TrainConfig.COMMAND))


def check_recipe(arguments: Sequence[str], command: list[str], recipes: Iterable[str]) -> None:
    """Raise ValueError for an unknown recipe; the parser's own message would list all recipes."""
    words = list(arguments)[len(command) : len(command) + 1]
    names = [*recipes, "resume"]
    if list(arguments)[: len(command)] != command or not words or words[0].startswith("-") or words[0] in names:
        return
    close = get_close_matches(words[0], names)
    hint = f"did you mean {' or '.join(close)}?" if close else f"`lambdanets {' '.join(command)} --help` lists them"
    raise ValueError(f"unknown recipe {words[0]!r}: {hint}")


def names_images(word: str) -> bool:
    """Return whether the word after `train` names a dataset: an existing path, or a word that looks like a path or url.

    Recipes take precedence: a folder with the name of a recipe must be written as ./NAME.
    """
    if word in RECIPES or word == "resume" or word.startswith("-"):
        return False
    looks = "/" in word or os.sep in word or word.endswith((".csv", *SHARDS, "*", "}")) or word in EMBEDDED
    return looks or is_url(word) or Path(word).expanduser().exists()


def check_ambiguous(name: str, options: Sequence[str]) -> None:
    """Raise ValueError for the name of a recipe, or `resume`, that is also a folder here, if it is not clear which is
    meant."""
    recipe = RECIPES.get(name)
    clear = ("--help", "-h", *(["--data.path"] if recipe else []))
    resumed = recipe is None and options and not options[0].startswith("-")  # `resume RUN`
    if (recipe is None and name != "resume") or resumed or not Path(name).is_dir():
        return
    if {word.partition("=")[0] for word in options} & set(clear):
        return
    if recipe is None:
        raise ValueError(
            "`resume` is both a command and a folder here: `lambdanets train ./resume` trains on the folder, "
            "`lambdanets train resume RUN` resumes a run"
        )
    raise ValueError(
        f"`{name}` is both a recipe and a folder here: `lambdanets train ./{name}` trains on the folder, `lambdanets "
        f"train {name} --data.path {recipe.make().data.path}` uses the recipe"  # type: ignore[attr-defined]
    )


def check_name(name: str) -> None:
    """Raise ValueError for a word that is neither a folder, a recipe, `resume` nor an option."""
    names = [*RECIPES, "resume"]
    if name.startswith("-") or name in names:
        return
    folders = sorted(one.name for one in Path().iterdir() if one.is_dir() and not one.name.startswith("."))
    close = [*get_close_matches(name, names), *(f"{one}/" for one in get_close_matches(name, folders))]
    hint = f"did you mean {' or '.join(close)}?" if close else "`lambdanets train --help` lists the recipes"
    raise ValueError(f"{name}: no such folder, and no recipe of that name; {hint}")


def overview() -> str:
    """Return the help of `lambdanets train` without a folder or recipe."""
    lines = [
        "usage: lambdanets train FOLDER | RECIPE | resume RUN [OPTIONS]",
        "",
        "Train an image classifier on your own images, or with a recipe.",
        "",
        "`lambdanets train FOLDER` chooses all settings for your images and prints the reasons.",
        "`lambdanets train FOLDER --help` lists the settings.",
        "",
        "`lambdanets train RECIPE --data.path FOLDER --out RUN` uses the fixed settings of a recipe.",
        "`lambdanets train RECIPE --help` shows its hardware, training time, accuracy and settings.",
        "",
        "`lambdanets train resume RUN` resumes a run from its newest checkpoint.",
        "",
        "On several GPUs: `torchrun --nproc-per-node 8 -m lambdanets train RECIPE ...`. Ctrl-C and SIGTERM write a",
        "checkpoint before the run stops.",
        "",
        "Recipes:",
    ]
    listed = {name: recipe.title for name, recipe in RECIPES.items() if not name.startswith(tuple(SERIES))}
    for prefix, title in SERIES.items():
        first = next(name for name in RECIPES if name.startswith(prefix))
        count = sum(name.startswith(prefix) for name in RECIPES)
        listed[f"{prefix}..."] = f"{title} ({count}, such as {first})"
    return "\n".join([*lines, *(f"  {name:<19} {title}" for name, title in listed.items())])


def train_command(arguments: Sequence[str] = ()) -> type[Any]:
    """Return the command `lambdanets train`. Recipes have their titles as help, the one in `arguments` its
    docstring.

    Without a folder or recipe, prints the overview and raises SystemExit.
    """
    words = list(arguments)
    if words[:1] == ["train"]:
        if len(words) == 1:
            print(overview(), file=sys.stderr)
            raise SystemExit(2)
        if words[1] in ("-h", "--help"):
            print(overview())
            raise SystemExit(0)
        if names_images(words[1]):
            return train_images_command(words[2:])
        check_ambiguous(words[1], words[2:])
        check_name(words[1])
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
        """Recipe that provides the default settings."""

    TrainRecipe.__doc__ = Train.__doc__
    return TrainRecipe


def with_hints(kind: type[Any], hints: Mapping[str, str], prefix: str = "") -> type[Any]:
    """Return a copy of a configuration class whose help shows other texts as the defaults of some settings."""
    kinds = get_type_hints(kind, include_extras=True)
    made = []
    for one in fields(kind):
        found, name = kinds[one.name], f"{prefix}{one.name}"
        default = one.default if one.default is not MISSING else one.default_factory()  # pyright: ignore[reportCallIssue]
        if is_dataclass(found):
            found = with_hints(found, hints, f"{name}.")  # pyright: ignore[reportArgumentType]
            default = found(**vars(default))
        elif name in hints:
            metavar = next((m.metavar for m in getattr(found, "__metadata__", ()) if hasattr(m, "metavar")), None)
            bare = get_args(found)[0] if get_origin(found) is Annotated else found
            hint = f"({'with a folder' if metavar else 'default'}: {hints[name]})"  # the text has its usual default
            found = Annotated[bare, tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)]
        made.append((one.name, found, field(default_factory=functools.partial(copy, default))))
    return make_dataclass(kind.__name__, made, bases=(kind,), frozen=True, kw_only=True)


def train_images_command(options: Sequence[str]) -> type[Any]:
    """Return the command `lambdanets train IMAGES`, with the settings that `options` contain as `given`."""
    names = set(names_of(TrainConfig()))
    written = {word.partition("=")[0][2:].replace("-", "_") for word in options if word.startswith("--")}
    opposite = {name: re.sub(r"(^|\.)([^.]+)$", r"\1no_\2", name) for name in names}  # --no-NAME of a flag
    found = tuple(sorted(name for name in names if {name, opposite[name]} & written))

    scratch = Annotated[tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help=help_of_scratch())]
    made: list[Any] = [("from_scratch", scratch, field(default=False))]
    if {"-h", "--help"} & set(options):
        kind: Any = with_hints(TrainConfig, HINTS)
        made.append(("settings", Annotated[kind, tyro.conf.arg(name="")], field(default_factory=kind)))
    about = {"given": found, "__doc__": TrainImages.__doc__}
    return make_dataclass("TrainGivenImages", made, bases=(TrainImages,), frozen=True, kw_only=True, namespace=about)


def help_of_scratch() -> str:
    """Return the help of --from-scratch, which depends on the weights that come with the package."""
    if not packaged_names():
        return "Start from random weights, which is the default unless --model.pretrained is set."
    return (
        "Start from random weights. By default, training on photographs starts from the weights that come with "
        "lambdanets, with smaller learning rates and fewer epochs."
    )


@dataclass(frozen=True, kw_only=True)
class TrainImages:
    """Train a classifier on your own images: a folder with one folder per class, or with train/ and val/ inside.

    Network, image size, batch size, epochs and all other settings are chosen from the images and the machine, and
    printed with the reasons and the expected time. Options that you set are kept. `lambdanets train RECIPE` uses fixed
    settings instead.
    """

    given: ClassVar[tuple[str, ...]] = ()

    images: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES", help_behavior_hint="")]
    """Dataset: a folder, tar shards, a .csv list or idx files (docs/data.md), or mnist, digits that come with the
    package."""
    minutes: Annotated[float | None, optional("MINUTES")] = None
    """Approximate time budget; by default 8 minutes on a CPU and 30 on a GPU for up to 1,000 images, and in proportion
    to their number for more."""
    resume: bool = False
    """Resume from --out if it has a checkpoint, otherwise start a new run."""
    from_scratch: tyro.conf.FlagCreatePairsOff[bool] = False
    """Start from random weights."""
    report: bool = True
    """Write report.html at the end of training."""
    settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=lambda: TrainConfig(recipe=RECIPE))

    def run(self) -> int:
        from lambdanets.report.page import write_report
        from lambdanets.train.own import choose, run, show_end

        given = {name: functools.reduce(getattr, name.split("."), self.settings) for name in self.given}
        console = Console(highlight=False)
        config = choose(self.images, given, self.minutes, self.resume, console, self.from_scratch)
        result = run(config, self.resume, console)
        if not result.finished:
            return show_stopped(result, config, console)
        show_end(config, result, write_report(config.out) if self.report else None, console)
        return 0


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train an image classifier on your own images, or with a recipe.

    `lambdanets train FOLDER` chooses all settings for your images and prints the reasons.

    `lambdanets train RECIPE --data.path FOLDER --out RUN` uses the fixed settings of a recipe. `lambdanets train RECIPE
    --help` shows its hardware, training time, accuracy and settings.

    On several GPUs: `torchrun --nproc-per-node 8 -m lambdanets train RECIPE ...`. Ctrl-C and SIGTERM write a checkpoint
    before the run stops.
    """

    recipe: Any
    resume: bool = False
    """Resume from --out if it has a checkpoint, otherwise start a new run; suits jobs that are requeued."""
    report: bool = True
    """Write report.html at the end of training."""
    find_rate: bool = False
    """Run a learning-rate range test instead of training: increase the learning rate over 100 steps, suggest a value,
    and write find_rate.json and find_rate.svg into --out."""

    def run(self) -> int:
        if self.find_rate:
            return self.suggest_rate()
        again = isinstance(self.recipe, Resume)
        config = self.recipe.config() if isinstance(self.recipe, Resume) else self.recipe
        return train(config, resume=again or self.resume, report=self.report)

    def suggest_rate(self) -> int:
        from lambdanets.train.find_rate import find_rate, show, write

        if self.resume or isinstance(self.recipe, Resume):
            raise ValueError("--find-rate needs a new run: remove resume")
        found = find_rate(self.recipe.make_task(), self.recipe)
        if int(os.environ.get("RANK", "0")) == 0:
            write(found, self.recipe.out)
            show(found, Console(highlight=False))
        return 0


def train(config: TrainConfig, *, resume: bool = False, report: bool = True, console: Console | None = None) -> int:
    """Train a classifier, show the progress, and return the exit status."""
    from lambdanets.report.page import write_report

    if resume and (config.out / CONFIG).is_file():  # a run keeps its behaviour when defaults change
        config = as_before(config, read_stored(config.out).settings)
    return train_task(config.make_task(), config, resume, write_report if report else None, console)


def train_task(
    task: Task,
    config: RunConfig,
    resume: bool,
    report: Callable[[Path], Path] | None,
    console: Console | None,
) -> int:
    """Train, show the progress, write a report at the end, and return the exit status."""
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
    """Print how to resume, and return the exit status."""
    console.print(f"stopped by {result.stopped_by} at step {result.step} of {result.steps}, checkpoint saved. Resume:")
    console.print(f"  lambdanets {config.COMMAND} resume {config.out}", soft_wrap=True)
    return SIGNAL_STATUS.get(result.stopped_by or "", 1)

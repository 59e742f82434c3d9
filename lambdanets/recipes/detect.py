"""`lambdanets detect`: train by a recipe, and what uses the result."""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import tyro
from rich.console import Console

from lambdanets.detect.bench import BenchDetector
from lambdanets.detect.command import (
    CheckAnnotations,
    EvaluateDetector,
    PredictObjects,
    ReportDetector,
    ScoreResults,
)
from lambdanets.detect.config import DetectConfig
from lambdanets.recipes.coco import coco_mask_rcnn, coco_one_gpu, debug, shapes, small_set
from lambdanets.train.command import Recipe, RunFolder, check_recipe, train_task
from lambdanets.typed import from_json

RECIPES: dict[str, Recipe] = {
    "shapes": Recipe(shapes, "coloured shapes, made from a seed: on two CPU cores, in some minutes"),  # type: ignore[arg-type]
    "debug": Recipe(debug, "a few steps with everything on: does detection work here?"),  # type: ignore[arg-type]
    "small_set": Recipe(small_set, "a few hundred pictures of your own, on one GPU"),  # type: ignore[arg-type]
    "coco_one_gpu": Recipe(coco_one_gpu, "the paper's setup scaled to one GPU"),  # type: ignore[arg-type]
    "coco_mask_rcnn": Recipe(coco_mask_rcnn, "the paper's setup: Mask R-CNN at 1024x1024, from scratch"),  # type: ignore[arg-type]
}


@dataclass(frozen=True)
class ResumeDetector(RunFolder):
    """Go on with a run, by its own configuration, from its newest whole checkpoint."""

    def config(self) -> DetectConfig:
        data = self.read()
        if "heads" not in data:
            raise ValueError(f"{self.run} is not the run of a detector: `lambdanets train resume {self.run}`")
        return replace(from_json(DetectConfig, data), out=self.run)


@dataclass(frozen=True, kw_only=True)
class TrainDetector:
    """Train a detector: `lambdanets detect train [RECIPE] --data.path DATA --out RUN`, then any setting of the recipe.

    Without a recipe it learns coloured shapes. `lambdanets detect train RECIPE --help` shows what a recipe costs, what
    to expect of it, and all its settings. On several GPUs:
    `torchrun --nproc-per-node 8 -m lambdanets detect train ...`.
    """

    recipe: Any
    resume: bool = False
    """Go on with the run in --out if it has a checkpoint, otherwise start."""
    report: bool = True
    """Write report.html at the end."""

    def run(self) -> int:
        again = isinstance(self.recipe, ResumeDetector)
        config = self.recipe.config() if isinstance(self.recipe, ResumeDetector) else self.recipe
        return train(config, resume=again or self.resume, report=self.report)


def detect_command(arguments: Sequence[str] = ()) -> Any:
    """`lambdanets detect`: a list of recipes shows their titles, the help of the one in `arguments` all about it."""
    check_recipe(arguments, ["detect", "train"], RECIPES)
    kinds: list[Any] = [
        Annotated[
            DetectConfig,
            tyro.conf.subcommand(
                name, default=recipe.make(), description=recipe.document if name in arguments else recipe.title
            ),
        ]
        for name, recipe in RECIPES.items()
    ]
    chosen: Any = functools.reduce(operator.or_, kinds) | Annotated[ResumeDetector, tyro.conf.subcommand("resume")]

    @dataclass(frozen=True, kw_only=True)
    class TrainRecipe(TrainDetector):
        recipe: Annotated[chosen, tyro.conf.arg(name="")] = shapes()  # noqa: RUF009  # pyright: ignore[reportInvalidTypeForm]
        """Where the settings start from."""

    TrainRecipe.__doc__ = TrainDetector.__doc__

    @dataclass(frozen=True)
    class Detect:
        """Object detection and instance segmentation: Mask R-CNN with lambda backbones on COCO-format data."""

        what: Annotated[
            Annotated[TrainRecipe, tyro.conf.subcommand("train")]
            | Annotated[EvaluateDetector, tyro.conf.subcommand("evaluate")]
            | Annotated[PredictObjects, tyro.conf.subcommand("predict")]
            | Annotated[CheckAnnotations, tyro.conf.subcommand("check")]
            | Annotated[ScoreResults, tyro.conf.subcommand("score")]
            | Annotated[ReportDetector, tyro.conf.subcommand("report")]
            | Annotated[BenchDetector, tyro.conf.subcommand("bench")],
            tyro.conf.arg(name=""),
        ]

        def run(self) -> int:
            return self.what.run()

    return Detect


def train(config: DetectConfig, *, resume: bool = False, report: bool = True, console: Console | None = None) -> int:
    """Trains a detector and shows how it goes; returns an exit status."""
    from lambdanets.detect.page import write_report
    from lambdanets.detect.task import PROBLEMS, Detect

    console = console or Console(highlight=False)
    task = Detect(config)
    if task.problems:
        console.print(
            f"{len(task.problems)} bad entries of the annotations are left out, the first: {task.problems[0]}; "
            f"all of them: {config.out / PROBLEMS}",
            markup=False,
            soft_wrap=True,
        )
    return train_task(task, config, "detect train", resume, write_report if report else None, console)

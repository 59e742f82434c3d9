"""The commands of `lambdanets detect`. The modules that they call need the extra `lambdanets[detect]`."""

import functools
import json
import math
import operator
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lambdanets.detect.config import DetectConfig
from lambdanets.options import check_numbers, chosen_device, optional
from lambdanets.recipes.coco import coco_mask_rcnn, coco_one_gpu, debug, shapes, small_set
from lambdanets.runs import RunWeights, read_config
from lambdanets.train.command import Recipe, RunFolder, check_recipe, train_task
from lambdanets.train.config import LARGEST_BATCH, Precision
from lambdanets.train.inference.command import STDIN
from lambdanets.typed import LARGEST_IMAGE, from_json

MOST_SHOWN = 20
RECIPES: dict[str, Recipe] = {
    "shapes": Recipe(shapes, "synthetic coloured shapes: a few minutes on two CPU cores"),
    "debug": Recipe(debug, "a few steps with every feature on, to check the installation"),
    "small_set": Recipe(small_set, "a few hundred images of your own, on one GPU"),
    "coco_one_gpu": Recipe(coco_one_gpu, "the paper's setup, scaled to one GPU"),
    "coco_mask_rcnn": Recipe(coco_mask_rcnn, "the paper's setup: Mask R-CNN at 1024x1024, from scratch"),
}


@dataclass(frozen=True)
class ResumeDetector(RunFolder):
    """Resume a run from its newest complete checkpoint, with its own configuration."""

    def config(self) -> DetectConfig:
        return cast(DetectConfig, read_config(self.run, DetectConfig.COMMAND))


@dataclass(frozen=True, kw_only=True)
class TrainDetector:
    """Train a detector: `lambdanets detect train [RECIPE] --data.path DATA --out RUN`, then any setting of the recipe.

    The default recipe trains on synthetic shapes. `lambdanets detect train RECIPE --help` shows the cost, the expected
    result and all settings of a recipe. On several GPUs: `torchrun --nproc-per-node 8 -m lambdanets detect train ...`.
    """

    recipe: Any
    resume: bool = False
    """Resume from --out if it has a checkpoint, otherwise start a new run."""
    report: bool = True
    """Write report.html at the end of training."""

    def run(self) -> int:
        again = isinstance(self.recipe, ResumeDetector)
        config = self.recipe.config() if isinstance(self.recipe, ResumeDetector) else self.recipe
        return train(config, resume=again or self.resume, report=self.report)


def train(config: DetectConfig, *, resume: bool = False, report: bool = True, console: Console | None = None) -> int:
    """Train a detector with progress output and return the exit status."""
    from lambdanets.detect.page import write_report
    from lambdanets.detect.task import PROBLEMS, Detect

    console = console or Console(highlight=False)
    task = Detect(config)
    if task.problems:
        console.print(
            f"{len(task.problems)} invalid annotations are skipped, the first: {task.problems[0]}; full list: "
            f"{config.out / PROBLEMS}",
            markup=False,
            soft_wrap=True,
        )
    return train_task(task, config, resume, write_report if report else None, console)


@dataclass(frozen=True)
class Using:
    """Which weights to use, and how to run them."""

    weights: RunWeights = "ema"
    """Weights of a run: their moving average (ema), those of the last step (raw), or those with the best score, kept by
    early stopping or --keep-best (best)."""
    size: Annotated[int | None, optional("PIXELS")] = None
    """Resize images so that their longer side has this many pixels; by default the size of training."""
    precision: Precision = "float32"
    """Autocast dtype of the forward pass; float64 also converts the weights."""
    device: Annotated[str | None, optional("DEVICE")] = None
    """Device: cpu or cuda; by default a GPU if there is one."""

    def open(self, what: str) -> Any:
        from lambdanets.detect.use import open_detector

        check_numbers(self, "--", size=(32, LARGEST_IMAGE))
        return open_detector(what, weights=self.weights, device=self.device, precision=self.precision)

    def workers(self) -> int:
        return min(os.cpu_count() or 1, 16) if chosen_device(self.device).type == "cuda" else 0


What = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WHAT")]


@dataclass(frozen=True)
class EvaluateDetector:
    """Evaluate a trained detector: COCO average precision of boxes and masks."""

    what: What
    """A run folder or a .safetensors file."""
    data: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[DATA]", help_behavior_hint="")] = None
    """Dataset, as for `lambdanets detect train --data.path`; by default the images that the run was evaluated on."""
    split: Literal["train", "validation", "test"] = "validation"
    """The split to evaluate on."""
    images: Annotated[str | None, optional("PATH")] = None
    """Folder or tar of the images, if DATA is a file."""
    using: Annotated[Using, tyro.conf.arg(name="")] = field(default_factory=Using)
    batch_size: int = 8
    """Images per forward pass; affects only speed and memory."""
    results: Annotated[Path | None, optional("FILE")] = None
    """Write the detections to this COCO result file."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        from lambdanets.detect import precision
        from lambdanets.detect.results import write_results
        from lambdanets.detect.use import look_through

        if self.batch_size < 1:
            raise ValueError(f"--batch-size must be at least 1, got {self.batch_size}")
        check_numbers(self, "--", batch_size=(1, LARGEST_BATCH))
        if self.results is None and not precision.available():
            raise ValueError(f"{precision.MISSING}; or write the detections to a file with --results")
        trained = self.using.open(self.what)
        about = trained.about
        data, indices, split = self.pictures(about)
        if data.scenes.problems:
            count = len(data.scenes.problems)
            print(f"{count} invalid annotations are skipped, the first: {data.scenes.problems[0]}", file=sys.stderr)
        seen, results, seconds, broken = [], [], 0.0, 0
        for one in look_through(
            trained,
            data,
            indices=indices,
            size=self.using.size,
            batch_size=self.batch_size,
            workers=self.using.workers(),
        ):
            if one.error:
                print(f"skipped: {data.name(one.index)}: {one.error}", file=sys.stderr)
                broken += 1
                continue
            seen.append(one.index)
            picture = data.scenes.pictures[one.index]
            results += [found.as_coco(picture.id, about.categories) for found in one.found]
            seconds += one.seconds
        if self.results is not None:
            write_results(self.results, results)
        if not precision.available():
            print(f"lambdanets: {precision.MISSING}", file=sys.stderr)
            print(
                f"{self.results} has {len(results)} detections: evaluate them elsewhere with `lambdanets detect score`"
            )
            return 0
        scores = precision.average_precision(
            data.scenes.as_coco(seen), results, masks=data.scenes.masks, detections=about.heads.detections
        )
        facts: dict[str, Any] = {
            "split": split,
            "pictures": len(seen),
            "bad_annotations": len(data.scenes.problems),
            "broken": broken,
            "detections_counted": max(100, about.heads.detections),
        }
        facts["pictures_per_second"] = round(len(seen) / max(seconds, 1e-9), 2)
        report(scores, {c.id: c.name for c in about.categories}, facts, self.json)
        return 0

    def pictures(self, about: Any) -> tuple[Any, Any, str]:
        """Return the dataset, the indices of the images to evaluate on (None: all), and the name of that part."""
        from lambdanets.detect.coco import open_set
        from lambdanets.detect.task import evaluated_set

        where, images = self.data, self.images
        if where is None:
            if not about.recipe:
                raise ValueError("the weights have no dataset of their own: add DATA to the command")
            config = from_json(DetectConfig, about.recipe)
            if self.split == "validation" and images is None:
                return evaluated_set(config)
            where, images = config.data.path, images or config.data.images
        masks = "auto" if about.masks else "no"  # masks are not required: boxes alone can be evaluated
        return open_set(where, self.split, images=images, masks=masks, categories=about.categories), None, self.split


@dataclass(frozen=True)
class ScoreResults:
    """Evaluate a COCO result file, for example one from another machine."""

    results: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RESULTS")]
    """A COCO result file, such as detections.json of a run."""
    annotations: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ANNOTATIONS")]
    """The COCO annotation file of the images."""
    detections: int = 100
    """Maximum number of detections per image: only those with the highest scores count."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        from lambdanets.detect.annotations import read_scenes
        from lambdanets.detect.precision import average_precision
        from lambdanets.detect.results import check_sizes, read_results

        check_numbers(self, "--", detections=(1, 100_000))
        results = read_results(self.results)
        boxes, masks = (any(key in one for one in results) for key in ("bbox", "segmentation"))
        scenes = read_scenes(self.annotations, None, masks="auto" if masks else "no")
        check_sizes(self.results, results, scenes.pictures)
        if results and not boxes and not scenes.masks:
            raise ValueError(f"{self.results} has only masks, but {self.annotations} has none")
        unknown = {one["image_id"] for one in results} - {picture.id for picture in scenes.pictures}
        if unknown:
            raise ValueError(
                f"{self.results} has detections for {len(unknown)} images that are not in {self.annotations}"
            )
        others = {one["category_id"] for one in results} - {category.id for category in scenes.categories}
        if others:
            print(
                f"{self.annotations} has no category {min(others)}: detections of unknown categories are ignored",
                file=sys.stderr,
            )
        scores = average_precision(
            scenes.as_coco(),
            results,
            boxes=boxes or not results,
            masks=masks and scenes.masks,
            detections=self.detections,
        )
        facts = {"pictures": len(scenes), "bad_annotations": len(scenes.problems)}
        report(scores, {c.id: c.name for c in scenes.categories}, facts, self.json)
        return 0


def report(scores: Any, names: dict[int, str], facts: dict[str, Any], as_json: bool) -> None:
    """Print scores as a table or as JSON."""
    if as_json:
        numbers = {name: value if math.isfinite(value) else None for name, value in scores.numbers.items()}
        classes = {
            kind: {names.get(i, str(i)): v if math.isfinite(v) else None for i, v in found.items()}
            for kind, found in scores.classes.items()
        }
        print(json.dumps({**facts, **numbers, "classes": classes}, indent=2))
        return
    columns = ("ap", "ap50", "ap75", "small", "medium", "large", "recall")
    table = Table(title=", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items()))
    for title in ("", *(c.upper() if c.startswith("ap") else c for c in columns)):
        table.add_column(title, justify="right")
    for kind in scores.classes:
        table.add_row(kind, *(percent(scores.numbers[f"{kind}_{c}"]) for c in columns))
    console = Console()
    console.print(table)
    if len(names) > 1:
        last = list(scores.classes)[-1]
        table = Table(title=f"{last} AP by class")
        table.add_column("class", overflow="fold")
        table.add_column("AP", justify="right")
        found = sorted(scores.classes[last].items(), key=lambda one: one[1] if math.isfinite(one[1]) else 2.0)
        for number, value in found[:MOST_SHOWN]:
            table.add_row(escape(names.get(number, str(number))), percent(value))
        console.print(table)


def percent(value: float) -> str:
    return f"{100 * value:.1f}" if math.isfinite(value) else "-"


@dataclass(frozen=True)
class PredictObjects:
    """Detect objects in images: write the images with boxes and masks, and detections.jsonl.

    Unreadable images are reported and skipped; the exit status is then 1.
    """

    what: What
    """A run folder or a .safetensors file."""
    images: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES", help_behavior_hint="")
    ] = ()
    """Image files and folders (.jpg, .png, .webp); "-" or nothing reads an image or a list of paths from stdin."""
    output: Path = Path("predictions")
    """Folder for the images and detections.jsonl."""
    score: float = 0.5
    """Minimum score of the detections that are drawn and written, from 0 to 1."""
    draw: bool = True
    """Write images with the detections drawn on them."""
    json: bool = False
    """Also print the detections: one JSON object per image and line."""
    using: Annotated[Using, tyro.conf.arg(name="")] = field(default_factory=Using)

    def run(self) -> int:
        from lambdanets.detect.predict import predict
        from lambdanets.train.inference.predict import gather

        check_numbers(self, "--", score=(0, 1))
        words = self.images or (STDIN,)
        if STDIN in words and sys.stdin.isatty():
            raise ValueError("there are no images: name files or folders, or pipe a list of them to stdin")
        trained = self.using.open(self.what)
        given = gather(words, getattr(sys.stdin, "buffer", None))
        if not given:
            raise ValueError("there are no images: stdin was empty")
        failed, empty = 0, []
        for one in predict(
            trained, given, self.output, least_score=self.score, size=self.using.size, draw_pictures=self.draw
        ):
            failed += "error" in one
            empty += [one["highest_score"]] if "highest_score" in one else []
            if self.json:
                print(json.dumps(one), flush=True)
            elif "error" in one:
                print(f"{one['image']}: {one['error']}", file=sys.stderr)
            else:
                shown = ", ".join(f"{found['class']} {found['score']:.0%}" for found in one["objects"][:MOST_SHOWN])
                print(f"{one['image']}: {shown or 'nothing'}")
        print(f"written to {self.output}", file=sys.stderr)
        if empty:
            print(nothing_found(self.score, empty), file=sys.stderr)
        return 1 if failed else 0


def nothing_found(score: float, highest: Sequence[float]) -> str:
    """Return a sentence for images without an object of this score; `highest` are their highest scores."""
    best = max(highest)
    lower = math.floor(100 * best) / 100
    hint = f"--score {lower:g} shows more" if lower > 0 else "train longer"
    images = "1 image has" if len(highest) == 1 else f"{len(highest)} images have"
    return f"{images} no object with a score of {score:g} or more; the highest score there is {best:.3f}: {hint}"


@dataclass(frozen=True)
class CheckAnnotations:
    """Check a detection dataset: list invalid annotations, unreadable images and duplicates.

    Annotations with missing files, wrong boxes or masks, or unknown categories are invalid; training skips them. Every
    image is decoded. The exit status is 1 if there are invalid annotations, unreadable images or images in several
    splits.
    """

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """A folder or a COCO file, as for `lambdanets detect train --data.path`."""
    images: Annotated[str | None, optional("PATH")] = None
    """Folder or tar of the images, if DATA is a file."""
    masks: Literal["auto", "yes", "no"] = "auto"
    """Whether every object needs a mask; auto: yes if more than half of the objects have one."""

    def run(self) -> int:
        from lambdanets.data.check import check
        from lambdanets.data.command import listing, progress, same
        from lambdanets.detect.check import Pixels
        from lambdanets.detect.coco import open_set, splits_of

        count, sets = 0, {}
        for split in splits_of(self.data) or ("train",):
            data = open_set(self.data, split, images=self.images, masks=self.masks)
            scenes, sets[split] = data.scenes, Pixels(data.scenes, data.files)
            for problem in scenes.problems:
                print(f"{split}: {problem}")
            count += len(scenes.problems)
            outlines = "with masks" if scenes.masks else "boxes only"
            print(
                f"{split}: {len(scenes):,} images, {scenes.objects:,} objects of {len(scenes.categories)} classes, "
                f"{outlines}, {len(scenes.problems)} invalid annotations"
            )
        with progress("reading images", sum(map(len, sets.values()))) as done:
            read = check(sets, done=done)
        listing("images cannot be used", [f"{one.name}: {one.reason}" for one in read.unreadable])
        listing("images are in more than one split", [same(group) for group in read.leaked])
        listing("images are duplicated within a split", [same(group) for group in read.duplicates])
        return 1 if count or read.unreadable or read.leaked else 0


@dataclass(frozen=True)
class ReportDetector:
    """Write report.html into a run folder: AP curves, and the images with the best and the worst detections."""

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder."""
    pictures: int = 12
    """Number of images shown for each of the best and the worst detections."""

    def run(self) -> int:
        from lambdanets.detect.page import write_report

        check_numbers(self, "--", pictures=(0, 10_000))
        print(write_report(self.run_folder, self.pictures))
        return 0


def detect_command(arguments: Sequence[str] = ()) -> Any:
    """Return the class of `lambdanets detect`. The help shows the full text of a recipe that is in `arguments`."""
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
        """The recipe, which provides the default settings."""

    TrainRecipe.__doc__ = TrainDetector.__doc__

    @dataclass(frozen=True)
    class Detect:
        """Train and use object detectors: Mask R-CNN with lambda backbones on COCO-format data."""

        what: Annotated[
            Annotated[TrainRecipe, tyro.conf.subcommand("train")]
            | Annotated[EvaluateDetector, tyro.conf.subcommand("evaluate")]
            | Annotated[PredictObjects, tyro.conf.subcommand("predict")]
            | Annotated[CheckAnnotations, tyro.conf.subcommand("check")]
            | Annotated[ScoreResults, tyro.conf.subcommand("score")]
            | Annotated[ReportDetector, tyro.conf.subcommand("report")],
            tyro.conf.arg(name=""),
        ]

        def run(self) -> int:
            return self.what.run()

    return Detect

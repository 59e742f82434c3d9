"""Train on a user's images with automatically chosen settings: `lambdanets train FOLDER` and `lambdanets.fit`."""

import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from torch import nn

from lambdanets.report.page import write_report
from lambdanets.report.run import read_run
from lambdanets.report.scores import by_class, confusion, labelled
from lambdanets.report.show import percent, some
from lambdanets.runs import CONFIG, WEIGHTS, read_config
from lambdanets.train.config import TrainConfig
from lambdanets.train.inference.command import Using
from lambdanets.train.inference.predict import Prediction, gather, predict
from lambdanets.train.inference.trained import Trained, open_trained
from lambdanets.train.loop import fit as run_loop
from lambdanets.train.plan import IMBALANCE, Facts, Plan, make_plan, new_folder, with_settings
from lambdanets.train.probe import find_start, look_at, machine_of, measure
from lambdanets.train.progress import Watcher
from lambdanets.train.result import Result

SHORT_NAMES = {
    "model": "model.name",
    "image_size": "model.image_size",
    "pretrained": "model.pretrained",
    "validation": "data.validation",
    "workers": "data.workers",
}


@dataclass(frozen=True)
class Fitted:
    """Result of `lambdanets.fit`.

    Attributes:
        model: the network with averaged weights, in eval mode, on its device. It takes normalised images [B, C, H, W]
            and returns logits [B, classes].
        class_names: class names in the order of the logits.
        accuracy: top-1 accuracy, from 0 to 1, on the validation or held-out images.
        scores: all metrics of the last evaluation: {"ema" or "raw": {split: {metric: value}}}.
        folder: folder of the run: weights, log, checkpoints, predictions.
        report: path of report.html; None without a report.
        seconds: training time.
    """

    model: nn.Module
    class_names: tuple[str, ...]
    accuracy: float
    scores: dict[str, dict[str, dict[str, float]]]
    folder: Path
    report: Path | None
    seconds: float
    trained: Trained = field(repr=False)

    def predict(self, images: str | Path | Iterable[str | Path], top: int = 5) -> list[Prediction]:
        """Predict the most likely classes of image files, or of all images in a folder, like `lambdanets predict`.

        Args:
            images: a file, a folder, or several of them.
            top: number of classes per image.
        """
        several = [images] if isinstance(images, str | Path) else images
        return list(predict(self.trained, gather(map(str, several)), top))


def fit(
    data: str | Path,
    *,
    out: str | Path | None = None,
    minutes: float | None = None,
    resume: bool = False,
    report: bool = True,
    quiet: bool = False,
    from_scratch: bool = False,
    **settings: Any,
) -> Fitted:
    """Train a classifier on your images. Settings that are not passed are chosen automatically and printed with
    reasons.

    Args:
        data: a folder with one folder per class (or with train/ and val/ inside), tar shards, a .csv list, idx files,
            or "mnist".
        out: folder for the results; by default a new one in runs/.
        minutes: approximate time budget for training.
        resume: resume from `out` if it has a checkpoint.
        report: write report.html.
        quiet: print nothing.
        from_scratch: start from random weights, also if trained ones come with lambdanets.
        settings: any setting of `lambdanets train`: epochs=20, batch_size=64, device="cpu", seed=1,
            augment={"flip": 0}; also model="lambda_resnet50", image_size=96, validation="other/", pretrained=WEIGHTS.

    Returns a `Fitted`. Raises ValueError for unknown settings and for data that cannot be used, and KeyboardInterrupt
    if training was stopped by Ctrl-C; a checkpoint is written first.

    Example:
        >>> import lambdanets
        >>> result = lambdanets.fit("mnist", epochs=0.05, out="digits", quiet=True)
        >>> result.class_names
        ('0', '1', '2', '3', '4', '5', '6', '7', '8', '9')
        >>> str(result.folder / "weights.safetensors"), str(result.report)
        ('digits/weights.safetensors', 'digits/report.html')
        >>> from PIL import Image
        >>> Image.new("L", (28, 28)).save("black.png")
        >>> [len(prediction.classes) for prediction in result.predict("black.png", top=3)]
        [3]
    """
    # A notebook reports a terminal but cannot move the cursor, so it gets lines instead of a progress bar.
    notebook = Console().is_jupyter
    console = Console(highlight=False, force_jupyter=False, force_terminal=False if notebook else None, quiet=quiet)
    given = {SHORT_NAMES.get(name, name): value for name, value in dotted(settings).items()}
    if out is not None:
        given["out"] = str(out)
    config = choose(str(data), given, minutes, resume, console, from_scratch)
    result = run(config, resume, console)
    if not result.finished:
        raise KeyboardInterrupt(
            f"training was stopped; resume it: fit({str(data)!r}, out={str(config.out)!r}, resume=True)"
        )
    page = write_report(config.out) if report else None
    show_end(config, result, page, console)
    trained = open_trained(str(config.out), Using(device=config.device))
    scores = next(iter(result.scores.values()))
    accuracy = list(scores.values())[-1]["top1"]
    return Fitted(
        trained.network, trained.class_names, accuracy, result.scores, config.out, page, result.seconds, trained
    )


def dotted(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings: {"augment": {"flip": 0}} becomes {"augment.flip": 0}."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= dotted(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def choose(
    data: str,
    given: Mapping[str, Any],
    minutes: float | None,
    resume: bool,
    console: Console,
    from_scratch: bool = False,
) -> TrainConfig:
    """Choose the configuration for these images and print the reasons; for a resumed run, return its configuration."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"settings can be chosen for one process only: with torchrun, use a recipe, for example train imagenette "
            f"--data.path {data}"
        )
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes must be above 0, got {minutes}")
    if given.get("data.path", data) != data:
        raise ValueError(f"got two datasets, {data} and data.path {given['data.path']}: pass one of them")
    out = Path(given["out"]) if "out" in given else new_folder(data, again=resume)
    if resume and (out / CONFIG).is_file():
        # The images may have moved; different images are refused.
        return with_settings(read_config(out, TrainConfig.COMMAND), {"data.path": data, **given, "out": out})
    if (out / CONFIG).is_file():
        raise ValueError(f"{out} already holds a run: resume it with --resume, or choose another --out")
    if from_scratch and given.get("model.pretrained"):
        raise ValueError(f"got from_scratch and model.pretrained {given['model.pretrained']}: pass one of them")
    facts = look_at(data, given.get("data.validation"))
    console.print(escape(f"{data}: {about(facts)}"), soft_wrap=True)
    if "out" not in given and out != (first := new_folder(data, again=True)):
        console.print(escape(f"{first} exists: this run is written to {out}"), soft_wrap=True)
    config = with_settings(TrainConfig(), given)  # raise for invalid settings before timing steps
    if "model.name" in given:
        config.model.row()  # raises for an unknown network
    start = None if from_scratch else find_start(facts, given)
    console.print("timing a few training steps")
    plan = make_plan(facts, machine_of(given.get("device")), measure, {**given, "out": out}, minutes, start)
    show_plan(plan, console)
    return plan.config


def about(facts: Facts) -> str:
    sizes = [count for _, count in facts.class_sizes]
    each = f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
    kind = "grey" if facts.grey else "colour"
    return (
        f"{facts.images:,} {kind} images in {len(sizes)} classes ({each} per class), short side {facts.short_side} px"
    )


def show_plan(plan: Plan, console: Console) -> None:
    for reason in plan.reasons:
        console.print(escape(f"  {reason}"), soft_wrap=True)
    console.print(escape(f"output folder: {plan.config.out}"), soft_wrap=True)


def run(config: TrainConfig, resume: bool, console: Console) -> Result:
    """Train with a progress bar, or with printed lines without a terminal."""
    listen = threading.current_thread() is threading.main_thread()
    with Watcher(console) as watcher:
        return run_loop(config.make_task(), config, resume=resume, watch=watcher, listen=listen)


def show_end(config: TrainConfig, result: Result, report: Path | None, console: Console) -> None:
    """Print the accuracy, the output files and the next commands."""
    out = config.out
    split, numbers = list(next(iter(result.scores.values())).items())[-1]
    right, examples = numbers["top1"], int(numbers["examples"])
    error = (right * (1 - right) / max(examples, 1)) ** 0.5
    line = f"accuracy: {percent(right, 1)} on {some(examples, 'image', 'images')} not used for training ({split})"
    line += f", standard error {100 * error:.1f} points"
    if (mean := mean_over_classes(out)) is not None:
        line += f", mean over classes {percent(mean, 1)}"
    console.print(line, soft_wrap=True)
    if report is not None:
        console.print(escape(f"report:   {report}"), soft_wrap=True)
    console.print(escape(f"weights:  {out / WEIGHTS}"), soft_wrap=True)
    console.print("next:")
    for command in (f"predict {out} IMAGES", f"evaluate {out} OTHER_IMAGES", f"export {out} {out / 'export'}"):
        console.print(escape(f"  lambdanets {command}"), soft_wrap=True)


def mean_over_classes(folder: Path) -> float | None:
    """Return the mean accuracy over classes if the classes have very different sizes, otherwise None."""
    predictions = read_run(folder).predictions
    if predictions is None:
        return None
    found = by_class(confusion(*labelled(predictions.logits_NC, predictions.labels_N)))
    rows = [row for row in found if row.recall is not None]
    sizes = [row.examples for row in rows]
    if not rows or max(sizes) < IMBALANCE * min(sizes):
        return None
    return sum(row.recall or 0.0 for row in rows) / len(rows)

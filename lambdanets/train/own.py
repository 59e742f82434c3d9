"""Train on the user's images with settings that are chosen: `lambdanets train FOLDER` and `lambdanets.fit`."""

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
from lambdanets.train.probe import look_at, machine_of, measure
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
    """What `lambdanets.fit` returns.

    Attributes:
        model: the network with averaged weights, in eval mode, on its device.
        class_names: in the order of its outputs.
        accuracy: the share of right answers on images that it was not trained on.
        scores: all numbers of the last evaluation: {"ema" or "raw": {split: {name: number}}}.
        folder: of the run: weights, log, checkpoints, predictions.
        report: the page about the run; None if it was not wanted.
        seconds: that training took.
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
        """The likeliest classes of image files, or of all images below a folder. `lambdanets predict` does the same."""
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
    **settings: Any,
) -> Fitted:
    """Train a network on your images; settings that are not given are chosen, and the reasons printed.

    Args:
        data: a folder with a folder for each class (or with train/ and val/ of such), shards, a .csv list, idx files.
        out: the folder for the results; by default a new one in runs/.
        minutes: how long training may take, roughly.
        resume: resume from `out` if it has a checkpoint.
        report: write report.html.
        quiet: print nothing.
        settings: any setting of `lambdanets train`: epochs=20, batch_size=64, device="cpu", seed=1,
            augment={"flip": 0}; also model="lambda_resnet50", image_size=96, validation="other/", pretrained=WEIGHTS.
    """
    # A notebook gets lines of text: its stream says that it is a terminal, but it cannot move a cursor.
    notebook = Console().is_jupyter
    console = Console(highlight=False, force_jupyter=False, force_terminal=False if notebook else None, quiet=quiet)
    given = {SHORT_NAMES.get(name, name): value for name, value in dotted(settings).items()}
    if out is not None:
        given["out"] = str(out)
    config = choose(str(data), given, minutes, resume, console)
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
    """{"augment": {"flip": 0}} as {"augment.flip": 0}."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= dotted(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def choose(data: str, given: Mapping[str, Any], minutes: float | None, resume: bool, console: Console) -> TrainConfig:
    """The configuration for these images, its reasons printed; that of a run if it is resumed."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"settings are chosen for one process: with torchrun, name a recipe: train imagenette --data.path {data}"
        )
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes must be more than 0, got {minutes}")
    if given.get("data.path", data) != data:
        raise ValueError(f"train on {data} or on data.path {given['data.path']}? Give one of them")
    out = Path(given["out"]) if "out" in given else new_folder(data, again=resume)
    if resume and (out / CONFIG).is_file():  # a run keeps what was chosen for it
        # The images may lie elsewhere now; others are refused.
        return with_settings(read_config(out, TrainConfig.COMMAND), {"data.path": data, **given, "out": out})
    if (out / CONFIG).is_file():
        raise ValueError(f"{out} already holds a run: resume it with --resume, or choose another --out")
    facts = look_at(data, given.get("data.validation"))
    console.print(escape(f"{data}: {about(facts)}"), soft_wrap=True)
    with_settings(TrainConfig(), given)  # a wrong setting is refused before steps are timed
    console.print("timing some training steps")
    plan = make_plan(facts, machine_of(given.get("device")), measure, {**given, "out": out}, minutes)
    show_plan(plan, console)
    return plan.config


def about(facts: Facts) -> str:
    sizes = [count for _, count in facts.class_sizes]
    each = f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
    kind = "grey" if facts.grey else "colour"
    return (
        f"{facts.images:,} {kind} images of {len(sizes)} classes ({each} of each), "
        f"{facts.short_side} px on their short side"
    )


def show_plan(plan: Plan, console: Console) -> None:
    for reason in plan.reasons:
        console.print(escape(f"  {reason}"), soft_wrap=True)
    console.print(escape(f"folder of the run: {plan.config.out}"), soft_wrap=True)


def run(config: TrainConfig, resume: bool, console: Console) -> Result:
    """Train with a progress bar, or lines where there is no terminal."""
    listen = threading.current_thread() is threading.main_thread()
    with Watcher(console) as watcher:
        return run_loop(config.make_task(), config, resume=resume, watch=watcher, listen=listen)


def show_end(config: TrainConfig, result: Result, report: Path | None, console: Console) -> None:
    """How good the network is, where everything lies, and what to do next."""
    out = config.out
    split, numbers = list(next(iter(result.scores.values())).items())[-1]
    right, examples = numbers["top1"], int(numbers["examples"])
    error = (right * (1 - right) / max(examples, 1)) ** 0.5
    line = f"accuracy: {percent(right, 1)} of {some(examples, 'image', 'images')} that it was not trained on ({split})"
    line += f"; standard error {100 * error:.1f} points"
    if (mean := mean_over_classes(out)) is not None:
        line += f"; mean over classes {percent(mean, 1)}"
    console.print(line, soft_wrap=True)
    if report is not None:
        console.print(escape(f"report:   {report}"), soft_wrap=True)
    console.print(escape(f"weights:  {out / WEIGHTS}"), soft_wrap=True)
    console.print("next:")
    for command in (f"predict {out} IMAGES", f"evaluate {out} OTHER_IMAGES", f"export {out} {out / 'export'}"):
        console.print(escape(f"  lambdanets {command}"), soft_wrap=True)


def mean_over_classes(folder: Path) -> float | None:
    """The mean accuracy of the classes of a run, where their sizes are unequal; otherwise None."""
    predictions = read_run(folder).predictions
    if predictions is None:
        return None
    found = by_class(confusion(*labelled(predictions.logits_NC, predictions.labels_N)))
    rows = [row for row in found if row.recall is not None]
    sizes = [row.examples for row in rows]
    if not rows or max(sizes) < IMBALANCE * min(sizes):
        return None
    return sum(row.recall or 0.0 for row in rows) / len(rows)

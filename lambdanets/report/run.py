"""Reads the files of a run folder that the report shows."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lambdanets.models.pretrained import Card, read_card
from lambdanets.models.stored import read_state
from lambdanets.report.log import Log, Record, number, read_log
from lambdanets.report.positions import Movement, movements
from lambdanets.runs import CONFIG, LOG, WEIGHTS, read_stored, runs_here

if TYPE_CHECKING:
    from PIL.Image import Image

    from lambdanets.data.source import Source

PREDICTIONS, START = "predictions.safetensors", "start.safetensors"
SHOWN = ("classification", "co-training", "distillation", "custom")  # tasks; others have their own report, or none

TOLD = ("placement", "layer", "image_size", "embedding_std")  # settings of the model that are shown if they are set


@dataclass(frozen=True)
class Predictions:
    """Logits of the last evaluation: N examples, C classes. `indices_N` are indices into the evaluated source."""

    logits_NC: Tensor
    labels_N: Tensor
    indices_N: Tensor
    names: tuple[str, ...]
    split: str = ""  # "validation" or "held_out"


@dataclass(frozen=True)
class ReportedRun:
    """Everything that the report shows. Parts that a run does not have (yet) are None or empty."""

    folder: Path
    log: Log
    config: Record = field(default_factory=dict)
    card: Card | None = None
    predictions: Predictions | None = None
    movements: tuple[Movement, ...] = ()
    problems: tuple[str, ...] = ()  # one sentence for each file that could not be read

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def network(self) -> str:
        """Name of the network, and the settings that differ from its defaults."""
        model = self.config.get("model")
        if not isinstance(model, dict):
            return ""
        changes = [f"{key}={model[key]}" for key in TOLD if model.get(key) is not None]
        options = model.get("options") or ()
        return ", ".join(
            [str(model.get("name", "")), *changes, *map(str, options if isinstance(options, list) else ())]
        )

    @property
    def final(self) -> Record:
        """The last evaluation, preferably of the averaged weights."""
        found = self.log.evaluated("ema") or self.log.evaluations
        return found[-1] if found else {}

    def mean(self, name: str) -> float | None:
        """Return the mean of a logged value without the first record, which includes startup."""
        values = [value for _, value in self.log.curve(name)]
        values = values[1:] or values
        return sum(values) / len(values) if values else None

    @property
    def classes(self) -> int | None:
        """Number of classes, or None if no file has it."""
        if self.predictions is not None:
            return self.predictions.logits_NC.shape[1]
        logged = number(self.log.start.get("classes"))
        return (len(self.card.class_names) if self.card else 0) or (None if logged is None else int(logged)) or None

    @property
    def parameters(self) -> float | None:
        return number(self.log.start.get("parameters"))


def read_run(folder: Path) -> ReportedRun:
    """Read a run of a classifier. A damaged file is left out and reported in `problems`.

    Raises:
        FileNotFoundError: the folder does not exist or has no log.jsonl.
        ValueError: the run is of another task.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: pass a folder that `lambdanets train` wrote. {runs_here()}")
    log = read_log(folder / LOG)
    problems: list[str] = []

    def attempt(what: str, read: Callable[[], Any], otherwise: Any) -> Any:
        if not (folder / what).is_file():
            return otherwise
        try:
            return read()
        except (ValueError, OSError, KeyError, TypeError) as error:
            problems.append(f"{what} could not be read: {error}")
            return otherwise

    stored = attempt(CONFIG, lambda: read_stored(folder), None)
    config = stored.settings if stored else {}
    if stored and stored.task not in SHOWN:
        own = f"`lambdanets {stored.command.split()[0]} --help` lists its commands, " if stored.command else ""
        raise ValueError(
            f"{folder} is a run of {stored.task}, which this report does not show: {own}"
            f"`tensorboard --logdir {folder}` shows its curves"
        )
    card = attempt(WEIGHTS, lambda: read_card(folder / WEIGHTS), None)
    names = card.class_names if card else ()
    predictions = attempt(PREDICTIONS, lambda: read_predictions(folder / PREDICTIONS, names), None)
    moved = attempt(START, lambda: tuple(movements(folder / START, folder / WEIGHTS)), ())
    return ReportedRun(folder, log, config, card, predictions, moved, tuple(problems))


def read_predictions(path: Path, names: tuple[str, ...] = ()) -> Predictions:
    from safetensors import safe_open

    state = read_state(path)
    with safe_open(str(path), framework="pt") as file:
        split = (file.metadata() or {}).get("split", "")
    logits_NC, labels_N = state["logits"], state["labels"]
    indices_N = state.get("indices", labels_N.new_full(labels_N.shape, -1))
    if logits_NC.ndim != 2 or labels_N.shape != logits_NC.shape[:1] or indices_N.shape != labels_N.shape:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in state.items())
        raise ValueError(f"the shapes of its tensors do not match: {shapes}")
    classes = logits_NC.shape[1]
    if len(names) != classes:
        names = tuple(map(str, range(classes)))
    return Predictions(logits_NC, labels_N, indices_N, names, split)


def evaluated_source(run: ReportedRun) -> "Source":
    """Open the images that the run was evaluated on."""
    from lambdanets.data.source import NoSplitError, open_source

    data = run.config.get("data")
    if not isinstance(data, dict) or not isinstance(data.get("path"), str):
        raise ValueError("config.json has no data.path")
    split = (run.predictions.split if run.predictions else "") or run.final.get("split")
    if split == "held_out":
        return open_source(data["path"], split="train")
    where = data.get("validation") or data["path"]
    try:
        return open_source(where, split="validation")
    except NoSplitError:  # the validation images are a folder without splits
        return open_source(where, split="train")


def read_image(run: ReportedRun) -> Callable[[int], tuple[str, "Image"]]:
    """Return a function from an index into the evaluated source to the name and the image."""
    from lambdanets.report.pictures import picture

    source = evaluated_source(run)
    return lambda index: (source.name(index), picture(source, index))

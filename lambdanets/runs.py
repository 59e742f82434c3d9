"""The folder of a run: the names of its files, and config.json with the task and settings of the run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from lambdanets.files import read_object, write_json
from lambdanets.typed import from_json, to_json

CONFIG, LOG, RUN, CHECKPOINTS = "config.json", "log.jsonl", "run.json", "checkpoints"
TENSORBOARD, REPORT = "tensorboard", "report.html"
WEIGHTS, RAW_WEIGHTS = "weights.safetensors", "weights_raw.safetensors"  # averaged; without averaging (last step only)
BEST_WEIGHTS = "best.safetensors"  # of the evaluation with the best score
RUN_WEIGHTS = {"ema": WEIGHTS, "raw": RAW_WEIGHTS, "best": BEST_WEIGHTS}
RunWeights = Literal["ema", "raw", "best"]  # the keys of RUN_WEIGHTS
RUNS = "runs/"  # folder of runs by default; never the owner of a model on the hub
LISTED = 5  # runs that a message lists
TASK = "task"  # the key in config.json
# The configuration class of each task that can be resumed, imported only when such a run is read.
TASKS = {
    "classification": "lambdanets.train.config:TrainConfig",
    "co-training": "lambdanets.pseudo.config:CoTrainConfig",
    "distillation": "lambdanets.pseudo.config:DistillConfig",
    "detection": "lambdanets.detect.config:DetectConfig",
    "language": "lambdanets.experiments.language.task:LanguageConfig",
}
# Runs written before config.json had this key: a setting that only this task has. All others are classification.
OLD_TASKS = {"heads": "detection", "pseudo": "co-training", "text": "language"}


class TaskConfig(Protocol):
    """The configuration dataclass of a task."""

    TASK: ClassVar[str]  # its key in TASKS
    COMMAND: ClassVar[str]  # `lambdanets COMMAND resume RUN` resumes a run; "" if there is no such command

    @property
    def out(self) -> Path: ...


def config_of(task: str) -> type[TaskConfig] | None:
    """Return the configuration class of a task, or None if the task is unknown or its module is not installed."""
    module, _, name = TASKS.get(task, "").partition(":")
    try:
        return getattr(import_module(module), name) if module else None
    except ModuleNotFoundError:
        return None


@dataclass(frozen=True)
class StoredConfig:
    """The contents of config.json."""

    task: str
    settings: dict[str, Any]

    @property
    def command(self) -> str:
        """Return the command that trains this task, or "" if there is none."""
        kind = config_of(self.task)
        return kind.COMMAND if kind else ""


def as_stored(config: TaskConfig) -> dict[str, Any]:
    """Return the contents of config.json for a configuration."""
    return {TASK: config.TASK, **to_json(config)}


def write_config(config: TaskConfig) -> None:
    """Write config.json into the folder of the run."""
    write_json(config.out / CONFIG, as_stored(config), indent=2)


def runs_here() -> str:
    """Return a sentence with the current directory and its newest runs, for messages about a run that does not
    exist."""
    found = [path.parent for path in Path(RUNS).glob(f"*/{CONFIG}")]
    if not found:
        return f"The current directory, {Path.cwd()}, has no runs in {RUNS}"
    newest = sorted(found, key=lambda folder: (folder / CONFIG).stat().st_mtime, reverse=True)
    listed = ", ".join(map(str, newest[:LISTED])) + (", ..." if len(found) > LISTED else "")
    return f"Runs in the current directory, {Path.cwd()}: {listed}"


def read_stored(folder: Path) -> StoredConfig:
    """Read config.json; raises a ValueError if the folder has none."""
    path = folder / CONFIG
    if not path.is_file():
        here = "" if folder.is_dir() else f". {runs_here()}"
        raise ValueError(f"{folder} is not the folder of a run: it has no {CONFIG}{here}")
    settings = read_object(path)
    task = settings.pop(TASK) if TASK in settings else task_of_old_run(settings)
    if not isinstance(task, str):
        raise ValueError(f"{path}: {TASK} must be text, got {str(task)[:40]}")
    return StoredConfig(task, settings)


def task_of_old_run(settings: Mapping[str, Any]) -> str:
    """Return the task of a run whose config.json has no task."""
    return next((task for key, task in OLD_TASKS.items() if key in settings), "classification")


def read_config(folder: Path, command: str) -> Any:
    """Return the configuration of a run to resume; raises a ValueError if another command trained the run."""
    stored = read_stored(folder)
    kind = config_of(stored.task)
    if kind is None:
        raise ValueError(f"{folder} is a run of {stored.task}: this version resumes runs of {', '.join(TASKS)}")
    if command != kind.COMMAND:
        raise ValueError(f"{folder} is a run of {stored.task}: use `lambdanets {kind.COMMAND} resume {folder}`")
    return replace(from_json(kind, stored.settings), out=folder)  # type: ignore[type-var]

"""Result of a run, and the files written at its end."""

from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from lambdanets.files import FULL
from lambdanets.runs import CHECKPOINTS
from lambdanets.train import checkpoint
from lambdanets.train.task import Task

Scores = dict[str, dict[str, dict[str, float]]]  # {"ema" or "raw": {split: {metric: value}}}


@dataclass(frozen=True)
class Result:
    """Result of `fit`.

    Attributes:
        folder: folder of the run.
        step, steps: completed steps, and steps of the whole run.
        stopped_by: name of the signal that stopped the run; None if it is finished.
        scores: metrics of the last evaluation: {"ema" or "raw": {split: {metric: value}}}.
        skipped: number of skipped steps.
        seconds: training time.
        main: whether this is the main process, which writes the files.
    """

    folder: Path
    step: int
    steps: int
    stopped_by: str | None = None
    scores: Scores = field(default_factory=dict)
    skipped: int = 0
    seconds: float = 0.0
    main: bool = True

    @property
    def finished(self) -> bool:
        return self.stopped_by is None


def save_at_end(task: Task, folder: Path, models: dict[str, nn.Module], scores: Scores) -> None:
    """Write the files of the task; on a full disk, older checkpoints are removed for a second attempt."""
    checkpoints = folder / CHECKPOINTS
    try:
        try:
            task.save(folder, "end", models, scores)
        except OSError as error:
            if error.errno not in FULL or not checkpoint.make_room(checkpoints):
                raise
            task.save(folder, "end", models, scores)
    except OSError as error:
        kept = checkpoint.complete(checkpoints)
        advice = f"{kept[-1].name} is kept: resume the run to write them" if kept else "there is no checkpoint"
        raise OSError(f"cannot write the weights: {error}. Free some disk space; {advice}") from error

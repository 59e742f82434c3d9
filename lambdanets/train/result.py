"""How a run ends: its result, and the files that its task writes."""

from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from lambdanets.files import FULL
from lambdanets.runs import CHECKPOINTS
from lambdanets.train import checkpoint
from lambdanets.train.task import Task

Scores = dict[str, dict[str, dict[str, float]]]  # "ema" or "raw": split: name: number


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    step: int
    steps: int
    stopped_by: str | None = None  # a signal; None if it is finished
    scores: Scores = field(default_factory=dict)
    skipped: int = 0
    seconds: float = 0.0
    main: bool = True  # whether this is the process that writes

    @property
    def finished(self) -> bool:
        return self.stopped_by is None


def save_at_end(task: Task, folder: Path, models: dict[str, nn.Module], scores: Scores) -> None:
    """Write the task's files; on a full disk older checkpoints are removed for a second try."""
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
        raise OSError(f"the weights cannot be written: {error}. Free some space; {advice}") from error

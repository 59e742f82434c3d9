"""What happened, one JSON object a line: `log.jsonl` is the truth, TensorBoard's events are drawn from it."""

import json
import math
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

LOG, CONFIG, CHECKPOINTS, TENSORBOARD = "log.jsonl", "config.json", "checkpoints", "tensorboard"
CURVES = ("step", "evaluation")  # the events that become curves


class RunLog:
    """Appends records to a run's log. Only the main process has a folder; the others' records go nowhere.

    Nothing is taken back: a run that resumes repeats steps, and the `resumed` record says from where. Readers leave
    out what was logged beyond it.
    """

    def __init__(self, folder: Path | None, seconds: float = 0.0, step: int = 0) -> None:
        self.began = time.monotonic() - seconds
        self.file = self.board = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / LOG
            torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
            self.file = path.open("a", encoding="utf-8")
            if torn:  # a crash in the middle of a line
                self.file.write("\n")
            self.board = summary_writer(folder / TENSORBOARD, step)

    @property
    def seconds(self) -> float:
        """Since the run began, without the time between its parts."""
        return time.monotonic() - self.began

    def write(self, event: str, **values: Any) -> dict[str, Any]:
        record = {"event": event, "time": round(self.seconds, 3), **values}
        if self.file is not None:
            self.file.write(json.dumps(plain(record), allow_nan=False) + "\n")
            self.file.flush()
        if self.board is not None and event in CURVES:
            name = event if event == "step" else f"{values.get('split', 'evaluation')}_{values.get('weights', 'raw')}"
            for key, value in values.items():
                if isinstance(value, float) and key != "epoch":
                    self.board.add_scalar(f"{name}/{key}", value, values["step"])
        return record

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        if self.board is not None:
            self.board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def plain(value: Any) -> Any:
    """What JSON has no number for is null."""
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary_writer(folder: Path, step: int) -> Any:
    """TensorBoard's, if it is installed; after a resume its curves go on from `step`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step or None)

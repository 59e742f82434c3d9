"""Log of a run: `log.jsonl` has one JSON object per line; TensorBoard and other loggers get the same metrics."""

import importlib
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from lambdanets.files import read_object
from lambdanets.runs import LOG, RUN, TENSORBOARD

CURVES = ("step", "evaluation")  # events that are also sent to the logger
Logger = Literal["tensorboard", "wandb", "trackio", "none"]
TRACKERS = ("wandb", "trackio")
PROJECT = "lambdanets"  # in wandb and trackio


class FolderLostError(OSError):
    """The folder of a run was deleted, renamed or replaced while the run wrote into it."""


class RunLog:
    """Appends records to the log of a run. Only the main process has a folder; other processes write nothing.

    Records are never removed: a resumed run repeats steps, its `resumed` record has the step where it starts, and
    readers ignore earlier records beyond that step. If a file cannot be written, for example on a full disk, the run
    continues: `warn` gets one message per file, and records are lost until there is space again.
    """

    def __init__(
        self,
        folder: Path | None,
        seconds: float = 0.0,
        step: int = 0,
        warn: Callable[[str], None] = warnings.warn,
        logger: Logger = "tensorboard",
    ) -> None:
        self.began = time.monotonic() - seconds
        self.warn, self.warned = warn, False
        self.file = self.board = self.hook = None
        self.tracker: Any = tracking_library(logger) if folder is not None and logger in TRACKERS else None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.path, self.curves = folder / LOG, folder / TENSORBOARD
            self.torn = ends_torn(self.path)  # after a crash
            self.file = self.path.open("ab", buffering=0)  # unbuffered: lines are written immediately
            self.hook, threading.excepthook = threading.excepthook, self.thread_failed
            try:
                self.board = summary_writer(self.curves, step) if logger == "tensorboard" else None
            except OSError as error:
                self.drop_board(error)

    @property
    def seconds(self) -> float:
        """Return the seconds since the start of the run, without the time between stop and resume."""
        return time.monotonic() - self.began

    def check(self) -> None:
        """Raise FolderLostError if the path of the log does not lead to the open file any more."""
        if self.file is None:
            return
        with suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(self.path.stat(), os.fstat(self.file.fileno())):
                return
        raise FolderLostError(
            f"{self.path} was deleted, renamed or replaced during the run, so the run stops. If the folder was only "
            f"renamed, resume the run there"
        )

    def write(self, event: str, **values: Any) -> dict[str, Any]:
        """Append a record. Raises FolderLostError if the file was deleted or renamed."""
        self.check()
        record = {"event": event, "time": round(self.seconds, 3), **values}
        if self.file is not None:
            try:
                self.append(json.dumps(plain(record), allow_nan=False).encode() + b"\n")
            except OSError as error:
                if not self.warned:
                    self.warn(f"cannot write {self.path}, records are lost until this is possible again: {error}")
                self.warned = True
        if self.tracker is not None and event in ("start", "resumed"):
            self.track(lambda: start_tracking(self.tracker, self.path.parent, values))
        if event in CURVES:
            name = event if event == "step" else f"{values.get('split', 'evaluation')}_{values.get('weights', 'raw')}"
            curves = {
                f"{name}/{key}": value for key, value in values.items() if isinstance(value, float) and key != "epoch"
            }
            self.draw(curves, values["step"])
        return record

    def draw(self, curves: dict[str, float], step: int) -> None:
        if self.board is not None:
            try:
                for name, value in curves.items():
                    self.board.add_scalar(name, value, step)
            except OSError as error:
                self.drop_board(error)
        self.track(lambda: self.tracker.log(curves, step=step))

    def track(self, act: Callable[[], Any]) -> None:
        """Call the tracking library; stop using it if it fails, for example without a network."""
        if self.tracker is not None:
            try:
                act()
            except Exception as error:
                name, self.tracker = self.tracker.__name__, None
                self.warn(f"{name} failed and gets no further metrics; {LOG} has all of them: {error}")

    def append(self, line: bytes) -> None:
        assert self.file is not None
        rest = b"\n" + line if self.torn else line
        while rest:  # on a full disk, a short write is followed by an error
            written = self.file.write(rest) or 0
            self.torn = rest[:written][-1:] != b"\n" if written else self.torn
            rest = rest[written:]

    def drop_board(self, error: OSError) -> None:
        self.board = None
        self.warn(f"cannot write {self.curves}, TensorBoard gets no further metrics: {error}")

    def thread_failed(self, args: threading.ExceptHookArgs) -> None:
        """Report the error of a thread, except of TensorBoard's writer, whose next call raises the error again."""
        ours = type(args.thread).__module__.startswith("tensorboard.") and isinstance(args.exc_value, OSError)
        if not ours and self.hook is not None:
            self.hook(args)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        if self.board is not None:
            try:
                self.board.close()
            except OSError as error:
                self.drop_board(error)
        self.track(lambda: self.tracker.finish())
        if self.hook is not None:
            threading.excepthook, self.hook = self.hook, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def ends_torn(path: Path) -> bool:
    """Return whether a file ends in the middle of a line."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def plain(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary_writer(folder: Path, step: int) -> Any:
    """Return TensorBoard's writer if it is installed; after a resume at `step`, curves continue with the next step."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)


def tracking_library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"logger {name} is not installed: pip install {name}, or use --logger tensorboard") from error


def start_tracking(library: Any, folder: Path, values: dict[str, Any]) -> None:
    """Start or continue the run in wandb or trackio. Both take these arguments; only wandb takes an id."""
    known = {"id": read_object(folder / RUN)["id"], "dir": str(folder)} if library.__name__ == "wandb" else {}
    library.init(project=PROJECT, name=folder.resolve().name, config=values.get("config"), resume="allow", **known)

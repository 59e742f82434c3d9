"""Requests to stop: the loop finishes its step, writes a checkpoint and ends.

Only a second Ctrl-C ends at once: a scheduler and torchrun may both pass on one SIGTERM.

Where there is nothing to save, `Interrupts` end at once.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Self

import torch

AGAIN = "press Ctrl-C again to stop at once (the steps since the last checkpoint are lost)"
WATCHED = ("SIGTERM", "SIGINT", "SIGUSR1")  # SIGUSR1: SLURM's --signal=USR1@120, before the time is up
SIGNAL_STATUS = {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 138}  # what a command that they ended returns


class StopRequests:
    """`with StopRequests() as stop: ... stop.name` is the signal that came, or None."""

    def __init__(self, watched: Sequence[str] = WATCHED) -> None:
        self.watched = watched
        self.name: str | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for name in self.watched:
                if hasattr(signal, name):
                    number = getattr(signal, name)
                    self.before[number] = signal.signal(number, self.note)
        return self

    def note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT" == self.name:
            raise KeyboardInterrupt
        self.name = name
        if os.environ.get("RANK", "0") == "0":  # of several processes one says it
            again = f"; {AGAIN}" if name == "SIGINT" else ""
            with contextlib.suppress(OSError):  # unlike print, os.write may be called in a signal handler
                os.write(2, f"\n{name}: stopping after this step, with a checkpoint{again}\n".encode())

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before.clear()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.restore()


class Interrupted(KeyboardInterrupt):
    """A signal came; its name is the argument."""


class Interrupts(StopRequests):
    """`with Interrupts() as stop: ...` raises Interrupted where the program is when a signal comes, so that all that is
    open gets closed. Only in a backward pass it waits for `stop.check()`: torch's queue of a pass that an exception
    leaves outlives Python, and a crash at the very end would take the place of the exit status."""

    def note(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        if torch._C._current_graph_task_id() < 0:
            self.check()

    def check(self) -> None:
        if self.name is not None:
            raise Interrupted(self.name)

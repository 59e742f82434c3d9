"""Requests to stop: the loop finishes its step, writes a checkpoint and ends.

Only a second Ctrl-C ends at once: a scheduler and torchrun may both pass on one SIGTERM.
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

WATCHED = ("SIGTERM", "SIGINT", "SIGUSR1")  # SIGUSR1: SLURM's --signal=USR1@120, before the time is up


class StopRequests:
    """`with StopRequests() as stop: ... stop.name` is the signal that came, or None."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for name in WATCHED:
                if hasattr(signal, name):
                    number = getattr(signal, name)
                    self.before[number] = signal.signal(number, self.note)
        return self

    def note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT" == self.name:
            raise KeyboardInterrupt
        self.name = name

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before.clear()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.restore()

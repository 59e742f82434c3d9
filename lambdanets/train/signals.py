"""Requests to stop: the loop finishes its step, writes a checkpoint and ends.

Only a second Ctrl-C ends at once: a scheduler and torchrun may both pass on one SIGTERM.

Where there is nothing to save, `sigterm_interrupts` makes SIGTERM what Ctrl-C is everywhere in Python.
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

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

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before.clear()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.restore()


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM raises Terminated wherever the program is, so that all that is open gets closed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # Python allows handlers nowhere else
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""Handling of stop signals: the loop finishes its step, writes a checkpoint and ends.

Only a second Ctrl-C stops immediately, since a scheduler and torchrun may both send the same SIGTERM.

Python runs signal handlers between two operations of the main thread. A backward pass on a CPU is one operation that
can take minutes, so a separate thread announces the signals.

`Interrupts` stop immediately, for programs that have nothing to save.
"""

import contextlib
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Self

import torch

AGAIN = "press Ctrl-C again to stop immediately (the steps since the last checkpoint are lost)"
AT_ONCE = "stopping without a checkpoint when the current operation returns"
WATCHED = ("SIGTERM", "SIGINT", "SIGUSR1")  # SIGUSR1: SLURM's --signal=USR1@120, before the time limit
SIGNAL_STATUS = {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 138}  # exit status of a command that a signal stopped


class StopRequests:
    """Context manager that records stop signals: `stop.name` is the name of the signal, or None."""

    announces = True  # on stderr

    def __init__(self, watched: Sequence[str] = WATCHED) -> None:
        self.watched = watched
        self.name: str | None = None
        self.before: dict[int, Any] = {}
        self.heard: Counter[str] = Counter()  # signals that the thread received
        self.noted: Counter[str] = Counter()  # signals that the handler received; Python may merge several
        self.announced: dict[tuple[str, bool], object] = {}
        self.ends: tuple[socket.socket, socket.socket] | None = None  # of the announcing thread, of the C handler
        self.wakeup_before = -1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for name in self.watched:
                if hasattr(signal, name):
                    number = getattr(signal, name)
                    self.before[number] = signal.signal(number, self.note)
            if self.before and self.announces:
                self.ends = socket.socketpair()
                self.ends[1].setblocking(False)
                self.wakeup_before = signal.set_wakeup_fd(self.ends[1].fileno(), warn_on_full_buffer=False)
                threading.Thread(target=self.listen, args=(self.ends[0],), name="signals", daemon=True).start()
        return self

    def listen(self, end: socket.socket) -> None:
        """Announce the signals whose numbers Python's C handler writes to the socket."""
        with end:
            while numbers := end.recv(64):
                for name in (signal.Signals(number).name for number in numbers if number in self.before):
                    self.heard[name] += 1
                    self.announce(name, self.heard[name])

    def note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        self.noted[name] = max(self.noted[name] + 1, self.heard[name])
        self.announce(name, self.noted[name])
        if name == "SIGINT" and self.noted[name] > 1:
            raise KeyboardInterrupt
        self.name = name

    def announce(self, name: str, count: int) -> None:
        """Print the effect of a signal, once, whether the handler or the thread is first."""
        at_once = name == "SIGINT" and count > 1
        mine = object()
        if self.announced.setdefault((name, at_once), mine) is not mine or os.environ.get("RANK", "0") != "0":
            return  # only one of several processes prints
        again = f"; {AGAIN}" if name == "SIGINT" else ""
        does = AT_ONCE if at_once else f"stopping after this step, with a checkpoint{again}"
        with contextlib.suppress(OSError):  # unlike print, os.write may be called in a signal handler
            os.write(2, f"\n{name}: {does}\n".encode())

    def restore(self) -> None:
        if self.ends is not None:
            signal.set_wakeup_fd(self.wakeup_before)
            self.ends[1].shutdown(socket.SHUT_RDWR)  # ends the thread, even if forked workers have copies
            self.ends[1].close()
            self.ends = None
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before.clear()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.restore()


class Interrupted(KeyboardInterrupt):
    """A signal was received; its name is the argument."""


class Interrupts(StopRequests):
    """Context manager that raises Interrupted when a signal arrives, so that open files are closed. During a backward
    pass it waits for `stop.check()`: an exception would leave torch's queue of the pass alive until Python exits, where
    it would crash and change the exit status."""

    announces = False

    def note(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        if torch._C._current_graph_task_id() < 0:
            self.check()

    def check(self) -> None:
        if self.name is not None:
            raise Interrupted(self.name)

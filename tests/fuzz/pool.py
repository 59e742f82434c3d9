"""Worker processes for cases: a case that crashes, hangs or takes too much memory fails without stopping the others."""

import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

SECONDS = 60
"""The limit of a case."""
GRACE = 5
"""Seconds beyond the limit after which the parent kills a worker."""
MEMORY = 4 * 2**30
WORKERS = 2

Verdict = Literal["accepted", "refused", "failed"]


@dataclass(frozen=True)
class Result:
    """The result of a case. `text` describes what was changed, and what is wrong if it failed."""

    format: str
    number: int
    verdict: Verdict
    seconds: float
    text: str = ""


class TooLongError(BaseException):
    """The case has reached its limit; not an Exception, so that the library cannot catch it."""


def run_case(format: str, number: int, seconds: float = SECONDS) -> Result:
    """Run one case in this process."""
    from tests.fuzz.case import Defect, FuzzCase

    module = import_module(f"tests.fuzz.{format}")
    folder = Path(tempfile.mkdtemp(prefix=f"{format}-{number}-"))
    case = FuzzCase(number, random.Random(f"{format} {number}"), folder)
    began = time.monotonic()
    wrong = ""
    accepted = False

    def too_long(*_: Any) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        accepted = module.run(case)
    except TooLongError:
        wrong = f"takes longer than {seconds} s"
    except Defect as defect:
        wrong = str(defect)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        shutil.rmtree(folder, ignore_errors=True)
    verdict: Verdict = "failed" if wrong else "accepted" if accepted else "refused"
    text = "; ".join(case.notes) + (f": {wrong}" if wrong else "")
    return Result(format, number, verdict, time.monotonic() - began, text)


def work(pipe: Connection, place: str) -> None:
    """Run cases in a worker process until the pipe is closed."""
    os.environ |= {"LAMBDANETS_CACHE": f"{place}/cache", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg", "TMPDIR": place}
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    tempfile.tempdir = place
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import torch

    import lambdanets.cli  # noqa: F401  # takes seconds, which must not count for a case

    torch.set_num_threads(1)
    forbid_network()
    warnings.simplefilter("always", UserWarning)  # also after the first case
    pipe.send(None)
    while True:
        try:
            format, number = pipe.recv()
        except EOFError:
            return
        try:
            result = run_case(format, number)
        except Exception as error:  # an error in the case itself
            from tests.fuzz.case import where

            result = Result(
                format, number, "failed", 0.0, f"the case: {type(error).__name__}: {error} ({where(error)})"
            )
        pipe.send(result)


def forbid_network() -> None:
    """Turn connections to the network into defects."""
    from tests.fuzz.case import Defect

    def connect(*arguments: Any) -> None:
        raise Defect(f"a connection to {arguments[1:]}")

    socket.socket.connect = connect  # type: ignore[method-assign]
    socket.getaddrinfo = connect  # type: ignore[assignment]


class Worker:
    """A worker process and its current case."""

    def __init__(self, place: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, place), daemon=True)
        self.process.start()
        theirs.close()
        self.job: tuple[str, int] | None = None
        self.began = time.monotonic()
        self.ready = False

    def give(self, job: tuple[str, int]) -> None:
        self.job, self.began = job, time.monotonic()
        self.pipe.send(job)

    def late(self) -> bool:
        return self.job is not None and time.monotonic() - self.began > SECONDS + GRACE

    def end(self) -> int | None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
        return self.process.exitcode


def run_all(jobs: Iterable[tuple[str, int]], place: Path, workers: int = WORKERS) -> list[Result]:
    """Yield the results of (format, number) cases in the order in which they end."""
    waiting = deque(jobs)
    results: list[Result] = []
    crew: list[Worker] = []

    def lost(worker: Worker, why: str) -> None:
        crew.remove(worker)
        code = worker.end()
        if worker.job is None:
            raise RuntimeError(f"a worker ended before its first case, with {code}")
        results.append(Result(*worker.job, "failed", time.monotonic() - worker.began, why or f"ended with {code}"))

    try:
        while waiting or any(worker.job or not worker.ready for worker in crew):
            while waiting and len(crew) < workers:
                crew.append(Worker(tempfile.mkdtemp(dir=place)))
            for pipe in wait([worker.pipe for worker in crew], timeout=1):
                worker = next(one for one in crew if one.pipe is pipe)
                try:
                    result = worker.pipe.recv()
                except (EOFError, OSError):
                    worker.process.join(5)
                    lost(worker, f"the process ended with {worker.process.exitcode}")
                    continue
                if worker.ready:
                    results.append(result)
                worker.ready, worker.job = True, None
                if waiting:
                    worker.give(waiting.popleft())
            for worker in [one for one in crew if one.late()]:
                lost(worker, f"was killed after {SECONDS + GRACE} s")
    finally:
        for worker in crew:
            worker.end()
    return results

"""What is measured, one thing at a time, and kept: a job that stands in the file is not measured again."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

import torch

from lambdanets.bench.check import MismatchError
from lambdanets.bench.compiled import Way, compilation
from lambdanets.bench.networks import Entry, cuda_lost, measure
from lambdanets.bench.throughput import Precision, Protocol, free_memory, is_no_memory
from lambdanets.experiments.reproduce import growth
from lambdanets.files import read_object, write_json
from lambdanets.machine import describe

FILE = "reproduce.json"
QUICK_SIZE = 64
QUICK_PARAMETERS = 50e6  # larger networks take a CPU too long
Found = dict[str, Any]
OUT_OF_MEMORY = "out of memory"
CUT_SHORT = "cut_short"  # in a result: fewer steps were timed than the settings ask for


@dataclass(frozen=True)
class Settings:
    """How everything is measured.

    Attributes:
        device: where.
        quick: small images and few repeats.
        dtype: of networks; None: bfloat16 on a GPU where the paper's numbers are, and float32 elsewhere.
        compile: no, yes (torch.compile of networks), graphs (and CUDA graphs), or blocks (block by block, and a graph).
        batch: where the search for the largest batch begins.
        seconds: at most so long for the timed steps of one job (three run anyway).
    """

    device: torch.device
    quick: bool = False
    dtype: Precision | None = None
    compile: Way = "no"
    batch: int | None = None
    seconds: float = 5.0

    def as_json(self) -> Found:
        return {**vars(self), "device": self.device.type}

    @classmethod
    def from_json(cls, found: Found) -> "Settings":
        """Also of a GPU where there is none: to look up what was measured."""
        return cls(**{**found, "device": torch.device(found["device"])})

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def sizes(self) -> growth.Sizes:
        return growth.QUICK if self.quick else growth.CUDA if self.cuda else growth.CPU

    def protocol(self, mode: Literal["inference", "training"], half: bool) -> Protocol:
        batch = self.batch or (2 if self.quick else 1024 if self.cuda else 8)
        return Protocol(
            mode=mode,
            precision=self.dtype or ("bfloat16" if half and self.cuda else "float32"),
            **compilation(self.compile, self.device),
            batch=batch,
            memory_batch=min(batch, 128),
            repeats=1 if self.quick else 20,
            seconds=0.0 if self.quick else self.seconds,
            latency=False,
        )


@dataclass(frozen=True)
class NetworkJob:
    """A network, by `measure/`'s throughput: the same protocol for all."""

    network: str  # as `lambdanets bench network` takes it
    image_size: int
    mode: Literal["inference", "training"]
    half: bool = False  # the paper's number is in bfloat16

    def key(self, settings: Settings) -> str:
        protocol = settings.protocol(self.mode, self.half)
        words = [self.network, f"{self.size(settings)}px", self.mode, protocol.precision, f"batch {protocol.batch}"]
        return " | ".join([*words, *([protocol.how] if protocol.compiled else [])])

    def size(self, settings: Settings) -> int:
        return QUICK_SIZE if settings.quick else self.image_size

    def run(self, settings: Settings) -> Found:
        entry, size = Entry.parse(self.network), self.size(settings)
        if settings.quick and parameters(entry, size) > QUICK_PARAMETERS:
            return {"error": "not measured: too large for --quick"}
        protocol = settings.protocol(self.mode, self.half)
        row = measure(entry, (size, size), protocol, settings.device)
        folded = True
        if row.result is None and (row.error or "").startswith(MismatchError.__name__):
            # networks of the ablations that do not train well may not be compared with random weights
            folded = False
            row = measure(entry, (size, size), replace(protocol, fold=False), settings.device)
        if row.result is None:
            error = row.error or "no result"
            return {"error": OUT_OF_MEMORY if is_no_memory(Exception(error)) or "not even one" in error else error}
        about = {"parameters": row.parameters, "asked_batch": protocol.batch, "image_size": size, "fold": folded}
        return {**asdict(row.result), **about}


@dataclass(frozen=True)
class GrowthJob:
    """An operation of a complexity table, with one size doubled."""

    table: str
    operation: str
    letter: str

    def sizes(self, settings: Settings) -> growth.Sizes:
        return replace(settings.sizes, u=2) if self.table == "tab:complexity_u" else settings.sizes

    def key(self, settings: Settings) -> str:
        return " | ".join(["growth", self.table, self.operation, f"2{self.letter}", self.sizes(settings).text()])

    def run(self, settings: Settings) -> Found:
        operation = growth.TABLES[self.table][self.operation]
        # a GPU repeats for 20 ms times this number, and its fastest repeat counts: its clocks are steady
        repeats = 5 if settings.quick or settings.cuda else 20
        seconds = min(settings.seconds, 0.2 if settings.quick else 2.0)
        try:
            found = growth.measure_growth(
                operation, self.sizes(settings), self.letter, settings.device, repeats, seconds
            )
        except Exception as error:  # whatever it is, the others are still to be measured
            reason = OUT_OF_MEMORY if is_no_memory(error) else f"{type(error).__name__}: {error}".partition("\n")[0]
        else:
            return asdict(found)
        free_memory()  # outside of the handler, where the error would keep every tensor
        return {"error": reason}


Job = NetworkJob | GrowthJob


def parameters(entry: Entry, size: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in entry.build((size, size)).parameters())


def hardware(about: Mapping[str, Any]) -> str:
    """A GPU, or a CPU with its threads."""
    machine = about["machine"]
    cores = machine["cores"]
    return machine["gpu"] or f"{machine['cpu']}, {cores} {'thread' if cores == 1 else 'threads'}"


@dataclass
class Store:
    """Everything measured so far on one machine, in one JSON file."""

    path: Path
    found: dict[str, Found] = field(default_factory=dict)  # by key of the job
    shown: dict[str, list[Found]] = field(default_factory=dict)  # lines of each experiment, as they were printed
    headlines: list[str] = field(default_factory=list)
    hardware: str | None = None
    settings: Found | None = None  # of the last measurements

    @classmethod
    def open(cls, folder: Path) -> "Store":
        path = folder / FILE
        if not path.exists():
            return cls(path)
        try:
            data = read_object(path, constants=True)
            shown, headlines = data["experiments"], data["headlines"]
            return cls(path, data["measurements"], shown, headlines, data["hardware"], data.get("settings"))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} cannot be read ({error!r}): move it away, or give --out another folder") from None

    def get(self, job: Job, settings: Settings) -> Found | None:
        return self.found.get(job.key(settings))

    def write(self) -> None:
        data = {"name": "reproduce", "hardware": self.hardware, "settings": self.settings, "headlines": self.headlines}
        write_json(self.path, {**data, "experiments": self.shown, "measurements": self.found})

    def take(self, hardware: str) -> None:
        """Refuses another machine than the one that the file is of."""
        if self.hardware not in (None, hardware):
            raise ValueError(f"{self.path} holds results of {self.hardware}, this is {hardware}: give another --out")
        self.hardware = hardware

    def is_missing(self, job: Job, settings: Settings, retry: bool) -> bool:
        """Not measured, cut short when the time was over, or (`retry`) ended with an error."""
        known = self.get(job, settings)
        return known is None or known.get(CUT_SHORT, False) or (retry and "error" in known)

    def fill(
        self, jobs: Iterable[Job], settings: Settings, *, minutes: float | None = None, retry: bool = False
    ) -> None:
        """Measures what is missing, in order, and writes after each.

        An error stands as a result (it would come again); `retry` measures those once more.
        """
        about = describe(settings.device)
        self.take(hardware(about))
        self.settings = settings.as_json()
        different = {job.key(settings): job for job in jobs}.values()
        missing = [job for job in different if self.is_missing(job, settings, retry)]
        start = time.monotonic()
        for number, job in enumerate(missing, start=1):
            left = inf if minutes is None else 60 * minutes - (time.monotonic() - start)
            if left < 0:
                jobs_left = len(missing) - number + 1
                print(f"{jobs_left} of {len(missing)} measurements left, the time is over: the same command goes on")
                break
            result = job.run(replace(settings, seconds=min(settings.seconds, left)))  # a last one times fewer steps
            if left < settings.seconds:
                result = {**result, CUT_SHORT: True}
            machine = {name: about[name] for name in ("date", "commit", "versions")}
            self.found[job.key(settings)] = {**result, "hardware": self.hardware, **machine}
            self.write()
            print(
                f"[{number}/{len(missing)} {time.monotonic() - start:.0f} s] {job.key(settings)}: {said(result)}",
                flush=True,
            )
            if lost := cuda_lost(settings.device):
                raise OSError(f"{job.key(settings)}: {lost}. What was measured is kept; the same command goes on")


def said(result: Found) -> str:
    if "error" in result:
        return result["error"]
    if "examples_per_second" in result:
        return f"{result['examples_per_second']:.4g} ex/s with batch {result['batch']}"
    return f"time x{result['seconds']:.2f}, space x{result['bytes']:.2f}"

"""The measurements, each a job whose result is stored in reproduce.json and not measured again."""

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
QUICK_PARAMETERS = 50e6  # larger networks take too long on a CPU
Found = dict[str, Any]
OUT_OF_MEMORY = "out of memory"
CUT_SHORT = "cut_short"  # key of a result for which the time budget allowed fewer steps than the settings


@dataclass(frozen=True)
class Settings:
    """Settings of all measurements.

    Attributes:
        device: the device that is measured.
        quick: use small images and few repeats.
        dtype: dtype of networks; None: bfloat16 on a GPU where the paper uses it, otherwise float32.
        compile: no, yes (torch.compile), graphs (torch.compile with CUDA graphs), or blocks (each block compiled, and
            the step in one CUDA graph).
        batch: batch size at which the search for the largest batch starts.
        seconds: maximum time for the timed steps of one job; at least three steps are timed.
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
        """Read stored settings; the device need not exist on this machine."""
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
    """The throughput of a network, measured with the same protocol for all networks."""

    network: str  # in the form that `lambdanets bench network` accepts
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
            # with random weights, folding may change the outputs of ablation networks too much for the check
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
        # a GPU repeats for 20 ms times this number; the fastest repeat counts, and GPU clocks are stable
        repeats = 5 if settings.quick or settings.cuda else 20
        seconds = min(settings.seconds, 0.2 if settings.quick else 2.0)
        try:
            found = growth.measure_growth(
                operation, self.sizes(settings), self.letter, settings.device, repeats, seconds
            )
        except Exception as error:  # continue with the other measurements
            reason = OUT_OF_MEMORY if is_no_memory(error) else f"{type(error).__name__}: {error}".partition("\n")[0]
        else:
            return asdict(found)
        free_memory()  # outside the handler, where the error's traceback would keep every tensor alive
        return {"error": reason}


Job = NetworkJob | GrowthJob


def parameters(entry: Entry, size: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in entry.build((size, size)).parameters())


def hardware(about: Mapping[str, Any]) -> str:
    """Return the name of the GPU, or of the CPU with its number of threads."""
    machine = about["machine"]
    cores = machine["cores"]
    return machine["gpu"] or f"{machine['cpu']}, {cores} {'thread' if cores == 1 else 'threads'}"


@dataclass
class Store:
    """All measurements of one machine, in one JSON file."""

    path: Path
    found: dict[str, Found] = field(default_factory=dict)  # results by key of the job
    shown: dict[str, list[Found]] = field(default_factory=dict)  # printed lines of each experiment
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
            raise ValueError(
                f"{path} cannot be read ({error!r}): move it, or choose another folder with --out"
            ) from None

    def get(self, job: Job, settings: Settings) -> Found | None:
        return self.found.get(job.key(settings))

    def write(self) -> None:
        data = {"name": "reproduce", "hardware": self.hardware, "settings": self.settings, "headlines": self.headlines}
        write_json(self.path, {**data, "experiments": self.shown, "measurements": self.found})

    def take(self, hardware: str) -> None:
        """Set the hardware; raises a ValueError if the file has results of other hardware."""
        if self.hardware not in (None, hardware):
            raise ValueError(
                f"{self.path} has results of {self.hardware}, but this machine is {hardware}: choose another --out"
            )
        self.hardware = hardware

    def is_missing(self, job: Job, settings: Settings, retry: bool) -> bool:
        """Return whether a job must run: no result, a result cut short by --minutes, or (with `retry`) an error."""
        known = self.get(job, settings)
        return known is None or known.get(CUT_SHORT, False) or (retry and "error" in known)

    def fill(
        self, jobs: Iterable[Job], settings: Settings, *, minutes: float | None = None, retry: bool = False
    ) -> None:
        """Run the missing jobs in order and write the file after each.

        An error is stored as a result, since it would probably occur again; `retry` repeats such jobs.
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
                print(f"time budget used: {jobs_left} of {len(missing)} measurements left; the same command resumes")
                break
            result = job.run(replace(settings, seconds=min(settings.seconds, left)))  # the last job times fewer steps
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
                raise OSError(f"{job.key(settings)}: {lost}. All results are stored; the same command resumes")


def said(result: Found) -> str:
    if "error" in result:
        return result["error"]
    if "examples_per_second" in result:
        return f"{result['examples_per_second']:.4g} ex/s with batch {result['batch']}"
    return f"time x{result['seconds']:.2f}, space x{result['bytes']:.2f}"

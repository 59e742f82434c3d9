"""`lambdanets reproduce`."""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lambdanets.bench.compiled import Way, compilation
from lambdanets.bench.throughput import Precision
from lambdanets.experiments.reproduce.experiments import EXPERIMENTS
from lambdanets.experiments.reproduce.jobs import FILE, Settings
from lambdanets.experiments.reproduce.marks import MARKS, Comparison, Quantity, compare
from lambdanets.experiments.reproduce.numbers import COLUMNS, Number, as_json, read_accuracy
from lambdanets.experiments.reproduce.page import HTML, MARKDOWN, comments
from lambdanets.experiments.reproduce.run import listing, reproduce
from lambdanets.machine import threads
from lambdanets.options import chosen_device, optional
from lambdanets.tables import Format, print_table

COLORS = {"match": "green", "near": "green", "reading": "yellow", "misprint": "red", "cited": "dim"}
KIND_COLORS = {"exact": "green", "measured": "blue", "paper": "dim"}
COUNTS: tuple[Quantity, ...] = ("params", "flops", "memory")


@dataclass(frozen=True)
class Reproduce:
    """The paper's tables and figures, its numbers beside ours: counts, speed and memory on this machine.

    NAME is a table or figure (--list has them all), `all`, or one of params, flops and memory: every such count of all
    tables. Where a number fits another reading of the paper, or none that we tried, a note says so. Accuracies on
    ImageNet and COCO are the paper's own and are labelled so. Results are kept in --out: what was measured is not
    measured again, so that the same command goes on where it was stopped.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional, optional("NAME ...")] = ()
    """Tables and figures, `all`, or params, flops, memory."""
    list: bool = False
    """Name all tables and figures, and do nothing else."""
    format: Format = "table"
    """table, markdown or json."""
    out: Annotated[Path | None, optional("FOLDER")] = None
    """The folder for reproduce.json, .md and .html; runs/reproduce, or runs/reproduce-quick."""
    quick: bool = False
    """Images of 64 pixels and single steps, in turns, for 2 minutes: does it run? Without names: all of them."""
    minutes: Annotated[float | None, optional("MINUTES")] = None
    """Start no further measurement after this long, and cut the last one short; the same command goes on."""
    measure: bool = True
    """Measure what is missing. --no-measure: what the folder has, from whatever machine and by the settings that stand
    there, and counts."""
    retry: bool = False
    """Measure again what ended with an error (also: out of memory)."""
    accuracy: Annotated[str | None, optional("FILE")] = None
    """A compare.json of `lambdanets experiments compare`, for accuracies of our own; `imagenette`:
    runs/compare/compare.json."""
    device: Annotated[str | None, optional("DEVICE")] = None
    """cpu, cuda or cuda:1. A GPU if there is one."""
    dtype: Annotated[Precision | None, optional("DTYPE")] = None
    """Of networks: float32, tf32 or bfloat16. By default bfloat16 on a GPU where the paper has it, else float32."""
    compile: Way = "no"
    """Networks as they are, compiled by torch.compile (yes), also started by CUDA graphs, or compiled by blocks, which
    takes the least time (on a GPU a step is one CUDA graph): all alike."""
    threads: Annotated[int | None, optional("N")] = None
    """CPU threads; torch's own number, with --quick one."""
    batch: Annotated[int | None, optional("N")] = None
    """Where the search for the largest batch begins; 1024, on a CPU 8."""
    seconds: float = 5.0
    """Time no further step after this long with one network (three are timed anyway)."""

    def run(self) -> int:
        if self.list:
            titles = ("name", "what", "in the paper's source")
            if self.format == "json":
                print(json.dumps([dict(zip(titles, line, strict=True)) for line in listing()], indent=1))
            else:
                print_table(titles, listing(), self.format)
            return 0
        for name, least in (("minutes", 0), ("seconds", 0), ("batch", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} {value:g}: {least} or more")
        names = self.experiments()
        folder = self.out or Path("runs") / ("reproduce-quick" if self.quick else "reproduce")
        counts = {what: compare(what) for what in COUNTS if what in self.names}
        if self.format != "json":
            for lines in counts.values():
                self.show_counts(lines)
        found, headlines = self.reproduced(names, folder) if names else ({}, [])
        if self.format == "json":
            counted = {what: [asdict(one) for one in lines] for what, lines in counts.items()}
            print(json.dumps(counted | {name: as_json(lines) for name, lines in found.items()}, indent=1))
            return 0
        for name, lines in found.items():
            print(f"\n{'## ' if self.format == 'markdown' else ''}{EXPERIMENTS[name].title} ({name})\n")
            cells = [[getattr(one, column) for column in COLUMNS] for one in lines]
            print_table(COLUMNS, cells, self.format, numbers=(3, 4), colors=[KIND_COLORS[one.kind] for one in lines])
        for text in (*headlines, *(comments() if headlines else ())):
            print(text)
        if names:
            print(f"written to {folder / HTML}, {MARKDOWN} and {FILE}")
        return 0

    def reproduced(self, names: tuple[str, ...], folder: Path) -> tuple[Mapping[str, Sequence[Number]], Sequence[str]]:
        device = chosen_device(self.device)
        if self.dtype == "tf32" and device.type != "cuda":
            raise ValueError("--dtype tf32 is for CUDA GPUs: use float32")
        compilation(self.compile, device)  # refuses what the device does not have
        settings = Settings(device, self.quick, self.dtype, self.compile, self.batch, self.seconds)
        accuracy = read_accuracy(self.accuracy) if self.accuracy is not None else {}
        progress = nullcontext() if self.format == "table" else redirect_stdout(sys.stderr)  # what is printed is read
        with progress, threads(1 if self.quick and self.threads is None else self.threads):
            return reproduce(
                names,
                folder,
                settings,
                accuracy=accuracy,
                minutes=self.minutes,
                measure=self.measure,
                retry=self.retry,
            )

    def experiments(self) -> tuple[str, ...]:
        if not self.names and not self.quick:
            raise ValueError("which table or figure? Give names, or all; `lambdanets reproduce --list` has them")
        chosen = [name for name in self.names if name not in (*COUNTS, "all")]
        for name in chosen:
            if name not in EXPERIMENTS:
                raise ValueError(f"no table or figure is called {name!r}; `lambdanets reproduce --list` has them all")
        if "all" in self.names or not self.names:
            return tuple(EXPERIMENTS)
        return tuple(dict.fromkeys(chosen))

    def show_counts(self, found: Sequence[Comparison]) -> None:
        """Every count of one quantity, of all tables."""
        lines = [comparison_line(one) for one in found]
        titles = ("table", "row", "paper", "ours", "mark", "note")
        print_table(titles, lines, self.format, numbers=(2, 3), colors=[COLORS[one.mark] for one in found])
        for mark, meaning in MARKS.items():
            count = sum(one.mark == mark for one in found)
            if count:
                print(f"{'- ' if self.format == 'markdown' else ''}{count} {mark}: {meaning}")


def comparison_line(one: Comparison) -> tuple[str, ...]:
    ours = "-" if one.ours is None else with_unit(one.ours, one)
    note = one.note if one.reading is None else f"{with_unit(one.reading, one)}: {one.note}"
    return one.table, one.label, f"{one.paper} {one.unit}", ours, one.mark, note


def with_unit(value: float, one: Comparison) -> str:
    """With one digit more than the paper prints, so that the rounding can be followed."""
    return f"{value:.{len(one.paper.partition('.')[2]) + 1}f} {one.unit}"

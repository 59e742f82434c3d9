"""The command `lambdanets reproduce`."""

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
    """Reproduce the paper's tables and figures: counts, and speed and memory measured on this machine.

    NAME is a table or figure (see --list), `all`, or one of params, flops and memory for these counts of all tables.
    A note explains each count that differs from the paper as written. Accuracies on ImageNet and COCO are always those
    of the paper. Results are stored in --out, and the same command resumes an interrupted run without repeating
    measurements.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional, optional("NAME ...")] = ()
    """Tables and figures, `all`, or params, flops, memory."""
    list: bool = False
    """List all tables and figures and exit."""
    format: Format = "table"
    """Output format: table, markdown or json."""
    out: Annotated[Path | None, optional("FOLDER")] = None
    """Folder for reproduce.json, .md and .html; default runs/reproduce, with --quick runs/reproduce-quick."""
    quick: bool = False
    """Check in 2 minutes that everything runs: images of 64 pixels, and one step of each network. Without NAME: all."""
    minutes: Annotated[float | None, optional("MINUTES")] = None
    """Time budget in minutes: no new measurement starts after it. The same command resumes. Default: no limit."""
    measure: bool = True
    """Measure missing numbers. --no-measure only shows the results in --out, from any machine, and the counts."""
    retry: bool = False
    """Repeat measurements that ended with an error, including out of memory."""
    accuracy: Annotated[str | None, optional("FILE")] = None
    """A compare.json written by `lambdanets experiments compare`, whose accuracies are added to the tables;
    `imagenette` means runs/compare/compare.json."""
    device: Annotated[str | None, optional("DEVICE")] = None
    """cpu, cuda or cuda:N; default: the GPU if there is one."""
    dtype: Annotated[Precision | None, optional("DTYPE")] = None
    """Dtype of the networks: float32, tf32 or bfloat16. Default: bfloat16 on a GPU for tables where the paper uses it,
    otherwise float32."""
    compile: Way = "no"
    """How all networks are compiled: no (eager), yes (torch.compile), graphs (torch.compile with CUDA graphs), or
    blocks (torch.compile for each block, which compiles fastest; on a GPU a step is one CUDA graph)."""
    threads: Annotated[int | None, optional("N")] = None
    """Number of CPU threads; default: torch's setting, with --quick 1."""
    batch: Annotated[int | None, optional("N")] = None
    """Batch size at which the search for the largest batch starts; default 1024, on a CPU 8."""
    seconds: float = 5.0
    """Maximum time in seconds for the timed steps of one network; at least three steps are timed."""

    def run(self) -> int:
        if self.list:
            titles = ("name", "title", "label in the paper's source")
            if self.format == "json":
                print(json.dumps([dict(zip(titles, line, strict=True)) for line in listing()], indent=1))
            else:
                print_table(titles, listing(), self.format)
            return 0
        for name, least in (("minutes", 0), ("seconds", 0), ("batch", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} must be at least {least}, got {value:g}")
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
            raise ValueError("--dtype tf32 needs a CUDA GPU: use float32")
        compilation(self.compile, device)  # raises an error if the device does not support it
        settings = Settings(device, self.quick, self.dtype, self.compile, self.batch, self.seconds)
        accuracy = read_accuracy(self.accuracy) if self.accuracy is not None else {}
        progress = nullcontext() if self.format == "table" else redirect_stdout(sys.stderr)  # keep stdout parseable
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
            raise ValueError("no table or figure given: name some, or `all`; `lambdanets reproduce --list` lists them")
        chosen = [name for name in self.names if name not in (*COUNTS, "all")]
        for name in chosen:
            if name not in EXPERIMENTS:
                raise ValueError(f"unknown table or figure {name!r}; `lambdanets reproduce --list` lists them all")
        if "all" in self.names or not self.names:
            return tuple(EXPERIMENTS)
        return tuple(dict.fromkeys(chosen))

    def show_counts(self, found: Sequence[Comparison]) -> None:
        """Print the counts of one quantity in all tables."""
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
    """Format a number with one digit more than in the paper, which shows how it rounds."""
    return f"{value:.{len(one.paper.partition('.')[2]) + 1}f} {one.unit}"

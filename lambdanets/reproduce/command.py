"""`lambdanets reproduce` and `lambdanets models`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lambdanets.measure.flops import paper_flops
from lambdanets.measure.parameters import count_parameters, meta_network
from lambdanets.measure.show import wide
from lambdanets.models import list_models
from lambdanets.reproduce.compare import MARKS, Comparison, Quantity, compare
from lambdanets.reproduce.tables import ROWS

Format = Literal["table", "markdown", "json"]
COLORS = {"match": "green", "near": "green", "reading": "yellow", "misprint": "red", "cited": "dim"}


@dataclass(frozen=True)
class Reproduce:
    """Every number of the paper's tables beside ours: parameters, FLOPs, memory. Nothing is trained or measured.

    Ours are of the networks as the paper writes them. Where its number fits another reading, or none, a note says so.
    """

    what: Annotated[Quantity, tyro.conf.Positional]
    """params, flops (2 for a multiply-add) or memory (of attention maps and position embeddings)."""
    format: Format = "table"
    """table, markdown or json."""

    def run(self) -> int:
        found = compare(self.what)
        if self.format == "json":
            print(json.dumps([asdict(one) for one in found], indent=1))
            return 0
        lines = [comparison_line(one) for one in found]
        titles = ("table", "row", "paper", "ours", "mark", "note")
        print_table(titles, lines, self.format, numbers=(2, 3), colors=[COLORS[one.mark] for one in found])
        for mark, meaning in MARKS.items():
            count = sum(one.mark == mark for one in found)
            if count:
                print(f"{'- ' if self.format == 'markdown' else ''}{count} {mark}: {meaning}")
        return 0


def comparison_line(one: Comparison) -> tuple[str, ...]:
    ours = "-" if one.ours is None else with_unit(one.ours, one)
    note = one.note if one.reading is None else f"{with_unit(one.reading, one)}: {one.note}"
    return one.table, one.label, f"{one.paper} {one.unit}", ours, one.mark, note


def with_unit(value: float, one: Comparison) -> str:
    """With one digit more than the paper prints, so that the rounding can be followed."""
    return f"{value:.{len(one.paper.partition('.')[2]) + 1}f} {one.unit}"


@dataclass(frozen=True)
class Models:
    """Every network that `create_model` knows: parameters, FLOPs at its image size, accuracy in the paper."""

    pattern: Annotated[str, tyro.conf.Positional] = "*"
    """Only names like this, for example "lambda_*"."""
    format: Format = "table"
    """table, markdown or json."""

    def run(self) -> int:
        names = list_models(self.pattern)
        if not names:
            raise ValueError(f"no model is called {self.pattern!r}; `lambdanets models` lists all")
        found = [describe_model(name) for name in names]
        if self.format == "json":
            print(json.dumps([asdict(one) for one in found], indent=1))
            return 0
        titles = ("model", "image", "params (M)", "GFLOPs", "ImageNet top-1 in the paper")
        lines = [
            (one.name, f"{one.image_size}", f"{one.parameters / 1e6:.2f}", f"{one.flops / 1e9:.2f}", accuracy(one))
            for one in found
        ]
        print_table(titles, lines, self.format, numbers=(1, 2, 3))
        return 0


@dataclass(frozen=True)
class PaperAccuracy:
    """A top-1 accuracy that the paper prints."""

    top1: str
    image_size: int
    table: str


@dataclass(frozen=True)
class Model:
    """A line of `lambdanets models`."""

    name: str
    image_size: int | tuple[int, int]
    parameters: int
    flops: int
    paper: tuple[PaperAccuracy, ...]  # supervised, without pseudo-labels


def describe_model(name: str) -> Model:
    network = meta_network(name)
    shape = (1, network.config.in_chans, *network.config.image_grid)
    accuracies = dict.fromkeys(
        PaperAccuracy(row.top1, row.image_size or 224, row.table)
        for row in ROWS
        if row.model == name and not row.arguments and row.top1 is not None
    )
    total = count_parameters(network).total
    return Model(name, network.config.image_size, total, paper_flops(network, shape).total, tuple(accuracies))


def accuracy(model: Model) -> str:
    """Each number once, with the first table that has it."""
    first = {(a.image_size, a.top1): a.table.removeprefix("tab:") for a in reversed(model.paper)}
    return ", ".join(f"{top1} at {size} ({table})" for (size, top1), table in sorted(first.items()))


def print_table(
    titles: Sequence[str],
    lines: Sequence[Sequence[str]],
    form: Format,
    *,
    numbers: Sequence[int] = (),
    colors: Sequence[str] | None = None,
) -> None:
    """A table for people: on a terminal, or as markdown. `numbers` are the columns to align on the right."""
    if form == "markdown":
        rule = ["---:" if i in numbers else "---" for i in range(len(titles))]
        for line in (titles, rule, *lines):
            print(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |")
        return
    table = Table()
    for i, title in enumerate(titles):
        table.add_column(title, justify="right" if i in numbers else "left", no_wrap=i in numbers)
    for i, line in enumerate(lines):
        table.add_row(*map(escape, line), style=None if colors is None else colors[i])
    wide(Console()).print(table)

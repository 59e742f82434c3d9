"""The paper's number, ours, and a mark."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from lambdanets.experiments.reproduce.rows import Row
from lambdanets.experiments.reproduce.tables import ROWS, unit
from lambdanets.models.counts import count_parameters, meta_network
from lambdanets.models.flops import paper_flops

Quantity = Literal["params", "flops", "memory"]
UNPRINTED = "-"
NEAR = 0.003  # a counter that includes biases or pooling is this far away
MARKS = {
    "match": "equal at the paper's rounding",
    "near": f"within {NEAR:.1%}",
    "reading": "not as it is written; equal, or near, under another reading",
    "misprint": "none of the readings that we tried gives it",
    "unprinted": "the paper prints no number",
    "cited": "another paper's number; the network is not here, or is timm's",
}
DEFAULT_SIZE = 224


@dataclass(frozen=True)
class Comparison:
    """One number of the paper."""

    table: str
    label: str
    unit: str
    paper: str
    ours: float | None  # of the network as it is written
    reading: float | None  # of the other reading, where there is one and it is needed
    mark: str
    note: str


def rounded(value: float, printed: str) -> str:
    """The value as exactly as `printed`: zeros at the end of a whole number do not count, 120 has two digits."""
    decimals = len(printed.partition(".")[2])
    if "." not in printed:
        decimals = -(len(printed) - len(printed.rstrip("0")))
    value = round(value, decimals)
    return f"{value:.{max(decimals, 0)}f}"


def fits(value: float, printed: str) -> str | None:
    """The mark of a value beside a printed number; None if it is another number."""
    if rounded(value, printed) == printed:
        return "match"
    return "near" if abs(value / float(printed) - 1) <= NEAR else None


def compare(quantity: Quantity) -> list[Comparison]:
    """Every row of the paper that prints this quantity."""
    return [compare_row(row, quantity) for row in ROWS if getattr(row, quantity) is not None]


def compare_row(row: Row, quantity: Quantity) -> Comparison:
    printed = getattr(row, quantity) or UNPRINTED
    name, size = unit(row, quantity)
    ours = value_of(row, quantity, row.arguments)
    cited = f"as cited from {row.cited}" if row.cited else ""

    def comparison(mark: str, note: str, reading: float | None = None) -> Comparison:
        found = None if ours is None else ours / size
        return Comparison(row.table, row.label, name, printed, found, reading, mark, note)

    if ours is None:
        return comparison("cited", cited)
    if printed == UNPRINTED:
        return comparison("unprinted", cited)
    mark = fits(ours / size, printed)
    if mark == "match":
        return comparison(mark, cited)
    if row.reading is not None:
        other = row.reading.value
        if row.reading.arguments is not None:
            found = value_of(row, quantity, {**row.arguments, **row.reading.arguments})
            other = None if found is None else found / size
        if other is not None and fits(other, printed):
            return comparison("reading", row.reading.text, other)
    return comparison(mark or "misprint", row.reason or "")


def value_of(row: Row, quantity: Quantity, arguments: Mapping[str, Any]) -> float | None:
    """Ours, in ones; None where we have no such network."""
    if quantity == "memory":
        return row.memory_bytes
    if row.model is None:
        return None
    counted = counts(row.model, row.image_size or DEFAULT_SIZE, tuple(sorted(arguments.items())))
    return counted[0] if quantity == "params" else counted[1]()


@cache
def counts(model: str, image_size: int, arguments: tuple[tuple[str, Any], ...]) -> tuple[int, Any]:
    """Parameters, and a function for FLOPs (which take longer, and few rows have them)."""
    network = meta_network(model, image_size=image_size, **dict(arguments))
    return count_parameters(network).total, lambda: paper_flops(network, (1, 3, image_size, image_size)).total

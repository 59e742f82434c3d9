"""Comparison of the paper's counts with ours. A mark describes how well they agree."""

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
NEAR = 0.003  # counting biases or pooling can make this relative difference
MARKS = {
    "match": "equal after rounding as in the paper",
    "near": f"within {NEAR:.1%}",
    "reading": "differs from the paper as written; equal or near under another reading",
    "misprint": "none of the readings that we tried gives the printed number",
    "unprinted": "the paper prints no number",
    "cited": "cited by the paper; this package does not have the network, or it is timm's",
}
DEFAULT_SIZE = 224


@dataclass(frozen=True)
class Comparison:
    """A number of the paper compared with ours.

    Attributes:
        table, label: label of the table in the paper's source, and name of the row.
        unit: unit of all three numbers.
        paper: the number as printed.
        ours: our count for the network as the paper describes it; None if this package does not have it.
        reading: our count under another reading of the paper, if only that one matches.
        mark: a key of `MARKS`: match, near, reading, misprint, unprinted or cited.
        note: explanation of a difference.

    >>> from lambdanets.experiments.reproduce import compare
    >>> one = next(one for one in compare("memory") if one.mark == "reading")
    >>> one.label, one.paper, round(one.ours, 2), one.reading
    ('Lambda layer (k=8)', '0.95', 0.96, 0.95)
    """

    table: str
    label: str
    unit: str
    paper: str
    ours: float | None
    reading: float | None
    mark: str
    note: str


def rounded(value: float, printed: str) -> str:
    """Round a value to the precision of `printed`; trailing zeros of an integer do not count: 120 has two digits."""
    decimals = len(printed.partition(".")[2])
    if "." not in printed:
        decimals = -(len(printed) - len(printed.rstrip("0")))
    value = round(value, decimals)
    return f"{value:.{max(decimals, 0)}f}"


def fits(value: float, printed: str) -> str | None:
    """Return "match" or "near" for a value and a printed number, or None if they differ."""
    if rounded(value, printed) == printed:
        return "match"
    return "near" if abs(value / float(printed) - 1) <= NEAR else None


def compare(quantity: Quantity) -> list[Comparison]:
    """Compare a quantity in all tables of the paper that print it.

    Args:
        quantity: "params", "flops" or "memory".

    >>> from lambdanets.experiments.reproduce import compare
    >>> one = compare("memory")[0]
    >>> one.label, one.paper, round(one.ours, 1), one.unit, one.mark
    ('Global self-attention', '120', 122.8, 'GB', 'match')
    """
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
    """Return our count in units of 1, or None if this package does not have the network."""
    if quantity == "memory":
        return row.memory_bytes
    if row.model is None:
        return None
    counted = counts(row.model, row.image_size or DEFAULT_SIZE, tuple(sorted(arguments.items())))
    return counted[0] if quantity == "params" else counted[1]()


@cache
def counts(model: str, image_size: int, arguments: tuple[tuple[str, Any], ...]) -> tuple[int, Any]:
    """Return the number of parameters, and a function that counts FLOPs, which is slower and rarely needed."""
    network = meta_network(model, image_size=image_size, **dict(arguments))
    return count_parameters(network).total, lambda: paper_flops(network, (1, 3, image_size, image_size)).total

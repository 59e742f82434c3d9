"""Tables of the results of `lambdanets bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import geometric_mean
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lambdanets.tables import wide

if TYPE_CHECKING:
    from lambdanets.bench.layers import LeftOut, Row

MIB = 2**20
FAMILIES = ("ours", "public", "convolution", "depthwise", "attention")


def tables(rows: list[Row], left_out: list[LeftOut], console: Console) -> None:
    """Print times of the operation, ratios and memory of whole layers, and the contenders that were not measured."""
    console = wide(console)
    operations = [row for row in rows if row.kind == "operation"]
    layers = [row for row in rows if row.kind == "layer"]
    if operations:
        table = Table(title="The operation alone, milliseconds (* is the backend that auto chooses)")
        fill(table, operations, lambda row: f"{'*' if row.chosen else ''}{row.milliseconds:.3g}")
        console.print(table)
    if layers:
        table = Table(title="Whole layers: ours in milliseconds, others relative to ours (above 1: slower)")
        fill(table, layers, time_or_ratio)
        console.print(table)
        own = {(row.case, row.mode): row.peak_bytes for row in layers if row.contender == "ours"}
        table = Table(title="Whole layers: peak memory without the input, ours in MiB, others relative to ours")
        fill(table, layers, lambda row: memory(row, own.get((row.case, row.mode), 0)))
        console.print(table)
        for sentence in summary(layers):
            console.print(sentence, highlight=False)
    for contender, reason in dict.fromkeys((one.contender, one.reason) for one in left_out):
        cases = dict.fromkeys(one.case for one in left_out if (one.contender, one.reason) == (contender, reason))
        where = ", ".join(cases) if len(cases) <= 3 else f"{len(cases)} cases"
        console.print(escape(f"not measured: {contender} ({reason}): {where}"), highlight=False)


def fill(table: Table, rows: list[Row], text: Callable[[Row], str]) -> None:
    """Fill a table with a line for each case and mode and a column for each contender."""
    ordered = sorted(rows, key=lambda row: FAMILIES.index(row.family))
    names = list(dict.fromkeys(row.contender for row in ordered))
    for title in ("case", "mode"):
        table.add_column(title, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    for case, mode in dict.fromkeys((row.case, row.mode) for row in rows):
        found = {row.contender: text(row) for row in rows if (row.case, row.mode) == (case, mode)}
        table.add_row(case.name, mode, *(found.get(name, "-") for name in names))


def time_or_ratio(row: Row) -> str:
    return f"{row.milliseconds:.3g} ms" if row.contender == "ours" or row.ratio is None else f"{row.ratio:.2f}x"


def memory(row: Row, own: int) -> str:
    if row.contender == "ours" or not own:
        return f"{row.peak_bytes / MIB:.1f} MiB"
    return f"{row.peak_bytes / own:.2f}x"


def summary(layers: list[Row]) -> Iterable[str]:
    """Compare our layer with the best public layer, by mode."""
    for mode in dict.fromkeys(row.mode for row in layers):
        best: dict[object, float] = {}
        for row in layers:
            if row.mode == mode and row.family == "public" and row.ratio is not None:
                best[row.case] = min(row.ratio, best.get(row.case, float("inf")))
        if best:
            ratios = list(best.values())
            yield (
                f"{mode}: the best public layer takes {min(ratios):.2f}x to {max(ratios):.2f}x the time of ours, "
                f"geometric mean of {len(ratios)} cases: {geometric_mean(ratios):.2f}x"
            )

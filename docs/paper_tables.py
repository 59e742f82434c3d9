"""The blocks of the documents from a reproduce.json: headlines, and one table for each of the paper's."""

from collections.abc import Mapping, Sequence
from typing import Any

from lambdanets.experiments.reproduce.experiments import EXPERIMENTS
from lambdanets.experiments.reproduce.marks import MARKS
from lambdanets.experiments.reproduce.numbers import MISSING, Number, from_json
from lambdanets.experiments.reproduce.page import GROWTH, comments, count, is_missing
from lambdanets.tables import markdown_line

Data = Mapping[str, Any]
EXTRA_DATA = "extra-data"
# Parts of notes that the table shows by itself.
PLAIN = (
    "match",
    "cited",
    "unprinted",
    "not measured yet",
    "the paper's own, not trained here",
    "published, not trained here",
)


def machine(data: Data) -> str:
    """Hardware, versions and day of the measurements, in words."""
    found = list(data["measurements"].values())
    if not found:
        return "Nothing is measured yet"
    last = max(found, key=lambda one: one["date"])
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items() if version)
    failed = sum("error" in one for one in found)
    errors = f", {failed} of them ended without a number" if failed else ""
    missing = sum(is_missing(one) for lines in data["experiments"].values() for one in from_json(lines))
    left = f"; {missing} numbers of the tables are not measured yet" if missing else ""
    return f"{data['hardware']}. {versions}. Measured {last['date'][:10]}; {len(found)} measurements{errors}{left}"


def summary(data: Data) -> str:
    """The headlines, beside what the paper claims."""
    lines = [f"{machine(data)}.\n\n"]
    lines += [f"- {text}\n" for text in data["headlines"]] or ["No two families are measured at one accuracy yet.\n"]
    return "".join([*lines, "\n", *(f"{text}\n\n" for text in comments())]).rstrip("\n") + "\n"


def tables(data: Data) -> str:
    """Every experiment of the file."""
    marks = [f"- {mark}: {meaning}.\n" for mark, meaning in MARKS.items() if mark not in PLAIN]
    parts = [f"{machine(data)}.\n\nWhat a note on a count says of it:\n\n", *marks]
    for name in EXPERIMENTS:
        if name not in data["experiments"]:
            continue
        lines = from_json(data["experiments"][name])
        parts.append(f"\n## {EXPERIMENTS[name].title}\n\n`lambdanets reproduce {name}`: {count(lines)}.\n\n")
        parts.append(table(lines, formula=name in GROWTH, slower=name == EXTRA_DATA))
        parts.append(notes(lines, formula=name in GROWTH))
        if name == EXTRA_DATA:
            parts.append(extra_data(lines))
    return "".join(parts)


def table(lines: Sequence[Number], *, formula: bool, slower: bool = False) -> str:
    """A line for each row, and for each quantity the paper's number, or what its formula says, and ours.

    In brackets: speeds as multiples of the first row; with `slower` how many times faster the first row is, as the
    paper prints it.
    """
    quantities = list(dict.fromkeys((one.quantity, one.unit) for one in lines))
    found = {(one.row, one.quantity, one.unit): one for one in lines}
    columns = []  # title, which side, quantity and unit
    for quantity, unit in quantities:
        mine = [one for one in lines if (one.quantity, one.unit) == (quantity, unit)]
        title = f"{quantity} ({unit})" if unit else quantity
        both = [any(getattr(one, side) != MISSING for one in mine) for side in ("paper", "ours")]
        if both[0]:
            columns.append((f"{title}, {'formula' if formula else 'paper'}", "paper", (quantity, unit)))
        if both[1] or mine[0].kind == "measured":
            columns.append((f"{title}, ours", "ours", (quantity, unit)))
    ratios = {} if formula else beside_the_first(lines, slower=slower)

    def cell(row: str, side: str, quantity: tuple[str, str]) -> str:
        one = found.get((row, *quantity))
        return "" if one is None else getattr(one, side) + ratios.get((row, *quantity, side), "")

    text = [markdown_line(["", *(title for title, _, _ in columns)]), markdown_line(["---", *["---:"] * len(columns)])]
    for row in dict.fromkeys(one.row for one in lines):
        text.append(markdown_line([row, *(cell(row, side, quantity) for _, side, quantity in columns)]))
    return "".join(text)


def beside_the_first(lines: Sequence[Number], *, slower: bool = False) -> dict[tuple[str, str, str, str], str]:
    """Measured numbers where the paper has them too, as multiples of the first such row: its hardware is another.

    With `slower` the other way round, and nothing for the first row.
    """
    found = {}
    firsts: dict[tuple[str, str], tuple[float, float]] = {}
    for one in lines:
        if one.kind != "measured" or one.value is None or not one.paper.replace(".", "", 1).isdigit():
            continue
        values = (float(one.paper), one.value)
        first = firsts.setdefault((one.quantity, one.unit), values)
        for side, value, start in zip(("paper", "ours"), values, first, strict=True):
            ratio = f" ({value / start:.2f})"
            if slower:
                ratio = "" if values == first else f" ({start / value:.1f}x)"
            found[one.row, one.quantity, one.unit, side] = ratio
    return found


def extra_data(lines: Sequence[Number]) -> str:
    """Why our ratios to ViT are smaller than the paper's, from FLOPs and measured speeds; empty without these."""
    found = {(one.row, one.quantity): one.value for one in lines if one.value is not None}
    rows = [row for row, quantity in found if quantity == "flops" and (row, "inference") in found]
    vit = next((row for row in rows if row.startswith("ViT")), None)
    if vit is None or rows[0] == vit:
        return ""
    ours, flops = rows[0], {row: found[row, "flops"] for row in rows}
    rates = {row: flops[row] * found[row, "inference"] / 1e3 for row in rows}  # TFLOP/s
    return (
        f"\nAn image costs {vit} {flops[vit] / flops[ours]:.1f} times as many FLOPs as {ours}, and on the paper's TPUs "
        f"it is 9.0 times slower in training and 9.5 times in inference: there, both run at about the same FLOP/s. On "
        f"this hardware they do not: in inference {vit} runs at {rates[vit]:.0f} TFLOP/s and {ours} at "
        f"{rates[ours]:.0f}, so that our ratios are smaller. The likely reason (not profiled): {vit} is nearly only "
        f"large matrix products and a fused attention kernel, whereas norms, activations and small convolutions, which "
        f"memory limits, take much of the time of an eager ResNet.\n"
    )


def notes(lines: Sequence[Number], *, formula: bool) -> str:
    """What is to be said about numbers, each note once with the rows that it is about.

    The quantity stands beside a row only where its others have another note.
    """
    about: dict[str, dict[str, list[str]]] = {}
    for one in lines:
        note = "; ".join(part for part in one.note.split("; ") if part not in PLAIN)
        if note:
            # a formula stands for all letters of its operation
            row = f"{one.row.rpartition(', ')[0]}, {one.quantity}" if formula else one.row
            about.setdefault(note, {}).setdefault(row, []).append(one.quantity)
    rows = [row for one in about.values() for row in one]
    text = []
    for note, found in about.items():
        which = (row if rows.count(row) == 1 else f"{row} ({', '.join(named)})" for row, named in found.items())
        text.append(f"- {note}. For: {'; '.join(dict.fromkeys(which))}.\n")
    return "".join(["\n" if text else "", *text])

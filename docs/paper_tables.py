"""Make the blocks of the documents from a reproduce.json: headlines, and one table for each table of the paper."""

from collections.abc import Mapping, Sequence
from typing import Any

from summary import when

from lambdanets.experiments.reproduce.experiments import EXPERIMENTS
from lambdanets.experiments.reproduce.marks import MARKS
from lambdanets.experiments.reproduce.numbers import MISSING, Number, from_json
from lambdanets.experiments.reproduce.page import GROWTH, comments, count, is_missing
from lambdanets.tables import markdown_line

Data = Mapping[str, Any]
EXTRA_DATA = "extra-data"
# Parts of notes that the table already shows.
PLAIN = (
    "match",
    "cited",
    "unprinted",
    "not measured yet",
    "the paper's own, not trained here",
    "published, not trained here",
)


def machine(data: Data) -> str:
    """Describe hardware, versions, dates and protocols of the measurements."""
    found = list(data["measurements"].values())
    if not found:
        return "No measurements yet"
    first, last = (pick(found, key=lambda one: one["date"]) for pick in (min, max))
    dates = " to ".join(dict.fromkeys((when(first), when(last))))
    protocols = [name.split(" | ")[-2:] for name in data["measurements"] if " | batch " in name]
    how = ["/".join(dict.fromkeys(words)) for words in zip(*protocols, strict=True)]
    networks = f"; networks: {', '.join(how)}" if how else ""
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items() if version)
    failed = sum("error" in one for one in found)
    errors = f", {failed} of them without a result" if failed else ""
    missing = sum(is_missing(one) for lines in data["experiments"].values() for one in from_json(lines))
    left = f"; {missing} numbers in the tables are not measured yet" if missing else ""
    return f"{data['hardware']}. {versions}. Measured {dates}{networks}; {len(found)} measurements{errors}{left}"


def summary(data: Data) -> str:
    """Return the headlines and the paper's claims."""
    lines = [f"{machine(data)}.\n\n"]
    lines += [f"- {text}\n" for text in data["headlines"]] or ["No two families are measured at the same accuracy.\n"]
    return "".join([*lines, "\n", *(f"{text}\n\n" for text in comments())]).rstrip("\n") + "\n"


def tables(data: Data) -> str:
    """Return the tables of all experiments in the file."""
    marks = [f"- {mark}: {meaning}.\n" for mark, meaning in MARKS.items() if mark not in PLAIN]
    parts = [f"{machine(data)}.\n\nNotes on counts use these words:\n\n", *marks]
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
    """Return a table with a line for each row, and for each quantity the paper's number (or formula) and ours.

    Numbers in parentheses are speeds relative to the first row, or with `slower` the speed-up of the first row over
    this one, as the paper prints it.
    """
    quantities = list(dict.fromkeys((one.quantity, one.unit) for one in lines))
    found = {(one.row, one.quantity, one.unit): one for one in lines}
    columns = []  # title, "paper" or "ours", (quantity, unit)
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
    """Return our and the paper's speeds relative to the first row that has both, since the hardware differs.

    With `slower` the inverse ratios, and nothing for the first row.
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
    """Explain from FLOPs and speeds why our ratios to ViT are smaller than the paper's; empty if not measured."""
    found = {(one.row, one.quantity): one.value for one in lines if one.value is not None}
    rows = [row for row, quantity in found if quantity == "flops" and (row, "inference") in found]
    vit = next((row for row in rows if row.startswith("ViT")), None)
    if vit is None or rows[0] == vit:
        return ""
    ours, flops = rows[0], {row: found[row, "flops"] for row in rows}
    rates = {row: flops[row] * found[row, "inference"] / 1e3 for row in rows}  # TFLOP/s
    return (
        f"\n{vit} needs {flops[vit] / flops[ours]:.1f} times as many FLOPs per image as {ours}. On the paper's TPUs it "
        f"is 9.0 times slower in training and 9.5 times in inference, so both run at about the same FLOP/s. On this "
        f"hardware our ratios are smaller: in inference {vit} runs at {rates[vit]:.0f} TFLOP/s and {ours} at "
        f"{rates[ours]:.0f} TFLOP/s. The likely reason (not profiled): {vit} consists mostly of large matrix products "
        f"and a fused attention kernel, whereas an eager ResNet spends much of its time in norms, activations and "
        f"small convolutions, which are limited by memory bandwidth.\n"
    )


def notes(lines: Sequence[Number], *, formula: bool) -> str:
    """Return a list of notes, each with the rows that it applies to.

    The quantity is added to a row if the row has several notes.
    """
    about: dict[str, dict[str, list[str]]] = {}
    for one in lines:
        note = "; ".join(part for part in one.note.split("; ") if part not in PLAIN)
        if note:
            # a formula applies to all letters of its operation
            row = f"{one.row.rpartition(', ')[0]}, {one.quantity}" if formula else one.row
            about.setdefault(note, {}).setdefault(row, []).append(one.quantity)
    rows = [row for one in about.values() for row in one]
    text = []
    for note, found in about.items():
        which = (row if rows.count(row) == 1 else f"{row} ({', '.join(named)})" for row, named in found.items())
        text.append(f"- {note}. Rows: {'; '.join(dict.fromkeys(which))}.\n")
    return "".join(["\n" if text else "", *text])

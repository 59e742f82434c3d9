"""What a reproduce.json holds, for the documents: headlines, and one table with a line for each row of the paper's."""

from collections.abc import Mapping, Sequence
from typing import Any

from lambdanets.reproduce.compare import MARKS
from lambdanets.reproduce.experiments import EXPERIMENTS
from lambdanets.reproduce.numbers import MISSING, Number, from_json
from lambdanets.reproduce.page import GROWTH, comments, count, is_missing, markdown_line

Data = Mapping[str, Any]
# Parts of notes that the table shows by itself.
PLAIN = ("match", "cited", "not measured yet", "the paper's own, not trained here", "published, not trained here")


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
        parts.append(table(lines, formula=name in GROWTH))
        parts.append(notes(lines, formula=name in GROWTH))
    return "".join(parts)


def table(lines: Sequence[Number], *, formula: bool) -> str:
    """A line for each row, and for each quantity the paper's number, or what its formula says, and ours."""
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
    ratios = {} if formula else beside_the_first(lines)

    def cell(row: str, side: str, quantity: tuple[str, str]) -> str:
        one = found.get((row, *quantity))
        return "" if one is None else getattr(one, side) + ratios.get((row, *quantity, side), "")

    text = [markdown_line(["", *(title for title, _, _ in columns)]), markdown_line(["---", *["---:"] * len(columns)])]
    for row in dict.fromkeys(one.row for one in lines):
        text.append(markdown_line([row, *(cell(row, side, quantity) for _, side, quantity in columns)]))
    return "".join(text)


def beside_the_first(lines: Sequence[Number]) -> dict[tuple[str, str, str, str], str]:
    """Measured numbers where the paper has them too, as multiples of the first such row: its hardware is another."""
    found = {}
    firsts: dict[tuple[str, str], tuple[float, float]] = {}
    for one in lines:
        if one.kind != "measured" or one.value is None or not one.paper.replace(".", "", 1).isdigit():
            continue
        values = (float(one.paper), one.value)
        first = firsts.setdefault((one.quantity, one.unit), values)
        for side, value, start in zip(("paper", "ours"), values, first, strict=True):
            found[one.row, one.quantity, one.unit, side] = f" ({value / start:.2f})"
    return found


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

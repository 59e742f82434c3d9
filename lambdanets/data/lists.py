"""A CSV list of images: columns `path`, `label` (a class name or number; may be missing) and `split` (may be missing).

Paths are relative to the list. It is the user's own list: it may point anywhere, but only regular files are read, and
only as images.
"""

import csv
from pathlib import Path

from lambdanets.data.source import SPLITS, FileSource, no_split

PATHS, LABELS = ("path", "file", "filename", "image"), ("label", "class", "target")


def open_list(path: Path, split: str) -> FileSource:
    rows = read_rows(path)
    if rows[0][2] is None:
        if split != "train":
            raise no_split(path, split, ["train"])
        chosen = rows
    else:
        there = {row[2] for row in rows}
        name = next((name for name in SPLITS[split] if name in there), None)
        if name is None:
            raise no_split(path, split, sorted(str(name) for name in there))
        chosen = [row for row in rows if row[2] == name]
    names = class_names([row[1] for row in rows if row[1]])
    numbers = {name: i for i, name in enumerate(names)}
    labels = [numbers[row[1]] if row[1] else -1 for row in chosen]
    return FileSource(path.parent, [row[0] for row in chosen], labels, names)


def read_rows(path: Path) -> list[tuple[str, str, str | None]]:
    """(path, label or "", split or None) of each line."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        try:
            lines = [line for line in csv.reader(file) if line]
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a CSV file in UTF-8: {error}") from error
    if not lines:
        raise ValueError(f"{path} is empty: expected lines of path,label")
    header = [cell.strip().lower() for cell in lines[0]]
    columns = (column(header, PATHS), column(header, LABELS), column(header, ("split",)))
    if columns[0] is None:
        columns = (0, 1 if len(header) > 1 else None, 2 if len(header) > 2 else None)
    else:
        lines = lines[1:]
    rows: list[tuple[str, str, str | None]] = []
    for number, line in enumerate(lines, 1):
        if len(line) != len(header):
            raise ValueError(f"{path}: line {number} has {len(line)} cells where the first has {len(header)}: {line}")
        cells = [None if at is None else line[at].strip() for at in columns]
        if not cells[0] or "\0" in cells[0]:
            raise ValueError(f"{path}: line {number} has no path: {line}")
        rows.append((cells[0], cells[1] or "", cells[2].lower() if cells[2] is not None else None))
    if not rows:
        raise ValueError(f"{path} has a header and no images")
    return rows


def column(header: list[str], names: tuple[str, ...]) -> int | None:
    return next((header.index(name) for name in names if name in header), None)


def class_names(labels: list[str]) -> list[str]:
    """Names in order; numbers in the order of numbers, and none left out, so that label 7 is class 7."""
    distinct = set(labels)
    if distinct and all(label.isdecimal() and str(int(label)) == label for label in distinct):
        largest = max(int(label) for label in distinct)
        if largest > 1_000_000:
            raise ValueError(f"label {largest}: labels are counted from 0, or names")
        return [str(i) for i in range(largest + 1)]
    return sorted(distinct)

"""Datasets as CSV lists with the columns `path`, `label` (class name or number, optional) and `split` (optional).

Paths are relative to the list and may lead anywhere, but only regular files are read, and only as images.
"""

import csv
import re
from pathlib import Path

from lambdanets.data.source import SPLITS, FileSource, no_split

PATHS, LABELS, SPLIT = ("path", "file", "filename", "image"), ("label", "class", "target"), ("split",)
MOST_BYTES = 2**31
MAX_LABEL = 1_000_000
UNLABELLED = "-1"  # if labels are numbers
NEGATIVE = re.compile(r"-[0-9]+")
SAME = (("train", "training"), ("val", "valid", "validation"), ("test", "testing"))  # names of the same split


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
            raise no_split(path, split, sorted(repr(str(name)[:40]) for name in there)[:10])
        check_splits(path, there)
        chosen = [row for row in rows if row[2] == name]
    names = class_names([row[1] for row in rows if row[1]], path)
    numbers = {name: i for i, name in enumerate(names)}
    labels = [numbers.get(row[1], -1) for row in chosen]
    return FileSource(path.parent, [row[0] for row in chosen], labels, names)


def read_rows(path: Path) -> list[tuple[str, str, str | None]]:
    """Return (path, label or "", split or None) of each line."""
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes; a list may have at most {MOST_BYTES:,}")
    lines: list[tuple[int, list[str]]] = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        try:
            for cells in reader:
                if cells:
                    lines.append((reader.line_num, [cell.strip() for cell in cells]))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text ({error}): save it as UTF-8") from error
        except csv.Error as error:
            raise ValueError(f"{path} is not a valid CSV file: line {reader.line_num}: {error}") from error
    if not lines:
        raise ValueError(f"{path} is empty; expected lines with path,label")
    header = [cell.lower() for cell in lines[0][1]]
    if any("\0" in cell for cell in header):
        raise ValueError(f"{path}: the first line has a NUL byte: {shortened(lines[0][1])}")
    columns = (column(header, PATHS), column(header, LABELS), column(header, SPLIT))
    if columns[0] is None:
        columns = (0, 1 if len(header) > 1 else None, 2 if len(header) > 2 else None)
    else:
        lines = lines[1:]
        twice = next((name for name in (*PATHS, *LABELS, *SPLIT) if header.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{path} has two columns named {twice!r}: remove one")
    rows: list[tuple[str, str, str | None]] = []
    for number, line in lines:
        if len(line) != len(header):
            raise ValueError(
                f"{path}: line {number} has {len(line)} cells, but the first line has {len(header)}: {shortened(line)}"
            )
        cells = [None if at is None else line[at] for at in columns]
        if not cells[0]:
            raise ValueError(f"{path}: line {number} has no path: {shortened(line)}")
        if any(character in cell for cell in cells if cell for character in "\0\r\n"):
            raise ValueError(f"{path}: line {number} has a line break or a NUL byte in a cell: {shortened(line)}")
        rows.append((cells[0], cells[1] or "", cells[2].lower() if cells[2] is not None else None))
    if not rows:
        raise ValueError(f"{path} has a header but no images")
    return rows


def check_splits(path: Path, there: set[str | None]) -> None:
    """Raise ValueError for names of splits whose rows no command would read."""
    unknown = sorted(str(name) for name in there if not any(name in words for words in SAME))
    if unknown:
        raise ValueError(
            f"{path} has rows with the split {unknown[0][:40]!r}, which is not one of "
            f"{', '.join(word for words in SAME for word in words)}: change it or remove the rows"
        )
    for words in SAME:
        both = [word for word in words if word in there]
        if len(both) > 1:
            raise ValueError(
                f"{path} has rows with both {both[0]!r} and {both[1]!r}, which are the same split: use one name"
            )


def shortened(line: list[str]) -> str:
    return repr(",".join(line[:5])[:80])


def column(header: list[str], names: tuple[str, ...]) -> int | None:
    return next((header.index(name) for name in names if name in header), None)


def class_names(labels: list[str], path: Path) -> list[str]:
    """Return the class names in alphabetical order. If labels are numbers, classes are 0 to the largest number, so that
    label 7 is class 7, and -1 means no label."""
    distinct = set(labels) - {UNLABELLED}
    if not distinct:
        return []
    if negative := sorted(label for label in distinct if NEGATIVE.fullmatch(label)):
        raise ValueError(
            f"{path}: the label {negative[0][:40]} is negative. Labels must be names, or numbers from 0; use -1 or an "
            f"empty cell for images without a label"
        )
    if not all(label.isascii() and label.isdecimal() and (label == "0" or label[0] != "0") for label in distinct):
        if UNLABELLED in labels:
            raise ValueError(f"{path} has the label -1 although labels are names: leave the cell empty for no label")
        return sorted(distinct)
    largest = max(distinct, key=lambda label: (len(label), label))
    if len(largest) > len(str(MAX_LABEL)) or int(largest) > MAX_LABEL:
        raise ValueError(
            f"{path}: the label {largest[:40]} is too large. Labels must be numbers from 0 to {MAX_LABEL:,}, or names"
        )
    return [str(i) for i in range(int(largest) + 1)]

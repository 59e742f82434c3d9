"""A CSV list of images: columns `path`, `label` (a class name or number; may be missing) and `split` (may be missing).

Paths are relative to the list. It is the user's own list: it may point anywhere, but only regular files are read, and
only as images.
"""

import csv
import re
from pathlib import Path

from lambdanets.data.source import SPLITS, FileSource, no_split

PATHS, LABELS, SPLIT = ("path", "file", "filename", "image"), ("label", "class", "target"), ("split",)
MOST_BYTES = 2**31
MAX_LABEL = 1_000_000
UNLABELLED = "-1"  # among numbers
NEGATIVE = re.compile(r"-[0-9]+")
SAME = (("train", "training"), ("val", "valid", "validation"), ("test", "testing"))  # words for a split


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
    """(path, label or "", split or None) of each line."""
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes; a list of images has at most {MOST_BYTES:,}")
    lines: list[tuple[int, list[str]]] = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        try:
            for cells in reader:
                if cells:
                    lines.append((reader.line_num, [cell.strip() for cell in cells]))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text in UTF-8 ({error}): save it as UTF-8") from error
        except csv.Error as error:
            raise ValueError(f"{path} is not a CSV file: line {reader.line_num}: {error}") from error
    if not lines:
        raise ValueError(f"{path} is empty: expected lines of path,label")
    header = [cell.lower() for cell in lines[0][1]]
    if any("\0" in cell for cell in header):
        raise ValueError(f"{path}: its first line has a NUL byte: {shortened(lines[0][1])}")
    columns = (column(header, PATHS), column(header, LABELS), column(header, SPLIT))
    if columns[0] is None:
        columns = (0, 1 if len(header) > 1 else None, 2 if len(header) > 2 else None)
    else:
        lines = lines[1:]
        twice = next((name for name in (*PATHS, *LABELS, *SPLIT) if header.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{path} has two columns {twice!r}: remove one")
    rows: list[tuple[str, str, str | None]] = []
    for number, line in lines:
        if len(line) != len(header):
            raise ValueError(
                f"{path}: line {number} has {len(line)} cells, and the first line has {len(header)}: {shortened(line)}"
            )
        cells = [None if at is None else line[at] for at in columns]
        if not cells[0]:
            raise ValueError(f"{path}: line {number} has no path: {shortened(line)}")
        if any(character in cell for cell in cells if cell for character in "\0\r\n"):
            raise ValueError(f"{path}: line {number} has a line break or a NUL byte in a cell: {shortened(line)}")
        rows.append((cells[0], cells[1] or "", cells[2].lower() if cells[2] is not None else None))
    if not rows:
        raise ValueError(f"{path} has a header and no images")
    return rows


def check_splits(path: Path, there: set[str | None]) -> None:
    """Refuse words for splits whose rows no command would read."""
    unknown = sorted(str(name) for name in there if not any(name in words for words in SAME))
    if unknown:
        raise ValueError(
            f"{path} has rows of the split {unknown[0][:40]!r}, which is not one of "
            f"{', '.join(word for words in SAME for word in words)}: change it or remove the rows"
        )
    for words in SAME:
        both = [word for word in words if word in there]
        if len(both) > 1:
            raise ValueError(f"{path} has rows of {both[0]!r} and of {both[1]!r}, which are one split: use one word")


def shortened(line: list[str]) -> str:
    return repr(",".join(line[:5])[:80])


def column(header: list[str], names: tuple[str, ...]) -> int | None:
    return next((header.index(name) for name in names if name in header), None)


def class_names(labels: list[str], path: Path) -> list[str]:
    """Names in alphabetical order. Numbers are in numerical order with none left out, so that label 7 is class 7, and
    -1 among them means that there is no label."""
    distinct = set(labels) - {UNLABELLED}
    if not distinct:
        return []
    if negative := sorted(label for label in distinct if NEGATIVE.fullmatch(label)):
        raise ValueError(
            f"{path}: the label {negative[0][:40]} is negative: labels are names, or numbers from 0, with -1 or an "
            f"empty cell where there is none"
        )
    if not all(label.isascii() and label.isdecimal() and (label == "0" or label[0] != "0") for label in distinct):
        if UNLABELLED in labels:
            raise ValueError(f"{path} has the label -1 among names: leave the cell empty where there is no label")
        return sorted(distinct)
    largest = max(distinct, key=lambda label: (len(label), label))
    if len(largest) > len(str(MAX_LABEL)) or int(largest) > MAX_LABEL:
        raise ValueError(
            f"{path}: the label {largest[:40]} is too large: labels are numbers from 0 to {MAX_LABEL:,}, or names"
        )
    return [str(i) for i in range(int(largest) + 1)]

"""CSV lists of images, compared with Python's strict CSV reader."""

import csv
import io
import random
from collections import Counter
from collections.abc import Callable

from tests.fuzz import damage
from tests.fuzz.case import FuzzCase, silent
from tests.fuzz.made import picture_bytes

WORDS = ("train", "training", "val", "valid", "validation", "test", "testing")
PATHS, LABELS = ("path", "file", "filename", "image"), ("label", "class", "target")
Rows = list[list[str]]


def run(case: FuzzCase) -> bool:
    from lambdanets.data.command import DataCheck
    from lambdanets.data.source import distinct_splits

    draw = case.random
    names = [f"{i}.png" for i in range(6)]
    for i, name in enumerate(names):
        (case.folder / name).write_bytes(picture_bytes(i, "PNG"))
    rows = base_rows(draw, names)
    said, data = "nothing", as_csv(rows)
    if case.number >= 5:
        said, data = draw.choice(STRUCTURED)(draw, rows) if draw.random() < 0.6 else damage.damaged(draw, data)
    case.note(said)
    path = case.folder / "list.csv"
    path.write_bytes(data)

    expected = reading(data)
    found = case.command(DataCheck(str(path), workers=1), names=("list.csv",))
    if found.refused:
        if said in HARMLESS:
            raise silent(f"refused although it is whole: {found.err}")
        return False
    if expected is None:
        raise silent(f"of a list that is damaged: {found.out}")
    sources = case.attempt(distinct_splits, str(path), names=("list.csv",))
    read: Counter = Counter()
    for split, source in sources.items():
        for i in range(len(source)):
            label = source.class_names[source.labels[i]] if source.labels[i] >= 0 else ""
            read[split, source.paths[i], label] += 1
    numbers = all(label.isascii() and label.isdecimal() for _, label, _ in expected if label not in ("", "-1"))
    wanted = Counter((kind(split), path, "" if numbers and label == "-1" else label) for path, label, split in expected)
    lost = Counter({key: count for key, count in wanted.items() if key[0] or not said_of(found.out + found.err)})
    if Counter(path for split, path, _ in lost.elements() if split == "validation") == Counter(
        path for split, path, _ in lost.elements() if split == "test"
    ):  # the same images: one of them stands for both
        lost = Counter({key: count for key, count in lost.items() if key[0] != "test"})
    if read != lost:
        raise silent(f"the list says {sorted(lost - read, key=str)}, read were {sorted(read - lost, key=str)}")
    missing = sum(count for (_, path, _), count in read.items() if path not in names)
    if (f"{missing} unreadable" in found.out) != bool(missing) or (missing and found.status != 1):
        raise silent(f"{missing} files are missing: {found.out}")
    return True


def said_of(text: str) -> bool:
    """Return whether a message mentions rows of an unknown split."""
    return "split" in text and "row" in text


def kind(split: str | None) -> str:
    """Return the split that a word names, or "" if it names none."""
    if split is None or split in ("train", "training"):
        return "train"
    return "" if split not in WORDS else "test" if split.startswith("test") else "validation"


def reading(data: bytes) -> list[tuple[str, str, str | None]] | None:
    """Return (path, label, split) of each row, or None if the list is damaged."""
    try:
        text = data.decode("utf-8-sig")
        lines = [line for line in csv.reader(io.StringIO(text, newline=""), strict=True) if line]
    except (UnicodeDecodeError, csv.Error):
        return None
    if not lines or "\0" in text:
        return None
    header = [cell.strip().lower() for cell in lines[0]]
    columns: list[int | None] = [next((i for i, cell in enumerate(header) if cell in PATHS), None)]
    if columns[0] is None:
        columns = [0, 1 if len(header) > 1 else None, 2 if len(header) > 2 else None]
    else:
        columns += [next((i for i, cell in enumerate(header) if cell in words), None) for words in (LABELS, ("split",))]
        lines = lines[1:]
    found = []
    for line in lines:
        if len(line) != len(header) or not line[columns[0] or 0].strip():
            return None
        path, label, split = (None if at is None else line[at].strip() for at in columns)
        if any("\n" in cell or "\r" in cell for cell in (label or "", split or "")):
            return None
        found.append((path, label or "", split.lower() if split is not None else None))
    return found or None


def base_rows(draw: random.Random, names: list[str]) -> Rows:
    labels = draw.choice((["cat", "dog", "cat", "dog", "eel", "eel"], ["0", "1", "2", "0", "1", "2"]))
    columns = draw.choice((1, 2, 3, 3))
    splits = ["train", "train", "train", "train", "val", "test"]
    rows = [list(row[:columns]) for row in zip(names, labels, splits, strict=True)]
    if draw.random() < 0.8:
        rows.insert(0, ["path", "label", "split"][:columns])
    return rows


def as_csv(rows: Rows, **options) -> bytes:
    file = io.StringIO()
    csv.writer(file, **options).writerows(rows)
    return file.getvalue().encode("utf-8", "surrogatepass")


# Damage ---------------------------------------------------------------------------------------------------------------

HARMLESS = ("nothing", "quoted", "with a byte order mark", "with line feeds", "with empty lines")
CELLS = (
    *("", " ", "x", "\0", "a\nb", '"', ",", "../0.png", "/etc/passwd", "/dev/zero", ".", "x" * 200_000, "\x1b[31m"),
    *(
        "-1",
        "7",
        "007",
        "999999999999999999999",
        "1000001",
        "٣",
        "nan",
        "1.5",
        "\ud800",
        "train",
        "trian",
        "VAL",
        "test",
    ),
)


def cell(draw: random.Random, rows: Rows) -> tuple[str, bytes]:
    row = draw.choice(rows)
    at, value = draw.randrange(len(row)), draw.choice(CELLS)
    before, row[at] = row[at], value
    return f"{before!r} is {value[:20]!r}", as_csv(rows)


def column(draw: random.Random, rows: Rows) -> tuple[str, bytes]:
    at, value = draw.randrange(len(rows[0])), draw.choice(CELLS)
    for row in rows[1:]:
        row[at] = value
    return f"column {at} is {value[:20]!r}", as_csv(rows)


def length(draw: random.Random, rows: Rows) -> tuple[str, bytes]:
    row = draw.choice(rows)
    if draw.random() < 0.5:
        row.append("more")
    else:
        row.pop()
    return f"a row of {len(row)}", as_csv(rows)


def header(draw: random.Random, rows: Rows) -> tuple[str, bytes]:
    rows[0] = draw.choice(
        (
            *(["label", "path"], ["path", "path"], ["path", "label", "label"], ["split", "label", "path"]),
            *(["image", "target"], ["x", "y"], [], ["path"], ["PATH", " Label "]),
        )
    )
    return f"header {rows[0]}", as_csv(rows)


def text(change: Callable[[random.Random, bytes], tuple[str, bytes]]):
    return lambda draw, rows: change(draw, as_csv(rows))


def quote(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    at = draw.choice([0, *(i + 1 for i, byte in enumerate(data) if byte in b",\n"), len(data)])
    return f"a quote at {at}", data[:at] + b'"' + data[at:]


STRUCTURED = (
    *(cell, cell, cell, column, length, header, text(quote), text(quote)),
    lambda draw, rows: ("quoted", as_csv(rows, quoting=csv.QUOTE_ALL)),
    text(lambda draw, data: ("with a byte order mark", b"\xef\xbb\xbf" + data)),
    text(lambda draw, data: ("with line feeds", data.replace(b"\r\n", b"\n"))),
    text(lambda draw, data: ("with empty lines", data.replace(b"\r\n", b"\r\n\r\n"))),
    text(lambda draw, data: ("with carriage returns", data.replace(b"\r\n", b"\r"))),
    text(lambda draw, data: ("in UTF-16", data.decode().encode("utf-16"))),
    text(lambda draw, data: ("in Latin-1", data.replace(b"0.png", b"\xe4.png").replace(b"cat", b"k\xe4"))),
    text(lambda draw, data: ("with semicolons", data.replace(b",", b";"))),
    text(lambda draw, data: ("of nothing", draw.choice((b"", b"\n", b"path,label\n", b"\xef\xbb\xbf")))),
)

"""Random damage to bytes and to JSON."""

import copy
import json
import random
from typing import Any

Path = tuple[str | int, ...]

DEEP = "@deep@"
"""Stands for 100,000 nested lists in the data that `as_text` writes."""


def damaged(draw: random.Random, data: bytes, first: int = 0) -> tuple[str, bytes]:
    """Return a damaged copy of `data` and what was changed, from byte `first` on."""
    while True:
        kind, changed = draw.choice(BYTES)(draw, data, first)
        if changed != data:
            return kind, changed


def flipped(draw: random.Random, data: bytes, first: int = 0) -> tuple[str, bytes]:
    at = draw.randrange(first, len(data))
    bit = 1 << draw.randrange(8)
    return f"bit {bit} of byte {at} of {len(data)}", data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]


def several(draw: random.Random, data: bytes, first: int) -> tuple[str, bytes]:
    found = bytearray(data)
    places = [draw.randrange(first, len(data)) for _ in range(draw.randint(2, 8))]
    for at in places:
        found[at] = draw.randrange(256)
    return f"bytes {sorted(places)} of {len(data)}", bytes(found)


def truncated(draw: random.Random, data: bytes, first: int = 0) -> tuple[str, bytes]:
    keep = draw.randrange(first, len(data))
    return f"cut off after {keep} of {len(data)} bytes", data[:keep]


def stretch(draw: random.Random, data: bytes, first: int) -> tuple[int, int]:
    start = draw.randrange(first, len(data))
    return start, min(len(data), start + draw.choice((1, 2, 7, 64, 512, 1000)))


def removed(draw: random.Random, data: bytes, first: int) -> tuple[str, bytes]:
    start, end = stretch(draw, data, first)
    return f"bytes {start} to {end} of {len(data)} removed", data[:start] + data[end:]


def repeated(draw: random.Random, data: bytes, first: int) -> tuple[str, bytes]:
    start, end = stretch(draw, data, first)
    return f"bytes {start} to {end} of {len(data)} twice", data[:end] + data[start:]


def inserted(draw: random.Random, data: bytes, first: int) -> tuple[str, bytes]:
    at = draw.randrange(first, len(data) + 1)
    new = draw.randbytes(draw.choice((1, 2, 8, 100, 512)))
    return f"{len(new)} bytes inserted at {at} of {len(data)}", data[:at] + new + data[at:]


def zeroed(draw: random.Random, data: bytes, first: int) -> tuple[str, bytes]:
    start, end = stretch(draw, data, first)
    return f"bytes {start} to {end} of {len(data)} are 0", data[:start] + bytes(end - start) + data[end:]


def spliced(draw: random.Random, data: bytes, first: int) -> tuple[str, bytes]:
    a, b = sorted(draw.randrange(first, len(data) + 1) for _ in range(2))
    c = draw.randrange(b, len(data) + 1)
    return f"[{a}:{b}] and [{b}:{c}] of {len(data)} exchanged", data[:a] + data[b:c] + data[a:b] + data[c:]


BYTES = (flipped, several, truncated, truncated, removed, repeated, inserted, zeroed, spliced)


# JSON -----------------------------------------------------------------------------------------------------------------

VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 2**40, -(2**63), 0.5, -0.5, 1e300, -1e300, 5e-324),
    *(10**400, float("nan"), float("inf"), "", "x", "1", "x" * 100_000, "\0\x1b[31m\n", "\ud800", "../../etc/passwd"),
    *([], {}, [[]], [None] * 3, [1, 2, 3], {"x": {}}, DEEP),
)


def places(data: Any, before: Path = ()) -> list[Path]:
    """Return the paths of all values in JSON data; () is the whole."""
    found = [before]
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            found += places(value, (*before, key))
    return found


def at(data: Any, path: Path) -> Any:
    for key in path:
        data = data[key]
    return data


def spoilt(draw: random.Random, data: Any, below: Path = ()) -> tuple[str, Path, Any]:
    """Return what was changed, where, and a copy of JSON data with one change below a path."""
    data = copy.deepcopy(data)
    path = draw.choice([below + path for path in places(at(data, below)) if path or below])
    parent, key = at(data, path[:-1]), path[-1]
    kind = draw.randrange(10)
    if kind == 0:
        del parent[key]
        return "deleted", path, data
    if kind == 1 and isinstance(parent, dict):
        name = draw.choice(("unknown", "", "pretrained", "__class__", "\0", "x" * 5_000, "name", "label"))
        parent.setdefault(name, draw.choice(VALUES))
        return f"added {name[:20]!r}", path[:-1], data
    value = draw.choice(VALUES)
    parent[key] = copy.deepcopy(value)
    return f"is {str(value)[:30]!r}", path, data


def as_text(data: Any) -> str:
    return json.dumps(data).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000)


def as_bytes(data: Any) -> bytes:
    return as_text(data).encode()


def dotted(path: Path) -> str:
    return ".".join(map(str, path))

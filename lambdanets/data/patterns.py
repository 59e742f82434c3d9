"""Expansion of brace lists and wildcards in file names and urls, with limits."""

import fnmatch
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase

ALPHABET = ascii_uppercase + ascii_lowercase
MOST_NAMES = 100_000  # per pattern
MOST_CHARACTERS, MOST_BRACES = 4096, 20  # per pattern with braces
MOST_ENTRIES = 1_000_000  # files and folders that are inspected per pattern with wildcards
NUMBERS = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.-?([0-9]+))?")
LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?([0-9]+))?")


def expand_braces(pattern: str) -> list[str]:
    """Expand a brace list as bash does: "x-{0000..0009}.tar", "{a,b}.tar", also nested. A backslash escapes."""
    if pattern.count("{") > MOST_BRACES or ("{" in pattern and len(pattern) > MOST_CHARACTERS):
        raise ValueError(
            f"{pattern[:60]!r}... has {pattern.count('{'):,} braces and {len(pattern):,} characters; at most "
            f"{MOST_BRACES} and {MOST_CHARACTERS:,} are allowed"
        )
    names = list(islice(expansions(pattern), MOST_NAMES + 1))
    if len(names) > MOST_NAMES:
        raise ValueError(f"{pattern[:200]!r} expands to more than {MOST_NAMES:,} names: use shorter ranges")
    return names


def expansions(pattern: str) -> Iterator[str]:
    group = first_group(pattern)
    if group is None:
        yield unescaped(pattern)
        return
    first, last = group
    head = unescaped(pattern[:first])
    for middle in alternatives(pattern[first + 1 : last]):
        for tail in expansions(pattern[last + 1 :]):
            yield head + middle + tail


def alternatives(body: str) -> Iterator[str]:
    """Yield the alternatives between two braces."""
    if found := NUMBERS.fullmatch(body):
        first, last, step = found.groups()
        padded = any(end.lstrip("-").startswith("0") and end.lstrip("-") != "0" for end in (first, last))
        width = max(len(first), len(last)) if padded else 0
        yield from (f"{number:0{width}d}" for number in span(int(first), int(last), step))
    elif found := LETTERS.fullmatch(body):
        first, last, step = found.groups()
        yield from (ALPHABET[at] for at in span(ALPHABET.index(first), ALPHABET.index(last), step))
    else:
        parts = split_at_commas(body)
        for part in parts:
            for name in expansions(part):
                yield name if len(parts) > 1 else f"{{{name}}}"  # "{x}" is not a list, so the braces stay


def span(first: int, last: int, step: str | None) -> range:
    size = int(step or 1) or 1
    return range(first, last + 1, size) if first <= last else range(first, last - 1, -size)


@lru_cache(64)  # the text after a range is the same for each of its names
def first_group(text: str) -> tuple[int, int] | None:
    """Return the positions of the first outer pair of braces."""
    depth, first = 0, 0
    for at, character in plain(text):
        if character == "{":
            depth, first = depth + 1, first if depth else at
        elif character == "}":
            depth -= 1
            if depth == 0:
                return first, at
            if depth < 0:
                break
    if depth:
        raise ValueError(f"{text[:200]!r} has unbalanced braces: write \\{{ or \\}} for a brace in a name")
    return None


def split_at_commas(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for at, character in plain(text):
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]


def plain(text: str) -> Iterator[tuple[int, str]]:
    """Yield the characters that are not escaped by a backslash, with their positions."""
    at = 0
    while at < len(text):
        if text[at] == "\\":
            at += 1
        else:
            yield at, text[at]
        at += 1


@lru_cache(64)
def unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def matching(pattern: str) -> list[Path]:
    """Return the sorted files and folders that match a path with wildcards (* ? [...]). "**" is the same as "*"."""
    path = Path(pattern)
    found, looked_at = [Path(path.anchor)], 0
    for part in path.parts[1:] if path.anchor else path.parts:
        if not any(character in part for character in "*?["):
            found = [place / part for place in found]
            continue
        matches = re.compile(fnmatch.translate(part)).match
        inside: list[Path] = []
        for place in found:
            if not place.is_dir():
                continue
            try:
                entries = os.scandir(place)
            except OSError:  # no permission to read the folder
                continue
            with entries:
                for entry in entries:
                    looked_at += 1
                    if looked_at > MOST_ENTRIES:
                        raise ValueError(
                            f"{pattern} searches more than {MOST_ENTRIES:,} files and folders: use the path of the "
                            f"folder without wildcards"
                        )
                    if matches(entry.name) and (part.startswith(".") or not entry.name.startswith(".")):
                        inside.append(place / entry.name)
        found = inside
    return sorted(place for place in found if os.path.lexists(place))

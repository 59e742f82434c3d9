"""Compact storage of many strings in two arrays.

Worker processes would copy a list of a million Python strings page by page, because reading a string changes its
reference count. Arrays stay shared.
"""

from collections.abc import Iterable

import numpy as np


class Strings:
    """A sequence of strings, including file names that are not UTF-8."""

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [string.encode("utf-8", "surrogateescape") for string in strings]
        self.bytes = np.frombuffer(b"".join(encoded), np.uint8)
        self.ends = np.cumsum([len(string) for string in encoded], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self.ends):
            raise IndexError(f"index {index} is out of range for {len(self.ends)} strings")
        start = self.ends[index - 1] if index else 0
        return self.bytes[start : self.ends[index]].tobytes().decode("utf-8", "surrogateescape")


def printable(text: str) -> str:
    """Escape control characters and other characters that a terminal or a log line cannot show."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def encodable(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8; false for lone surrogates and for file names that are not
    UTF-8."""
    return not any(0xD800 <= ord(c) <= 0xDFFF for c in text)

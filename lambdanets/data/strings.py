"""Many strings in two arrays.

A list of a million Python strings is copied page by page into every worker process, because reading a string counts
a reference inside it. Two arrays stay shared.
"""

from collections.abc import Iterable

import numpy as np


class Strings:
    """Strings by index; file names of any bytes included."""

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [string.encode("utf-8", "surrogateescape") for string in strings]
        self.bytes = np.frombuffer(b"".join(encoded), np.uint8)
        self.ends = np.cumsum([len(string) for string in encoded], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self.ends):
            raise IndexError(f"no string {index} of {len(self.ends)}")
        start = self.ends[index - 1] if index else 0
        return self.bytes[start : self.ends[index]].tobytes().decode("utf-8", "surrogateescape")


def printable(text: str) -> str:
    """The text with everything escaped that a terminal or a log line could stumble over."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def encodable(text: str) -> bool:
    """False for half a surrogate pair, which JSON can spell and no file can hold, and for names that are not UTF-8."""
    return not any(0xD800 <= ord(c) <= 0xDFFF for c in text)

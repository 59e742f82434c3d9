"""Where copies and indices are kept, and how files are written whole or not at all."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from lambdanets.files import whole_path


def cache_folder() -> Path:
    """$LAMBDANETS_CACHE, or `lambdanets` in the user's cache folder."""
    named = os.environ.get("LAMBDANETS_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lambdanets"


def fingerprint(path: Path) -> str:
    """Changes when the file does, as far as its size and time tell."""
    status = path.stat()
    return hashlib.sha256(f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}".encode()).hexdigest()[:32]


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when it is complete; nothing is left behind by an error."""
    with whole_path(path) as part, open(part, "wb") as file:
        yield file

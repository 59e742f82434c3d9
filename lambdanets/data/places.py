"""Where copies and indices are kept."""

import hashlib
import os
from pathlib import Path


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

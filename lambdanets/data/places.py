"""The cache folder for copies and indices of shards."""

import hashlib
import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $LAMBDANETS_CACHE, or `lambdanets` in the user's cache folder."""
    named = os.environ.get("LAMBDANETS_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lambdanets"


def fingerprint(path: Path) -> str:
    """Return a digest of path, size and modification time of a file."""
    status = path.stat()
    return hashlib.sha256(f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}".encode()).hexdigest()[:32]

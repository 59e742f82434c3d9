"""Shards on a web server: fetched once into the cache folder, then local.

webdataset opens them, in its secure mode, and only after our own look at the scheme: its urls can be commands.
"""

import hashlib
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from lambdanets.data.places import cache_folder, whole_file

SCHEMES = ("http", "https")
SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+:")  # two letters or more: "C:" is a disk


def is_url(text: str) -> bool:
    return SCHEME.match(text) is not None


def expand(text: str) -> list[str]:
    """The urls of a brace list, each of an allowed scheme."""
    from braceexpand import braceexpand

    urls = list(braceexpand(text))
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme.lower() not in SCHEMES or not parts.hostname or url.startswith("-"):
            raise ValueError(
                f"{url!r}: shards come from {' or '.join(SCHEMES)} urls or from files; commands (pipe:) and other "
                "schemes are refused, because whoever writes a url must not be able to run something"
            )
        if any(c.isspace() or not c.isprintable() for c in url):
            raise ValueError(f"{url!r}: a url has no spaces or control characters")
    return urls


@contextmanager
def opened(url: str) -> Iterator[BinaryIO]:
    """The bytes behind an http(s) url."""
    settings: Any = importlib.import_module("webdataset.utils")
    library: Any = importlib.import_module("webdataset.gopen")
    (url,) = expand(url.replace("{", "%7B").replace("}", "%7D"))
    before, settings.enforce_security = settings.enforce_security, True  # no pipes, no rewriting by environment
    try:
        stream = library.gopen(url, "rb")
    finally:
        settings.enforce_security = before
    try:
        yield stream
    finally:
        stream.close()


def fetch_all(text: str) -> list[Path]:
    """Local copies of the shards of a brace list, in one folder."""
    urls = expand(text)
    folder = cache_folder() / "fetched" / hashlib.sha256(text.encode()).hexdigest()[:32]
    return [fetch(url, folder) for url in urls]


def fetch(url: str, folder: Path) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]", "_", urlsplit(url).path.rpartition("/")[2]).lstrip(".") or "shard.tar"
    path = folder / name
    if not path.is_file():
        try:
            with opened(url) as stream, whole_file(path) as file:
                while block := stream.read(2**20):
                    file.write(block)
        except OSError as error:
            raise OSError(f"{url} cannot be fetched: {error}") from error
    return path

"""Files: JSON reading with limits, atomic writing, and folder locks. Every other module reads and writes here."""

import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST_JSON_BYTES = 64 * 2**20
MOST_DIGITS = 19  # of an integer: what fits into 64 bits
LOCK = ".lock"


class FolderInUseError(ValueError):
    """Another process holds the lock of a folder."""


@contextmanager
def whole_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `path` on success and removed on an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    # Some writers replace the file and choose its permissions (safetensors: the user alone). This empty file shows
    # which permissions the umask and the folder give.
    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        mode = stat.S_IMODE(part.stat().st_mode)
        yield part
        os.chmod(part, mode)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, as UTF-8."""
    with whole_path(path) as part:
        part.write_text(text, encoding="utf-8")


def parse_json(text: str | bytes, what: str) -> Any:
    """Parse JSON that may come from anywhere. A ValueError names `what`.

    Refused: text that is not JSON, deep nesting, integers beyond 64 bits, NaN and infinities.
    """

    def integer(digits: str) -> int:
        if len(digits) > MOST_DIGITS + digits.startswith("-") or not -(2**63) <= int(digits) < 2**63:
            raise ValueError(f"the integer {digits[:20]}... of {len(digits)} characters does not fit into 64 bits")
        return int(digits)

    def number(digits: str) -> float:
        value = float(digits)
        if value in (float("inf"), float("-inf")):
            raise ValueError(f"the number {digits[:20]} is too large for a float")
        return value

    def constant(name: str) -> float:
        raise ValueError(f"{name} is not a JSON number")

    try:
        return json.loads(text, parse_int=integer, parse_float=number, parse_constant=constant)
    except RecursionError:
        raise ValueError(f"{what} is not usable JSON: it is nested too deeply") from None
    except ValueError as error:  # also text that is not UTF-8
        raise ValueError(f"{what} is not usable JSON: {error}") from error


def read_json(path: Path, most: int = MOST_JSON_BYTES) -> Any:
    """Read a JSON file of at most `most` bytes, see `parse_json`."""
    with path.open("rb") as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise ValueError(f"{path} has more than {most:,} bytes, which is too large for this kind of file")
    return parse_json(text, str(path))


def as_object(data: Any, what: str) -> dict[str, Any]:
    """Return `data` if it is a JSON object, else raise a ValueError that names `what`."""
    if not isinstance(data, dict):
        raise ValueError(f"{what} must contain a JSON object, got {str(data)[:40]!r}")
    return data


def read_object(path: Path, most: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON file that contains an object."""
    return as_object(read_json(path, most), str(path))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the exclusive lock of a folder; FolderInUseError if another process holds it.

    The operating system releases the lock when the process ends, however it ends.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(handle, 64, 0).decode("ascii", "replace").strip()
            raise FolderInUseError(
                f"{folder} is in use by another process{f' ({owner})' if owner else ''}: wait for it to end, stop it, "
                f"or choose another folder"
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)

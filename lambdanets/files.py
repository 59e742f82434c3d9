"""JSON reading with limits, atomic writing, and folder locks, used by all other modules."""

import errno
import json
import os
import platform
import re
import secrets
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

MOST_JSON_BYTES = 64 * 2**20
MOST_DIGITS = 19  # of a 64-bit integer
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # full disk, exhausted quota, largest file size
LOCK = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # of file systems without flock
NO_LOCK_ADVICE = "make sure that no other process writes into it"
RESTART_WAIT = 60.0  # seconds that restarted processes wait for the lock of the processes that they replace
POLL = 0.05  # seconds between attempts to take a lock
HELD: set[int] = set()  # file descriptors of this process's locks


class FolderInUseError(ValueError):
    """Another process holds the lock of a folder."""


@contextmanager
def whole_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `path` on success and removed on an error.

    A device or a pipe, such as /dev/stdout, is written directly.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    # Some writers replace the file and set its permissions (safetensors: only the user can read it). This empty file
    # has the permissions that the umask and the folder give.
    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        mode = stat.S_IMODE(part.stat().st_mode)
        yield part
        os.chmod(part, mode)
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if type(error).__name__ == "SafetensorError":  # raised when writing fails, for example on a full disk
            failure = OSError(f"{path} cannot be written: {error}")
            number = re.search(r"os error (\d+)", str(error))
            failure.errno = int(number[1]) if number else None
            raise failure from error
        if isinstance(error, OSError) and error.errno in FULL and error.filename is None:  # raised by write(), fsync()
            error.filename = str(path)
        raise


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file open for writing, which is renamed to `path` on success; see `whole_path`."""
    with whole_path(path) as part, open(part, "wb") as file:
        yield file


def remove_parts(folder: Path, name: str = "*") -> None:
    """Remove temporary files that killed processes left when they wrote `folder`/`name`."""
    for part in folder.glob(f".{name}.*.part"):
        with suppress(OSError):
            part.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, as UTF-8."""
    with whole_path(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Any, *, indent: int | None = 1, default: Callable[[Any], Any] | None = None) -> None:
    """Write a JSON file atomically; `indent` and `default` as for `json.dumps`."""
    write_text(path, json.dumps(data, indent=indent, default=default) + "\n")


def parse_json(text: str | bytes, what: str, *, any_number: bool = False, constants: bool = False) -> Any:
    """Parse untrusted JSON.

    Args:
        text: the JSON text; bytes are UTF-8.
        what: name of the file or value for error messages.
        any_number: accept all numbers, for files whose numbers the caller checks one by one.
        constants: accept NaN and infinities.

    Raises a ValueError for text that is not JSON and for deep nesting and, unless `any_number` is set, for integers
    beyond 64 bits, floats beyond the float range, and (unless `constants` is set) NaN and infinities.
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
        if constants:
            return float(name)
        raise ValueError(f"{name} is not a JSON number")

    try:
        if any_number:
            return json.loads(text)
        return json.loads(text, parse_int=integer, parse_float=number, parse_constant=constant)
    except RecursionError:
        raise ValueError(f"{what} is not usable JSON: it is nested too deeply") from None
    except ValueError as error:  # also text that is not UTF-8
        raise ValueError(f"{what} is not usable JSON: {error}") from error


def read_json(path: Path, most: int = MOST_JSON_BYTES, *, any_number: bool = False, constants: bool = False) -> Any:
    """Read a JSON file of at most `most` bytes, see `parse_json`."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        # read(n) allocates n bytes: do not allocate the limit for a small file
        text = file.read((min(status.st_size, most) if stat.S_ISREG(status.st_mode) else most) + 1)
    if len(text) > most:
        raise ValueError(f"{path} has more than {most:,} bytes, which is too large for this kind of file")
    return parse_json(text, str(path), any_number=any_number, constants=constants)


def as_object(data: Any, what: str) -> dict[str, Any]:
    """Return `data` if it is a JSON object, else raise a ValueError that names `what`."""
    if not isinstance(data, dict):
        raise ValueError(f"{what} must contain a JSON object, got {str(data)[:40]!r}")
    return data


def read_object(path: Path, most: int = MOST_JSON_BYTES, *, constants: bool = False) -> dict[str, Any]:
    """Read a JSON file that contains an object."""
    return as_object(read_json(path, most, constants=constants), str(path))


def read_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 text file that are not blank, without surrounding spaces and byte order mark.

    Raises:
        ValueError: if it is not UTF-8 text.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): save it as UTF-8") from error
    return [line.strip() for line in lines if line.strip()]


@contextmanager
def locked(folder: Path, wait: float = 0.0) -> Iterator[None]:
    """Hold the exclusive lock of a folder; FolderInUseError if another process still holds it after `wait` seconds.

    The operating system releases the lock when the process exits or is killed. Forked children close their copy of the
    descriptor, so they do not keep the lock. On file systems without locks it only warns.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    make_folder(folder)
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    HELD.add(handle)
    try:
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise FolderInUseError(in_use(folder, handle)) from None
                time.sleep(POLL)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                warnings.warn(f"{folder} cannot be locked ({error.strerror}): {NO_LOCK_ADVICE}", stacklevel=3)
                break
        with suppress(OSError):  # a full disk; the name of the owner is only used in messages
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
        yield
    finally:
        if handle in HELD:  # not in a forked child
            HELD.remove(handle)
            os.close(handle)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents; NotADirectoryError if one of these paths is a file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        wrong = next((path for path in (folder, *folder.parents) if path.exists()), folder)
        raise NotADirectoryError(
            f"{folder} cannot be created because {wrong} is not a folder: choose another path"
        ) from error


def in_use(folder: Path, handle: int) -> str:
    owner = os.pread(handle, 200, 0).decode("utf-8", "replace").strip()
    named = f" ({owner})" if owner else ""
    return f"{folder} is in use by another process{named}: wait for it to end, stop it, or choose another folder"


def close_locks() -> None:
    """Close the parent's locks in a forked child, which would otherwise keep them after the parent was killed."""
    while HELD:
        os.close(HELD.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=close_locks)

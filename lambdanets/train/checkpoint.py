"""Complete checkpoints that are there or not, never half.

A checkpoint is written under another name, synced, and renamed; the name holds its step and the start of its SHA-256.
Older ones are removed only when the new one is complete, so there is always a good one, also on a full disk.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

NAME = re.compile(r"step-(\d{9})-([0-9a-f]{16})\.pt")
PART = ".part"
DAMAGED = ".damaged"

State = dict[str, Any]


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was found whole."""

    path: Path
    state: State
    damaged: tuple[str, ...] = ()  # newer ones that were not, and why


def complete(folder: Path) -> list[Path]:
    """The checkpoints of a folder by their names, oldest first."""
    found = [path for path in folder.glob("step-*.pt") if NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: (path.name[:14], path.stat().st_mtime_ns))


def save(state: State, folder: Path, step: int, *, keep: int = 2, write: Callable[..., None] = torch.save) -> Path:
    """Writes a checkpoint and then removes all but the last `keep`. An OSError leaves what was there.

    On a full disk all but the newest whole one make room for a second try.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"*{PART}"):  # of a process that was killed
        left.unlink(missing_ok=True)
    try:
        path = put(state, folder, step, write)
    except OSError:
        whole = next((path for path in reversed(complete(folder)) if is_whole(path)), None)
        room = [path for path in [*folder.glob(f"*{DAMAGED}"), *complete(folder)] if path != whole]
        if whole is None or not room:
            raise
        remove(room)
        path = put(state, folder, step, write)
    remove([old for old in complete(folder) if old != path][: 1 - keep or None])
    return path


def put(state: State, folder: Path, step: int, write: Callable[..., None]) -> Path:
    part = folder / f"step-{step:09d}{PART}"
    try:
        with part.open("wb") as file:
            try:
                write(state, file)
            except RuntimeError as error:  # torch's writer, when the file below it fails
                raise OSError(f"{part} cannot be written: {error}") from error
            file.flush()
            os.fsync(file.fileno())
        path = folder / f"step-{step:09d}-{digest(part)}.pt"
        os.replace(part, path)
        sync(folder)
        return path
    except OSError:
        part.unlink(missing_ok=True)
        raise


def load_newest(folder: Path) -> Loaded | None:
    """The newest whole checkpoint, or None if there is none at all. A ValueError if all are damaged.

    Damaged ones before it get another name, so that they are no longer among the last ones that are kept.
    """
    damaged: dict[Path, str] = {}
    for path in reversed(complete(folder)):
        wrong = None
        try:
            if not is_whole(path):
                wrong = f"{path.name} is damaged: its contents do not fit its name"
            else:
                state = torch.load(path, map_location="cpu", weights_only=True)
                set_aside(list(damaged))
                return Loaded(path, state, tuple(damaged.values()))
        except Exception as error:  # a damaged file raises anything
            wrong = f"{path.name} cannot be read: {' '.join(str(error).split())[:200]}"
        damaged[path] = wrong
    if damaged:
        raise ValueError(f"no checkpoint in {folder} is whole: {'; '.join(damaged.values())}")
    return None


def is_whole(path: Path) -> bool:
    """Whether the contents fit the name."""
    try:
        return digest(path) == path.stem.rpartition("-")[2]
    except OSError:
        return False


def set_aside(paths: list[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):  # a folder that cannot be written can still be read from
            path.rename(path.with_name(path.name + DAMAGED))


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def remove(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """The names in a folder, onto the disk; where a folder can be opened."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Atomic checkpoints.

A checkpoint is written under a temporary name, synced with fsync, and renamed. Its name contains the step and the start
of its SHA-256. Older checkpoints are removed only when the new one is complete, so there is always a valid one, even on
a full disk.
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
DAMAGED, FOREIGN = ".damaged", ".foreign"  # suffixes of unreadable checkpoints, and of those of other runs

State = dict[str, Any]


@dataclass(frozen=True)
class Loaded:
    """A valid checkpoint."""

    path: Path
    state: State
    damaged: tuple[str, ...] = ()  # newer checkpoints that are not usable, with the reason


class ForeignError(ValueError):
    """The checkpoint belongs to another run."""


def complete(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, judged by name, oldest first."""
    found = [path for path in folder.glob("step-*.pt") if NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: (path.name[:14], path.stat().st_mtime_ns))


def save(state: State, folder: Path, step: int, *, keep: int = 2, write: Callable[..., None] = torch.save) -> Path:
    """Write a checkpoint, then remove all but the last `keep`. An OSError leaves older checkpoints in place.

    On a full disk, all but the newest valid checkpoint are removed for a second attempt.
    """
    folder.mkdir(exist_ok=True)  # no parents: the folder of a run may have been deleted
    for left in folder.glob(f"*{PART}"):  # left by a process that was killed
        left.unlink(missing_ok=True)
    try:
        path = put(state, folder, step, write)
    except OSError:
        if not make_room(folder):
            raise
        path = put(state, folder, step, write)
    remove([old for old in complete(folder) if old != path][: 1 - keep or None])
    return path


def make_room(folder: Path) -> bool:
    """Remove damaged checkpoints and all but the newest valid one; return whether anything was removed."""
    whole = next((path for path in reversed(complete(folder)) if is_whole(path)), None)
    room = [path for path in [*folder.glob(f"*{DAMAGED}"), *complete(folder)] if path != whole]
    if whole is None or not room:
        return False
    remove(room)
    return True


def put(state: State, folder: Path, step: int, write: Callable[..., None]) -> Path:
    part = folder / f"step-{step:09d}{PART}"
    try:
        with part.open("wb") as file:
            try:
                write(state, file)
            except RuntimeError as error:  # raised by torch's writer if writing to the file fails
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


def load_newest(folder: Path, check: Callable[[State], None] = lambda state: None) -> Loaded | None:
    """Load the newest valid checkpoint; None if there are no checkpoints. Raises ValueError if none is valid.

    Args:
        folder: folder of the checkpoints.
        check: raises ForeignError for the state of another run, ValueError for an invalid state.

    Newer checkpoints that are not valid are renamed, so that they do not count towards the number to keep.
    """
    unusable: dict[Path, tuple[str, str]] = {}  # suffix and reason
    for path in reversed(complete(folder)):
        suffix = DAMAGED
        try:
            if not is_whole(path):
                reason = "is damaged: its content does not match the digest in its name"
            else:
                state = torch.load(path, map_location="cpu", weights_only=True)
                check(state)
                set_aside(unusable)
                return Loaded(path, state, tuple(reason for _, reason in unusable.values()))
        except ForeignError as error:
            suffix, reason = FOREIGN, str(error)
        except Exception as error:  # torch raises many types on damaged files
            reason = f"cannot be read: {' '.join(str(error).split())[:200]}"
        unusable[path] = suffix, f"{path.name} {reason}"
    if unusable:
        reasons = "; ".join(reason for _, reason in unusable.values())
        raise ValueError(f"no checkpoint in {folder} is usable: {reasons}")
    return None


def is_whole(path: Path) -> bool:
    """Return whether the content matches the digest in the name."""
    try:
        return digest(path) == path.stem.rpartition("-")[2]
    except OSError:
        return False


def set_aside(unusable: dict[Path, tuple[str, str]]) -> None:
    for path, (suffix, _) in unusable.items():
        with contextlib.suppress(OSError):  # the folder may be read-only
            path.rename(path.with_name(path.name + suffix))


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def remove(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """Call fsync on a folder, if the system can open folders."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""The description of the machine, which every stored measurement includes, and the number of CPU threads."""

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("torch", "triton", "timm", "lambda-networks")


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_model() -> str:
    """Return the CPU model from /proc/cpuinfo; platform.processor() is empty on most Linux systems."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the commit of the checkout that contains this package, followed by "+changes" if files were modified.

    `git archive` stores the commit in .git_archival.txt (see .gitattributes).
    """
    folder = Path(__file__).parent
    archived = folder.parent / ".git_archival.txt"
    if archived.exists() and "$" not in archived.read_text():
        return archived.read_text().removeprefix("commit:").strip()

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--", "..") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def describe(device: torch.device) -> dict[str, object]:
    """Return the machine, versions, commit and date."""
    from lambdanets import __version__

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {
            "system": platform.platform(),
            "cpu": cpu_model(),
            "cores": torch.get_num_threads(),  # used by torch
            "processors": os.cpu_count(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        },
        "versions": {
            "python": platform.python_version(),
            "lambdanets": __version__,  # of the running code: the metadata of an editable install may be older
            **{name: installed(name) for name in PACKAGES},
        },
    }


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Use `count` CPU threads inside the context; None keeps the current number."""
    if count is not None and count < 1:
        raise ValueError(f"--threads must be at least 1, got {count}")
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Processes of a run that were killed or hang, in words."""

import re

import torch.distributed as dist

from lambdanets.data.workers import loss_of_worker
from lambdanets.train.config import RunConfig


class LostProcessError(ValueError):
    """A worker process or another process of the run was killed or hangs."""


def lost_process(error: RuntimeError | OSError, config: RunConfig) -> str | None:
    """What to tell the user if another process is gone, or a file; None for other errors."""
    if isinstance(error, OSError):
        return str(error)
    reason = loss_of_worker(error) or loss_of_process(error, config.timeout_minutes)
    return reason and f"{reason}. The run in {config.out} resumes from its last checkpoint"


def loss_of_process(error: BaseException, timeout_minutes: float) -> str | None:
    """What to tell the user if an error means that another process of the run is gone or hangs; otherwise None."""
    text = " ".join(str(error).split())
    if not isinstance(error, dist.DistError) and not (
        isinstance(error, RuntimeError) and re.search(r"\bgloo\b|\bNCCL\b", text)
    ):
        return None
    if re.search(r"timed? ?out", text, re.IGNORECASE):
        found = f"another process of this run did not answer for {timeout_minutes:g} minutes (--timeout-minutes)"
        return f"{found}: it hangs, was stopped, or lost its network ({text[:200]})"
    return f"the connection to another process of this run is lost: it ended or was killed ({text[:200]})"

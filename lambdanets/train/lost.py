"""Error messages for processes of a run that were killed or hang."""

import re

import torch.distributed as dist

from lambdanets.data.workers import loss_of_worker
from lambdanets.train.config import RunConfig


class LostProcessError(ValueError):
    """A worker process or another process of the run was killed or hangs."""


def lost_process(error: RuntimeError | OSError, config: RunConfig) -> str | None:
    """Return a message for the user if another process ended or a file was lost; None for other errors."""
    if isinstance(error, OSError):
        return str(error)
    reason = loss_of_worker(error) or loss_of_process(error, config.timeout_minutes)
    return reason and f"{reason}. The run in {config.out} resumes from its last checkpoint"


def loss_of_process(error: BaseException, timeout_minutes: float) -> str | None:
    """Return a message for the user if an error means that another process ended or hangs; otherwise None."""
    text = " ".join(str(error).split())
    if not isinstance(error, dist.DistError) and not (
        isinstance(error, RuntimeError) and re.search(r"\bgloo\b|\bNCCL\b", text)
    ):
        return None
    if re.search(r"timed? ?out", text, re.IGNORECASE):
        found = f"another process of this run did not respond for {timeout_minutes:g} minutes (--timeout-minutes)"
        return f"{found}: it hangs, was stopped, or lost its network connection ({text[:200]})"
    return f"the connection to another process of this run was lost: it ended or was killed ({text[:200]})"

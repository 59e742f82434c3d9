"""Warnings about settings at the start of a run."""

from torch import nn

from lambdanets.data.order import Epochs
from lambdanets.train.config import RunConfig
from lambdanets.train.task import Share

USUAL_MOMENTUM = 0.1  # torch's default
SETTLED = 2.0  # below this value of momentum * steps, running statistics have not converged


def notes(model: nn.Module, config: RunConfig, share: Share, steps: int, epochs: Epochs) -> list[str]:
    """Return warnings as sentences without a full stop."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    found = []
    if norms and share.parts > 1:
        found.append(f"Batch norm uses micro-batches of {share.micro_batch}")
    rest = epochs.examples % epochs.step
    if rest and epochs.remainder == "drop":
        found.append(
            f"Every epoch skips {rest:,} of {epochs.examples:,} examples, which do not fill a batch; "
            f"--remainder carry uses them"
        )
    elif rest:
        found.append(f"An epoch has {epochs.steps:.4g} steps: the last batch of an epoch is filled from the next one")
    slow = min((norm.momentum or 1.0 for norm in norms), default=1.0)
    if slow < USUAL_MOMENTUM and slow * steps < SETTLED:
        found.append(
            f"A batch norm momentum of {slow:g} is too small for {steps:,} steps: "
            f"the running statistics will not converge. Use {USUAL_MOMENTUM}"
        )
    warmup, length = config.schedule.warmup_epochs, config.epochs
    if warmup >= length:
        found.append(
            f"The warmup takes {warmup:g} epochs and the run {length:g}, so the learning rate never reaches its peak: "
            f"use a smaller --schedule.warmup-epochs"
        )
    return found

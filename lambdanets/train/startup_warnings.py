"""What a reader of a run's numbers should know before it starts."""

from torch import nn

from lambdanets.data.order import Epochs
from lambdanets.train.config import RunConfig
from lambdanets.train.task import Share

USUAL_MOMENTUM = 0.1  # torch's default
SETTLED = 2.0  # momentum * steps below which running statistics still hold their start


def notes(model: nn.Module, config: RunConfig, share: Share, steps: int, epochs: Epochs) -> list[str]:
    """Sentences without a full stop."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    found = []
    if norms and share.parts > 1:
        found.append(f"Batch norm sees micro-batches of {share.micro_batch}")
    rest = epochs.examples % epochs.step
    if rest and epochs.remainder == "drop":
        found.append(
            f"Every epoch leaves out {rest:,} of {epochs.examples:,} examples, which do not fill a step; "
            f"--remainder carry uses them"
        )
    elif rest:
        found.append(f"An epoch is {epochs.steps:.4g} steps: a step that ends an epoch goes on with the next one")
    slow = min((norm.momentum or 1.0 for norm in norms), default=1.0)
    if slow < USUAL_MOMENTUM and slow * steps < SETTLED:
        found.append(
            f"A batch norm momentum of {slow:g} is too small for {steps:,} steps: "
            f"the statistics that evaluation uses will not have settled. Use {USUAL_MOMENTUM}"
        )
    warmup, length = config.schedule.warmup_epochs, config.epochs
    if warmup >= length:
        found.append(
            f"The warmup takes {warmup:g} epochs and the run {length:g}, so the learning rate never gets to its peak: "
            f"use a smaller --schedule.warmup-epochs"
        )
    return found

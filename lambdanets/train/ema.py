"""The moving average of the trainable parameters.

torch's AveragedModel does the same, but waits for the device at every step and copies the buffers one by one; here a
step costs three operations on all tensors at once, and the buffers are copied when somebody looks.
"""

import copy

import torch
from torch import Tensor, nn

from lambdanets.train import foreach
from lambdanets.train.config import Ema


def decay_of_step(ema: Ema, step: int, steps: int) -> float:
    """The decay of a step (counted from 0): less at the start, and never with a horizon too long for the run."""
    decay = min(ema.decay, 1 - 1 / max(ema.horizon * steps, 1.0 + 1e-9)) if ema.horizon else ema.decay
    return min(decay, (1 + step) / (10 + step)) if ema.warmup else decay


class MovingAverage:
    """A second network whose parameters follow those of the first. Shared tables stay shared."""

    fixed = False  # buffers are its own, and no longer those of the first network

    def __init__(self, model: nn.Module) -> None:
        self.source = model
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        pairs = list(zip(self.module.parameters(), model.parameters(), strict=True))
        self.mine = [mine.detach() for mine, theirs in pairs if theirs.requires_grad]
        self.theirs = [theirs.detach() for _, theirs in pairs if theirs.requires_grad]

    @torch.no_grad()
    def update(self, weight: Tensor) -> None:
        """Moves by `weight` (1 - decay; 0 for a step that was undone), a scalar on the device."""
        moves = foreach.sub(self.theirs, self.mine)
        foreach.mul_(moves, weight)
        foreach.add_(self.mine, moves)

    @torch.no_grad()
    def network(self) -> nn.Module:
        """The averaged network, with the buffers (and frozen parameters) of now."""
        if not self.fixed:
            for mine, theirs in zip(self.module.buffers(), self.source.buffers(), strict=True):
                mine.copy_(theirs)
        return self.module

"""The moving average of the trainable parameters.

torch's AveragedModel does the same, but waits for the device at every step and copies the buffers one by one; here a
step costs one operation on all tensors at once, and the buffers are copied when somebody looks.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lambdanets.train import foreach
from lambdanets.train.config import Ema
from lambdanets.train.distributed import World


def decay_of_step(ema: Ema, step: int, steps: int) -> float:
    """The decay of a step (counted from 0): less at the start, and never with a horizon too long for the run."""
    decay = min(ema.decay, 1 - 1 / max(ema.horizon * steps, 1.0)) if ema.horizon else ema.decay
    return min(decay, (1 + step) / (10 + step)) if ema.warmup else decay


class MovingAverage:
    """A second network whose parameters follow those of the first. Shared tables stay shared."""

    fixed = False  # until the next update: buffers are its own, and not those of the first network

    def __init__(self, model: nn.Module) -> None:
        self.source = model
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}  # mine and theirs
        for (name, mine), theirs in zip(self.module.named_parameters(), model.parameters(), strict=True):
            if theirs.requires_grad:
                if mine.stride() != theirs.stride():
                    raise ValueError(f"the parameter {name} has gaps in memory (strides {theirs.stride()}): clone it")
                group = self.groups.setdefault(theirs.dtype, ([], []))
                group[0].append(mine.detach())
                group[1].append(theirs.detach())

    @torch.no_grad()
    def update(self, weight: float | Tensor, skip: Tensor) -> None:
        """Moves by `weight` (1 - decay), unless `skip` is 1 (a float32 on the device): a step that was undone."""
        self.fixed = False
        for mine, theirs in self.groups.values():
            foreach.approach_(mine, theirs, weight, skip)

    @torch.no_grad()
    def network(self) -> nn.Module:
        """The averaged network, with the buffers (and frozen parameters) of now."""
        if not self.fixed:
            for mine, theirs in zip(self.module.buffers(), self.source.buffers(), strict=True):
                mine.copy_(theirs)
        return self.module

    @torch.no_grad()
    def recalibrate(self, batches: Iterable[Any], forward: Callable[[nn.Module, Any], object], world: World) -> None:
        """Replace the running statistics of batch norm by the mean over batches and processes, until the next update.

        As torch's update_bn, which would also reset the statistics of frozen layers.
        """
        network = self.network().train()
        norms = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean of all
        for batch in batches:
            forward(network, batch)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            for statistic in (norm.running_mean, norm.running_var):
                if statistic is not None:
                    world.mean_(statistic)
        network.eval()
        self.fixed = True

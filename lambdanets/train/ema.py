"""Exponential moving average of the trainable parameters.

torch's AveragedModel synchronises with the device in every step and copies buffers one by one. Here a step is one
operation on all tensors, and buffers are copied when the averaged network is used.
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
    """Return the decay at a step (counted from 0), with its warmup and the limit for short runs."""
    decay = min(ema.decay, 1 - 1 / max(ema.horizon * steps, 1.0)) if ema.horizon else ema.decay
    return min(decay, (1 + step) / (10 + step)) if ema.warmup else decay


class MovingAverage:
    """A copy of a network whose parameters are moving averages. Shared parameters stay shared."""

    fixed = False  # until the next update, keep own buffers instead of those of the first network

    def __init__(self, model: nn.Module) -> None:
        self.source = model
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}  # averaged and trained tensors
        for (name, mine), theirs in zip(self.module.named_parameters(), model.parameters(), strict=True):
            if theirs.requires_grad:
                if mine.stride() != theirs.stride():
                    raise ValueError(
                        f"the parameter {name} is not dense in memory (strides {theirs.stride()}): clone it"
                    )
                group = self.groups.setdefault(theirs.dtype, ([], []))
                group[0].append(mine.detach())
                group[1].append(theirs.detach())

    @torch.no_grad()
    def update(self, weight: float | Tensor, skip: Tensor) -> None:
        """Update the average with `weight` = 1 - decay, unless `skip` (float32 on the device) is 1 for a skipped
        step."""
        self.fixed = False
        for mine, theirs in self.groups.values():
            foreach.approach_(mine, theirs, weight, skip)

    @torch.no_grad()
    def network(self) -> nn.Module:
        """Return the averaged network with the current buffers and frozen parameters."""
        if not self.fixed:
            for mine, theirs in zip(self.module.buffers(), self.source.buffers(), strict=True):
                mine.copy_(theirs)
        return self.module

    @torch.no_grad()
    def recalibrate(self, batches: Iterable[Any], forward: Callable[[nn.Module, Any], object], world: World) -> None:
        """Set the running statistics of batch norm to the mean over batches and processes, until the next update.

        Like torch's update_bn, but without resetting the statistics of frozen layers.
        """
        network = self.network().train()
        norms = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # cumulative mean
        for batch in batches:
            forward(network, batch)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            for statistic in (norm.running_mean, norm.running_var):
                if statistic is not None:
                    world.mean_(statistic)
        network.eval()
        self.fixed = True

"""Running statistics of batch norm: one value for all processes and micro-batches of a step, and undone with it.

A step updates each of them once, by the mean over its micro-batches, whoever computed them: then the decay counts
steps, and any number of processes and micro-batches gives the same numbers. While a network trains, its buffers are
pieces of one flat tensor, so that a step and its undoing are a few operations, however many buffers there are.
"""

import math

import torch
from torch import Tensor, nn

from lambdanets.train.distributed import World

ALIGNED = 64  # bytes: where kernels that read several numbers at once like to begin


class RunningStatistics:
    """The buffers of a network that its forward pass changes."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self.model, self.world = model, world
        self.groups: list[Group] = []
        self.released = False

    def begin(self) -> None:
        """Before the first micro-batch of a step."""
        if not self.groups:
            by_kind: dict[torch.dtype, list[Tensor]] = {}
            for buffer in self.model.buffers():
                if buffer.numel():
                    by_kind.setdefault(buffer.dtype, []).append(buffer)
            self.groups = [Group(tensors) for tensors in by_kind.values()]
        elif self.released:
            for group in self.groups:
                group.gather()
        self.released = False
        for group in self.groups:
            group.parts = 0

    def release(self) -> None:
        """Gives each buffer memory of its own, until the next step: others may write the network to a file (safetensors
        takes no piece of a larger tensor) or load it."""
        if not self.released:
            for group in self.groups:
                for tensor in group.tensors:
                    tensor.data = tensor.clone()
        self.released = True

    def collect(self, last: bool) -> None:
        """After a micro-batch."""
        for group in self.groups:
            group.collect(last)

    def merged(self, finite: Tensor) -> Tensor:
        """After the last one: takes the mean of all processes; returns whether the step is `finite` in them too."""
        for group in self.groups:
            if group.floating:
                self.world.mean_(group.flat)
                finite = finite & group.stayed_finite()
        return finite

    def commit(self, finite: Tensor) -> None:
        """The new values, or the old ones if the step is not `finite`."""
        for group in self.groups:
            torch.where(finite, group.flat, group.kept, out=group.kept)
        self.put_back()

    def put_back(self) -> None:
        """As they were at `begin`."""
        for group in self.groups:
            group.flat.copy_(group.kept)


class Group:
    """Buffers of one dtype: `flat` is what they hold, `kept` what they held before the step."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors, self.floating = tensors, tensors[0].is_floating_point()
        step = ALIGNED // tensors[0].element_size()
        sizes = [-(-tensor.numel() // step) * step for tensor in tensors]
        self.flat = tensors[0].new_zeros(sum(sizes))
        self.pieces = [
            piece[: tensor.numel()].view(tensor.shape)
            for tensor, piece in zip(tensors, self.flat.split(sizes), strict=True)
        ]
        self.kept = torch.empty_like(self.flat)
        self.parts, self.sum = 0, self.kept
        self.gather()

    def gather(self) -> None:
        """Buffers become pieces of `flat`, which stays where it is."""
        for tensor, piece in zip(self.tensors, self.pieces, strict=True):
            piece.copy_(tensor)
            tensor.data = piece  # still the same object, for whoever knows it, and with a version of its own
        self.kept.copy_(self.flat)
        # The host waits for the device here: once for many steps, which are cheaper for it.
        self.began_finite = not self.floating or bool(is_finite(self.flat))

    def stayed_finite(self) -> Tensor:
        """Whether nothing became infinite or NaN in this step. What was so before it may stay as it is: a mask of -inf
        is nothing that training did."""
        if self.began_finite:  # as nearly all are: two operations
            return is_finite(self.flat)
        return (self.flat.isfinite() | (self.flat == self.kept) | self.kept.isnan()).all()

    def collect(self, last: bool) -> None:
        self.parts += 1
        if last and self.parts == 1:
            return  # they hold the new values already
        if self.floating:
            self.sum = self.flat.clone() if self.parts == 1 else self.sum.add_(self.flat)
        if not last:
            self.flat.copy_(self.kept)
        elif self.floating:
            torch.div(self.sum, self.parts, out=self.flat)


def is_finite(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values, math.inf) < math.inf  # false for NaN

"""Running statistics of batch norm: averaged over all processes and micro-batches of a step, restored if it is skipped.

A step updates each statistic once, by the mean over its micro-batches on all processes, so the decay counts steps, and
results do not depend on the number of processes and micro-batches. During training, buffers are views of one flat
tensor, so an update or a restore takes a few operations for any number of buffers.
"""

import math

import torch
from torch import Tensor, nn

from lambdanets.train.distributed import World

ALIGNED = 64  # bytes: alignment for vectorised loads


class RunningStatistics:
    """The buffers of a network that its forward pass changes."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self.model, self.world = model, world
        self.groups: list[Group] = []
        self.released = False

    def begin(self) -> None:
        """Prepare the first micro-batch of a step."""
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
        """Give each buffer its own memory until the next step, so that the network can be saved (safetensors refuses
        views of a larger tensor) or loaded."""
        if not self.released:
            for group in self.groups:
                for tensor in group.tensors:
                    tensor.data = tensor.clone()
        self.released = True

    def collect(self, last: bool) -> None:
        """Accumulate the statistics of a micro-batch."""
        for group in self.groups:
            group.collect(last)

    def merged(self, finite: Tensor) -> Tensor:
        """Average over all processes after the last micro-batch; return whether the step is finite, statistics
        included."""
        for group in self.groups:
            if group.floating:
                self.world.mean_(group.flat)
                finite = finite & group.stayed_finite()
        return finite

    def commit(self, finite: Tensor) -> None:
        """Store the new values, or the old ones if the step is not `finite`."""
        for group in self.groups:
            torch.where(finite, group.flat, group.kept, out=group.kept)
        self.put_back()

    def put_back(self) -> None:
        """Restore the values from before `begin`."""
        for group in self.groups:
            group.flat.copy_(group.kept)


class Group:
    """Buffers of one dtype: `flat` has their current values, `kept` those before the step."""

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
        """Make the buffers views of `flat`, whose memory does not move."""
        for tensor, piece in zip(self.tensors, self.pieces, strict=True):
            piece.copy_(tensor)
            tensor.data = piece  # the tensor object stays the same, with its own version counter
        self.kept.copy_(self.flat)
        # Synchronises with the device once, which makes many later steps cheaper.
        self.began_finite = not self.floating or bool(is_finite(self.flat))

    def stayed_finite(self) -> Tensor:
        """Return whether no value became infinite or NaN in this step. Values that were not finite before, such as a
        mask of -inf, do not count."""
        if self.began_finite:  # the usual case, two operations
            return is_finite(self.flat)
        return (self.flat.isfinite() | (self.flat == self.kept) | self.kept.isnan()).all()

    def collect(self, last: bool) -> None:
        self.parts += 1
        if last and self.parts == 1:
            return  # the buffers contain the new values already
        if self.floating:
            self.sum = self.flat.clone() if self.parts == 1 else self.sum.add_(self.flat)
        if not last:
            self.flat.copy_(self.kept)
        elif self.floating:
            torch.div(self.sum, self.parts, out=self.flat)


def is_finite(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values, math.inf) < math.inf  # false for NaN

"""Running statistics of batch norm: one value for all processes and micro-batches of a step, and undone with it.

A step updates each of them once, by the mean over its micro-batches, whoever computed them: then the decay counts
steps, and any number of processes and micro-batches gives the same numbers. They stay in one flat tensor between the
steps, so that an update and its undoing are a few operations, and the host never waits.
"""

import torch
from torch import Tensor, nn

from lambdanets.train import foreach
from lambdanets.train.distributed import World


class RunningStatistics:
    """The buffers of a network that its forward pass changes."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self.world = world
        self.true = torch.tensor(True, device=world.device)
        buffers = [b for b in model.buffers() if b.numel()]
        by_kind: dict[torch.dtype, list[Tensor]] = {}
        for buffer in buffers:
            by_kind.setdefault(buffer.dtype, []).append(buffer)
        self.groups = [Group(tensors) for tensors in by_kind.values()]

    def begin(self) -> None:
        """Before the first micro-batch of a step."""
        for group in self.groups:
            group.begin()

    def collect(self, last: bool) -> None:
        """After a micro-batch."""
        for group in self.groups:
            group.collect(last)

    def merged(self) -> Tensor:
        """After the last one: takes the mean of all processes; returns whether all is finite."""
        finite = self.true
        for group in self.groups:
            if group.floating:
                finite = finite & self.world.mean_(group.new).isfinite().all()
        return finite

    def commit(self, finite: Tensor) -> None:
        """The new values, or the old ones if the step is not `finite`."""
        for group in self.groups:
            group.commit(finite)

    def put_back(self) -> None:
        """As they were at `begin`."""
        for group in self.groups:
            group.put_back()

    def read(self) -> None:
        """The buffers were changed from outside (weights were loaded)."""
        for group in self.groups:
            group.read()


class Group:
    """Buffers of one dtype. All views are made once: hundreds of them in every step would cost the host too much."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.floating = tensors[0].is_floating_point()
        self.flat = [t.detach().view(-1) for t in tensors]
        self.kept = torch.cat(self.flat)  # what they hold between steps
        self.new = torch.empty_like(self.kept)
        pieces = self.kept.split([t.numel() for t in tensors])
        self.views = [piece.view_as(t) for piece, t in zip(pieces, tensors, strict=True)]
        self.parts = 0

    def begin(self) -> None:
        self.parts = 0

    def read(self) -> None:
        """The buffers were changed from outside."""
        torch.cat(self.flat, out=self.kept)

    def put_back(self) -> None:
        foreach.copy_(self.tensors, self.views)

    def collect(self, last: bool) -> None:
        if self.parts and self.floating:
            self.new += torch.cat(self.flat)
        else:
            torch.cat(self.flat, out=self.new)
        self.parts += 1
        if not last:
            self.put_back()
        elif self.parts > 1 and self.floating:
            self.new /= self.parts

    def commit(self, finite: Tensor) -> None:
        torch.where(finite, self.new, self.kept, out=self.kept)
        self.put_back()

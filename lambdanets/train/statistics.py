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
        finite = None
        for group in self.groups:
            if group.floating:
                self.world.mean_(group.new)
                found = group.new.isfinite().all()
                finite = found if finite is None else finite & found
        return torch.tensor(True, device=self.world.device) if finite is None else finite

    def commit(self, finite: Tensor) -> None:
        """The new values, or the old ones if the step is not `finite`."""
        for group in self.groups:
            group.commit(finite)

    def put_back(self) -> None:
        """As they were at `begin`."""
        for group in self.groups:
            assert group.kept is not None
            group.put(group.kept)

    def forget(self) -> None:
        """The buffers were changed from outside (weights were loaded)."""
        for group in self.groups:
            group.kept = None


class Group:
    """Buffers of one dtype."""

    kept: Tensor | None = None  # what they hold between steps
    new: Tensor

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors, self.sizes = tensors, [t.numel() for t in tensors]
        self.floating = tensors[0].is_floating_point()
        self.parts = 0

    def flat(self) -> Tensor:
        return torch.cat([t.detach().reshape(-1) for t in self.tensors])

    def put(self, flat: Tensor) -> None:
        views = [v.view_as(t) for v, t in zip(flat.split(self.sizes), self.tensors, strict=True)]
        foreach.copy_(self.tensors, views)

    def begin(self) -> None:
        if self.kept is None:
            self.kept = self.flat()
        self.parts = 0

    def collect(self, last: bool) -> None:
        assert self.kept is not None
        now = self.flat()
        self.new = self.new.add_(now) if self.parts and self.floating else now
        self.parts += 1
        if not last:
            self.put(self.kept)
        elif self.parts > 1 and self.floating:
            self.new.div_(self.parts)

    def commit(self, finite: Tensor) -> None:
        assert self.kept is not None
        self.kept = torch.where(finite, self.new, self.kept)
        self.put(self.kept)

"""Tensors that a lambda layer precomputes for inference, and when they are discarded."""

from typing import Self

import torch
from torch import nn

from lambdanets.layers.arguments import NotTraceable
from lambdanets.layers.positions import RelativePositions
from lambdanets.layers.projection import Projection, is_plain, merged
from lambdanets.ops.positions import Kept


class Fusing(NotTraceable):
    """Base class of layers that can merge their projections into one matrix and cache transformed embeddings."""

    channels: int
    context_channels: int
    positions: RelativePositions | None
    fused_projection: Projection | None
    kept: Kept | None

    def _projections(self) -> list[tuple[nn.Linear, nn.Module | None]]:
        """Return the linear maps of one input and the norms that follow them."""
        raise NotImplementedError

    def fuse(self) -> Self:
        """Prepare the layer for inference: eval mode, one cached matrix for all projections, batch norm folded in.

        The layer also caches transformed embeddings for the last few map sizes. Eval mode alone folds batch norm too,
        but computes the matrix again in every call. `unfuse`, `train`, `reset_parameters` and loading a state dict
        discard the cache, and it is not used while gradients of the weights are needed. After any other change of the
        weights (by an optimizer, or by copying an EMA) call `fuse` again.

        Returns:
            The layer itself.
        """
        self.eval()
        self.fused_projection = None
        projections = self._projections()
        one_input = self.channels == self.context_channels  # otherwise queries and context never have one input
        if one_input and all(is_plain(linear, norm) for linear, norm in projections):
            with torch.inference_mode(False), torch.no_grad():
                self.fused_projection = merged([Projection.of(linear, norm) for linear, norm in projections])
        self.kept = None if self.positions is None else Kept(self.positions.table)
        return self

    def unfuse(self) -> Self:
        """Discard what `fuse` cached, and return the layer."""
        self.fused_projection = self.kept = None
        return self

    def train(self, mode: bool = True) -> Self:
        if mode:
            self.unfuse()
        return super().train(mode)

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        self.unfuse()
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn, recurse: bool = True) -> Self:
        if self.fused_projection is not None:  # .to(), .cuda() and .half() apply to it too
            self.fused_projection = self.fused_projection.apply(fn)
        super()._apply(fn, recurse)
        if self.kept is not None and self.positions is not None:
            self.kept = Kept(self.positions.table)
        return self

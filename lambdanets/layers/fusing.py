"""What a lambda layer keeps for inference, and when it forgets it."""

from typing import Self

import torch
from torch import nn

from lambdanets.layers.arguments import NotTraceable
from lambdanets.layers.positions import RelativePositions
from lambdanets.layers.projection import Projection, is_plain, merged
from lambdanets.ops.positions import Kept


class Fusing(NotTraceable):
    """A layer whose projections can become one matrix, and that keeps what is made of its embeddings."""

    channels: int
    context_channels: int
    positions: RelativePositions | None
    fused_projection: Projection | None
    kept: Kept | None

    def _projections(self) -> list[tuple[nn.Linear, nn.Module | None]]:
        """The linear maps of one input, and the norms behind them."""
        raise NotImplementedError

    def fuse(self) -> Self:
        """Merges the projections, with batch norm folded in, into one matrix that is kept: for inference.

        So is what implementations make of the embeddings for a size of the map, for the last few sizes. Eval mode folds
        batch norm anyway, but makes that matrix again in every call. `unfuse`, `train`,
        `reset_parameters` and loading this layer's state dict forget it, and it is not used where gradients of the
        weights are asked for. After any other change of weights (an optimiser, an EMA copy) call `fuse` again.
        """
        self.eval()
        self.fused_projection = None
        projections = self._projections()
        one_input = self.channels == self.context_channels  # else queries and context never come from one input
        if one_input and all(is_plain(linear, norm) for linear, norm in projections):
            with torch.inference_mode(False), torch.no_grad():
                self.fused_projection = merged([Projection.of(linear, norm) for linear, norm in projections])
        self.kept = None if self.positions is None else Kept(self.positions.table)
        return self

    def unfuse(self) -> Self:
        """Forgets what `fuse` made."""
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
        if self.fused_projection is not None:  # .to(), .cuda(), .half() move it along
            self.fused_projection = self.fused_projection.apply(fn)
        super()._apply(fn, recurse)
        if self.kept is not None and self.positions is not None:
            self.kept = Kept(self.positions.table)
        return self

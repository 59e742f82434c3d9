"""Learned relative position embeddings as a separate module, so that layers can share them."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import nn

from lambdanets.layers.arguments import layer_arguments
from lambdanets.ops.positions import Kept, Relative, per_axis
from lambdanets.typed import Bounds, Count, Deviation

DEFAULT_SCOPE = {1: 23, 2: 23, 3: 7}
UNIT = "unit"  # the embedding_std with which the position part of the output has a variance of 1


class RelativePositions(nn.Module):
    """A learned table of relative position embeddings, the parameter `table`.

    Pass one module to several lambda layers (argument `positions`) to share it, as the paper does to save memory.

    Args:
        dims: number of spatial axes: 1, 2 or 3.
        scope: number of relative positions along each axis, one int or one per axis; None for every relative position
            within `input_size`.
        key_depth, intra_depth: depth of an embedding.
        heads: number of heads with separate embeddings, for multi-head layers; None for shared embeddings.
        input_size: the largest input (height, width, ...), required for a global scope.
        dilation: distance between neighbouring entries, in positions.
        embedding_std: standard deviation at initialisation. "unit" gives the position part of the layer's output a
            variance of 1 (derivation in docs/operation.md); the paper uses 1.0.
        batch_norm, query_softmax, causal: as in the layers that will use the table; "unit" depends on them. The
            default of batch_norm is True, or False if causal.
        device, dtype: of the table.

    Shape:
        table: `[*scope, (heads,) key_depth(, intra_depth)]`

    Example:
        >>> import torch
        >>> from lambdanets import LambdaLayer2d, RelativePositions
        >>> positions = RelativePositions(dims=2, scope=7, key_depth=16)
        >>> positions.table.shape
        torch.Size([7, 7, 16])
        >>> layers = [LambdaLayer2d(64, key_depth=16, positions=positions) for _ in range(2)]
        >>> layers[0].positions is layers[1].positions
        True
    """

    table: nn.Parameter

    @layer_arguments
    def __init__(
        self,
        dims: Annotated[int, Bounds(1, 3)] = 2,
        scope: Count | Sequence[Count] | None = 23,
        key_depth: Count = 16,
        *,
        intra_depth: Count = 1,
        heads: Count | None = None,
        input_size: Count | Sequence[Count] | None = None,
        dilation: Count | Sequence[Count] = 1,
        embedding_std: Deviation | Literal["unit"] = UNIT,
        batch_norm: bool | None = None,
        query_softmax: bool = False,
        causal: bool | str = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dims = dims
        self.key_depth = key_depth
        self.intra_depth = intra_depth
        self.heads = heads
        self.dilation = per_axis(dilation, dims, "dilation")
        self.embedding_std = embedding_std
        self.batch_norm = not causal if batch_norm is None else batch_norm
        self.query_softmax, self.causal = query_softmax, causal
        self.input_size = None if input_size is None else per_axis(input_size, dims, "input_size")
        self.is_global = scope is None
        if scope is None:
            if self.input_size is None:
                raise ValueError("scope=None (global) needs input_size=(height, width, ...), the largest input")
            if any(d != 1 for d in self.dilation):
                raise ValueError(f"scope=None (global) allows no dilation, got {self.dilation}: set scope")
            scope = [2 * s - 1 for s in self.input_size]
        self.scope = per_axis(scope, dims, "scope")
        depth = [] if heads is None else [heads]
        depth += [key_depth] if intra_depth == 1 else [key_depth, intra_depth]
        self.table = nn.Parameter(torch.empty(*self.scope, *depth, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the table from a normal distribution with standard deviation `embedding_std`."""
        std = self.unit_std() if isinstance(self.embedding_std, str) else self.embedding_std
        nn.init.normal_(self.table, std=std)

    def unit_std(self) -> float:
        """Return the standard deviation that "unit" stands for: (q * intra_depth * positions) ** -0.5."""
        q = squared_query(self.key_depth, self.batch_norm, self.query_softmax)
        positions = self.mean_reach()
        return (q * self.intra_depth * positions) ** -0.5 if positions else 1.0  # nothing in reach: any value will do

    def mean_reach(self) -> float:
        """Return the number of context positions that a query reaches: on average over a map of `input_size`, or in
        the interior of a large map if there is none.
        """
        everything, before = 1.0, 0.0  # before: earlier in row-major order, which a strictly causal query may use
        for axis, (scope, step) in enumerate(zip(self.scope, self.dilation, strict=True)):
            centre = (scope - 1) // 2
            shares = [1.0] * scope  # fraction of queries for which this entry of the table lies inside the map
            if self.input_size is not None:
                side = self.input_size[axis]
                shares = [max(0, side - abs(i - centre) * step) / side for i in range(scope)]
            before = before * sum(shares) + sum(shares[:centre])
            everything *= sum(shares)
        return everything if not self.causal else before + (self.causal != "strict")

    def forward(
        self,
        query_grid: Sequence[int],
        context_grid: Sequence[int],
        stride: Sequence[int],
        kept: Kept | None = None,
    ) -> Relative:
        """Return the embeddings for given grids of queries and context, as `lambda_op` takes them.

        Args:
            query_grid, context_grid: number of queries and context positions along each axis.
            stride: distance of the queries along each axis, in context positions.
            kept: cache of transformed embeddings (see `LambdaLayer.fuse`).
        """
        if self.is_global and self.input_size is not None:
            for name, grid, step in (("input", query_grid, stride), ("context", context_grid, (1,) * self.dims)):
                for size, bound, s in zip(grid, self.input_size, step, strict=True):
                    if (size - 1) * s + 1 > bound:
                        raise ValueError(
                            f"the {name} is {tuple(grid)} with stride {tuple(step)}, larger than the input_size "
                            f"{self.input_size} of this global scope: build the layer with a larger input_size "
                            f"or with a local scope"
                        )
        return Relative(self.table, tuple(query_grid), tuple(context_grid), self.dilation, tuple(stride), kept=kept)

    def extra_repr(self) -> str:
        options = f"scope={self.scope}, key_depth={self.key_depth}, intra_depth={self.intra_depth}, heads={self.heads}"
        return options if self.embedding_std == UNIT else f"{options}, embedding_std={self.embedding_std}"


def squared_query(key_depth: int, batch_norm: bool, query_softmax: bool) -> float:
    """Return the expected squared norm of a query at initialisation, in training, for inputs with a variance of 1.

    Projections start with a variance of 1 / key_depth; batch norm makes it 1. After a softmax over normal logits of
    variance v the norm is about e^v / (e^v + key_depth - 1), at most 1.22 times the true value.
    """
    if not query_softmax:
        return key_depth if batch_norm else 1
    spread = math.exp(1 if batch_norm else 1 / key_depth)
    return spread / (spread + key_depth - 1)

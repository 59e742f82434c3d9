"""Learned relative position embeddings as a module of their own, so that layers can share them."""

from collections.abc import Sequence

import torch
from torch import nn

from lambdanets.ops.positions import Kept, Relative, per_axis

DEFAULT_SCOPE = {1: 23, 2: 23, 3: 7}


class RelativePositions(nn.Module):
    """A table of position embeddings, `table` [*scope, (heads,) key_depth(, intra_depth)].

    Pass one to several lambda layers (`positions=`) to share it, as the paper does to save memory.

    Args:
        dims: how many spatial axes: 1, 2 or 3.
        scope: entries along each axis, an int or one for each axis; None: every relative position of `input_size`.
        key_depth, intra_depth: the depth of an embedding.
        heads: for multi-head layers, how many heads have embeddings of their own.
        input_size: the largest map (height, width, ...), needed for a global scope.
        dilation: the step between neighbouring entries, in positions.
        embedding_std: standard deviation at initialisation; the paper's is 1.
    """

    table: nn.Parameter

    def __init__(
        self,
        dims: int = 2,
        scope: int | Sequence[int] | None = 23,
        key_depth: int = 16,
        *,
        intra_depth: int = 1,
        heads: int | None = None,
        input_size: int | Sequence[int] | None = None,
        dilation: int | Sequence[int] = 1,
        embedding_std: float = 1.0,
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
        self.input_size = None if input_size is None else per_axis(input_size, dims, "input_size")
        self.is_global = scope is None
        if scope is None:
            if self.input_size is None:
                raise ValueError("scope=None (global) needs input_size=(height, width, ...): the largest input")
            if any(d != 1 for d in self.dilation):
                raise ValueError(f"a global scope has no dilation, got {self.dilation}; give a scope")
            scope = [2 * s - 1 for s in self.input_size]
        self.scope = per_axis(scope, dims, "scope")
        for name, sizes in (("scope", self.scope), ("dilation", self.dilation)):
            if any(s < 1 for s in sizes):
                raise ValueError(f"{name} must be positive, got {sizes}")
        depth = [] if heads is None else [heads]
        depth += [key_depth] if intra_depth == 1 else [key_depth, intra_depth]
        self.table = nn.Parameter(torch.empty(*self.scope, *depth, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.embedding_std)

    def forward(
        self,
        query_grid: Sequence[int],
        context_grid: Sequence[int],
        stride: Sequence[int],
        kept: Kept | None = None,
    ) -> Relative:
        """The embeddings placed on grids of queries and context."""
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
        return f"scope={self.scope}, key_depth={self.key_depth}, intra_depth={self.intra_depth}, heads={self.heads}"

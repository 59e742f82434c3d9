"""Expansion of a table of relative positions (or dense embeddings) to E, and folding of gradients of E to the table.

Letters: N queries, M context positions, K key depth, U intra-depth. For E see table_kernels.py.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# Triton adds num_warps and num_stages to the arguments of kernels.

import torch
from torch import Tensor

from . import table_kernels as kernels
from .problem import Geometry, ceil_div

ROWS, COLUMNS = 16, 128  # of the block of E that one program writes
RELATIVE = 32  # relative columns whose gradients one program sums
FOLDED = 128  # (row, column) pairs of queries that a program adds in one step


def expand(
    table: Tensor, geometry: Geometry, depth: int, shape: tuple[int, ...], dtype: torch.dtype,
    centre: tuple[int, int] | None = None, copies: int = 1, transposed: bool = False,
) -> Tensor:  # fmt: skip
    """Expand a table [scope_y, scope_x, K, U] or embeddings [N, M, K, U] to E [copies, context, (query, depth)].

    Args:
        table: the table or the embeddings.
        geometry: the grids.
        depth: K with its padding.
        shape: rows and columns of E, multiples of ROWS and `depth`; entries outside `geometry` are zero.
        dtype: the dtype of E.
        centre: index of relative position 0 in the table; by default the centre of the scope.
        copies: number of copies of E.
        transposed: store E as [copies, (query, depth), context].
    """
    table = table.contiguous()
    (rows, columns), query_grid = shape, geometry.query_grid
    queries, width = (table.shape[0], 1) if query_grid is None else (query_grid[0] * query_grid[1], query_grid[1])
    expanded = torch.empty(copies, *(shape[::-1] if transposed else shape), device=table.device, dtype=dtype)
    copy, *strides = expanded.stride()
    copy = 0 if copies == 1 else copy
    kernels.expand[(ceil_div(columns, COLUMNS), rows // ROWS, copies)](
        table, expanded, queries, geometry.context_grid[0] * geometry.context_grid[1],
        columns, copy, *(strides[::-1] if transposed else strides), width, geometry.context_grid[1],
        *geometry.scope, *(centre or geometry.centre), geometry.stride,
        K=table.shape[-2], U=geometry.intra_depth, KP=depth, DENSE=query_grid is None, ROW_BLOCK=ROWS,
        COLUMN_BLOCK=COLUMNS, num_warps=4,
    )  # fmt: skip
    return expanded


def fold(
    partial: Tensor, table: Tensor, geometry: Geometry, depth: int, centre: tuple[int, int] | None = None,
    into: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Sum partial dE [splits, (query, depth), context] to the gradient of the table or of dense embeddings.

    `into` is memory for the result, with the shape and dtype of the table; only for at most four columns of queries.
    """
    K, U = table.shape[-2:]
    if geometry.query_grid is None:
        N, M = table.shape[:2]
        summed = partial.sum(0).view(-1, depth, partial.shape[2])[:N, :K, : M * U]
        return summed.reshape(N, K, M, U).permute(0, 2, 1, 3).to(table.dtype).contiguous()
    query_width = geometry.query_grid[1]
    columns = 4 if query_width <= 4 else 16  # only two variants to compile: tiles and sequences, or maps
    blocks, across = ceil_div(query_width, columns), ceil_div(geometry.scope[1], RELATIVE)
    dtype = table.dtype if blocks == 1 else torch.float32
    assert into is None or (blocks == 1 and into.dtype == dtype)
    gradient = into[None] if into is not None else torch.empty(blocks, *table.shape, device=table.device, dtype=dtype)
    kernels.fold[(geometry.scope[0] * across * blocks, K * U)](
        partial, gradient, partial.shape[2], partial.shape[1], partial.shape[0], *geometry.query_grid,
        *geometry.context_grid, *geometry.scope, *(centre or geometry.centre), geometry.stride,
        K=K, U=U, KP=depth, R=FOLDED // columns, NX=columns, D=RELATIVE, WIDE=partial.numel() >= 2**31, num_warps=4,
    )  # fmt: skip
    return (gradient[0] if blocks == 1 else gradient.sum(0)).to(table.dtype)

"""The fused operation as registered operators: lambdanets::fused and lambdanets::fused_backward.

Letters: B batch, N queries, M context positions (times intra-depth U), H heads, K key depth, V value depth.
`embeddings` is a table [scope_y, scope_x, K, U] (query_grid given) or dense [N, M, K, U] (query_grid empty).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import launch, windows
from .launch import unit_stride
from .register import below_autograd, differentiable, operator


def geometry_of(
    embeddings: Tensor, query_grid: Sequence[int], context_grid: Sequence[int], stride: int
) -> launch.Geometry:
    if not query_grid:
        return launch.Geometry(None, (1, embeddings.shape[1]), (1, 1), 1, embeddings.shape[3])
    query, context = (query_grid[0], query_grid[1]), (context_grid[0], context_grid[1])
    return launch.Geometry(query, context, (embeddings.shape[0], embeddings.shape[1]), stride, embeddings.shape[3])


def fused_shape(
    queries: Tensor, values: Tensor, content: Tensor | None, embeddings: Tensor,
    query_grid: Sequence[int], context_grid: Sequence[int], stride: int,
) -> Tensor:  # fmt: skip
    return queries.new_empty(*queries.shape[:3], values.shape[2])


@operator("fused", fused_shape)
def fused(
    queries: Tensor, values: Tensor, content: Tensor | None, embeddings: Tensor,
    query_grid: Sequence[int], context_grid: Sequence[int], stride: int,
) -> Tensor:  # fmt: skip
    """queries [B,N,H,K], values [B,M*U,V], content [B,K,V] or None -> [B,N,H,V]."""
    geometry = geometry_of(embeddings, query_grid, context_grid, stride)
    mode = windows if windows.use_window(geometry, queries, values) else launch
    content = None if content is None else content.float().contiguous()
    return mode.forward(unit_stride(queries), unit_stride(values), content, embeddings, geometry)


def fused_backward_shape(
    gradient: Tensor, queries: Tensor, values: Tensor, content: Tensor | None, embeddings: Tensor,
    query_grid: Sequence[int], context_grid: Sequence[int], stride: int, needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    nothing = queries.new_empty(0)
    return (
        queries.new_empty(queries.shape) if needs[0] else nothing,
        values.new_empty(values.shape) if needs[1] else queries.new_empty(0),
        content.new_empty(content.shape) if needs[2] and content is not None else queries.new_empty(0),
        embeddings.new_empty(embeddings.shape) if needs[3] else queries.new_empty(0),
    )


@operator("fused_backward", fused_backward_shape)
def fused_backward(
    gradient: Tensor, queries: Tensor, values: Tensor, content: Tensor | None, embeddings: Tensor,
    query_grid: Sequence[int], context_grid: Sequence[int], stride: int, needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, values, content, embeddings; an empty tensor for each that `needs` does not ask for."""
    geometry = geometry_of(embeddings, query_grid, context_grid, stride)
    wanted = (needs[0], needs[1], needs[2], needs[3])
    mode = windows if windows.use_window(geometry, queries, values) else launch
    whole = None if content is None else content.float().contiguous()
    inputs = (unit_stride(gradient), unit_stride(queries), unit_stride(values))
    found = mode.backward(*inputs, whole, embeddings, geometry, wanted)
    dq, dv, dc, de = (queries.new_empty(0) if one is None else one for one in found)
    return dq, dv, dc if content is None else dc.to(content.dtype), de


class Fused(torch.autograd.Function):
    """Keeps its inputs only."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs[:4])
        ctx.grids = inputs[4:]
        return below_autograd(fused, *inputs)

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        queries, values, content, embeddings = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:4])
        found = fused_backward(gradient, queries, values, content, embeddings, *ctx.grids, needs)
        return (*(one if need else None for one, need in zip(found, needs, strict=True)), None, None, None)


differentiable(fused, Fused)


def pairs_in_scope(query_side: int, context_side: int, scope: int, stride: int) -> int:
    """Pairs (n, m) of one axis that lie in scope and inside the context."""
    back = (scope - 1) // 2
    total = 0
    for query in range(query_side):
        low, high = max(query * stride - back, 0), min(query * stride + scope - 1 - back, context_side - 1)
        total += max(high - low + 1, 0)
    return total


def count_flops(queries, values, embeddings, query_grid, context_grid, stride) -> int:
    """Multiply-adds times two, work in scope only: lambdas b*pairs*u*k*v, and applying them b*n*h*k*v."""
    batch, length, heads, depth = queries
    if query_grid:
        pairs = pairs_in_scope(query_grid[0], context_grid[0], embeddings[0], stride)
        pairs *= pairs_in_scope(query_grid[1], context_grid[1], embeddings[1], stride)
    else:
        pairs = embeddings[0] * embeddings[1]
    return 2 * batch * depth * values[2] * (pairs * embeddings[3] + length * heads)


@register_flop_formula(torch.ops.lambdanets.fused)
def forward_flops(queries, values, content, embeddings, query_grid, context_grid, stride, *args, **kwargs) -> int:
    return count_flops(queries, values, embeddings, query_grid, context_grid, stride)


@register_flop_formula(torch.ops.lambdanets.fused_backward)
def backward_flops(
    gradient, queries, values, content, embeddings, query_grid, context_grid, stride, needs, *args, **kwargs
) -> int:  # fmt: skip
    """Each of dq, dv and the table's gradient repeats the forward's work."""
    return (needs[0] + needs[1] + needs[3]) * count_flops(queries, values, embeddings, query_grid, context_grid, stride)

"""The fused operation as registered operators: lambdanets::fused and lambdanets::fused_backward.

Letters: B batch, N queries, M context positions (times intra-depth U), H heads, K key depth, V value depth.
`embeddings` is a table [scope_y, scope_x, K, U] (query_grid given) or dense [N, M, K, U] (query_grid empty).
Heads of queries and of the output are not an axis of their own: inductor takes every tensor with four axes for images,
and copies those that the backward pass keeps into the channels-last layout where a convolution follows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import launch, windows
from .content import content_gradients, content_lambda
from .launch import unit_stride
from .register import below_autograd, differentiable, operator


def geometry_of(
    embeddings: Tensor, query_grid: Sequence[int], context_grid: Sequence[int], stride: int
) -> launch.Geometry:
    if not query_grid:
        return launch.Geometry(None, (1, embeddings.shape[1]), (1, 1), 1, embeddings.shape[3])
    query, context = (query_grid[0], query_grid[1]), (context_grid[0], context_grid[1])
    return launch.Geometry(query, context, (embeddings.shape[0], embeddings.shape[1]), stride, embeddings.shape[3])


def heads_of(queries: Tensor, embeddings: Tensor) -> int:
    return queries.shape[2] // embeddings.shape[2]


def with_heads(joined: Tensor, depth: int) -> Tensor:
    """[B, N, H * depth] -> [B, N, H, depth], with a last stride of 1."""
    return unit_stride(joined).unflatten(2, (-1, depth))


def fused_shape(
    queries: Tensor, values: Tensor, keys: Tensor | None, content: Tensor | None, embeddings: Tensor,
    query_grid: Sequence[int], context_grid: Sequence[int], stride: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    output = queries.new_empty(*queries.shape[:2], heads_of(queries, embeddings) * values.shape[2])
    if keys is None:
        return output, queries.new_empty(0), queries.new_empty(0)
    B, K, V = keys.shape[0], keys.shape[2], values.shape[2]
    return output, values.new_empty(B, K, V, dtype=torch.float32), values.new_empty(B, K, dtype=torch.float32)


@operator("fused", fused_shape)
def fused(
    queries: Tensor, values: Tensor, keys: Tensor | None, content: Tensor | None, embeddings: Tensor,
    query_grid: Sequence[int], context_grid: Sequence[int], stride: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """queries [B,N,H*K], values [B,M*U,V] -> [B,N,H*V], and what the backward needs of the content lambda.

    That lambda is made of keys [B,M,K], or given, [B,K,V], or there is none.
    """
    geometry = geometry_of(embeddings, query_grid, context_grid, stride)
    queries, values = with_heads(queries, embeddings.shape[2]), unit_stride(values)
    mode = windows if windows.use_window(geometry, queries, values) else launch
    whole = None if content is None else content.float().contiguous()
    if keys is None:
        found, norm = queries.new_empty(0), queries.new_empty(0)
    else:
        found, norm = content_lambda(unit_stride(keys), values)
        whole = found
    return mode.forward(queries, values, whole, embeddings, geometry).flatten(2), found, norm


def fused_backward_shape(
    gradient: Tensor, queries: Tensor, values: Tensor, keys: Tensor | None, content: Tensor | None,
    norm: Tensor | None, embeddings: Tensor,
    query_grid: Sequence[int], context_grid: Sequence[int], stride: int, needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = (queries, values, keys, content, embeddings)
    found = (
        one.new_empty(one.shape) if need and one is not None else queries.new_empty(0)
        for one, need in zip(inputs, needs, strict=True)
    )
    dq, dv, dk, dc, de = found
    return dq, dv, dk, dc, de


@operator("fused_backward", fused_backward_shape)
def fused_backward(
    gradient: Tensor, queries: Tensor, values: Tensor, keys: Tensor | None, content: Tensor | None,
    norm: Tensor | None, embeddings: Tensor,
    query_grid: Sequence[int], context_grid: Sequence[int], stride: int, needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, values, keys, content, embeddings; an empty tensor for each that `needs` does not ask for.

    With keys, `content` and `norm` are what `fused` made of them.
    """
    geometry = geometry_of(embeddings, query_grid, context_grid, stride)
    whole = None if content is None else content.float().contiguous()
    values = unit_stride(values)
    gradient, queries = with_heads(gradient, values.shape[2]), with_heads(queries, embeddings.shape[2])
    mode = windows if windows.use_window(geometry, queries, values) else launch
    through_keys = keys is not None and (needs[1] or needs[2])
    wanted = (needs[0], needs[1], through_keys or (keys is None and needs[3]), needs[4])
    dq, dv, dc, de = mode.backward(gradient, queries, values, whole, embeddings, geometry, wanted)
    dk = None
    if through_keys:
        dk = content_gradients(dc, unit_stride(keys), values, whole, norm, dv)  # pyright: ignore
        dc = None
    if dc is not None and content is not None:
        dc = dc.to(content.dtype)
    needed = (None if dq is None else dq.flatten(2), dv, dk if needs[2] else None, dc, de)
    dq, dv, dk, dc, de = (queries.new_empty(0) if one is None else one for one in needed)
    return dq, dv, dk, dc, de


def plain_output(
    queries: Tensor, values: Tensor, keys: Tensor | None, content: Tensor | None, embeddings: Tensor,
    query_grid: Sequence[int], context_grid: Sequence[int], stride: int,
) -> Tensor:  # fmt: skip
    """What `fused` gives, by torch."""
    from lambdanets.ops import Dense, Relative, lambda_op

    positions = Relative(embeddings, query_grid, context_grid, stride=stride) if query_grid else Dense(embeddings)
    values_BMVU = values.unflatten(1, (-1, embeddings.shape[-1])).transpose(2, 3)
    keys_BMKU = None if keys is None else keys.unsqueeze(3)
    queries = with_heads(queries, embeddings.shape[2])
    output = lambda_op(queries, keys_BMKU, values_BMVU, positions, content=keys is not None, backend="gemm")
    if content is not None:
        output = output + torch.einsum("bnhk,bkv->bnhv", queries.float(), content.float()).to(output.dtype)
    return output.flatten(2)


class Fused(torch.autograd.Function):
    """Keeps its inputs, and of keys the content lambda and its norm, which are small."""

    @staticmethod
    def forward(ctx, *inputs):
        queries, values, keys, content, embeddings = inputs[:5]
        output, found, norm = below_autograd(fused, *inputs)
        kept = (content, None) if keys is None else (found, norm)
        ctx.save_for_backward(queries, values, keys, *kept, embeddings)
        ctx.grids = inputs[5:]
        ctx.mark_non_differentiable(found, norm)
        ctx.set_materialize_grads(False)
        return output, found, norm

    @staticmethod
    def backward(ctx, gradient, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        if gradient is None:
            return (None,) * 8
        needs = list(ctx.needs_input_grad[:5])
        if torch.is_grad_enabled():  # create_graph=True: by what torch can differentiate again
            queries, values, keys, content, _, embeddings = ctx.saved_tensors
            inputs = (queries, values, keys, content if keys is None else None, embeddings)
            wanted = [one for one, need in zip(inputs, needs, strict=True) if need and one is not None]
            again = iter(torch.autograd.grad(plain_output(*inputs, *ctx.grids), wanted, gradient, create_graph=True))
            return (*(next(again) if need else None for need in needs), None, None, None)
        found = fused_backward(gradient, *ctx.saved_tensors, *ctx.grids, needs)
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
    (batch, length, joined), depth = queries, embeddings[2]
    if query_grid:
        pairs = pairs_in_scope(query_grid[0], context_grid[0], embeddings[0], stride)
        pairs *= pairs_in_scope(query_grid[1], context_grid[1], embeddings[1], stride)
    else:
        pairs = embeddings[0] * embeddings[1]
    return 2 * batch * values[2] * (depth * pairs * embeddings[3] + length * joined)


def content_flops(keys, values) -> int:
    return 0 if keys is None else 2 * keys[0] * keys[1] * keys[2] * values[2]


@register_flop_formula(torch.ops.lambdanets.fused)
def forward_flops(
    queries, values, keys, content, embeddings, query_grid, context_grid, stride, *args, **kwargs
) -> int:  # fmt: skip
    whole = count_flops(queries, values, embeddings, query_grid, context_grid, stride)
    return whole + content_flops(keys, values)


@register_flop_formula(torch.ops.lambdanets.fused_backward)
def backward_flops(
    gradient, queries, values, keys, content, norm, embeddings, query_grid, context_grid, stride, needs, *args, **kwargs
) -> int:  # fmt: skip
    """Each of dq, dv and the table's gradient repeats the forward's work; keys and values each the content lambda's."""
    whole = count_flops(queries, values, embeddings, query_grid, context_grid, stride)
    return (needs[0] + needs[1] + needs[4]) * whole + (needs[1] + needs[2]) * content_flops(keys, values)

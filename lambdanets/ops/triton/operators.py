"""The fused operation as registered operators: lambdanets::fused and lambdanets::fused_backward.

With `pooled` the output goes through 3x3 average pooling with stride 2 and padding 1. The mode is chosen at run time,
with concrete sizes, so that new sizes do not recompile.

Letters: B batch, N queries, M context positions (times intra-depth U), H heads, K key depth, V value depth.
`embeddings` is a table [scope_y, scope_x, K, U] (query_grid given) or dense [N, M, K, U] (query_grid empty). Queries
and outputs have no separate head axis, because inductor treats tensors with four axes as images: before a convolution
it would copy those that the backward pass saves to the channels-last layout.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from types import ModuleType

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import expanded, pool_first, pooling_operators, streams, tiled
from .content import content_gradients, content_lambda
from .pooling import pooled_side
from .problem import Geometry, Problem, content_flops, count_flops, unit_stride
from .register import below_autograd, differentiable, operator

MODES = (pool_first, tiled, expanded)  # the first that can run is taken


def mode_of(problem: Problem, backward: bool = False) -> ModuleType:
    """Return the mode to run. Forward and backward may differ, because the backward starts from the inputs."""
    return next(mode for mode in MODES if mode.why_not(problem, backward) is None)


def with_heads(joined: Tensor, depth: int) -> Tensor:
    """Split the heads, [B, N, H * depth] -> [B, N, H, depth], with a last stride of 1."""
    return unit_stride(joined).unflatten(2, (-1, depth))


def problem_of(
    queries: Tensor, values: Tensor, content: Tensor | None, embeddings: Tensor,
    query_grid: Sequence[int], context_grid: Sequence[int], stride: int, pooled: bool,
) -> tuple[Problem, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the sizes of a call, and queries, values and content lambda in the form for the modes."""
    K, U = embeddings.shape[2:]
    if query_grid:
        (query_y, query_x), (context_y, context_x) = query_grid, context_grid
        scope = embeddings.shape[0], embeddings.shape[1]
        geometry = Geometry((query_y, query_x), (context_y, context_x), scope, stride, U)
    else:
        geometry = Geometry(None, (1, embeddings.shape[1]), (1, 1), 1, U)
    q_BNHK, v_BMV = with_heads(queries, K), unit_stride(values)
    c_BKV = None if content is None else content.float().contiguous()
    return Problem.of(geometry, q_BNHK, v_BMV, pooled), q_BNHK, v_BMV, c_BKV


def images_of(joined: Tensor, grid: Sequence[int]) -> Tensor:
    """View [B, N, C] as channels-last images [B, C, height, width]."""
    return joined.unflatten(1, (grid[0], grid[1])).permute(0, 3, 1, 2)


def positions_of(images: Tensor) -> Tensor:
    """Flatten images [B, C, height, width] to [B, N, C]."""
    return images.permute(0, 2, 3, 1).flatten(1, 2)


def fused_shape(queries, values, keys, content, embeddings, query_grid, context_grid, stride, pooled):
    (B, N, joined), K, V = queries.shape, embeddings.shape[2], values.shape[2]
    if pooled:
        N = pooled_side(query_grid[0], 3) * pooled_side(query_grid[1], 3)
    output = queries.new_empty(B, N, joined // K * V)
    if keys is None:
        return output, queries.new_empty(0), queries.new_empty(0)
    return output, values.new_empty(B, K, V, dtype=torch.float32), values.new_empty(B, K, dtype=torch.float32)


@operator("fused", fused_shape)
def fused(
    queries: Tensor, values: Tensor, keys: Tensor | None, content: Tensor | None, embeddings: Tensor,
    query_grid: Sequence[int], context_grid: Sequence[int], stride: int, pooled: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the output [B,N,H*V] (pooled: [B,P,H*V]) of queries [B,N,H*K] and values [B,M*U,V].

    The content lambda is computed from keys [B,M,K], or given as `content` [B,K,V], or absent. With keys, the second
    and third result are the content lambda and its norm, for the backward pass.
    """
    where = (query_grid, context_grid, stride, pooled)
    problem, q_BNHK, v_BMV, c_BKV = problem_of(queries, values, content, embeddings, *where)
    mode = mode_of(problem)
    if keys is None:
        found, norm = queries.new_empty(0), queries.new_empty(0)
    else:
        found, norm = content_lambda(unit_stride(keys), v_BMV)
        c_BKV = found
    output = mode.forward(problem, q_BNHK, v_BMV, c_BKV, embeddings).flatten(2)
    if pooled and not mode.POOLS:
        output = positions_of(pooling_operators.forward(images_of(output, query_grid), 3))
    return output, found, norm


def fused_backward_shape(gradient, queries, values, keys, content, norm, embeddings, *where):
    inputs, needs = (queries, values, keys, content, embeddings), where[-1]
    return tuple(
        one.new_empty(one.shape) if need and one is not None else queries.new_empty(0)
        for one, need in zip(inputs, needs, strict=True)
    )


@operator("fused_backward", fused_backward_shape)
def fused_backward(
    gradient: Tensor, queries: Tensor, values: Tensor, keys: Tensor | None, content: Tensor | None,
    norm: Tensor | None, embeddings: Tensor,
    query_grid: Sequence[int], context_grid: Sequence[int], stride: int, pooled: bool, needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of queries, values, keys, content and embeddings; empty tensors where `needs` is False.

    With keys, `content` and `norm` are the second and third result of `fused`.
    """
    where = (query_grid, context_grid, stride, pooled)
    problem, q_BNHK, v_BMV, c_BKV = problem_of(queries, values, content, embeddings, *where)
    mode = mode_of(problem, backward=True)
    if pooled and not mode.POOLS:
        windows = images_of(gradient, pool_first.windows_of(query_grid))
        gradient = positions_of(pooling_operators.backward(windows, query_grid[0], query_grid[1], 3))
    dy_BNHV, dk = with_heads(gradient, problem.V), None
    if keys is not None and (needs[1] or needs[2]):
        keys = unit_stride(keys)
        dk = torch.empty(keys.shape, device=keys.device, dtype=keys.dtype)
    wanted = (needs[0], needs[1], needs[3] if keys is None else dk is not None, needs[4])
    overlap = streams.forked(queries.device, problem.work) if mode.OVERLAPS else nullcontext(streams.ONE_BY_ONE)
    with overlap as side:
        dq, dv, dc, de = mode.backward(problem, dy_BNHV, q_BNHK, v_BMV, c_BKV, embeddings, wanted, side)
        if dk is not None:
            with side("values"):
                dv = content_gradients(dc, keys, v_BMV, c_BKV, norm, dv, dk)  # pyright: ignore
    dq = None if dq is None else dq.flatten(2)
    dv = None if dv is None else dv.contiguous()
    dc = dc.to(content.dtype) if dc is not None and keys is None and content is not None else None
    needed = (dq, dv, dk if needs[2] else None, dc, de)
    dq, dv, dk, dc, de = (queries.new_empty(0) if one is None else one for one in needed)
    return dq, dv, dk, dc, de


def plain_output(
    queries: Tensor, values: Tensor, keys: Tensor | None, content: Tensor | None, embeddings: Tensor,
    query_grid: Sequence[int], context_grid: Sequence[int], stride: int, pooled: bool,
) -> Tensor:  # fmt: skip
    """Compute the output of `fused` with torch operations."""
    from lambdanets.ops import Dense, Relative, lambda_op

    positions = Relative(embeddings, query_grid, context_grid, stride=stride) if query_grid else Dense(embeddings)
    values_BMVU = values.unflatten(1, (-1, embeddings.shape[-1])).transpose(2, 3)
    keys_BMKU = None if keys is None else keys.unsqueeze(3)
    queries = with_heads(queries, embeddings.shape[2])
    output = lambda_op(queries, keys_BMKU, values_BMVU, positions, content=keys is not None, backend="gemm")
    if content is not None:
        output = output + torch.einsum("bnhk,bkv->bnhv", queries.float(), content.float()).to(output.dtype)
    output = output.flatten(2)
    if not pooled:
        return output
    images = images_of(output, query_grid).contiguous()  # torch's gradients are wrong for channels-last: layers/pool.py
    return positions_of(torch.nn.functional.avg_pool2d(images, 3, 2, padding=1))


class Fused(torch.autograd.Function):
    """Autograd function of `fused`. It saves the inputs, and with keys the small content lambda and its norm."""

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
            return (None,) * 9
        needs = list(ctx.needs_input_grad[:5])
        if torch.is_grad_enabled():  # create_graph=True needs operations that torch can differentiate again
            queries, values, keys, content, _, embeddings = ctx.saved_tensors
            inputs = (queries, values, keys, content if keys is None else None, embeddings)
            wanted = [one for one, need in zip(inputs, needs, strict=True) if need and one is not None]
            again = iter(torch.autograd.grad(plain_output(*inputs, *ctx.grids), wanted, gradient, create_graph=True))
            return (*(next(again) if need else None for need in needs), *(None,) * 4)
        found = fused_backward(gradient, *ctx.saved_tensors, *ctx.grids, needs)
        return (*(one if need else None for one, need in zip(found, needs, strict=True)), *(None,) * 4)


differentiable(fused, Fused)


@register_flop_formula(torch.ops.lambdanets.fused)
def forward_flops(queries, values, keys, content, embeddings, *where, **kwargs) -> int:
    return count_flops(queries, values, embeddings, *where[:3]) + content_flops(keys, values)


@register_flop_formula(torch.ops.lambdanets.fused_backward)
def backward_flops(gradient, queries, values, keys, content, norm, embeddings, *where, **kwargs) -> int:
    """Count dq, dv and the gradient of the table like the forward pass, and the two gradients of the content lambda."""
    whole, needs = count_flops(queries, values, embeddings, *where[:3]), where[4]
    return (needs[0] + needs[1] + needs[4]) * whole + (needs[1] + needs[2]) * content_flops(keys, values)

"""Batch norm of queries and values as a registered operator: lambdanets::normed_parts and its backward.

torch copies each part out of the projection, normalises it, and concatenates the gradients: sixteen small kernels and
five more passes over memory. Here the forward and the backward pass are two kernels each. Sums are in float32, in a
fixed order.

Letters: B batch, N positions, R = B * N rows, S channels of the projection, P shares of the rows.
`sizes`: channels of queries, values and keys (0: no keys).
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# Triton adds num_warps and num_stages to the arguments of kernels.

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import norm_kernels as kernels
from .problem import ceil_div, multiprocessors, on_device
from .register import differentiable, directly, operator

ROWS, COLUMNS, STAGES = 128, 32, 4  # tile size, and tiles in flight: README.md
WIDE = 64  # rows and columns of a tile where gradients are summed, so that whole cache lines are read
SHARES = 64  # maximum shares of the rows: every normalising program first reads the sums of all shares
PROGRAMS = 2  # per multiprocessor, each with STAGES tiles in flight
STATISTICS = ("mean_q", "mean_v", "var_q", "var_v", "count_q", "count_v")


def strips(sizes: Sequence[int], columns: int = COLUMNS) -> int:
    """Return the number of tiles that cover the channels of these parts; no tile spans two parts."""
    return sum(ceil_div(size, columns) for size in sizes)


def shares_of(product: Tensor, sizes: Sequence[int]) -> tuple[int, int, int, tuple[Tensor, ...]]:
    """Return R, the rows of a share (a multiple of the tile), the number of shares P, and buffers for two sums.

    The shares fill the GPU, but there are at most SHARES. The buffers are [P, normed].
    """
    rows, device = product.shape[0] * product.shape[1], product.device
    programs = max(1, min(SHARES, multiprocessors(device) * PROGRAMS // strips(sizes[:2])))
    tiles = ceil_div(rows, ROWS)
    share = ceil_div(tiles, min(programs, tiles)) * ROWS
    shares = ceil_div(rows, share)
    sums = torch.empty(2, shares, sizes[0] + sizes[1], device=device, dtype=torch.float32)
    return rows, share, shares, sums.unbind()


def programs_of(rows: int, sizes: Sequence[int], device: torch.device) -> tuple[int, int]:
    """Return the launch grid of a kernel that writes all rows: (column strips, programs that share the rows)."""
    across = strips(sizes)
    return across, max(1, min(ceil_div(rows, ROWS), multiprocessors(device) * PROGRAMS // across))


def tile_of(sizes: Sequence[int], wide: bool = False) -> dict[str, Any]:
    parts = dict(FIRST=sizes[0], NORMED=sizes[0] + sizes[1], S=sum(sizes))
    rows, columns = (WIDE, WIDE) if wide else (ROWS, COLUMNS)
    return parts | dict(ROWS=rows, COLS=columns, STAGES=STAGES, num_warps=4)


def parts_shape(product_BNS: Tensor, *others) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sizes = others[-1]
    queries, values, keys = (product_BNS.new_empty(*product_BNS.shape[:2], size) for size in sizes)
    return queries, values, keys, product_BNS.new_empty(2, sizes[0] + sizes[1], dtype=torch.float32)


def gradients_shape(dq: Tensor, dv: Tensor, dk: Tensor, *kept) -> tuple[Tensor, ...]:
    """Return empty gradients of all saved inputs except the moments and the sizes."""
    return tuple(one.new_empty(one.shape) for one in kept[:-2])


def forward(
    product: Tensor, weight_q: Tensor, weight_v: Tensor, bias_q: Tensor, bias_v: Tensor,
    mean_q: Tensor, mean_v: Tensor, var_q: Tensor, var_v: Tensor, count_q: Tensor, count_v: Tensor,
    eps: Sequence[float], momentum: Sequence[float], sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return queries, values, keys, and the moments [2, normed], mean and 1 / standard deviation.

    Running statistics are updated in place.
    """
    product = product.contiguous()  # a no-op for the layers of this package
    q, v, k, moments = parts_shape(product, sizes)
    (rows, share, shares, sums), tile = shares_of(product, sizes), tile_of(sizes)
    with on_device(product):
        kernels.batch_moments[(strips(sizes[:2]), shares)](product, *sums, rows, share, **tile)
        kernels.normalise_parts[programs_of(rows, sizes, product.device)](
            product, q, v, k, *sums, moments, weight_q, weight_v, bias_q, bias_v,
            mean_q, mean_v, var_q, var_v, count_q, count_v, rows, share, shares, *eps, *momentum,
            SHARES=SHARES, **tile,
        )  # fmt: skip
    return q, v, k, moments


def backward(
    dq: Tensor, dv: Tensor, dk: Tensor,
    product: Tensor, weight_q: Tensor, weight_v: Tensor, bias_q: Tensor, bias_v: Tensor, moments: Tensor,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the projection, the weights and the biases."""
    product = product.contiguous()
    dq, dv, dk = (one.to(product.dtype).contiguous() for one in (dq, dv, dk))
    (rows, share, shares, sums), tile = shares_of(product, sizes), tile_of(sizes)
    gradients = tuple(map(torch.empty_like, (product, weight_q, weight_v, bias_q, bias_v)))
    dx, *parameters = gradients
    with on_device(product):
        kernels.gradient_moments[(strips(sizes[:2], WIDE), shares)](
            product, dq, dv, moments, *sums, rows, share, **tile_of(sizes, wide=True)
        )
        kernels.gradients_of_parts[programs_of(rows, sizes, product.device)](
            product, dq, dv, dk, dx, moments, *sums, weight_q, weight_v, *parameters, rows, shares,
            SHARES=SHARES, **tile,
        )  # fmt: skip
    return gradients  # pyright: ignore[reportReturnType]


normed_parts = operator("normed_parts", parts_shape, mutates=STATISTICS)(forward)
normed_parts_backward = operator("normed_parts_backward", gradients_shape)(backward)


def plain_parts(
    product_BNS: Tensor, weight_q: Tensor, weight_v: Tensor, bias_q: Tensor, bias_v: Tensor, eps: Sequence[float],
    sizes: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """Compute the parts of `normed_parts` with torch, without running statistics."""
    parts = list(product_BNS.split(list(sizes), dim=-1))
    for i, (weight, bias) in enumerate(((weight_q, bias_q), (weight_v, bias_v))):
        rows_RC = parts[i].flatten(0, 1)
        normed_RC = nn.functional.batch_norm(rows_RC, None, None, weight, bias, training=True, eps=eps[i])
        parts[i] = normed_RC.view_as(parts[i])
    return parts


class NormedParts(torch.autograd.Function):
    """Autograd function of `normed_parts`. It saves the projection, weights, biases and moments."""

    @staticmethod
    def forward(ctx, *inputs):
        *parts, moments = directly(normed_parts, *inputs)
        ctx.save_for_backward(*inputs[:5], moments)
        ctx.eps, ctx.sizes = inputs[-3], inputs[-1]
        ctx.mark_non_differentiable(moments)
        ctx.set_materialize_grads(False)  # the moments have no gradient
        return *parts, moments

    @staticmethod
    def backward(ctx, *gradients):
        *inputs, moments = ctx.saved_tensors
        gradients = [
            inputs[0].new_zeros(*inputs[0].shape[:2], size) if one is None else one
            for one, size in zip(gradients, ctx.sizes, strict=False)
        ]
        # create_graph=True, is_grads_batched=True and torch.vmap need torch's own operations
        if torch.is_grad_enabled() or any(map(is_batched, gradients)):
            needs, create_graph = ctx.needs_input_grad[:5], torch.is_grad_enabled()
            with torch.enable_grad():
                parts = plain_parts(*inputs, ctx.eps, ctx.sizes)  # pyright: ignore[reportCallIssue]
            wanted = [one for one, needed in zip(inputs, needs, strict=True) if needed]
            pairs = [pair for pair in zip(parts, gradients, strict=True) if pair[0].requires_grad]  # not frozen
            outputs, upstream = zip(*pairs, strict=True)
            again = iter(torch.autograd.grad(outputs, wanted, upstream, create_graph=create_graph))
            found = [next(again) if needed else None for needed in needs]
        else:
            found = directly(normed_parts_backward, *gradients, *inputs, moments, ctx.sizes)
        return *found, *(None,) * 9


def is_batched(gradient: Tensor) -> bool:
    kinds = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return kinds.is_batchedtensor(gradient) or kinds.is_legacy_batchedtensor(gradient)


differentiable(normed_parts, NormedParts)

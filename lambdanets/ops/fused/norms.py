"""Batch norm of queries and values for training, straight from the projection that holds both and the keys.

torch would copy each part out of the projection, norm it, and put the gradients together again: sixteen small
kernels and five more passes. Here two kernels go forward and two back. Sums are in float32, in a fixed order.

Letters: B batch, N positions, R = B * N rows, S channels of the projection, P shares of the rows.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from . import why_not
from .launch import multiprocessors, on_device

ROWS, COLUMNS, STAGES = 128, 32, 4
SHARES = 64  # of the rows, at most: whoever norms reads the sums of all of them at once, before it begins
PROGRAMS = 2  # per multiprocessor


def takes(product_BNS: Tensor, norms: Sequence[nn.Module | None]) -> bool:
    """Whether `normed_parts` does here what calling the norms would do."""
    if len(norms) not in (2, 3) or (len(norms) == 3 and norms[2] is not None):
        return False
    if norms[0] is norms[1]:  # it updates its running statistics twice, one after the other
        return False
    if type(product_BNS) is not Tensor or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False  # the compiler fuses batch norm by itself
    if forward_ad._current_level >= 0:  # kernels have gradients only
        return False
    if not product_BNS.is_contiguous() or product_BNS.shape[0] * product_BNS.shape[1] < 2:
        return False
    return all(map(is_plain, norms[:2])) and why_not(product_BNS.device, product_BNS.dtype, 1, 1, 1) is None


def is_plain(norm: nn.Module | None) -> bool:
    """A batch norm that takes this batch's statistics, learns, and keeps a running average with a fixed momentum."""
    if type(norm) is not nn.BatchNorm2d or not norm.training or not norm.affine or norm.momentum is None:
        return False
    if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked is None:
        return False
    vectors = (norm.weight, norm.bias, norm.running_mean, norm.running_var)  # of functional_call they may be slices
    return all(vector.is_contiguous() for vector in vectors) and not is_hooked(norm)


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody wants to know when this module is called, or has put a forward of their own on it."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def normed_parts(product_BNS: Tensor, norms: Sequence[nn.Module | None], sizes: Sequence[int]) -> list[Tensor]:
    """Queries and values after their norms, and keys if there are any, each contiguous; updates running statistics."""
    first, second = norms[:2]
    assert isinstance(first, nn.BatchNorm2d)
    assert isinstance(second, nn.BatchNorm2d)
    return list(
        NormedParts.apply(product_BNS, first.weight, second.weight, first.bias, second.bias, first, second, sizes)
    )


def strips(sizes: Sequence[int]) -> int:
    """Tiles side by side that cover the channels of these parts, each part by its own."""
    return sum(-(-size // COLUMNS) for size in sizes)


def shares_of(rows: int, sizes: Sequence[int], device: torch.device) -> tuple[int, int]:
    """Rows of a share, a multiple of the tile, and how many shares: as many as fill the chip, or SHARES."""
    programs = max(1, min(SHARES, multiprocessors(device) * PROGRAMS // strips(sizes[:2])))
    tiles = -(-rows // ROWS)
    share = -(-tiles // min(programs, tiles)) * ROWS
    return share, -(-rows // share)


def programs_of(rows: int, sizes: Sequence[int], device: torch.device) -> tuple[int, int]:
    """A grid for who norms: (strips, programs that share the rows)."""
    across = strips(sizes)
    return across, max(1, min(-(-rows // ROWS), multiprocessors(device) * PROGRAMS // across))


def tile_of(sizes: Sequence[int]) -> dict[str, Any]:
    parts = dict(FIRST=sizes[0], NORMED=sizes[0] + sizes[1], S=sum(sizes))
    return parts | dict(ROWS=ROWS, COLS=COLUMNS, STAGES=STAGES, num_warps=4)


class NormedParts(torch.autograd.Function):
    """Keeps the projection, the weights, and mean and deviation of each channel."""

    @staticmethod
    def forward(ctx, product, weight_q, weight_v, bias_q, bias_v, first, second, sizes):
        from . import norm_kernels as kernels

        (B, N, S), normed = product.shape, sizes[0] + sizes[1]
        rows, device = B * N, product.device
        share, shares = shares_of(rows, sizes, device)
        parts = [torch.empty(B, N, size, device=device, dtype=product.dtype) for size in sizes]
        sums = torch.empty(2, shares, normed, device=device, dtype=torch.float32)
        moments = torch.empty(2, normed, device=device, dtype=torch.float32)
        tile = tile_of(sizes)
        with on_device(product):
            kernels.batch_moments[(strips(sizes[:2]), shares)](product, sums[0], sums[1], rows, share, **tile)
            kernels.normalise_parts[programs_of(rows, sizes, device)](
                product, parts[0], parts[1], parts[-1], sums[0], sums[1], moments, weight_q, weight_v, bias_q, bias_v,
                first.running_mean, second.running_mean, first.running_var, second.running_var,
                first.num_batches_tracked, second.num_batches_tracked,
                rows, share, shares, first.eps, second.eps, first.momentum, second.momentum,
                SHARES=cast(Any, SHARES), **tile,
            )  # fmt: skip
        ctx.save_for_backward(product, weight_q, weight_v, bias_q, bias_v, moments)
        ctx.sizes, ctx.eps = tuple(sizes), (first.eps, second.eps)
        return tuple(parts)

    @staticmethod
    def backward(ctx, *gradients):
        product, weight_q, weight_v, bias_q, bias_v, moments = ctx.saved_tensors
        # create_graph=True, is_grads_batched=True, torch.vmap: by what torch can differentiate again, and in batches
        if torch.is_grad_enabled() or any(map(is_batched, gradients)):
            again, inputs = torch.is_grad_enabled(), [product, weight_q, weight_v, bias_q, bias_v]
            with torch.enable_grad():
                parts = plain_parts(product, (weight_q, weight_v), (bias_q, bias_v), ctx.eps, ctx.sizes)
            wanted = [one for one, needed in zip(inputs, ctx.needs_input_grad, strict=False) if needed]
            pairs = [pair for pair in zip(parts, gradients, strict=True) if pair[0].requires_grad]  # others are frozen
            outputs, upstream = zip(*pairs, strict=True)
            found = iter(torch.autograd.grad(outputs, wanted, upstream, create_graph=again))
            return (*(next(found) if needed else None for needed in ctx.needs_input_grad[:5]), None, None, None)
        from . import norm_kernels as kernels

        (B, N, S), normed = product.shape, ctx.sizes[0] + ctx.sizes[1]
        rows, device = B * N, product.device
        share, shares = shares_of(rows, ctx.sizes, device)
        gradients = [one.to(product.dtype).contiguous() for one in gradients]
        sums = torch.empty(2, shares, normed, device=device, dtype=torch.float32)
        dx = torch.empty_like(product)
        dweight_q, dweight_v, dbias_q, dbias_v = map(torch.empty_like, (weight_q, weight_v, bias_q, bias_v))
        tile = tile_of(ctx.sizes)
        with on_device(product):
            kernels.gradient_moments[(strips(ctx.sizes[:2]), shares)](
                product, gradients[0], gradients[1], moments, sums[0], sums[1], rows, share, **tile
            )
            kernels.gradients_of_parts[programs_of(rows, ctx.sizes, device)](
                product, gradients[0], gradients[1], gradients[-1], dx, moments, sums[0], sums[1],
                weight_q, weight_v, dweight_q, dweight_v, dbias_q, dbias_v, rows, shares,
                SHARES=cast(Any, SHARES), **tile,
            )  # fmt: skip
        return dx, dweight_q, dweight_v, dbias_q, dbias_v, None, None, None


def is_batched(gradient: Tensor) -> bool:
    kinds = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return kinds.is_batchedtensor(gradient) or kinds.is_legacy_batchedtensor(gradient)


def plain_parts(
    product_BNS: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], eps: Sequence[float], sizes: Sequence[int]
) -> list[Tensor]:
    """What `normed_parts` gives, by torch, without running statistics."""
    parts = list(product_BNS.split(list(sizes), dim=-1))
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        rows_RC = parts[i].flatten(0, 1)
        normed_RC = nn.functional.batch_norm(rows_RC, None, None, weight, bias, training=True, eps=eps[i])
        parts[i] = normed_RC.view_as(parts[i])
    return parts

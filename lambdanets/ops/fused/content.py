"""The content lambda as registered operators: lambdanets::content and lambdanets::content_backward.

Letters: B batch, M context positions, K key depth, V value depth.
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .launch import on_device, power_of_two, precision_of, unit_stride
from .register import below_autograd, differentiable, operator

BACKWARD_ROWS, BACKWARD_TURNS = 32, 4


def tile_sizes(key_depth: int, value_depth: int, context: int, element_size: int) -> tuple[int, int, int]:
    """KP, VT, C: a block of context fills registers with its keys and shared memory with its values."""
    depth, value_tile = max(16, power_of_two(key_depth)), min(128, max(16, power_of_two(value_depth)))
    if depth >= 64:  # a least width of operands in shared memory: forward_kernels.py
        value_tile = max(64, value_tile)
    if element_size == 4:
        value_tile = min(32, value_tile)
    block = max(16, min(256, 4096 // depth, 16384 // (value_tile * element_size)))
    return depth, value_tile, min(block, 64) if context <= 64 else block


def content_shape(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    B, K, V = keys.shape[0], keys.shape[2], values.shape[2]
    return values.new_empty(B, K, V, dtype=torch.float32), values.new_empty(B, K, dtype=torch.float32)


@operator("content", content_shape)
def content(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """keys [B,M,K], values [B,M,V] -> the content lambda [B,K,V] and log(sum of exp(keys)) [B,K], in float32."""
    from . import content_kernels as kernels

    keys, values = unit_stride(keys), unit_stride(values)
    (B, M, K), V = keys.shape, values.shape[2]
    depth, value_tile, block = tile_sizes(K, V, M, values.element_size())
    found = torch.empty(B, K, V, device=values.device, dtype=torch.float32)
    norm = torch.empty(B, K, device=values.device, dtype=torch.float32)
    with on_device(values):
        kernels.content_forward[(B, -(-V // value_tile))](
            keys, values, found, norm, M, V, *keys.stride()[:2], *values.stride()[:2],
            K=K, KP=depth, VT=value_tile, C=block, PRECISION=precision_of(values.dtype), num_warps=4,
        )  # fmt: skip
    return found, norm


def content_backward_shape(
    gradient: Tensor, keys: Tensor, values: Tensor, found: Tensor, norm: Tensor
) -> tuple[Tensor, Tensor]:
    return keys.new_empty(keys.shape), values.new_empty(values.shape)


@operator("content_backward", content_backward_shape)
def content_backward(
    gradient: Tensor, keys: Tensor, values: Tensor, found: Tensor, norm: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values."""
    from . import content_kernels as kernels

    keys, values, gradient = unit_stride(keys), unit_stride(values), gradient.float().contiguous()
    (B, M, K), V = keys.shape, values.shape[2]
    depth, value_tile, _ = tile_sizes(K, V, M, values.element_size())
    dk = torch.empty(B, M, K, device=keys.device, dtype=keys.dtype)
    dv = torch.empty(B, M, V, device=values.device, dtype=values.dtype)
    with on_device(values):
        kernels.content_backward[(-(-M // (BACKWARD_ROWS * BACKWARD_TURNS)), B)](
            keys, values, found, norm, gradient, dk, dv, M, V, *keys.stride()[:2], *values.stride()[:2],
            K=K, KP=depth, VT=value_tile, NV=-(-V // value_tile), C=BACKWARD_ROWS, TURNS=BACKWARD_TURNS,
            PRECISION=precision_of(values.dtype), num_warps=4,
        )  # fmt: skip
    return dk, dv


class Content(torch.autograd.Function):
    """Keeps its inputs, and the two small results."""

    @staticmethod
    def forward(ctx, keys, values):
        found, norm = below_autograd(content, keys, values)
        ctx.save_for_backward(keys, values, found, norm)
        ctx.mark_non_differentiable(norm)
        ctx.set_materialize_grads(False)
        return found, norm

    @staticmethod
    def backward(ctx, gradient, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        return (None, None) if gradient is None else content_backward(gradient, *ctx.saved_tensors)


differentiable(content, Content)


@register_flop_formula(torch.ops.lambdanets.content)
def forward_flops(keys, values, *args, **kwargs) -> int:
    return 2 * keys[0] * keys[1] * keys[2] * values[2]


@register_flop_formula(torch.ops.lambdanets.content_backward)
def backward_flops(gradient, keys, values, *args, **kwargs) -> int:
    return 2 * forward_flops(keys, values)

"""Average pooling with stride 2 as registered operators, lambdanets::average_pool and its backward.

Pooling is bound by memory bandwidth: the kernels read every map about once, 16 bytes at a time, and sum in float32.
Pooling is linear, so each operator is the gradient of the other.

Letters: B batch, H x W the map, P x Q the pooled map, C channels. `kernel` is 3, with zero padding of 1, or 2.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# Triton adds num_warps and num_stages to the arguments of kernels.

from typing import Any

import torch
from torch import Tensor

from . import pooling_kernels as kernels
from .pooling import pooled_side
from .problem import ceil_div, on_device, power_of_two
from .register import differentiable, directly, operator

CHANNELS = (256, 128, 64)  # channels of a tile: the size that leaves the fewest unused
NUMBERS, COLUMNS, ROWS, WARPS = 1024, 32, 2, 4  # of a tile: numbers per row, maximum columns, rows, warps


def tile_of(channels: int, kernel: int) -> dict[str, Any]:
    size = min(CHANNELS, key=lambda size: ceil_div(channels, size) * size)
    size = min(size, power_of_two(channels))
    return dict(KERNEL=kernel, CH=size, COLS=min(COLUMNS, NUMBERS // size), ROWS=ROWS, num_warps=WARPS)


def programs(batch: int, rows: int, columns: int, channels: int, tile: dict[str, Any]) -> tuple[int]:
    """Return a grid with one dimension, because the others are limited to 65,535 programs."""
    return (batch * ceil_div(rows, tile["ROWS"]) * ceil_div(columns, tile["COLS"]) * ceil_div(channels, tile["CH"]),)


def images(like: Tensor, *shape: int) -> Tensor:
    """Return uninitialised channels-last images [B, C, H, W].

    The compiler would copy an output [B, H, W, C] to this layout before a convolution.
    """
    return torch.empty(shape, device=like.device, dtype=like.dtype, memory_format=torch.channels_last)


def pooled_images(x: Tensor, kernel: int) -> Tensor:
    B, C, H, W = x.shape
    return images(x, B, C, pooled_side(H, kernel), pooled_side(W, kernel))


def whole_images(gradient: Tensor, height: int, width: int, kernel: int) -> Tensor:
    return images(gradient, *gradient.shape[:2], height, width)


def forward(x: Tensor, kernel: int) -> Tensor:
    """Pool x [B, C, H, W] to channels-last [B, C, P, Q]."""
    x = x.contiguous(memory_format=torch.channels_last)  # a no-op for the layers of this package
    y = pooled_images(x, kernel)
    (B, C, P, Q), tile = y.shape, tile_of(x.shape[1], kernel)
    with on_device(x):
        kernels.pool_forward[programs(B, P, Q, C, tile)](x, y, *x.shape[2:], P, Q, C, **tile)
    return y


def backward(gradient: Tensor, height: int, width: int, kernel: int) -> Tensor:
    """Return the gradient of the images, channels-last [B, C, H, W], from that of the pooled images [B, C, P, Q]."""
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    dx = whole_images(gradient, height, width, kernel)
    (B, C, P, Q), tile = gradient.shape, tile_of(gradient.shape[1], kernel)
    with on_device(gradient):
        grid = programs(B, pooled_side(height, 3), pooled_side(width, 3), C, tile)
        kernels.pool_backward[grid](gradient, dx, height, width, P, Q, C, **tile)
    return dx


average_pool = operator("average_pool", pooled_images)(forward)
average_pool_backward = operator("average_pool_backward", whole_images)(backward)


class AveragePool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BCHW, kernel):
        ctx.sizes = (*x_BCHW.shape[2:], kernel)
        return directly(average_pool, x_BCHW, kernel)

    @staticmethod
    def backward(ctx, gradient_BCPQ):  # pyright: ignore[reportIncompatibleMethodOverride]
        return average_pool_backward(gradient_BCPQ, *ctx.sizes), None


class AveragePoolBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient_BCPQ, height, width, kernel):
        ctx.kernel = kernel
        return directly(average_pool_backward, gradient_BCPQ, height, width, kernel)

    @staticmethod
    def backward(ctx, gradient_BCHW):  # pyright: ignore[reportIncompatibleMethodOverride]
        return average_pool(gradient_BCHW, ctx.kernel), None, None, None


differentiable(average_pool, AveragePool)
differentiable(average_pool_backward, AveragePoolBackward)

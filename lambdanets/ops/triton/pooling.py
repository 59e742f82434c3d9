"""Average pooling by half of channels-last images: when kernels do it, and how they are launched.

Pooling waits for memory: the kernels read every map about once, 16 bytes at a time, and sum in float32.
Autograd and registration: pooling_operators.py.

Letters: B batch, H x W the map, P x Q the pooled map, C channels. `kernel`: 3, with a border of zeros, or 2.
"""

from typing import Any

import torch
from torch import Tensor

from . import interpreted, why_not
from .norms import only_torch
from .problem import ceil_div, on_device, power_of_two

CHANNELS = (256, 128, 64)  # of a tile: whichever leaves the fewest of its last one unused
NUMBERS, COLUMNS, ROWS, WARPS = 1024, 32, 2, 4  # of a tile: numbers of a row, columns at most, rows one after another


def takes(x_BCHW: Tensor) -> bool:
    """Whether the kernels may pool these images."""
    if not (x_BCHW.is_cuda or interpreted()) or type(x_BCHW) is not Tensor or x_BCHW.ndim != 4 or only_torch():
        return False
    last = x_BCHW.is_contiguous(memory_format=torch.channels_last)
    return last and why_not(x_BCHW.device, x_BCHW.dtype, 1, 1, 1) is None


def average_pool(x_BCHW: Tensor, kernel: int) -> Tensor:
    """Channels-last images [B, C, P, Q], rounded once."""
    from . import pooling_operators as operators

    # The compiler needs the operator, which ends in the function too; for eager calls the dispatcher is a detour.
    call = operators.average_pool if torch.compiler.is_dynamo_compiling() else operators.AveragePool.apply
    return call(x_BCHW, kernel)


def pooled_side(side: int, kernel: int) -> int:
    return (side + kernel - 2) // 2


def tile_of(channels: int, kernel: int) -> dict[str, Any]:
    size = min(CHANNELS, key=lambda size: ceil_div(channels, size) * size)
    size = min(size, power_of_two(channels))
    return dict(KERNEL=kernel, CH=size, COLS=min(COLUMNS, NUMBERS // size), ROWS=ROWS, num_warps=WARPS)


def programs(batch: int, rows: int, columns: int, channels: int, tile: dict[str, Any]) -> tuple[int]:
    """One dimension: the others of a grid are limited to 65,535."""
    return (batch * ceil_div(rows, tile["ROWS"]) * ceil_div(columns, tile["COLS"]) * ceil_div(channels, tile["CH"]),)


def images(like: Tensor, *shape: int) -> Tensor:
    """Channels-last ones [B, C, H, W], not filled. The compiler, which lays out as channels-last what a convolution
    follows, would copy [B, H, W, C]."""
    return torch.empty(shape, device=like.device, dtype=like.dtype, memory_format=torch.channels_last)


def forward(x: Tensor, kernel: int) -> Tensor:
    """x [B, C, H, W] -> [B, C, P, Q], channels-last."""
    from . import pooling_kernels as kernels

    x = x.contiguous(memory_format=torch.channels_last)  # already so, unless somebody calls the operator
    B, C, H, W = x.shape
    P, Q, tile = pooled_side(H, kernel), pooled_side(W, kernel), tile_of(C, kernel)
    y = images(x, B, C, P, Q)
    with on_device(x):
        kernels.pool_forward[programs(B, P, Q, C, tile)](x, y, H, W, P, Q, C, **tile)
    return y


def backward(gradient: Tensor, height: int, width: int, kernel: int) -> Tensor:
    """gradient [B, C, P, Q] -> [B, C, H, W], channels-last."""
    from . import pooling_kernels as kernels

    gradient = gradient.contiguous(memory_format=torch.channels_last)
    B, C, P, Q = gradient.shape
    tile = tile_of(C, kernel)
    dx = images(gradient, B, C, height, width)
    with on_device(gradient):
        grid = programs(B, pooled_side(height, 3), pooled_side(width, 3), C, tile)
        kernels.pool_backward[grid](gradient, dx, height, width, P, Q, C, **tile)
    return dx

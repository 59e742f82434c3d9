"""Queries, values and keys of a narrow layer in training, normed, without their product in memory.

Launches the kernels of narrow_kernels.py; when they may run: norms.py; autograd and registration: norm_operators.py.
Letters: B batch, N positions, R = B * N rows, C channels, S channels of the product.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import constant_when_compiling
from .launch import multiprocessors, on_device, power_of_two

TYPES = (torch.bfloat16,)  # not float16, whose gradients of weights lose too much: README.md
CHANNELS = 128  # of the input: more would not fit, or spill
QUERIES, SIDE = 64, 32  # channels of queries, and of values as of keys, which stand side by side
SHARED_MEMORY = 227 * 1024  # bytes that a program may take on an H100: nothing smaller was measured


class Tile(NamedTuple):
    """Rows, tiles on their way, warps, programs per multiprocessor: measured, README.md."""

    rows: int
    stages: int
    warps: int
    programs: int


MOMENTS = PARTS = Tile(64, 4, 4, 2)
PRODUCTS = {64: Tile(64, 3, 4, 2), 128: Tile(64, 4, 8, 1)}  # by padded channels
INPUTS = {64: Tile(64, 3, 4, 2), 128: Tile(64, 2, 4, 2)}
SHARES, MERGED = 512, 8  # shares of the rows at most, and channels of a program that merges their moments
TURN, SUMMED = 64, 32  # parts and numbers of a program that sums parts, in a turn
WEIGHED = 16  # channels of a program that makes the gradients of weights


@functools.cache
def shared_memory(index: int) -> int:
    return torch.cuda.get_device_properties(index).shared_memory_per_block_optin


@constant_when_compiling
def has_room(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    return shared_memory(torch.cuda.current_device() if device.index is None else device.index) >= SHARED_MEMORY


def fits(channels: int, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether these kernels take inputs of this width and type, and parts of these sizes."""
    narrow = channels <= CHANNELS and sizes[0] <= QUERIES and max(sizes[1:]) <= SIDE
    return narrow and dtype in TYPES and has_room(device)


def channels_of(channels: int, sizes: Sequence[int]) -> dict[str, Any]:
    """What kernels know of the channels. At least 64 of the input: narrow_kernels.py."""
    padded = max(64, power_of_two(channels))
    return dict(C=channels, CP=padded, FIRST=sizes[0], NORMED=sizes[0] + sizes[1], S=sum(sizes))


def parts_of(sizes: Sequence[int]) -> dict[str, Any]:
    """Widths for kernels that make the parts, each at least as wide as a product on tensor cores."""
    values, keys = (max(16, power_of_two(max(1, size))) for size in sizes[1:])
    return dict(QP=QUERIES, VP=values, KP=keys)


def options(tile: Tile) -> dict[str, Any]:
    return dict(ROWS=tile.rows, STAGES=tile.stages, num_warps=tile.warps)


def programs_of(rows: int, tile: Tile, device: torch.device) -> int:
    return max(1, min(-(-rows // tile.rows), multiprocessors(device) * tile.programs, SHARES))


def forward(
    inputs: Tensor, weight: Tensor, weight_q: Tensor, weight_v: Tensor, bias_q: Tensor, bias_v: Tensor,
    mean_q: Tensor, mean_v: Tensor, var_q: Tensor, var_v: Tensor, count_q: Tensor, count_v: Tensor,
    eps: Sequence[float], momentum: Sequence[float], sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, values, keys, and the moments [2, normed]: mean and 1 / deviation. Running statistics move in place."""
    from . import narrow_kernels as kernels

    inputs, weight = inputs.contiguous(), weight.contiguous()  # already so, unless somebody calls the operator
    (B, N, C), device, S, normed = inputs.shape, inputs.device, sum(sizes), sizes[0] + sizes[1]
    rows, tiles, known = B * N, -(-B * N // MOMENTS.rows), channels_of(C, sizes)
    share = -(-tiles // programs_of(rows, MOMENTS, device)) * MOMENTS.rows
    shares = -(-rows // share)
    parts = [torch.empty(B, N, size, device=device, dtype=inputs.dtype) for size in sizes]
    sums = torch.empty(2, shares, normed, device=device, dtype=torch.float32).unbind()
    moments = torch.empty(2, normed, device=device, dtype=torch.float32)
    line = torch.empty(2, S, device=device, dtype=torch.float32)
    merging: dict[str, Any] = dict(FIRST=sizes[0], NORMED=normed, S=S, SHARES=SHARES, COLS=MERGED)
    with on_device(inputs):
        kernels.moments_of_product[(shares,)](
            inputs, weight, sums[0], sums[1], rows, share, **known, **parts_of(sizes), **options(MOMENTS)
        )  # fmt: skip
        kernels.merge_moments[(-(-S // MERGED),)](
            sums[0], sums[1], moments, line, weight_q, weight_v, bias_q, bias_v,
            mean_q, mean_v, var_q, var_v, count_q, count_v,
            rows, share, shares, eps[0], eps[1], momentum[0], momentum[1], **merging,
        )  # fmt: skip
        kernels.parts_of_product[(programs_of(rows, PARTS, device),)](
            inputs, weight, line, parts[0], parts[1], parts[2], rows, **known, **parts_of(sizes), **options(PARTS)
        )
    return parts[0], parts[1], parts[2], moments


def backward(
    dq: Tensor, dv: Tensor, dk: Tensor,
    inputs: Tensor, weight: Tensor, weight_q: Tensor, weight_v: Tensor, bias_q: Tensor, bias_v: Tensor,
    moments: Tensor, sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the inputs, the projection's weights, and the norms' weights and biases."""
    from . import narrow_kernels as kernels

    inputs, weight = inputs.contiguous(), weight.contiguous()
    (B, N, C), device, S = inputs.shape, inputs.device, sum(sizes)
    rows, known, parts = B * N, channels_of(C, sizes), dict(QP=QUERIES, SIDE=SIDE)
    dq, dv, dk = (one.to(inputs.dtype).contiguous() for one in (dq, dv, dk))
    on_products, on_inputs = PRODUCTS[known["CP"]], INPUTS[known["CP"]]
    programs, length = programs_of(rows, on_products, device), C * C + S * C + C + S
    partial = torch.empty(programs, length, device=device, dtype=torch.float32)
    sums = torch.empty(length, device=device, dtype=torch.float32)
    line = torch.empty(3, S, device=device, dtype=torch.float32)
    dx, dweight = torch.empty_like(inputs), torch.empty_like(weight)
    dweight_q, dweight_v, dbias_q, dbias_v = map(torch.empty_like, (weight_q, weight_v, bias_q, bias_v))
    summing: dict[str, Any] = dict(TURN=TURN, COLS=SUMMED)
    weighing: dict[str, Any] = dict(COLS=WEIGHED, num_warps=8)
    with on_device(inputs):
        kernels.products_of_gradients[(programs,)](
            inputs, dq, dv, dk, partial, rows, **known, **parts, **options(on_products)
        )  # fmt: skip
        kernels.sum_parts[(-(-length // SUMMED),)](partial, sums, programs, length, **summing)
        kernels.gradients_of_weights[(-(-S // WEIGHED),)](
            sums, weight, dweight, moments, line, weight_q, weight_v, dweight_q, dweight_v, dbias_q, dbias_v, rows,
            **known, **weighing,
        )  # fmt: skip
        kernels.gradients_of_inputs[(programs_of(rows, on_inputs, device),)](
            inputs, weight, line, dq, dv, dk, dx, rows, **known, **parts, **options(on_inputs)
        )
    return dx, dweight, dweight_q, dweight_v, dbias_q, dbias_v

"""Position lambdas by the lambda convolution, in both forms that the paper gives.

Letters: B batch, N queries, M context positions, H heads, K key depth, V value depth, U intra-depth.

The table is the kernel of either an (n+1)-d convolution, with the value depth as an additional axis of kernel size 1,
or an n-d depthwise convolution with a channel multiplier, with the table repeated for every value channel. Memory: the
lambdas, B N K V.

The backend "conv" uses the first form for one or two axes and the second for three, because torch has no 4-d
convolution. The backend "depthwise" (depthwise.py) always uses the second form.
"""

from collections.abc import Callable
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from lambdanets.ops.positions import Axis, Relative
from lambdanets.ops.problem import Problem

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}

LARGE = 2**24  # bytes: larger lambdas are allocated anew in every call, with page faults


def why_not(problem: Problem) -> str | None:
    """Return the reason why this backend cannot run, or None."""
    if not isinstance(problem.positions, Relative):
        return "a convolution needs relative positions on a grid"
    if problem.mask_NM is not None:
        return "a convolution cannot apply a mask, which differs between queries"
    if problem.positions.dims > 3:
        return f"torch has convolutions on up to 3 axes, got {problem.positions.dims}"
    return None


def position_output(problem: Problem) -> Tensor:
    """Return the position output, [B, N, H, V]."""
    assert isinstance(problem.positions, Relative)
    return convolved(problem, extra_axis if problem.positions.dims < 3 else depthwise)


def convolved(problem: Problem, convolve: Callable[[Tensor, Tensor, list[Axis]], Tensor]) -> Tensor:
    """Return the position output [B, N, H, V] by one of the two forms, `extra_axis` or `depthwise`."""
    positions = problem.positions
    assert isinstance(positions, Relative)
    if problem.causal:
        positions = positions.causal(problem.strict)
    if torch.compiler.is_compiling():  # clipping would fix symbolic sizes
        table, axes = positions.table, positions.axes()
    else:
        table, axes = positions.clipped()
    lambdas_BKVN = convolve(problem.values_BMVU, table, axes)
    return torch.einsum("bnhk,bkvn->bnhv", problem.queries_BNHK, lambdas_BKVN)


def work(problem: Problem) -> tuple[float, float]:
    """Return the numbers of multiply-adds and of intermediate elements for the cost model."""
    positions = problem.positions
    assert isinstance(positions, Relative)
    _, axes = positions.clipped()
    B, N, _, _, K, V, U = problem.sizes
    elements = 2 * B * N * K * V
    if not problem.needs_grad and B * N * K * V * problem.values_BMVU.element_size() > LARGE:
        elements *= 2
    return B * N * K * V * U * prod(min(a.scope, a.context) for a in axes), elements


def extra_axis(values_BMVU: Tensor, table: Tensor, axes: list[Axis]) -> Tensor:
    """Return position lambdas [B, K, V, N] by an (n+1)-d convolution: U channels in, K out, V a spatial axis."""
    B, _, V, U = values_BMVU.shape
    grid = [a.context for a in axes]
    inputs = values_BMVU.permute(0, 3, 2, 1).reshape(B, U, V, *grid)
    kernel = table.movedim((-2, -1), (0, 1)).unsqueeze(2).contiguous()  # [K, U, 1, *scope]
    inputs, padding = padded(inputs, axes)
    convolve = CONVOLUTIONS[len(axes) + 1]
    lambdas = convolve(
        inputs,
        kernel,
        stride=(1, *(a.stride for a in axes)),
        padding=(0, *padding),
        dilation=(1, *(a.dilation for a in axes)),
    )
    return lambdas.flatten(3)


def depthwise(values_BMVU: Tensor, table: Tensor, axes: list[Axis]) -> Tensor:
    """Return position lambdas [B, K, V, N] by an n-d depthwise convolution: V groups of U channels in and K out."""
    B, _, V, U = values_BMVU.shape
    inputs = values_BMVU.permute(0, 2, 3, 1).reshape(B, V * U, *[a.context for a in axes])
    kernel = table.movedim((-2, -1), (0, 1))  # [K, U, *scope]
    K = kernel.shape[0]
    kernel = kernel.expand(V, *kernel.shape).flatten(0, 1).contiguous()
    inputs, padding = padded(inputs, axes)
    lambdas = CONVOLUTIONS[len(axes)](
        inputs,
        kernel,
        stride=tuple(a.stride for a in axes),
        padding=padding,
        dilation=tuple(a.dilation for a in axes),
        groups=V,
    )
    return lambdas.view(B, V, K, prod(lambdas.shape[2:])).transpose(1, 2)


def padded(inputs: Tensor, axes: list[Axis]) -> tuple[Tensor, tuple[int, ...]]:
    """Pad the context with zeros so that the first window belongs to the first query and the last to the last query.

    Returns:
        The inputs, and the padding that the convolution has to add. The convolution adds equal borders, which is
        faster; other borders are added here. A negative border crops context that no query reaches.
    """
    left = [-a.first for a in axes]
    right = [(a.queries - 1) * a.stride + a.last - (a.context - 1) for a in axes]
    # With a stride the border depends on the size modulo the stride, which an exported program must not fix.
    dynamic = torch.compiler.is_exporting() and any(a.stride > 1 for a in axes)
    if not dynamic and all(low == high and low >= 0 for low, high in zip(left, right, strict=True)):
        return inputs, tuple(left)
    borders = [b for low, high in zip(reversed(left), reversed(right), strict=True) for b in (low, high)]
    return F.pad(inputs, borders), (0,) * len(axes)

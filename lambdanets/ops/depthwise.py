"""Position lambdas by an n-d depthwise convolution with channel multiplier, the second form that the paper gives.

Letters: B batch, N queries, K key depth, V value depth, U intra-depth, R relative positions.

Each of the V value channels is convolved with the same K kernels, so the table is repeated V times. With intra-depth
the convolution has V groups of U input and K output channels. Memory: the lambdas, B N K V, and the repeated table,
R V K U.
"""

from math import prod

from torch import Tensor

from lambdanets.ops import conv
from lambdanets.ops.conv import why_not
from lambdanets.ops.positions import Relative
from lambdanets.ops.problem import Problem

__all__ = ["position_output", "why_not", "work"]


def position_output(problem: Problem) -> Tensor:
    """Return the position output, [B, N, H, V]."""
    return conv.convolved(problem, conv.depthwise)


def work(problem: Problem) -> tuple[float, float]:
    """Return the numbers of multiply-adds and of intermediate elements (with the repeated table) for the cost model."""
    positions = problem.positions
    assert isinstance(positions, Relative)
    _, axes = positions.clipped()
    _, _, _, _, K, V, U = problem.sizes
    macs, elements = conv.work(problem)
    return macs, elements + K * V * U * prod(a.scope for a in axes)

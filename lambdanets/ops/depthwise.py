"""The lambda convolution as an n-d depthwise convolution with channel multiplier, the paper's other form of "conv".

Letters: B batch, N queries, K key depth, V value depth, U intra-depth, R relative positions.

Each of the V value channels is convolved with the same K kernels: the table, repeated V times. With intra-depth the
convolution has V groups of U channels in and K out. Memory: lambdas, B N K V, and the repeated table, R V K U.
"""

from math import prod

from torch import Tensor

from lambdanets.ops import conv
from lambdanets.ops.conv import why_not
from lambdanets.ops.positions import Relative
from lambdanets.ops.problem import Problem

__all__ = ["position_output", "why_not", "work"]


def position_output(problem: Problem) -> Tensor:
    """[B, N, H, V]."""
    return conv.convolved(problem, conv.depthwise)


def work(problem: Problem) -> tuple[float, float]:
    """Multiply-adds, and elements of intermediates: those of "conv", and the repeated table."""
    positions = problem.positions
    assert isinstance(positions, Relative)
    _, axes = positions.clipped()
    _, _, _, _, K, V, U = problem.sizes
    macs, elements = conv.work(problem)
    return macs, elements + K * V * U * prod(a.scope for a in axes)

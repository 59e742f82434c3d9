"""Position lambdas by Fourier transforms, for large maps and scopes: the cost hardly depends on the scope.

Letters: B batch, N queries, M context positions, H heads, K key depth, V value depth, U intra-depth.

A cross-correlation is a product in the frequency domain: lambda(f) = conj(table(f)) values(f), summed over u.
Along an axis, a transform of length max(M - first, last query + last + 1) keeps the wrapped-around part separate.
Memory: the lambdas of a batch chunk in the frequency domain, then B N K V.
"""

from math import log2, prod

import torch
from torch import Tensor

from lambdanets.ops.positions import Relative, wrap
from lambdanets.ops.problem import Problem

WORKSPACE = 2**22  # complex elements of lambdas in the frequency domain at a time (at least one example)


def why_not(problem: Problem) -> str | None:
    """Return the reason why this backend cannot run, or None."""
    if not isinstance(problem.positions, Relative):
        return "a Fourier transform needs relative positions on a grid"
    if problem.mask_NM is not None:
        return "a Fourier transform cannot apply a mask, which differs between queries"
    return None


def position_output(problem: Problem) -> Tensor:
    """Return the position output, [B, N, H, V]."""
    positions = problem.positions
    assert isinstance(positions, Relative)
    if problem.causal:
        positions = positions.causal(problem.strict)
    table, axes = positions.clipped()
    B, N, _, _, K, V, U = problem.sizes
    dims = tuple(range(-len(axes), 0))
    lengths = [fast_length(a.unwrapped_length) for a in axes]
    table_KU = wrap(table, axes, lengths).movedim((-2, -1), (0, 1))  # [K, U, *lengths]
    # Not .conj(), which only sets a flag that compiled code ignores.
    spectrum_KU = torch.fft.rfftn(table_KU, dim=dims).conj_physical()
    grid = [a.context for a in axes]
    chunk = max(1, WORKSPACE // max(1, K * V * prod(lengths) // 2))
    outputs = []
    for start in range(0, max(B, 1), chunk):
        values = problem.values_BMVU[start : start + chunk]
        values = values.permute(0, 2, 3, 1).reshape(-1, V, U, *grid)
        spectrum_BVU = torch.fft.rfftn(values, s=lengths, dim=dims)
        lambdas = torch.einsum("ku...,bvu...->bkv...", spectrum_KU, spectrum_BVU)
        lambdas = torch.fft.irfftn(lambdas, s=lengths, dim=dims)
        for dim, axis in zip(dims, axes, strict=True):
            lambdas = lambdas.narrow(dim, 0, (axis.queries - 1) * axis.stride + 1)
            if axis.stride > 1:
                lambdas = lambdas.index_select(dim, torch.arange(axis.queries, device=lambdas.device) * axis.stride)
        lambdas = lambdas.reshape(-1, K, V, N)
        outputs.append(torch.einsum("bnhk,bkvn->bnhv", problem.queries_BNHK[start : start + chunk], lambdas))
    return torch.cat(outputs)


def work(problem: Problem) -> tuple[float, float]:
    """Return the numbers of multiply-adds and of intermediate elements for the cost model."""
    positions = problem.positions
    assert isinstance(positions, Relative)
    _, axes = positions.clipped()
    B, N, _, _, K, V, U = problem.sizes
    spectrum = prod(fast_length(a.unwrapped_length) for a in axes)
    transforms = (B * V * U + K * U + B * K * V) * spectrum
    return 2 * B * K * V * U * spectrum, transforms * max(1.0, log2(max(2, spectrum))) + 2 * B * N * K * V


def fast_length(length: int) -> int:
    """Return the smallest number from `length` up whose only prime factors are 2, 3 and 5."""
    while True:
        rest = length
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return length
        length += 1

"""The fused kernels as a backend for `choose.py`: content and position part in one pass.

Letters: B batch, N queries, M context positions, H heads, K key depth, V value depth, U intra-depth.
"""

from dataclasses import replace

import torch
from torch import Tensor

from lambdanets.ops import triton as fused
from lambdanets.ops.content import content_lambda
from lambdanets.ops.positions import Dense, Relation, Relative
from lambdanets.ops.problem import Problem


def why_not(problem: Problem) -> str | None:
    """Return the reason why this backend cannot run, or None."""
    positions = problem.positions
    if positions is None:
        return "without positions there is nothing to fuse"
    if isinstance(positions, Relation):
        return "the fused kernels take relative or dense positions, not relations by index"
    if problem.mask_NM is not None or problem.causal:
        return "the fused kernels share one content lambda among all queries: no masks, no causal order"
    dims, dilation = 1, 1
    if isinstance(positions, Relative):
        dims, dilation = positions.dims, max(positions.dilation)
        if len(set(positions.stride)) > 1:
            return f"the fused kernels take one stride for all axes, got {positions.stride}"
    if problem.queries_BNHK.dtype != problem.values_BMVU.dtype:
        return f"queries are {problem.queries_BNHK.dtype} and values {problem.values_BMVU.dtype}: make them one dtype"
    _, _, _, H, K, V, U = problem.sizes
    return fused.why_not(problem.device, problem.queries_BNHK.dtype, K, V, H, U, dims, dilation=dilation)


def work(problem: Problem) -> tuple[float, float]:
    """Return the numbers of multiply-adds and of elements read and written, for the cost model."""
    B, N, M, H, K, V, U = problem.sizes
    pairs = N * M * U
    if isinstance(problem.positions, Relative):  # whole context rows, of the rows in reach
        _, axes = problem.positions.clipped()
        pairs = pairs * min(1.0, (axes[0].last - axes[0].first + 1) / axes[0].context)
    return B * K * V * (pairs + N * H), B * (N * H * (K + V) + M * U * V)


def whole_output(problem: Problem, dtype: torch.dtype) -> Tensor:
    """Return the sum of position and content output, [B, N, H, V], accumulated in float32."""
    positions, values, keys = problem.positions, problem.values_BMVU, problem.keys_BMKU
    content = None
    if keys is not None:  # the kernels support the softmax without mask and intra-depth
        if problem.key_norm == "softmax" and problem.context_mask_BM is None and keys.shape[3] == 1:
            keys = keys.squeeze(3)
        else:
            content = content_lambda(replace(problem, keys_BMKU=keys.to(torch.float32)))  # normalised in float32
            keys = None
    if values.shape[3] == 1:
        values = values.squeeze(3)
    if isinstance(positions, Dense):
        return fused.fused_dense(problem.queries_BNHK, values, content, positions.embeddings, keys=keys)
    assert isinstance(positions, Relative)
    where = (positions.query_grid, positions.context_grid, positions.stride[0])
    return fused.fused_relative(problem.queries_BNHK, values, content, positions.table, *where, keys=keys)


def position_output(problem: Problem) -> Tensor:
    """Return the position output alone."""
    return whole_output(replace(problem, keys_BMKU=None), torch.float32)

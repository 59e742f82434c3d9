"""The lambda operation as fused Triton kernels, which compute and apply lambdas on the chip without storing them.

Letters: B batch, N queries, M context positions, H heads, K key depth, V value depth, U intra-depth.
Triton and the kernels are imported by the first call, not with this package. README.md has the derivation and the
layouts.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["fused_dense", "fused_relative", "why_not"]

TYPES = (torch.bfloat16, torch.float16, torch.float32)


def constant_when_compiling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function like `torch.compiler.assume_constant_result`, without importing the compiler and Triton."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_compiling
def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@constant_when_compiling
def why_not(
    device: torch.device, dtype: torch.dtype, key_depth: int, value_depth: int, heads: int,
    intra_depth: int = 1, dims: int = 2, *, dilation: int = 1,
) -> str | None:  # fmt: skip
    """Return the reason why the fused kernels cannot run this, or None."""
    if not has_triton():
        return "the fused kernels need Triton, which is not installed"
    if device.type == "cuda":
        if torch.version.hip is not None:
            return "the fused kernels were never run on AMD GPUs"
        index = torch.cuda.current_device() if device.index is None else device.index
        if capability(index) < (8, 0):
            return f"the fused kernels need capability 8.0; this GPU has {'.'.join(map(str, capability(index)))}"
    elif not (device.type == "cpu" and interpreted()):
        return f"the fused kernels need a CUDA GPU (or TRITON_INTERPRET=1 on the CPU), not {device.type}"
    if device.type == "cpu" and dtype == torch.bfloat16:
        return "Triton's interpreter does not support bfloat16, because numpy has no such dtype: use float16 or float32"
    if dtype not in TYPES:
        return f"the fused kernels take bfloat16, float16 and float32, not {str(dtype).removeprefix('torch.')}"
    if dims > 2:
        return f"the fused kernels take 1-d and 2-d positions, not {dims}-d"
    if dilation != 1:
        return "the fused kernels have no dilation"
    if not 1 <= key_depth <= 64:
        return f"the fused kernels take a key depth of 1 to 64, not {key_depth}"
    if not 1 <= value_depth <= 1024:
        return f"the fused kernels take a value depth of 1 to 1024, not {value_depth}"
    if not 1 <= heads <= 128:
        return f"the fused kernels take 1 to 128 heads, not {heads}"
    if not 1 <= intra_depth <= 64:
        return f"the fused kernels take an intra-depth of 1 to 64, not {intra_depth}"
    return None


def with_intra_depth(values: Tensor, embeddings: Tensor, position_dims: int) -> tuple[Tensor, Tensor]:
    """Merge intra-depth into the context: values [B,M,V(,U)] -> [B,M*U,V], embeddings [*positions,K(,U)] -> [...,K,U].

    The sum over u is equivalent to a sum over a context that is U times longer.
    """
    if embeddings.dim() == position_dims + 1:
        embeddings = embeddings.unsqueeze(-1)
    if values.dim() == 4:
        values = values.permute(0, 1, 3, 2).reshape(values.shape[0], -1, values.shape[2])
    return values, embeddings


def fused_relative(
    queries: Tensor, values: Tensor, content: Tensor | None, table: Tensor,
    query_grid: Sequence[int], context_grid: Sequence[int], stride: int = 1, *, keys: Tensor | None = None,
    pooled: bool = False,
) -> Tensor:  # fmt: skip
    """Apply content and relative position lambdas to their queries.

    table[i] is the embedding of context - query * stride = i - (scope - 1) // 2. Context outside the grid contributes
    nothing.

    Args:
        queries: [B,N,H,K].
        values: [B,M,V(,U)].
        content: the content lambda [B,K,V], or None.
        table: [*scope,K(,U)] with one or two scope axes.
        query_grid, context_grid: shapes of the queries (N) and of the context (M).
        stride: distance between neighbouring queries, in context positions.
        keys: keys [B,M,K] from which to compute the content lambda by a softmax over m (requires U = 1).
        pooled: apply 3x3 average pooling with stride 2 and padding 1 to the output (2-d).

    Returns:
        The output [B,N,H,V], or [B,P,H,V] if pooled.
    """
    from . import operators

    dims = len(query_grid)
    if pooled and dims != 2:
        raise ValueError(f"windows of 3x3 need two axes, got a grid {tuple(query_grid)}")
    values, table = with_intra_depth(values, table, dims)
    if dims == 1:  # a map of width 1, so that the band of rows in reach is exact
        query_grid, context_grid, table = [query_grid[0], 1], [context_grid[0], 1], table.unsqueeze(1)
    arguments = (queries.flatten(2), values.to(queries.dtype), keys, content, table)
    output = operators.fused(*arguments, list(query_grid), list(context_grid), stride, pooled)[0]
    return output.unflatten(2, (queries.shape[2], values.shape[2]))


def fused_dense(
    queries: Tensor, values: Tensor, content: Tensor | None, embeddings: Tensor, *, keys: Tensor | None = None
) -> Tensor:
    """Apply content and position lambdas like `fused_relative`, with an embedding for every pair, [N,M,K(,U)]."""
    from . import operators

    values, embeddings = with_intra_depth(values, embeddings, 2)
    arguments = (queries.flatten(2), values.to(queries.dtype), keys, content, embeddings)
    return operators.fused(*arguments, [], [], 1, False)[0].unflatten(2, (queries.shape[2], values.shape[2]))


def compiled_kernels() -> int:
    """Return the number of kernel variants that this process has compiled or loaded."""
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in sys.modules.items() if name.startswith(f"{__name__}.")]
    kernels = {id(f): f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)}
    return sum(len(cache[0]) for kernel in kernels.values() for cache in kernel.device_caches.values())

"""The sizes of a call of the fused operation, and helpers to launch kernels.

A mode is a module with two constants and three functions:
    POOLS       whether its output is already pooled
    OVERLAPS    whether its backward runs kernels on several streams
    why_not(problem, backward) -> str | None      the reason why it does not run this problem, or None
    forward(problem, q, v, c, table) -> y
    backward(problem, dy, q, v, c, table, needs, side) -> dq, dv, dc, dtable
with q [B,N,H,K], v [B,M,V], the content lambda c [B,K,V] in float32 or None, the table [scope_y,scope_x,K,U] or dense
embeddings [N,M,K,U], and y [B,N,H,V]. `needs` selects the gradients to compute; `side`: see streams.py.

Letters: B batch, N queries, M context positions (times intra-depth U), H heads, K key depth, V value depth.
"""

import contextlib
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
Needs = tuple[bool, bool, bool, bool]


@dataclass(frozen=True)
class Geometry:
    """The grids of queries and context. query_grid is None for dense embeddings."""

    query_grid: tuple[int, int] | None
    context_grid: tuple[int, int]
    scope: tuple[int, int]
    stride: int = 1
    intra_depth: int = 1

    @property
    def centre(self) -> tuple[int, int]:
        return (self.scope[0] - 1) // 2, (self.scope[1] - 1) // 2

    def extent(self) -> tuple[int, ...]:
        """Return query grid, context grid, and reach backward and forward along each axis, as kernel arguments."""
        assert self.query_grid is not None
        (back_y, back_x), (scope_y, scope_x) = self.centre, self.scope
        return (*self.query_grid, *self.context_grid, back_y, back_x, scope_y - 1 - back_y, scope_x - 1 - back_x)


def pairs_in_scope(queries: int, context: int, scope: int, stride: int) -> int:
    """Return the number of pairs (n, m) of one axis that lie in scope and inside the context."""
    back = (scope - 1) // 2
    first = range(-back, queries * stride - back, stride)  # positions in the scopes of the queries
    return sum(max(min(low + scope, context) - max(low, 0), 0) for low in first)


def count_flops(queries, values, embeddings, query_grid, context_grid, stride) -> int:
    """Return the FLOPs for given shapes: 2 * (b*pairs*u*k*v for the lambdas + b*n*h*k*v to apply them).

    Only pairs in scope count. Pooling does not change the count, although other kernels may run.
    """
    (batch, length, joined), depth = queries, embeddings[2]
    if query_grid:
        pairs = pairs_in_scope(query_grid[0], context_grid[0], embeddings[0], stride)
        pairs *= pairs_in_scope(query_grid[1], context_grid[1], embeddings[1], stride)
    else:
        pairs = embeddings[0] * embeddings[1]
    return 2 * batch * values[2] * (depth * pairs * embeddings[3] + length * joined)


def content_flops(keys, values) -> int:
    return 0 if keys is None else 2 * keys[0] * keys[1] * keys[2] * values[2]


@dataclass(frozen=True)
class Problem:
    """Sizes and dtype of a call. `pooled`: followed by 3x3 average pooling with stride 2."""

    geometry: Geometry
    B: int
    N: int
    M: int
    H: int
    K: int
    V: int
    dtype: torch.dtype
    device: torch.device
    pooled: bool = False

    @classmethod
    def of(cls, geometry: Geometry, q_BNHK: Tensor, v_BMV: Tensor, pooled: bool = False) -> "Problem":
        (B, N, H, K), (M, V) = q_BNHK.shape, v_BMV.shape[1:]
        return cls(geometry, B, N, M, H, K, V, q_BNHK.dtype, q_BNHK.device, pooled)

    @property
    def work(self) -> float:
        """The approximate number of operations of the forward pass, and of each product of the backward pass."""
        scope = self.geometry.scope
        return 2.0 * self.B * self.N * min(self.M, scope[0] * scope[1]) * self.K * self.V

    @property
    def half(self) -> bool:
        return self.dtype.itemsize == 2

    @property
    def precision(self) -> str:
        return precision_of(self.dtype)

    def content_gradient(self, q_BNHK: Tensor, dy_BNHV: Tensor) -> Tensor:
        """Return dc [B, K, V], rounded to the dtype of q."""
        return torch.bmm(q_BNHK.reshape(self.B, -1, self.K).mT, dy_BNHV.reshape(self.B, -1, self.V))

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=dtype or self.dtype)

    def new_float32(self, *shape: int) -> Tensor:
        return self.new(*shape, dtype=torch.float32)


def precision_of(dtype: torch.dtype) -> str:
    """Return the precision of float32 products for Triton; it has no effect for half-precision types.

    torch's "highest" becomes three TF32 products of split operands, added in float32, which are as accurate as IEEE
    products (HISTORY.md).
    """
    return "tf32x3" if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def shares(device: torch.device, programs: int, divisible: int, per_processor: int) -> int:
    """Return into how many shares to split an axis of `divisible` steps, so that the grid fills the GPU about once."""
    return max(1, min(divisible, multiprocessors(device) * per_processor // max(programs, 1)))


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def without_autocast(tensor: Tensor) -> torch.autocast:
    """Return a context manager that disables autocast, so that products keep the dtype of their operands."""
    return torch.autocast("cuda" if tensor.is_cuda else "cpu", enabled=False)


def unit_stride(tensor: Tensor) -> Tensor:
    """Return a tensor whose last stride is 1, as the kernels require; slices of a projection need no copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()

"""The mode for lambdas followed by 3x3 average pooling with stride 2, computed like attention: pool first.

    z[p, h, v] = 1/9 sum_m s[p, h, m] v[m, v]        s[p, h, m] = sum over the places n of window p of q[n, h] . e_nm

Without a softmax the order of the products is free. Pooling leaves a quarter of the outputs, and s has H numbers per
pair of window and context position, where lambdas have K: far less work for small maps. Both sums are matrix products,
the first for each window with rows (head, example), the second for each example with rows (window, head); the layout
[P, H, B, M] of s serves both. The content lambda adds K columns to s, with the summed queries of the windows, and K
rows to the values. README.md has the costs.

Letters: B batch, N queries, M = N context positions, C columns of s, P windows, H heads, K key depth, V value depth.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# Triton adds num_warps and num_stages to the arguments of kernels.

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import pool_first_kernels as kernels
from . import tables
from .pooling import pooled_side
from .problem import Geometry, Gradients, Needs, Problem, ceil_div, on_device, power_of_two, without_autocast
from .streams import ONE_BY_ONE, Sides

POOLS, OVERLAPS = True, False
PLACES = 9  # positions of a window
WORKSPACE = 2**29  # maximum bytes of s at a time, and of E
NUMBERS = 4096  # numbers of queries in a tile


@dataclass(frozen=True)
class Moves:
    """Multiply-adds of lambdas that take as long as all memory accesses to one number of s (map) or E (embedding)."""

    map: int
    embedding: int


# Fitted to times with 1 to 256 images (maps-variants-cuda.json).
FORWARD, BACKWARD = Moves(550, 440), Moves(330, 150)


def why_not(problem: Problem, backward: bool) -> str | None:
    """Return the reason why this mode cannot run or is slower, or None.

    It computes all pairs of positions, lambdas only those in scope.
    """
    geometry, B, H, K, V = problem.geometry, problem.B, problem.H, problem.K, problem.V
    grid, scope = geometry.query_grid, geometry.scope
    if not problem.pooled:
        return "no pooling follows"
    if grid is None or grid != geometry.context_grid or geometry.stride != 1 or geometry.intra_depth != 1:
        return "pooling first takes relative positions with stride 1 and intra-depth 1 on one grid"
    (rows, across), (_, columns), depth = windows_of(grid), columns_of(grid[0] * grid[1], K), PLACES * K
    pairs = rows * across * columns
    if not problem.half:
        return "cuBLAS has no tensor cores for float32, unless it may be rounded"
    if pairs * depth * problem.dtype.itemsize > WORKSPACE:
        return "the embeddings of all windows would take too much memory"
    moves = BACKWARD if backward else FORWARD
    maps = B * pairs * H * max(depth + V, moves.map)
    lambdas = B * grid[0] * grid[1] * min(scope[0], grid[0]) * min(scope[1], grid[1]) * K * V
    if maps + pairs * depth * moves.embedding >= lambdas:  # embeddings are computed once for the whole batch
        return "lambdas first are faster"
    return None


def windows_of(grid: Sequence[int]) -> tuple[int, int]:
    return pooled_side(grid[0], 3), pooled_side(grid[1], 3)


def columns_of(context: int, depth: int) -> tuple[int, int]:
    """Return the first column of the content and the number of columns, multiples of 32 bytes for fast products."""
    first = ceil_div(context, 16) * 16
    return first, ceil_div(first + depth, 16) * 16


def parts_of(batch: int, bytes_each: int) -> list[slice]:
    """Split the batch into parts whose maps fit into the workspace."""
    size = max(1, WORKSPACE // bytes_each)
    return [slice(start, min(start + size, batch)) for start in range(0, batch, size)]


def expand(table: Tensor, geometry: Geometry, dtype: torch.dtype) -> Tensor:
    """Expand a table [scope_y, scope_x, K, 1] to E [C, P, 9 * K]: embeddings of windows, then units for content."""
    K, grid, windows = table.shape[2], geometry.context_grid, windows_of(geometry.context_grid)
    (first, columns), count = columns_of(grid[0] * grid[1], K), windows[0] * windows[1]
    expanded = torch.empty(columns, count, PLACES * K, device=table.device, dtype=dtype)
    kernels.expand_windows[(ceil_div(count * PLACES * K, tables.COLUMNS), columns // tables.ROWS)](
        table.contiguous(), expanded, count, *grid, windows[1], *geometry.scope, *geometry.centre, first,
        K=K, ROW_BLOCK=tables.ROWS, COLUMN_BLOCK=tables.COLUMNS, num_warps=4,
    )  # fmt: skip
    return expanded


def fold(gradient: Tensor, table: Tensor, geometry: Geometry) -> Tensor:
    """Sum the gradient of E [P, 9 * K, C] to that of the table, in float32."""
    # Windows are queries of depth 9 K with a scope that is wider by two: place j of a window is shifted by j.
    (height, width, K, _), grid = table.shape, geometry.context_grid
    around = Geometry(windows_of(grid), grid, (height + 2, width + 2), stride=2)
    like = torch.empty(*around.scope, PLACES * K, 1, device=table.device, dtype=torch.float32)
    shifted = tables.fold(gradient.flatten(0, 1)[None], like, around, PLACES * K)
    down, right = (width + 2) * PLACES * K, PLACES * K
    strides = (down, right, down + 3 * K, right + K, 1)  # third axis: the next row and the next row of places
    return shifted.as_strided((height, width, 3, 3, K), strides).sum((2, 3)).unsqueeze(3)


def gather(q: Tensor, grid: Sequence[int]) -> Tensor:
    """Gather the queries of every window, q [B, N, H, K] -> [P, H * B, 9 * K]."""
    (B, _, H, K), (rows, across) = q.shape, windows_of(grid)
    gathered = torch.empty(rows * across, H * B, PLACES * K, device=q.device, dtype=q.dtype)
    depth = power_of_two(PLACES * K)
    block = max(1, NUMBERS // depth)
    kernels.gather[(rows * across, ceil_div(H * B, block))](
        q, gathered, B, *grid, across, *q.stride()[:2], H=H, K=K, JK=depth, RB=block, num_warps=4
    )
    return gathered


def scatter(gathered: Tensor, dq: Tensor, grid: Sequence[int]) -> None:
    """Sum gradients of the queries of windows [P, H * B, 9 * K] to those of the queries, contiguous dq [B, N, H, K]."""
    B, N, H, K = dq.shape
    joined = power_of_two(H * K)
    block = max(1, min(64, NUMBERS // joined))
    kernels.scatter[(N, ceil_div(B, block))](
        gathered, dq, B, grid[1], *windows_of(grid), H=H, K=K, HK=joined, BB=block, num_warps=4
    )


def maps_of(gathered: Tensor, expanded: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return s by window, [P, H * B, C], and a view of it by example, [B, P * H, C]."""
    s = torch.bmm(gathered, expanded.permute(1, 2, 0))
    return s, s.view(s.shape[0] * heads, -1, s.shape[2]).transpose(0, 1)


def gradient_of_embeddings(gathered: Tensor, ds: Tensor) -> Tensor:
    """Return the gradient of E, [P, 9 * K, C]. Its sums over heads and examples can exceed the range of float16."""
    if ds.dtype != torch.float16:
        return torch.bmm(gathered.mT, ds)
    if ds.is_cuda:
        return torch.bmm(gathered.mT, ds, out_dtype=torch.float32)
    return torch.bmm(gathered.mT.float(), ds.float())


def with_content(v: Tensor, c: Tensor | None, depth: int) -> Tensor:
    """Stack values [B, M, V] and the optional content lambda [B, K, V] to rows [B, C, V], as the columns of s."""
    (B, M, V), (first, columns) = v.shape, columns_of(v.shape[1], depth)
    rows = torch.empty(B, columns, V, device=v.device, dtype=v.dtype)
    rows[:, :M] = v
    if first > M:
        rows[:, M:first] = 0
    if c is None or first + depth < columns:
        rows[:, first:] = 0
    if c is not None:
        rows[:, first : first + depth] = c
    return rows


def forward(problem: Problem, q: Tensor, v: Tensor, c: Tensor | None, table: Tensor) -> Tensor:
    """Return the pooled output [B, P, H, V]."""
    B, H, V, grid = problem.B, problem.H, problem.V, problem.geometry.context_grid
    with on_device(q), without_autocast(q):
        expanded, values = expand(table, problem.geometry, q.dtype), with_content(v, c, problem.K)
        columns, P, _ = expanded.shape
        z = problem.new(B, P * H, V)
        for part in parts_of(B, P * H * columns * q.element_size()):
            _, by_example = maps_of(gather(q[part], grid), expanded, H)
            z[part].baddbmm_(by_example, values[part], beta=0, alpha=1 / PLACES)
    return z.view(B, P, H, V)


def backward(
    problem: Problem, dz: Tensor, q: Tensor, v: Tensor, c: Tensor | None, table: Tensor, needs: Needs,
    side: Sides = ONE_BY_ONE,
) -> Gradients:  # fmt: skip
    """Return the gradients, given that of the pooled output, dz [B, P, H, V]. dv has gaps between examples."""
    B, M, K, V, H, geometry = problem.B, problem.M, problem.K, problem.V, problem.H, problem.geometry
    grid, P, (first, columns) = geometry.context_grid, dz.shape[1], columns_of(M, K)
    dq = problem.new(*q.shape) if needs[0] else None
    d_values = problem.new(B, columns, V) if needs[1] or needs[2] else None
    dtable = torch.zeros(table.shape, device=q.device, dtype=torch.float32) if needs[3] else None
    dz = dz.reshape(B, P * H, V)
    with on_device(q), without_autocast(q):
        expanded, values = expand(table, geometry, q.dtype), with_content(v, c, K)
        for part in parts_of(B, P * H * columns * q.element_size()):
            gathered = gather(q[part], grid)
            by_window, by_example = maps_of(gathered, expanded, H)
            if d_values is not None:
                d_values[part].baddbmm_(by_example.mT, dz[part], beta=0, alpha=1 / PLACES)
            if dq is not None or dtable is not None:  # the gradient of s overwrites s
                by_example.baddbmm_(dz[part], values[part].mT, beta=0, alpha=1 / PLACES)
            if dq is not None:
                scatter(torch.bmm(by_window, expanded.transpose(0, 1)), dq[part], grid)
            if dtable is not None:
                dtable += fold(gradient_of_embeddings(gathered, by_window), table, geometry)
    dv = d_values[:, :M] if needs[1] and d_values is not None else None
    dc = None
    if needs[2] and d_values is not None:
        dc = problem.new_float32(B, K, V).copy_(d_values[:, first : first + K])
    return dq, dv, dc, None if dtable is None else dtable.to(table.dtype)

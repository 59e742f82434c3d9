"""The expanded mode, for small maps and for problems that `tiled` does not support.

E has an embedding for every pair (tables.py). Tile sizes depend on K, H, V, the dtype and the class of the map size,
not on the batch or the exact map size.
Letters: B batch, N queries, M context positions (times intra-depth U), H heads, K key depth, V value depth.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# Triton adds num_warps and num_stages to the arguments of kernels.

import functools
from dataclasses import dataclass, replace

from torch import Tensor

from . import expanded_kernels as kernels
from . import tables
from .problem import Geometry, Gradients, Needs, Problem, ceil_div, on_device, power_of_two, shares, without_autocast
from .streams import ONE_BY_ONE, Sides

POOLS, OVERLAPS = False, False
SMALL_CONTEXT = {2: 256, 4: 0}  # bytes per element -> largest context that one block holds completely
SHARED_MEMORY = 200 * 1024  # maximum bytes for the operands of a kernel (Hopper has 227 KiB)


@dataclass(frozen=True)
class Tile:
    """The compile-time constants of a kernel.

    Attributes:
        K, H: key depth and heads.
        KP, HP: key depth and heads, padded to powers of two.
        T, BB, VT: queries, batch elements and values of a tile.
        NV: tiles of values.
        chunks: powers of two whose sum is the number of context positions of a block.
        small: whether one block holds the whole context.
        stages, warps: pipeline stages and warps.
        occupancy: programs per multiprocessor, for kernels that divide an axis into shares.
        precision: precision of float32 products.
        content: whether there is a content part.
    """

    K: int
    H: int
    KP: int
    HP: int
    T: int
    BB: int
    VT: int
    NV: int
    chunks: tuple[int, ...]
    small: bool
    stages: int
    warps: int
    occupancy: int
    precision: str
    content: bool

    @property
    def rows(self) -> int:
        return self.T * self.KP

    @property
    def columns(self) -> int:
        return self.BB * self.VT

    @property
    def heads(self) -> int:
        return self.BB * self.T * self.HP

    @property
    def context(self) -> int:
        return sum(self.chunks)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first position of each chunk of a block."""
        return tuple(sum(self.chunks[:i]) for i in range(len(self.chunks)))

    def shared_memory(self, kernel: str, element_size: int) -> int:
        """Return the approximate bytes of shared memory for the operands of a kernel."""
        values, heads, depth = self.columns, self.heads, max(16, self.KP)
        kept = 0
        if kernel == "forward_small":
            kept, streamed = values * self.context + self.rows * depth, self.rows * (self.context + heads)
        elif kernel == "query_gradients_small":
            kept, streamed = values * self.context + self.rows * depth, self.rows * self.context + heads * values
        elif kernel == "value_gradients":
            streamed = self.rows * (self.context + heads) + heads * values
        elif kernel == "table_gradients":
            streamed = values * (self.context + heads) + self.rows * heads
        else:
            streamed = (values + self.rows) * self.context
        return (kept + self.stages * streamed) * element_size


def chunks_of(context: int) -> tuple[int, ...]:
    """Return one of four classes of small contexts as a sum of powers of two (14x14: 128 + 64 + 16)."""
    return next(chunks for chunks in ((64,), (128,), (128, 64, 16), (256,)) if context <= sum(chunks))


@functools.cache
def padded(K: int, H: int, V: int, element_size: int) -> tuple[int, int, int]:
    """Return the maximum queries of a tile, the padded depth and the padded heads, for all kernels of a problem."""
    half = element_size == 2
    depth, heads = max(4, power_of_two(K)), power_of_two(H)
    together = max(1, (64 if half else 32) // max(16, power_of_two(V)))  # batch elements that fill the value rows
    # Smaller tiles for float32: without tensor cores ("highest" precision) large tiles take minutes to compile.
    queries = max(1, min((128 if half else 64) // depth, (256 if half else 64) // (heads * together)))
    # Operands in shared memory have a minimum width, see expanded_kernels.py.
    return queries, max(depth, (64 if half else 32) // queries), max(heads, (32 if half else 16) // queries)


@functools.cache
def tile_of(
    kernel: str, K: int, H: int, M: int, V: int, element_size: int, small: bool, content: bool, precision: str
) -> Tile:
    """Return the tile of a kernel, from measurements on an H200 (HISTORY.md), for any batch and exact map size."""
    queries, KP, HP = padded(K, H, V, element_size)
    VT = min(128, max(16, power_of_two(V)))
    T, BB, stages, warps, occupancy = queries, max(1, 64 // VT), 3, 4, 1
    if T > 1 and T // 2 * KP >= 64:
        T //= 2
    if element_size == 4:
        VT = min(32, VT)
        T, BB, stages, chunks = queries, 32 // VT, 1, (32,)
    elif small:
        chunks, occupancy = chunks_of(M), 2
        if kernel != "query_gradients_small":
            if sum(chunks) > 64:  # otherwise one program fills a multiprocessor
                VT = min(VT, 64)
            warps = 8 if VT == 128 and kernel != "table_gradients" else 4
    elif kernel == "table_gradients":
        T, chunks, stages, warps = queries, (256,), 3 if BB < 4 else 2, 8
    elif kernel == "value_gradients":
        chunks = (128,)
    else:
        T, chunks, BB = queries, (64,), max(1, min(128 // VT, 128 // (queries * HP)))
    tile = Tile(K, H, KP, HP, T, BB, VT, ceil_div(V, VT), chunks, small, stages, warps, occupancy, precision, content)
    while tile.stages > 1 and tile.shared_memory(kernel, element_size) > SHARED_MEMORY:
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def why_not(problem: Problem, backward: bool) -> None:
    return None


def is_small(problem: Problem) -> bool:
    return SMALL_CONTEXT[problem.dtype.itemsize] >= problem.M


def tile(kernel: str, problem: Problem, content: bool, small: bool) -> Tile:
    sizes = (problem.K, problem.H, problem.M, problem.V, problem.dtype.itemsize)
    return tile_of(kernel, *sizes, small, content, problem.precision)


def band(geometry: Geometry, narrow: bool = True) -> tuple[int, int, int, int, int]:
    """Return the flat positions of a context row (0: no band), query width, rows in reach back and forward, stride."""
    if geometry.query_grid is None:
        return 0, 1, 0, 0, 1
    width, back = geometry.context_grid[1] * geometry.intra_depth, geometry.centre[0]
    return width if narrow else 0, geometry.query_grid[1], back, geometry.scope[0] - 1 - back, geometry.stride


def expand(problem: Problem, table: Tensor) -> Tensor:
    """Return E [context, (query, depth)], padded to whole blocks along both axes."""
    queries, depth, _ = padded(problem.K, problem.H, problem.V, problem.dtype.itemsize)
    block = 256 if problem.half else 32
    shape = (ceil_div(problem.M, block) * block, ceil_div(problem.N, queries) * queries * depth)
    return tables.expand(table, problem.geometry, depth, shape, problem.dtype)[0]


def forward(problem: Problem, q: Tensor, v: Tensor, c: Tensor | None, table: Tensor) -> Tensor:
    B, N, M, V = problem.B, problem.N, problem.M, problem.V
    small, content = is_small(problem), q if c is None else c
    use = tile("forward_small" if small else "forward_large", problem, c is not None, small)
    groups, strides = ceil_div(B, use.BB), (*q.stride()[:3], *v.stride()[:2])
    y = problem.new(B, N, problem.H, V)
    with on_device(q):
        e = expand(problem, table)
        if small:
            splits = shares(q.device, groups * use.NV, ceil_div(N, use.T), use.occupancy)
            kernels.forward_small[(groups, use.NV, splits)](
                q, v, content, e, y, B, N, M, V, e.shape[1], splits, *strides, use, num_warps=use.warps
            )
        else:
            kernels.forward_large[(groups, ceil_div(N, use.T), use.NV)](
                q, v, content, e, y, B, N, M, V, e.shape[1], *band(problem.geometry), *strides, use,
                num_warps=use.warps, num_stages=use.stages,
            )  # fmt: skip
    return y


def backward(
    problem: Problem, dy: Tensor, q: Tensor, v: Tensor, c: Tensor | None, table: Tensor, needs: Needs,
    side: Sides = ONE_BY_ONE,
) -> Gradients:  # fmt: skip
    dq = dv = dc = dtable = None
    # A block with the whole context processes every query, so it can also sum the gradient of the content lambda.
    with_values = is_small(problem) and needs[1] and needs[2]
    with on_device(q):
        e = expand(problem, table) if needs[0] or needs[1] else q
        if needs[2]:
            dc = problem.new_float32(problem.B, problem.K, problem.V)
        if needs[0]:
            dq = query_gradients(problem, dy, v, c, e)
        if needs[1]:
            dv = value_gradients(problem, dy, q, v, e, dc if with_values else None)
        if dc is not None and not with_values:
            with without_autocast(q):
                dc.copy_(problem.content_gradient(q, dy))
        if needs[3]:
            dtable = table_gradients(problem, dy, q, v, table)
    return dq, dv, dc, dtable


def query_gradients(problem: Problem, dy: Tensor, v: Tensor, c: Tensor | None, e: Tensor) -> Tensor:
    B, N, M, V = problem.B, problem.N, problem.M, problem.V
    small, narrow = is_small(problem) and V <= 128, not is_small(problem)
    use = tile("query_gradients_small" if small else "query_gradients_large", problem, c is not None, small)
    dq = problem.new(B, N, problem.H, problem.K)
    groups, strides = ceil_div(B, use.BB), (*dy.stride()[:3], *v.stride()[:2])
    content = dy if c is None else c
    if small:
        splits = shares(dy.device, groups, ceil_div(N, use.T), use.occupancy)
        kernels.query_gradients_small[(groups, splits)](
            dy, v, content, e, dq, B, N, M, V, e.shape[1], splits, *strides, use, num_warps=use.warps
        )
    else:
        kernels.query_gradients_large[(groups, ceil_div(N, use.T))](
            dy, v, content, e, dq, B, N, M, V, e.shape[1], *band(problem.geometry, narrow), *strides, use,
            num_warps=use.warps, num_stages=use.stages,
        )  # fmt: skip
    return dq


def value_gradients(problem: Problem, dy: Tensor, q: Tensor, v: Tensor, e: Tensor, dc: Tensor | None) -> Tensor:
    """Compute and return dv; also write dc if it is given."""
    B, N, M, V, small = problem.B, problem.N, problem.M, problem.V, is_small(problem)
    use = tile("value_gradients", problem, dc is not None, small)
    dv = problem.new(B, M, V, dtype=v.dtype)
    kernels.value_gradients[(ceil_div(B, use.BB), ceil_div(M, use.context), use.NV)](
        q, dy, e, dv, dv if dc is None else dc, B, N, M, V, e.shape[1], *band(problem.geometry, not small),
        *q.stride()[:3], *dy.stride()[:3], use, num_warps=use.warps,
    )  # fmt: skip
    return dv


def table_gradients(problem: Problem, dy: Tensor, q: Tensor, v: Tensor, table: Tensor) -> Tensor:
    B, N, M, V, small = problem.B, problem.N, problem.M, problem.V, is_small(problem)
    use, block = tile("table_gradients", problem, False, small), 256 if problem.half else 32
    query_tiles, blocks, columns = ceil_div(N, use.T), ceil_div(M, use.context), ceil_div(M, block) * block
    splits = shares(q.device, query_tiles * blocks, ceil_div(B, use.BB), use.occupancy)
    partial = problem.new_float32(splits, query_tiles * use.rows, columns)
    kernels.table_gradients[(query_tiles, blocks, splits)](
        q, dy, v, partial, B, N, M, V, columns, query_tiles * use.rows, splits, *band(problem.geometry, not small),
        *q.stride()[:3], *dy.stride()[:3], *v.stride()[:2], use, num_warps=use.warps,
    )  # fmt: skip
    return tables.fold(partial, table, problem.geometry, use.KP)

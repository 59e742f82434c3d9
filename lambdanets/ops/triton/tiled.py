"""The tiled mode, for larger maps: all tiles of queries share one small expanded table (README.md).

Letters: B batch, N queries, M context positions, H heads, K key depth, V value depth. g is the gradient of the lambdas.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# Triton adds num_warps and num_stages to the arguments of kernels.

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from . import tables
from . import tiled_kernels as kernels
from .problem import Geometry, Gradients, Needs, Problem, ceil_div, on_device, power_of_two, shares, without_autocast
from .streams import ONE_BY_ONE, Sides

POOLS, OVERLAPS = False, True
SMALL_CONTEXT = 256  # context positions up to which the expanded mode is faster, because E stays in the L2 cache
MOST_HEADS = 16  # more heads need too many registers
COPIES, COPIED = 4, 2**20  # number of copies of a table for neighbouring programs, for tables of at most these bytes
THREE_PROGRAMS = 168  # registers per thread that let three programs of 4 warps fit a multiprocessor
MANY_VALUES = 64  # values of a batch element from which tiles of one element are neighbours in the grid
WIDE = 32  # maps with more columns use other tiles of context positions
WORKSPACE = 512 * 2**20  # maximum bytes of g that the backward stores at a time
SPREAD_ELEMENTS = 2048  # elements of g that a program computes in one step
SPREAD_PROGRAMS = 8  # programs per multiprocessor for g


@dataclass(frozen=True)
class Tile:
    """The compile-time constants of a kernel.

    Attributes:
        K, H: key depth and heads.
        KP, HP, VP: K, H and V, padded to powers of two.
        rows, width: positions of a tile (queries; in dv context positions).
        columns: pairs (batch element, value) of a tile.
        block: inner length of one product.
        stages, warps: pipeline stages and warps.
        occupancy: programs per multiprocessor.
        precision: precision of float32 products.
        NV: tiles of values.
        halves: compute dv by halves of a tile.
        tiles_first: neighbouring programs have tiles of one batch element, not one tile of many batch elements.
        content: whether there is a content part.
    """

    K: int
    H: int
    KP: int
    HP: int
    VP: int
    rows: int
    width: int
    columns: int
    block: int
    stages: int
    warps: int
    occupancy: int
    precision: str
    NV: int = 1
    halves: bool = False
    tiles_first: bool = False
    content: bool = False

    @property
    def T(self) -> int:
        return self.rows * self.width

    @property
    def VT(self) -> int:
        """The number of values of a batch element."""
        return min(self.columns, self.VP)

    @property
    def BB(self) -> int:
        """The number of batch elements."""
        return self.columns // self.VT

    def across(self, grid: tuple[int, int]) -> int:
        return ceil_div(grid[1], self.width)

    def count(self, grid: tuple[int, int]) -> int:
        return ceil_div(grid[0], self.rows) * self.across(grid)

    def reach(self, geometry: Geometry) -> tuple[int, int]:
        """Return the size of the window of a tile: all positions within the scope of its positions."""
        return self.rows + geometry.scope[0] - 1, self.width + geometry.scope[1] - 1


def split_tile(positions: int, one_wide: bool) -> tuple[int, int]:
    """Split `positions` (a power of two) into rows and width, about square; a column if the map has one column."""
    if one_wide:
        return positions, 1
    width = 1 << ((positions.bit_length()) // 2)
    return positions // width, width


@functools.cache
def tile_of(kernel: str, K: int, H: int, V: int, width: int, half: bool, precision: str) -> Tile:
    """Return the tile of a kernel, from measurements on an H200 (HISTORY.md), for a class of map widths."""
    KP, VP, HP = (max(16, power_of_two(size)) for size in (K, V, H))
    queries = split_tile(max(1, (128 if half else 64) // KP), width == 1)
    rows, columns = split_tile(128 if half else 64, width == 1)
    sizes = (K, H, KP, max(8, power_of_two(H)), VP)
    if kernel == "value_gradients":
        if not half:
            return Tile(*sizes, rows, columns, 128, 32, 3, 4, 2, precision)
        if width > WIDE:  # tall tiles
            return Tile(*sizes, columns, rows, 128, 32, 4, 4, 2, precision, halves=True)
        if width > 16 and VP < MANY_VALUES:  # whole rows
            return Tile(*sizes, 4, 32, 128, 64, 3, 4, 2, precision)
        return Tile(*sizes, rows, columns, 128, 32, 4, 4, 2, precision, halves=True)
    if kernel == "table_gradients":
        return Tile(*sizes, *queries, 64 if half else 32, 128 if half else 64, 3, 4, 2, precision)
    if kernel == "lambda_gradients":  # several batch elements, so that whole cache lines are written
        tile = Tile(K, H, KP, HP, VP, 1, 1, 128 if half or VP <= 32 else 32, 0, 1, 4, SPREAD_PROGRAMS, precision)
        together = tile.columns * KP
        turn = max(1, min(8, SPREAD_ELEMENTS // together))
        warps = 2 if half and turn * together <= SPREAD_ELEMENTS else 4
        return replace(tile, rows=turn, warps=warps, NV=VP // tile.VT)
    tile = Tile(*sizes, *queries, 128 if half else 32, 32, 4 if half else 1, 4, 2, precision)
    return replace(tile, NV=ceil_div(V, tile.VT))


def why_not(problem: Problem, backward: bool) -> str | None:
    """Return the reason why this mode cannot run or is slower, or None.

    It needs relative positions on larger maps, and a scope that is smaller than the map.
    """
    geometry, (scope_y, scope_x) = problem.geometry, problem.geometry.scope
    depth, values = max(16, power_of_two(problem.K)), max(16, power_of_two(problem.V))
    if geometry.query_grid is None or geometry.stride != 1 or geometry.intra_depth != 1:
        return "the tiled kernels take relative positions with stride 1 and intra-depth 1"
    if problem.H > MOST_HEADS:
        return f"the tiled kernels take at most {MOST_HEADS} heads, not {problem.H}"
    if problem.M <= SMALL_CONTEXT or scope_y * scope_x > min(problem.M, 2**18):
        return (
            f"up to {SMALL_CONTEXT} context positions, or with a scope as large as the map, the expanded mode is faster"
        )
    if max(problem.N, problem.M) * depth * values >= 2**28 or (scope_y + 127) * (scope_x + 31) * depth >= 2**24:
        return "the tiled kernels index the lambdas of a batch element, and the table of a tile, with 32 bits"
    return None


@functools.cache
def variant(tile: Tile, content: bool, tiles_first: bool) -> Tile:
    return replace(tile, content=content, tiles_first=tiles_first)


def tile(kernel: str, problem: Problem, content: bool = False) -> Tile:
    grid = problem.geometry.context_grid if kernel == "value_gradients" else grid_of(problem)
    width = min(grid[1], WIDE + 1)  # reduced to its class
    width = width if width in (1, WIDE + 1) else 17 if width > 16 else 16
    use = tile_of(kernel, problem.K, problem.H, problem.V, width, problem.half, problem.precision)
    return variant(use, content, False)


def grid_of(problem: Problem) -> tuple[int, int]:
    assert problem.geometry.query_grid is not None
    return problem.geometry.query_grid


def launch_grid(problem: Problem, use: Tile) -> tuple[Tile, tuple[int, int]]:
    """Return the numbers of batch and query tiles in the faster order; the second one must be less than 2**16."""
    batch_tiles, query_tiles = ceil_div(problem.B, use.BB), use.count(grid_of(problem))
    if query_tiles >= 2**16 or (use.VT >= MANY_VALUES and batch_tiles < 2**16):
        return variant(use, use.content, True), (query_tiles, batch_tiles)
    return use, (batch_tiles, query_tiles)


def expand(
    problem: Problem, table: Tensor, queries: tuple[int, int], context: tuple[int, int],
    centre: tuple[int, int] = (0, 0), transposed: bool = False,
) -> Tensor:  # fmt: skip
    """Return the expanded table of one tile, [copies, context positions, (query, depth)], or transposed (for dv)."""
    depth, geometry = max(16, power_of_two(problem.K)), Geometry(queries, context, problem.geometry.scope)
    rows, columns = ceil_div(context[0] * context[1], tables.ROWS) * tables.ROWS, queries[0] * queries[1] * depth
    copies = COPIES if not transposed and rows * columns * problem.dtype.itemsize <= COPIED else 1
    return tables.expand(table, geometry, depth, (rows, columns), problem.dtype, centre, copies, transposed)


def forward(problem: Problem, q: Tensor, v: Tensor, c: Tensor | None, table: Tensor) -> Tensor:
    use, grid = launch_grid(problem, tile("forward", problem, c is not None))
    # Without the limit the kernel uses four more registers; with it three programs fit. Other sizes would spill.
    usual = problem.half and problem.K == 16 and problem.H <= 8 and problem.V % 16 == 0
    registers = {"maxnreg": THREE_PROGRAMS} if usual else {}
    y = problem.new(problem.B, problem.N, problem.H, problem.V)
    with on_device(q):
        t = expand(problem, table, (use.rows, use.width), use.reach(problem.geometry))
        kernels.forward_window[(*grid, use.NV)](
            q, v, q if c is None else c, t, y, problem.B, problem.V, *problem.geometry.extent(), t.shape[0],
            t.stride(0), *q.stride()[:3], *v.stride()[:2], use, num_warps=use.warps, num_stages=use.stages, **registers,
        )  # fmt: skip
    return y


class Work(NamedTuple):
    """An allocated result and the functions that compute it: `start` for each part of the batch, then `finish`.

    Allocation is separate because memory belongs to the stream that allocates it, and kernels run on several streams
    (streams.py).
    """

    result: Tensor
    start: Callable[[int], object]
    finish: Callable[[], object] = lambda: None


def backward(
    problem: Problem, dy: Tensor, q: Tensor, v: Tensor, c: Tensor | None, table: Tensor, needs: Needs,
    side: Sides = ONE_BY_ONE,
) -> Gradients:  # fmt: skip
    """Return the gradients. Those of v and c are ready on the side stream `values`.

    dv and dT are products with g, which is stored for as much of the batch as fits into WORKSPACE. dq does not need g;
    its programs run where those of g, dv and dT leave multiprocessors idle.
    """
    g_bytes = problem.N * max(16, power_of_two(problem.K)) * max(16, power_of_two(problem.V)) * problem.dtype.itemsize
    most = min(problem.B, 2**16 - 1, max(1, WORKSPACE // g_bytes))
    part = ceil_div(problem.B, ceil_div(problem.B, most))  # equal parts of the batch
    queries = lambdas = values = positions = dc = None
    with on_device(q):
        if needs[1] or needs[3]:  # first, so that g does not wait for later kernels of this stream
            dc, lambdas = lambda_gradients(problem, dy, q, part, needs[2])
            side.wait("values", "here")  # deterministic mode fills new memory on this stream
        if needs[0]:
            queries = query_gradients(problem, dy, q, v, c, table)
        if lambdas is None:
            if queries is not None:
                queries.start(0)
            if needs[2]:
                with without_autocast(q):
                    dc = problem.content_gradient(q, dy).float()
                side.wait("values", "here")
            return queries and queries.result, None, dc, None
        if needs[1]:
            values = value_gradients(problem, v, table, lambdas.result)
        if needs[3]:
            positions = table_gradients(problem, v, table, lambdas.result)
        side.keep(lambdas, values, positions)

        for b_first in range(0, problem.B, part):
            side.wait("values", "table")  # which may still read g of the previous part
            with side("values"):
                lambdas.start(b_first)
            side.wait("table", "values")
            if b_first == 0:
                side.wait("values", "here")  # for the table of dv; dq is launched later
                side.wait("table", "here")
                if queries is not None:
                    queries.start(0)
            if values is not None:
                with side("values"):
                    values.start(b_first)
            if positions is not None:
                with side("table"):
                    positions.start(b_first)
        with side("values"):
            lambdas.finish()
        if positions is not None:
            with side("table"):
                positions.finish()
    return queries and queries.result, values and values.result, dc, positions and positions.result


def query_gradients(problem: Problem, dy: Tensor, q: Tensor, v: Tensor, c: Tensor | None, table: Tensor) -> Work:
    use, grid = launch_grid(problem, tile("query_gradients", problem, c is not None))
    t = expand(problem, table, (use.rows, use.width), use.reach(problem.geometry))
    dq = problem.new(problem.B, problem.N, problem.H, problem.K)

    def start(_: int) -> None:
        kernels.query_gradients_window[grid](
            dy, v, q if c is None else c, t, dq, problem.B, problem.V, *problem.geometry.extent(), t.shape[0],
            t.stride(0), *dy.stride()[:3], *v.stride()[:2], use, num_warps=use.warps, num_stages=use.stages,
        )  # fmt: skip

    return Work(dq, start)


def lambda_gradients(
    problem: Problem, dy: Tensor, q: Tensor, part: int, with_content: bool
) -> tuple[Tensor | None, Work]:
    """Prepare g [(n, k), (b, v)] of a part of the batch, and dc, its sum over queries, computed in registers."""
    B, N, K, V, use = problem.B, problem.N, problem.K, problem.V, tile("lambda_gradients", problem, with_content)
    g = problem.new(N * use.KP, part * use.VP)
    batch_tiles = ceil_div(part, use.BB)
    most = min(ceil_div(N, use.T), max(1, N * part // (16 * B)))  # the partial sums of dc take at most 1/8 of g
    query_shares = shares(q.device, batch_tiles * use.NV, most, use.occupancy)
    dc = problem.new_float32(B, K, V) if with_content else None
    parts = problem.new_float32(query_shares, B, K, V) if with_content else g

    def start(b_first: int) -> None:
        kernels.lambda_gradients[(query_shares, batch_tiles, use.NV)](
            q, dy, g, parts, B, V, N, b_first, g.shape[1], query_shares, *q.stride()[:3], *dy.stride()[:3], use,
            num_warps=use.warps,
        )  # fmt: skip

    return dc, Work(g, start, lambda: None if dc is None else torch.sum(parts, 0, out=dc))


def value_gradients(problem: Problem, v: Tensor, table: Tensor, g: Tensor) -> Work:
    geometry, use = problem.geometry, tile("value_gradients", problem)
    dv = problem.new(*v.shape)
    far = geometry.scope[0] - 1, geometry.scope[1] - 1
    # [(window of queries, depth), positions of the tile]
    d = expand(problem, table, use.reach(geometry), (use.rows, use.width), far, transposed=True)

    def start(b_first: int) -> None:
        kernels.value_gradients_window[(ceil_div(g.shape[1], use.columns), use.count(geometry.context_grid))](
            g, d, dv, problem.B, problem.V, *geometry.extent(), b_first, g.shape[1], use,
            num_warps=use.warps, num_stages=use.stages,
        )  # fmt: skip

    return Work(dv, start)


def table_gradients(problem: Problem, v: Tensor, table: Tensor, g: Tensor) -> Work:
    """Prepare partial dT [splits, columns of tiles, nk, clipped positions of their windows], which `finish` sums."""
    geometry, use, grid = problem.geometry, tile("table_gradients", problem), grid_of(problem)
    across, reach = use.across(grid), use.reach(geometry)
    blocks, programs = table_blocks(geometry, use)
    steps = ceil_div(g.shape[1], use.columns) * ceil_div(grid[0], use.rows)
    splits = even_shares(v.device, programs, steps, use.occupancy)
    rows, columns, positions = use.T * use.KP, blocks * use.block, reach[0] * reach[1]
    parts = problem.new_float32(splits, across, rows, columns)
    summed = problem.new_float32(1, rows, positions)
    dt = problem.new(*table.shape, dtype=table.dtype)

    def start(b_first: int) -> None:
        kernels.table_gradients_window[(across * blocks, splits)](
            g, v, parts, problem.B, problem.V, *geometry.extent(), splits, b_first, g.shape[1], blocks,
            *v.stride()[:2], use, num_warps=use.warps,
        )  # fmt: skip

    def finish() -> None:
        back, block = geometry.centre[1], 128
        kernels.sum_table_parts[(rows, ceil_div(positions, block))](
            parts, summed, geometry.context_grid[1], back, geometry.scope[1] - 1 - back, positions, columns,
            splits, across, TX=use.width, S=16, C=block, num_warps=4,
        )  # fmt: skip
        one = Geometry((use.rows, use.width), reach, geometry.scope)
        tables.fold(summed, table, one, use.KP, (0, 0), into=dt)

    return Work(dt, start, finish)


@functools.cache
def table_blocks(geometry: Geometry, use: Tile) -> tuple[int, int]:
    """Return the maximum number of blocks of the window of a column of query tiles in dT, and their total number."""
    assert geometry.query_grid is not None
    back, height, limit = geometry.centre[1], use.rows + geometry.scope[0] - 1, geometry.context_grid[1]
    forward = geometry.scope[1] - 1 - back
    widths = (
        min(x + use.width + forward, limit) - max(x - back, 0) for x in range(0, geometry.query_grid[1], use.width)
    )
    blocks = [ceil_div(height * max(width, 0), use.block) for width in widths]
    return max(1, *blocks), max(1, sum(blocks))


def even_shares(device: torch.device, programs: int, divisible: int, per_processor: int) -> int:
    """Return shares like `shares`, but for one to three rounds on the GPU, whichever leaves the least of it idle."""
    return max(
        (shares(device, programs, divisible, per_processor * rounds) for rounds in (1, 2, 3)),
        key=lambda splits: splits * programs / -(-splits * programs // shares(device, 1, 2**30, per_processor)),
    )

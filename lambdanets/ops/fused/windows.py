"""The window mode, for larger maps: choosing its tiles and launching its kernels. What it is: README.md.

Letters: B batch, N queries, M context positions, H heads, K key depth, V value depth.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .launch import EXPANDED, Geometry, fold_partial, on_device, power_of_two, precision_of, shares

WINDOW_CONTEXT = 256  # contexts above this take the window mode, where it can run them
WORKSPACE = 512 * 2**20  # bytes of g = dlambda that the backward holds at a time, at most
TABLES = 4  # copies of the table that neighbouring programs read: 182 us for 197 with one, at 28x28x128
TABLE_BYTES = 2**20  # a larger one has more lines than programs ask for at once
SPREAD_ELEMENTS = 4096  # of g that a program makes in one turn
SPREAD_PROGRAMS = 4  # per multiprocessor
THREE_PROGRAMS = 168  # registers a thread with which three programs of 4 warps fit a multiprocessor
SIDE_BY_SIDE = 64  # values of an example from which on neighbouring tiles of one example run side by side
WIDE = 32  # maps with more columns take other tiles of context positions
WINDOW_HEADS = 16  # more heads would need more registers than there are


@dataclass(frozen=True)
class WindowTile:
    """How one kernel of the window mode runs.

    rows x width positions per tile (queries; in dv context positions), columns (batch element, value) per tile, the
    length of one product, pipeline stages, warps, programs per multiprocessor.
    """

    rows: int
    width: int
    columns: int
    block: int
    stages: int
    warps: int
    occupancy: int


def split_tile(positions: int, one_wide: bool) -> tuple[int, int]:
    """A tile of `positions` (a power of two) as rows x width, about square; a column where the map is one."""
    if one_wide:
        return positions, 1
    width = 1 << ((positions.bit_length()) // 2)
    return positions // width, width


@functools.cache
def context_tile(width: int, values: int, element_size: int) -> WindowTile:
    """For dv, whose tiles are of context positions, on a map of this width: as `window_tile`.

    `values`: their depth, padded.
    """
    half = element_size == 2
    rows, columns = split_tile(128 if half else 64, width == 1)
    if not half:
        return WindowTile(rows, columns, 128, 32, 3, 4, 2)
    if width > WIDE:  # 577 us with the long side down, 603 with it across, at 56x56x64
        return WindowTile(columns, rows, 128, 32, 4, 4, 2)
    if width > 16 and values < SIDE_BY_SIDE:  # whole rows: 194 us for 214 at 28x28x128, 470 for 459 at 28x28x256
        return WindowTile(4, 32, 128, 64, 3, 4, 2)
    return WindowTile(rows, columns, 128, 64, 3, 4, 2)  # 459 us; 491 with products of 32, at 28x28x256


@functools.cache
def window_tile(kernel: str, depth: int, one_wide: bool, element_size: int) -> WindowTile:
    """Fixed choices, from measurements on an H200 (README.md); never a function of batch or map size."""
    half = element_size == 2
    rows, width = split_tile(max(1, (128 if half else 64) // depth), one_wide)
    if kernel == "table_gradients":
        return WindowTile(rows, width, 64 if half else 32, 128 if half else 64, 3, 4, 2)
    return WindowTile(rows, width, 128 if half else 32, 32, 4 if half else 1, 4, 2)


def expand_window(
    table: Tensor, query_grid: tuple[int, int], context_grid: tuple[int, int], centre: tuple[int, int], depth: int,
    dtype: torch.dtype, transposed: bool = False,
) -> Tensor:  # fmt: skip
    """The table for one tile: [copies, positions of context_grid, queries of query_grid * depth], or transposed (dv).

    Positions are rounded up to whole blocks (tables.py). Small ones that are not dv's have copies.
    """
    from . import tables

    table = table.contiguous()
    queries, context = query_grid[0] * query_grid[1], context_grid[0] * context_grid[1]
    blocks = -(-context // EXPANDED[0])
    rows = blocks * EXPANDED[0]
    shape = (queries * depth, rows) if transposed else (rows, queries * depth)
    small = not transposed and rows * queries * depth * dtype.itemsize <= TABLE_BYTES
    copies = TABLES if small else 1
    expanded = torch.empty(copies, *shape, device=table.device, dtype=dtype)
    copy, *strides = expanded.stride()
    tables.expand[(-(-queries * depth // EXPANDED[1]), blocks, copies)](
        table, expanded, queries, context, queries * depth, copy, *(strides[::-1] if transposed else strides),
        query_grid[1], context_grid[1],
        *table.shape[:2], *centre, 1,
        K=table.shape[2], U=1, KP=depth, DENSE=False, ROW_BLOCK=EXPANDED[0], COLUMN_BLOCK=EXPANDED[1], num_warps=4,
    )  # fmt: skip
    return expanded


def use_window(geometry: Geometry, q: Tensor, v: Tensor) -> bool:
    """Relative positions on larger maps (measured: README.md).

    Smaller maps are faster with E, which then lives in the cache; so are scopes wider than the map, where a tile's
    table would be larger than the map itself. Kernels count the lambdas of one example in 32 bits.
    """
    _, N, H, K = q.shape
    M, V = v.shape[1:]
    return (
        geometry.query_grid is not None
        and geometry.stride == 1
        and geometry.intra_depth == 1
        and H <= WINDOW_HEADS
        and M > WINDOW_CONTEXT
        and geometry.scope[0] * geometry.scope[1] <= min(M, 2**18)
        and max(N, M) * max(16, power_of_two(K)) * max(16, power_of_two(V)) < 2**28
        and (geometry.scope[0] + 127) * (geometry.scope[1] + 31) * max(16, power_of_two(K)) < 2**24  # dv's table
    )


def window_geometry(geometry: Geometry) -> tuple[int, ...]:
    """Query grid, context grid, reach back and forward, as the kernels take them."""
    assert geometry.query_grid is not None
    back_y, back_x = geometry.centre
    forward = geometry.scope[0] - 1 - back_y, geometry.scope[1] - 1 - back_x
    return (*geometry.query_grid, *geometry.context_grid, back_y, back_x, *forward)


def tiles_of(grid: tuple[int, int], use: WindowTile) -> int:
    return -(-grid[0] // use.rows) * -(-grid[1] // use.width)


def tiles_first(batch_tiles: int, query_tiles: int, value_tile: int) -> bool:
    """Whether neighbouring tiles of one example run side by side, not one tile of many examples.

    The second dimension of a grid holds fewer than 2**16.
    """
    return query_tiles >= 2**16 or (value_tile >= SIDE_BY_SIDE and batch_tiles < 2**16)


@functools.cache
def table_blocks(geometry: Geometry, use: WindowTile) -> tuple[int, int]:
    """Blocks of the window of a column of query tiles in dT, at most, and how many there are in all columns."""
    assert geometry.query_grid is not None
    back, height, limit = geometry.centre[1], use.rows + geometry.scope[0] - 1, geometry.context_grid[1]
    forward = geometry.scope[1] - 1 - back
    widths = (
        min(x + use.width + forward, limit) - max(x - back, 0) for x in range(0, geometry.query_grid[1], use.width)
    )
    blocks = [-(-height * max(width, 0) // use.block) for width in widths]
    return max(1, *blocks), max(1, sum(blocks))


def even_shares(device: torch.device, programs: int, divisible: int, per_processor: int) -> int:
    """As `shares`, but up to three times around the chip, whichever leaves the least of it idle."""
    return max(
        (shares(device, programs, divisible, per_processor * rounds) for rounds in (1, 2, 3)),
        key=lambda splits: splits * programs / -(-splits * programs // shares(device, 1, 2**30, per_processor)),
    )


def forward(q: Tensor, v: Tensor, c: Tensor | None, table: Tensor, geometry: Geometry) -> Tensor:
    """As forward, with one expanded table for all tiles of queries."""
    from . import window_kernels as kernels

    assert geometry.query_grid is not None
    B, N, H, K = q.shape
    V = v.shape[2]
    depth = max(16, power_of_two(K))
    y = torch.empty(B, N, H, V, device=q.device, dtype=q.dtype)
    use = window_tile("forward", depth, geometry.query_grid[1] == 1, q.element_size())
    value_tile = min(use.columns, max(16, power_of_two(V)))
    batch_tile = use.columns // value_tile
    reach = (use.rows + geometry.scope[0] - 1, use.width + geometry.scope[1] - 1)
    # Four above that without a limit: 419 us at 28x28x256, 372 with it. Other depths and odd sizes would spill.
    usual = q.element_size() == 2 and K == 16 and H <= 8 and V % 16 == 0
    registers = {"maxnreg": THREE_PROGRAMS} if usual else {}
    with on_device(q):
        t = expand_window(table, (use.rows, use.width), reach, (0, 0), depth, q.dtype)
        grid = (-(-B // batch_tile), tiles_of(geometry.query_grid, use))
        swap = tiles_first(*grid, value_tile)
        kernels.forward_window[(*(grid[::-1] if swap else grid), -(-V // value_tile))](
            q, v, q if c is None else c, t, y, B, V, *window_geometry(geometry), t.shape[0], t.stride(0),
            *q.stride()[:3], *v.stride()[:2],
            K=K, H=H, TY=use.rows, TX=use.width, KP=depth, HP=max(8, power_of_two(H)), VT=value_tile, BB=batch_tile,
            C=use.block, HAS_C=c is not None, TILES_FIRST=swap, PRECISION=precision_of(q.dtype),
            num_warps=use.warps, num_stages=use.stages, **registers,
        )  # fmt: skip
    return y


@dataclass(frozen=True)
class WindowCall:
    """What the window mode's kernels share in one backward. depth, values: key and value depth, padded."""

    geometry: Geometry
    table: Tensor
    dtype: torch.dtype
    size: int
    depth: int
    values: int

    def tile(self, kernel: str) -> WindowTile:
        assert self.geometry.query_grid is not None
        return window_tile(kernel, self.depth, self.geometry.query_grid[1] == 1, self.size)

    def reach(self, use: WindowTile) -> tuple[int, int]:
        """Size of the window of a tile: all positions within the scope of one of its own."""
        return use.rows + self.geometry.scope[0] - 1, use.width + self.geometry.scope[1] - 1


def backward(
    dy: Tensor, q: Tensor, v: Tensor, c: Tensor | None, table: Tensor, geometry: Geometry,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of q, v, c and the table, those that are needed."""
    B, N, H, K = q.shape
    V = v.shape[2]
    call = WindowCall(geometry, table, q.dtype, q.element_size(), max(16, power_of_two(K)), max(16, power_of_two(V)))
    dq = dv = dc = dt = None
    with on_device(q):
        if needs[0]:
            dq = window_query_gradients(call, dy, q, v, c)
        if needs[1] or needs[3]:
            dv, dt, dc = window_value_and_table_gradients(call, dy, q, v, needs)
        elif needs[2]:
            queries, gradients = q.reshape(B, N * H, K), dy.reshape(B, N * H, V)
            dc = torch.bmm(queries.transpose(1, 2), gradients).float()
    return dq, dv, dc, dt


def window_query_gradients(call: WindowCall, dy: Tensor, q: Tensor, v: Tensor, c: Tensor | None) -> Tensor:
    from . import window_kernels as kernels

    B, N, H, K = q.shape
    V = v.shape[2]
    geometry, use = call.geometry, call.tile("query_gradients")
    assert geometry.query_grid is not None
    value_tile = min(use.columns, call.values)
    batch_tile = use.columns // value_tile
    t = expand_window(call.table, (use.rows, use.width), call.reach(use), (0, 0), call.depth, q.dtype)
    dq = torch.empty(B, N, H, K, device=q.device, dtype=q.dtype)
    grid = (-(-B // batch_tile), tiles_of(geometry.query_grid, use))
    swap = tiles_first(*grid, value_tile)
    kernels.query_gradients_window[grid[::-1] if swap else grid](
        dy, v, q if c is None else c, t, dq, B, V, *window_geometry(geometry), t.shape[0], t.stride(0),
        *dy.stride()[:3], *v.stride()[:2],
        K=K, H=H, KP=call.depth, HP=max(8, power_of_two(H)), TY=use.rows, TX=use.width, VT=value_tile,
        NV=-(-V // value_tile), BB=batch_tile, C=use.block, HAS_C=c is not None, TILES_FIRST=swap,
        PRECISION=precision_of(q.dtype), num_warps=use.warps, num_stages=use.stages,
    )  # fmt: skip
    return dq


def window_value_and_table_gradients(
    call: WindowCall, dy: Tensor, q: Tensor, v: Tensor, needs: tuple[bool, bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dv and dT are products with g = dlambda, which is written for as much of the batch as WORKSPACE holds.

    dc is g's sum over queries, taken while it is in registers.
    """
    from . import window_kernels as kernels

    B, N, H, K = q.shape
    M, V = v.shape[1:]
    geometry, depth, values, precision = call.geometry, call.depth, call.values, precision_of(q.dtype)
    assert geometry.query_grid is not None
    where, scope = window_geometry(geometry), geometry.scope
    part = min(B, 2**16 - 1, max(1, WORKSPACE // (N * depth * values * call.size)))
    part = -(-B // -(-B // part))  # equal parts of the batch
    columns = part * values
    g = torch.empty(N * depth, columns, device=q.device, dtype=q.dtype)
    value_tile = min(128 if call.size == 2 else 32, values)
    batch_tile = max(1, 64 // value_tile)
    together = batch_tile * depth * value_tile
    queries = max(1, min(8, SPREAD_ELEMENTS // together))
    warps = 2 if call.size == 2 and queries * together <= SPREAD_ELEMENTS else 4
    batch_tiles, value_tiles = -(-part // batch_tile), values // value_tile
    query_shares = shares(q.device, batch_tiles * value_tiles, -(-N // queries), SPREAD_PROGRAMS)
    dc = torch.empty(query_shares, B, K, V, device=q.device, dtype=torch.float32) if needs[2] else None

    on_values = context_tile(geometry.context_grid[1], values, call.size)
    d = dv = dt = partial = None
    if needs[1]:
        dv = torch.empty(B, M, V, device=q.device, dtype=v.dtype)
        own = (on_values.rows, on_values.width)
        centre = (scope[0] - 1, scope[1] - 1)
        # [(window of queries, depth), positions of the tile]
        d = expand_window(call.table, call.reach(on_values), own, centre, depth, q.dtype, transposed=True)
    on_table = call.tile("table_gradients")
    if needs[3]:
        across = -(-geometry.query_grid[1] // on_table.width)
        blocks, programs = table_blocks(geometry, on_table)
        steps = -(-columns // on_table.columns) * -(-geometry.query_grid[0] // on_table.rows)
        splits = even_shares(q.device, programs, steps, on_table.occupancy)
        rows = on_table.rows * on_table.width * depth
        partial = torch.empty(splits, across, rows, blocks * on_table.block, device=q.device, dtype=torch.float32)

    for b_first in range(0, B, part):
        kernels.spread_window[(query_shares, batch_tiles, value_tiles)](
            q, dy, g, g if dc is None else dc, B, V, N, b_first, columns, query_shares,
            *q.stride()[:3], *dy.stride()[:3], K=K, H=H, T=queries, KP=depth, HP=max(16, power_of_two(H)), VP=values,
            VT=value_tile, BB=batch_tile, WITH_C=dc is not None, PRECISION=precision, num_warps=warps,
        )  # fmt: skip
        if dv is not None:
            grid = (-(-columns // on_values.columns), tiles_of(geometry.context_grid, on_values))
            kernels.value_gradients_window[grid](
                g, d, dv, B, V, *where, b_first, columns, CY=on_values.rows, CX=on_values.width, KP=depth, VP=values,
                BV=on_values.columns, C=on_values.block, PRECISION=precision,
                num_warps=on_values.warps, num_stages=on_values.stages,
            )  # fmt: skip
        if partial is not None:
            kernels.table_gradients_window[(across * blocks, splits)](
                g, v, partial, B, V, *where, splits, b_first, columns, blocks, *v.stride()[:2],
                TY=on_table.rows, TX=on_table.width, KP=depth, VP=values, BV=on_table.columns, C=on_table.block,
                PRECISION=precision, STAGES=on_table.stages, num_warps=on_table.warps,
            )  # fmt: skip
    if partial is not None:
        dt = window_table_gradient(call, on_table, partial)
    return dv, dt, None if dc is None else dc.sum(0)


def window_table_gradient(call: WindowCall, use: WindowTile, partial: Tensor) -> Tensor:
    """Parts of dT [splits, columns of tiles, nk, clipped positions of their windows] -> the gradient of the table."""
    from . import window_kernels as kernels

    geometry, reach = call.geometry, call.reach(use)
    splits, across, rows, part_columns = partial.shape
    back, positions, block = geometry.centre[1], reach[0] * reach[1], 128
    summed = torch.empty(1, rows, positions, device=partial.device, dtype=torch.float32)
    kernels.sum_table_parts[(rows, -(-positions // block))](
        partial, summed, geometry.context_grid[1], back, geometry.scope[1] - 1 - back, positions, part_columns, splits,
        across, TX=use.width, S=16, C=block, num_warps=4,
    )  # fmt: skip
    local = Geometry((use.rows, use.width), reach, geometry.scope, 1, 1)
    return fold_partial(summed, call.table, local, (0, 0), call.depth)

"""The window mode, for larger maps: choosing its tiles, and the forward pass. What it is: README.md.

Letters: B batch, N queries, M context positions, H heads, K key depth, V value depth.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .launch import EXPANDED, Geometry, on_device, power_of_two, precision_of

WINDOW_CONTEXT = 256  # contexts above this take the window mode, where it can run them
TABLES = 4  # copies of the table that neighbouring programs read: 182 us for 197 with one, at 28x28x128
TABLE_BYTES = 2**20  # a larger one has more lines than programs ask for at once
THREE_PROGRAMS = 168  # registers a thread with which three programs of 4 warps fit a multiprocessor
SIDE_BY_SIDE = 64  # values of an example from which on neighbouring tiles of one example run side by side
WIDE = 32  # maps with more columns take other tiles of context positions
WINDOW_HEADS = 16  # more heads would need more registers than there are


@dataclass(frozen=True)
class WindowTile:
    """How one kernel of the window mode runs.

    rows x width positions per tile (queries; in dv context positions), columns (batch element, value) per tile, the
    length of one product, pipeline stages, warps, programs per multiprocessor; whether dv goes by halves of a tile.
    """

    rows: int
    width: int
    columns: int
    block: int
    stages: int
    warps: int
    occupancy: int
    halves: bool = False


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
    if width > WIDE:  # the long side down: 577 us, across 603, at 56x56x64; by halves 541, whole 564
        return WindowTile(columns, rows, 128, 32, 4, 4, 2, halves=True)
    if width > 16 and values < SIDE_BY_SIDE:  # whole rows: 194 us for 214 at 28x28x128, 470 for 459 at 28x28x256
        return WindowTile(4, 32, 128, 64, 3, 4, 2)
    return WindowTile(rows, columns, 128, 32, 4, 4, 2, halves=True)  # 444 us at 28x28x256; whole, products of 64: 466


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


def work(geometry: Geometry, q: Tensor, v: Tensor) -> float:
    """Operations of one of the products, about."""
    (B, N, _, K), (M, V) = q.shape, v.shape[1:]
    return 2.0 * B * N * min(M, geometry.scope[0] * geometry.scope[1]) * K * V


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

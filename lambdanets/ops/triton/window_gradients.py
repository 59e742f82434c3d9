"""The window mode, for larger maps: the backward pass. What it is: README.md.

Letters: B batch, N queries, M context positions, H heads, K key depth, V value depth. g is the gradient of the lambdas.
Functions here ask for memory and give a function that launches the kernels: memory belongs to the stream on which it
was asked for, and kernels run beside each other on several (beside.py).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .beside import ONE_BY_ONE, Sides
from .launch import Geometry, fold_partial, on_device, power_of_two, precision_of, shares, without_autocast
from .windows import (
    WindowTile,
    context_tile,
    expand_window,
    tiles_first,
    tiles_of,
    window_geometry,
    window_tile,
)

WORKSPACE = 512 * 2**20  # bytes of g = dlambda that the backward holds at a time, at most
SPREAD_ELEMENTS = 2048  # of g that a program makes in one turn
SPREAD_PROGRAMS = 8  # per multiprocessor
SPREAD_COLUMNS = 128  # of g that it writes side by side: 191 us for 205 with 64, at 56x56x64


@dataclass(frozen=True)
class Call:
    """What the kernels of one backward share. depth, values: key and value depth, padded; part: examples whose g is
    there at a time."""

    geometry: Geometry
    table: Tensor
    dtype: torch.dtype
    depth: int
    values: int
    part: int

    @property
    def columns(self) -> int:
        return self.part * self.values

    @property
    def query_grid(self) -> tuple[int, int]:
        assert self.geometry.query_grid is not None
        return self.geometry.query_grid

    def tile(self, kernel: str) -> WindowTile:
        return window_tile(kernel, self.depth, self.query_grid[1] == 1, self.dtype.itemsize)

    def reach(self, use: WindowTile) -> tuple[int, int]:
        """Size of the window of a tile: all positions within the scope of one of its own."""
        return use.rows + self.geometry.scope[0] - 1, use.width + self.geometry.scope[1] - 1


def call_of(q: Tensor, v: Tensor, table: Tensor, geometry: Geometry) -> Call:
    (B, N, _, K), V = q.shape, v.shape[2]
    depth, values = max(16, power_of_two(K)), max(16, power_of_two(V))
    most = min(B, 2**16 - 1, max(1, WORKSPACE // (N * depth * values * q.element_size())))
    return Call(geometry, table, q.dtype, depth, values, -(-B // -(-B // most)))  # equal parts of the batch


def backward(
    dy: Tensor, q: Tensor, v: Tensor, c: Tensor | None, table: Tensor, geometry: Geometry,
    needs: tuple[bool, bool, bool, bool], side: Sides = ONE_BY_ONE,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of q, v, c and the table, those that are needed. Those of v and c are there on the side of values.

    dv and dT are products with g, which is written for as much of the batch as WORKSPACE holds. dq needs no g: its
    programs fill the room that those of g, dv and dT leave.
    """
    B, N, H, K = q.shape
    call = call_of(q, v, table, geometry)
    dq = dv = dc = dt = g = None
    start_queries = start_lambdas = start_values = start_table = sum_content = sum_table = nothing
    with on_device(q):
        # First of all: g waits for nothing that is launched here later.
        if needs[1] or needs[3]:
            g, dc, start_lambdas, sum_content = lambda_gradients(call, dy, q, needs[2])
            side.wait("values", "here")  # new memory is filled here, if torch is to be deterministic
        if needs[0]:
            dq, start_queries = query_gradients(call, dy, q, v, c)
        if g is None:
            start_queries()
            if needs[2]:
                with without_autocast(q):
                    dc = torch.bmm(q.reshape(B, N * H, K).mT, dy.reshape(B, N * H, v.shape[2])).float()
                side.wait("values", "here")
            return dq, None, dc, None
        if needs[1]:
            dv, start_values = value_gradients(call, v, g)
        if needs[3]:
            dt, start_table, sum_table = table_gradients(call, v, g)
        side.keep(start_lambdas, start_values, start_table, sum_content, sum_table)

        for b_first in range(0, B, call.part):
            side.wait("values", "table")  # which may read g of the part before
            with side("values"):
                start_lambdas(b_first)
            side.wait("table", "values")
            if b_first == 0:
                side.wait("values", "here")  # for dv's table; not for dq
                side.wait("table", "here")
                start_queries()
            with side("values"):
                start_values(b_first)
            with side("table"):
                start_table(b_first)
        with side("values"):
            sum_content()
        with side("table"):
            sum_table()
    return dq, dv, dc, dt


def nothing(*_: object) -> None:
    pass


def query_gradients(
    call: Call, dy: Tensor, q: Tensor, v: Tensor, c: Tensor | None
) -> tuple[Tensor, Callable[[], None]]:
    from . import window_kernels as kernels

    B, N, H, K = q.shape
    V, use = v.shape[2], call.tile("query_gradients")
    value_tile = min(use.columns, call.values)
    batch_tile = use.columns // value_tile
    t = expand_window(call.table, (use.rows, use.width), call.reach(use), (0, 0), call.depth, q.dtype)
    dq = torch.empty(B, N, H, K, device=q.device, dtype=q.dtype)
    grid = (-(-B // batch_tile), tiles_of(call.query_grid, use))
    swap = tiles_first(*grid, value_tile)

    def start() -> None:
        kernels.query_gradients_window[grid[::-1] if swap else grid](
            dy, v, q if c is None else c, t, dq, B, V, *window_geometry(call.geometry), t.shape[0], t.stride(0),
            *dy.stride()[:3], *v.stride()[:2],
            K=K, H=H, KP=call.depth, HP=max(8, power_of_two(H)), TY=use.rows, TX=use.width, VT=value_tile,
            NV=-(-V // value_tile), BB=batch_tile, C=use.block, HAS_C=c is not None, TILES_FIRST=swap,
            PRECISION=precision_of(q.dtype), num_warps=use.warps, num_stages=use.stages,
        )  # fmt: skip

    return dq, start


def lambda_gradients(
    call: Call, dy: Tensor, q: Tensor, with_content: bool
) -> tuple[Tensor, Tensor | None, Callable[[int], None], Callable[[], None]]:
    """g [(n, k), (b, v)] of a part of the batch, and dc, its sum over queries, taken while it is in registers."""
    from . import window_gradient_kernels as kernels

    B, N, H, K = q.shape
    V, values = dy.shape[3], call.values
    g = torch.empty(N * call.depth, call.columns, device=q.device, dtype=q.dtype)
    value_tile = min(128 if call.dtype.itemsize == 2 else 32, values)
    batch_tile = max(1, SPREAD_COLUMNS // value_tile) if value_tile == values else 1  # whole examples side by side
    together = batch_tile * call.depth * value_tile
    queries = max(1, min(8, SPREAD_ELEMENTS // together))
    warps = 2 if call.dtype.itemsize == 2 and queries * together <= SPREAD_ELEMENTS else 4
    batch_tiles, value_tiles = -(-call.part // batch_tile), values // value_tile
    most = min(-(-N // queries), max(1, N * call.part // (16 * B)))  # dc's parts: an eighth of g, or less
    query_shares = shares(q.device, batch_tiles * value_tiles, most, SPREAD_PROGRAMS)
    dc = parts = None
    if with_content:
        dc = torch.empty(B, K, V, device=q.device, dtype=torch.float32)
        parts = torch.empty(query_shares, *dc.shape, device=q.device, dtype=torch.float32)

    def start(b_first: int) -> None:
        kernels.spread_window[(query_shares, batch_tiles, value_tiles)](
            q, dy, g, g if parts is None else parts, B, V, N, b_first, call.columns, query_shares,
            *q.stride()[:3], *dy.stride()[:3], K=K, H=H, T=queries, KP=call.depth, HP=max(16, power_of_two(H)),
            VP=values, VT=value_tile, BB=batch_tile, WITH_C=parts is not None, PRECISION=precision_of(q.dtype),
            num_warps=warps,
        )  # fmt: skip

    def sum_content() -> None:
        if parts is not None:
            torch.sum(parts, 0, out=dc)

    return g, dc, start, sum_content


def value_gradients(call: Call, v: Tensor, g: Tensor) -> tuple[Tensor, Callable[[int], None]]:
    from . import window_gradient_kernels as kernels

    (B, M, V), geometry = v.shape, call.geometry
    use = context_tile(geometry.context_grid[1], call.values, call.dtype.itemsize)
    grid = (-(-call.columns // use.columns), tiles_of(geometry.context_grid, use))
    dv = torch.empty(B, M, V, device=v.device, dtype=v.dtype)
    # [(window of queries, depth), positions of the tile]
    d = expand_window(
        call.table, call.reach(use), (use.rows, use.width), (geometry.scope[0] - 1, geometry.scope[1] - 1), call.depth,
        call.dtype, transposed=True,
    )  # fmt: skip

    def start(b_first: int) -> None:
        kernels.value_gradients_window[grid](
            g, d, dv, B, V, *window_geometry(geometry), b_first, call.columns, CY=use.rows, CX=use.width,
            KP=call.depth, VP=call.values, BV=use.columns, C=use.block, HALVES=use.halves,
            PRECISION=precision_of(call.dtype), num_warps=use.warps, num_stages=use.stages,
        )  # fmt: skip

    return dv, start


def table_gradients(call: Call, v: Tensor, g: Tensor) -> tuple[Tensor, Callable[[int], None], Callable[[], None]]:
    """Parts of dT [splits, columns of tiles, nk, clipped positions of their windows], summed and folded in the end."""
    from . import window_gradient_kernels as kernels

    (B, _, V), geometry, use = v.shape, call.geometry, call.tile("table_gradients")
    across, reach = -(-call.query_grid[1] // use.width), call.reach(use)
    blocks, programs = table_blocks(geometry, use)
    steps = -(-call.columns // use.columns) * -(-call.query_grid[0] // use.rows)
    splits = even_shares(v.device, programs, steps, use.occupancy)
    rows, part_columns, positions = use.rows * use.width * call.depth, blocks * use.block, reach[0] * reach[1]
    parts = torch.empty(splits, across, rows, part_columns, device=v.device, dtype=torch.float32)
    summed = torch.empty(1, rows, positions, device=v.device, dtype=torch.float32)
    dt = torch.empty(call.table.shape, device=v.device, dtype=call.table.dtype)

    def start(b_first: int) -> None:
        kernels.table_gradients_window[(across * blocks, splits)](
            g, v, parts, B, V, *window_geometry(geometry), splits, b_first, call.columns, blocks, *v.stride()[:2],
            TY=use.rows, TX=use.width, KP=call.depth, VP=call.values, BV=use.columns, C=use.block,
            PRECISION=precision_of(call.dtype), STAGES=use.stages, num_warps=use.warps,
        )  # fmt: skip

    def sum_parts() -> None:
        back, block = geometry.centre[1], 128
        kernels.sum_table_parts[(rows, -(-positions // block))](
            parts, summed, geometry.context_grid[1], back, geometry.scope[1] - 1 - back, positions, part_columns,
            splits, across, TX=use.width, S=16, C=block, num_warps=4,
        )  # fmt: skip
        tile = Geometry((use.rows, use.width), reach, geometry.scope, 1, 1)
        fold_partial(summed, call.table, tile, (0, 0), call.depth, into=dt)

    return dt, start, sum_parts


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

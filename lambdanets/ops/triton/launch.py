"""Choosing tiles and launching the kernels. Plain functions on tensors; autograd and registration: operators.py.

Letters: B batch, N queries, M context positions (times intra-depth U), H heads, K key depth, V value depth.
Tiles depend on K, H, V, the type and the class of the map, never on the batch or the exact map.
"""

import contextlib
import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

RELATIVE = 32  # relative columns whose gradients one program sums
FOLDED = 128  # (row, column) pairs of queries that it adds in a turn: 8.9 us at 14x14, with 64 12.8, with 256 9.2
EXPANDED = (16, 128)  # rows and columns of E that one program writes
SMALL_CONTEXT = {2: 256, 4: 0}  # bytes per element -> context of which one block holds all


@dataclass(frozen=True)
class Geometry:
    """Where queries and context sit. Dense embeddings: query_grid is None."""

    query_grid: tuple[int, int] | None
    context_grid: tuple[int, int]
    scope: tuple[int, int]
    stride: int
    intra_depth: int

    @property
    def centre(self) -> tuple[int, int]:
        return (self.scope[0] - 1) // 2, (self.scope[1] - 1) // 2

    def band(self) -> tuple[int, int, int, int, int]:
        """band_width, query_width, reach_back, reach_forward, stride, as the kernels take them."""
        if self.query_grid is None:
            return 0, 1, 0, 0, 1
        back = self.centre[0]
        return self.context_grid[1] * self.intra_depth, self.query_grid[1], back, self.scope[0] - 1 - back, self.stride


@dataclass(frozen=True)
class Tiles:
    """Sizes shared by all kernels of one call: queries per tile, padded depth and heads, padded context."""

    queries: int
    depth: int
    heads: int
    small: bool
    columns: int


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def cover(context: int) -> tuple[int, int, int]:
    """One of four classes of small contexts, as a sum of powers of two (14x14: 128 + 64 + 16)."""
    for chunks in ((64, 0, 0), (128, 0, 0), (128, 64, 16)):
        if context <= sum(chunks):
            return chunks
    return (256, 0, 0)


def choose_tiles(key_depth: int, heads: int, value_depth: int, context: int, element_size: int) -> Tiles:
    depth = max(4, power_of_two(key_depth))
    padded_heads = power_of_two(heads)
    together = max(
        1, (64 if element_size == 2 else 32) // max(16, power_of_two(value_depth))
    )  # batch elements that fill a tile's value rows
    # float32 takes smaller tiles: without tensor cores ("highest" precision) large ones compile for minutes.
    half = element_size == 2
    queries = max(1, min((128 if half else 64) // depth, (256 if half else 64) // (padded_heads * together)))
    padded_heads = max(padded_heads, (32 if half else 16) // queries)  # a least width: forward_kernels.py
    depth = max(depth, (64 if half else 32) // queries)
    small = context <= SMALL_CONTEXT[element_size]
    block = 256 if half else 32
    return Tiles(queries, depth, padded_heads, small, -(-context // block) * block)


@dataclass(frozen=True)
class Settings:
    """How one kernel runs: queries, value depth and batch elements per tile, the block of context as powers of two,
    pipeline stages, warps, and programs per multiprocessor (for kernels that share the batch out)."""

    queries: int
    value_tile: int
    batch_tile: int
    chunks: tuple[int, int, int]
    stages: int
    warps: int
    occupancy: int


def preferred(kernel: str, tiles: Tiles, context: int, value_depth: int, element_size: int) -> Settings:
    """Fixed choices, from measurements on an H200 (README.md); never a function of batch or exact map size."""
    if element_size == 4:
        value_tile = min(32, max(16, power_of_two(value_depth)))
        return Settings(tiles.queries, value_tile, 32 // value_tile, (32, 0, 0), 1, 4, 1)
    value_tile = min(128, max(16, power_of_two(value_depth)))
    queries = tiles.queries
    if queries > 1 and queries // 2 * tiles.depth >= 64:
        queries //= 2
    # Several batch elements share a tile where the value depth alone would leave it narrower than 64.
    fill = max(1, 64 // value_tile)
    if tiles.small:
        chunks = cover(context)
        if kernel == "query_gradients_small":
            return Settings(queries, value_tile, fill, chunks, 3, 4, 2)
        if sum(chunks) > 64:  # else one program fits a multiprocessor: 130 us for 91 in dT at 14x14x512
            value_tile = min(value_tile, 64)
        if kernel == "table_gradients":
            return Settings(queries, value_tile, fill, chunks, 3, 4, 2)
        return Settings(queries, value_tile, fill, chunks, 3, 8 if value_tile == 128 else 4, 2)
    if kernel == "table_gradients":
        return Settings(tiles.queries, value_tile, fill, (256, 0, 0), 3 if fill < 4 else 2, 8, 1)
    if kernel == "value_gradients":
        return Settings(queries, value_tile, fill, (128, 0, 0), 3, 4, 1)
    batch_tile = max(1, min(128 // value_tile, 128 // (tiles.queries * tiles.heads)))
    return Settings(tiles.queries, value_tile, batch_tile, (64, 0, 0), 3, 4, 1)


def shared_memory(kernel: str, use: Settings, tiles: Tiles, element_size: int) -> int:
    """Bytes of shared memory that a kernel's operands take, about."""
    nk, bv = use.queries * tiles.depth, use.batch_tile * use.value_tile
    bnh, columns, depth = use.batch_tile * use.queries * tiles.heads, sum(use.chunks), max(16, tiles.depth)
    kept, streamed = 0, 0
    if kernel == "forward_small":
        kept, streamed = bv * columns + nk * depth, nk * (columns + bnh)
    elif kernel == "query_gradients_small":
        kept, streamed = bv * columns + nk * depth, nk * columns + bnh * bv
    elif kernel == "value_gradients":
        streamed = nk * (columns + bnh) + bnh * bv
    elif kernel == "table_gradients":
        streamed = bv * (columns + bnh) + nk * bnh
    else:
        streamed = (bv + nk) * columns
    return (kept + use.stages * streamed) * element_size


@functools.cache
def settings(kernel: str, tiles: Tiles, context: int, value_depth: int, element_size: int) -> Settings:
    """The preferred settings, with as many pipeline stages as shared memory holds (227 KiB on Hopper)."""
    use = preferred(kernel, tiles, context, value_depth, element_size)
    while use.stages > 1 and shared_memory(kernel, use, tiles, element_size) > 200 * 1024:
        use = replace(use, stages=use.stages - 1)
    return use


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def without_autocast(tensor: Tensor) -> torch.autocast:
    """Products have the types of their operands, in a backward pass under autocast too."""
    return torch.autocast("cuda" if tensor.is_cuda else "cpu", enabled=False)


def precision_of(dtype: torch.dtype) -> str:
    """fp32 honours torch.set_float32_matmul_precision; half types have one way only.

    "highest" is three TF32 products of split operands, added in float32: as exact as IEEE products (README.md).
    """
    return "tf32x3" if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"


def unit_stride(tensor: Tensor) -> Tensor:
    """Kernels take any strides but the last, which must be 1 (slices of one projection qualify)."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def shares(device: torch.device, programs: int, divisible: int, per_processor: int) -> int:
    """Shares of an axis of `divisible` steps such that the grid fills the chip about once."""
    return max(1, min(divisible, multiprocessors(device) * per_processor // max(programs, 1)))


def blocks_of(use: Settings) -> dict[str, int]:
    C0, C1, C2 = use.chunks
    return dict(T=use.queries, VT=use.value_tile, BB=use.batch_tile, C0=C0, C1=C1, C2=C2)


def expand_table(
    table_or_embeddings: Tensor, geometry: Geometry, tiles: Tiles, queries: int, dtype: torch.dtype
) -> Tensor:
    """table [scope_y, scope_x, K, U] or embeddings [N, M, K, U] -> E [columns, queries * depth], both padded."""
    from . import tables

    source = table_or_embeddings.contiguous()
    width = -(-queries // tiles.queries) * tiles.queries * tiles.depth
    expanded = torch.empty(tiles.columns, width, device=source.device, dtype=dtype)
    context = geometry.context_grid[0] * geometry.context_grid[1]
    tables.expand[(-(-width // EXPANDED[1]), tiles.columns // EXPANDED[0], 1)](
        source, expanded, queries, context, width, 0, width, 1,
        1 if geometry.query_grid is None else geometry.query_grid[1], geometry.context_grid[1],
        *geometry.scope, *geometry.centre, geometry.stride,
        K=source.shape[-2], U=geometry.intra_depth, KP=tiles.depth, DENSE=geometry.query_grid is None,
        ROW_BLOCK=EXPANDED[0], COLUMN_BLOCK=EXPANDED[1], num_warps=4,
    )  # fmt: skip
    return expanded


def forward(q: Tensor, v: Tensor, c: Tensor | None, table_or_embeddings: Tensor, geometry: Geometry) -> Tensor:
    """q [B,N,H,K], v [B,M*U,V], c [B,K,V] fp32 or None -> y [B,N,H,V]."""
    from . import forward_kernels as kernels

    B, N, H, K = q.shape
    M, V = v.shape[1:]
    y = torch.empty(B, N, H, V, device=q.device, dtype=q.dtype)
    tiles = choose_tiles(K, H, V, M, q.element_size())
    shared = dict(K=K, H=H, KP=tiles.depth, HP=tiles.heads, HAS_C=c is not None, PRECISION=precision_of(q.dtype))
    strides = (*q.stride()[:3], *v.stride()[:2])
    with on_device(q):
        e = expand_table(table_or_embeddings, geometry, tiles, N, q.dtype)
        if tiles.small:
            use = settings("forward_small", tiles, M, V, q.element_size())
            groups, value_tiles = -(-B // use.batch_tile), -(-V // use.value_tile)
            splits = shares(q.device, groups * value_tiles, -(-N // use.queries), use.occupancy)
            kernels.forward_small[(groups, value_tiles, splits)](
                q, v, q if c is None else c, e, y, B, N, M, V, e.stride(0), splits, *strides, **shared,
                **blocks_of(use), STAGES=use.stages, num_warps=use.warps,
            )  # fmt: skip
        else:
            use = settings("forward_large", tiles, M, V, q.element_size())
            grid = (-(-B // use.batch_tile), -(-N // use.queries), -(-V // use.value_tile))
            kernels.forward_large[grid](
                q, v, q if c is None else c, e, y, B, N, M, V, e.stride(0), *geometry.band(), *strides, **shared,
                T=use.queries, VT=use.value_tile, BB=use.batch_tile, C0=use.chunks[0],
                num_warps=use.warps, num_stages=use.stages,
            )  # fmt: skip
    return y


def backward(
    dy: Tensor, q: Tensor, v: Tensor, c: Tensor | None, table_or_embeddings: Tensor, geometry: Geometry,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of q, v, c and the table or embeddings, those that are needed."""
    from . import backward_kernels as kernels

    B, N, H, K = q.shape
    M, V = v.shape[1:]
    size = q.element_size()
    tiles = choose_tiles(K, H, V, M, size)
    shared = dict(K=K, H=H, KP=tiles.depth, HP=tiles.heads, PRECISION=precision_of(q.dtype))
    sq, sv, sy = q.stride()[:3], v.stride()[:2], dy.stride()[:3]
    dq = dv = dc = de = None
    # A block of context that is the only one sees every query, so the content gradient can be summed beside it.
    content_beside = tiles.small and needs[1] and needs[2]
    band = (0, *geometry.band()[1:]) if tiles.small else geometry.band()

    with on_device(q):
        e = expand_table(table_or_embeddings, geometry, tiles, N, q.dtype) if needs[0] or needs[1] else None
        if needs[2]:
            dc = torch.empty(B, K, V, device=q.device, dtype=torch.float32)
        if needs[0]:
            dq = torch.empty(B, N, H, K, device=q.device, dtype=q.dtype)
            content = q if c is None else c
            if tiles.small and V <= 128:
                use = settings("query_gradients_small", tiles, M, V, size)
                groups = -(-B // use.batch_tile)
                splits = shares(q.device, groups, -(-N // use.queries), use.occupancy)
                kernels.query_gradients_small[(groups, splits)](
                    dy, v, content, e, dq, B, N, M, V, e.stride(0), splits, *sy, *sv, **shared, **blocks_of(use),
                    HAS_C=c is not None,
                    STAGES=use.stages, num_warps=use.warps,
                )  # fmt: skip
            else:
                use = settings("query_gradients_large", replace(tiles, small=False), M, V, size)
                kernels.query_gradients_large[(-(-B // use.batch_tile), -(-N // use.queries))](
                    dy, v, content, e, dq, B, N, M, V, e.stride(0), *band, *sy, *sv, **shared, T=use.queries,
                    VT=use.value_tile, NV=-(-V // use.value_tile), BB=use.batch_tile, C0=use.chunks[0],
                    HAS_C=c is not None, num_warps=use.warps, num_stages=use.stages,
                )  # fmt: skip
        if needs[1]:
            use = settings("value_gradients", tiles, M, V, size)
            dv = torch.empty(B, M, V, device=q.device, dtype=v.dtype)
            kernels.value_gradients[(-(-B // use.batch_tile), -(-M // sum(use.chunks)), -(-V // use.value_tile))](
                q, dy, e, dv, dc if content_beside else dv, B, N, M, V, e.stride(0), *band, *sq, *sy, **shared,
                **blocks_of(use), WITH_C=content_beside,
                STAGES=use.stages, num_warps=use.warps,
            )  # fmt: skip
        if needs[2] and not content_beside:
            queries, gradients = q.reshape(B, N * H, K), dy.reshape(B, N * H, V)
            with without_autocast(q):
                dc.copy_(torch.bmm(queries.transpose(1, 2), gradients))
        if needs[3]:
            use = settings("table_gradients", tiles, M, V, size)
            query_tiles, blocks = -(-N // use.queries), -(-M // sum(use.chunks))
            splits = shares(q.device, query_tiles * blocks, -(-B // use.batch_tile), use.occupancy)
            rows = query_tiles * use.queries * tiles.depth
            partial = torch.empty(splits, rows, tiles.columns, device=q.device, dtype=torch.float32)
            kernels.table_gradients[(query_tiles, blocks, splits)](
                q, dy, v, partial, B, N, M, V, tiles.columns, rows, splits, *band, *sq, *sy, *sv, **shared,
                **blocks_of(use), NV=-(-V // use.value_tile),
                STAGES=use.stages, num_warps=use.warps,
            )  # fmt: skip
            de = fold_table(partial, table_or_embeddings, geometry, tiles, N)
    return dq, dv, dc, de


def fold_table(partial: Tensor, table_or_embeddings: Tensor, geometry: Geometry, tiles: Tiles, queries: int) -> Tensor:
    """Partial dE [splits, query tiles * nk, columns] -> the gradient of the table, or of the dense embeddings."""
    K, U = table_or_embeddings.shape[-2:]
    if geometry.query_grid is None:
        context = geometry.context_grid[0] * geometry.context_grid[1]
        summed = partial.sum(0).view(-1, tiles.depth, tiles.columns)[:queries, :K, : context * U]
        gradient = summed.reshape(queries, K, context, U).permute(0, 2, 1, 3)
        return gradient.to(table_or_embeddings.dtype).contiguous()
    return fold_partial(partial, table_or_embeddings, geometry, geometry.centre, tiles.depth)


def fold_partial(
    partial: Tensor, table: Tensor, geometry: Geometry, centre: tuple[int, int], depth: int, into: Tensor | None = None
) -> Tensor:
    """Partial dE [splits, nk, columns] of the queries and context of `geometry` -> the gradient of the table.

    `into`: memory for it, like the table; for at most four columns of queries, which need no other.
    """
    from . import tables

    assert geometry.query_grid is not None
    K, U = table.shape[-2:]
    query_width = geometry.query_grid[1]
    columns = 4 if query_width <= 4 else 16  # few variants: windows and sequences, or maps
    blocks, across = -(-query_width // columns), -(-geometry.scope[1] // RELATIVE)
    dtype = table.dtype if blocks == 1 else torch.float32
    assert into is None or (blocks == 1 and into.dtype == dtype)
    gradient = into[None] if into is not None else torch.empty(blocks, *table.shape, device=table.device, dtype=dtype)
    tables.fold[(geometry.scope[0] * across * blocks, K * U)](
        partial, gradient, partial.shape[2], partial.shape[1], partial.shape[0], *geometry.query_grid,
        *geometry.context_grid, *geometry.scope, *centre, geometry.stride,
        K=K, U=U, KP=depth, R=FOLDED // columns, NX=columns, D=RELATIVE, WIDE=partial.numel() >= 2**31,
        num_warps=4,
    )  # fmt: skip
    return (gradient[0] if blocks == 1 else gradient.sum(0)).to(table.dtype)

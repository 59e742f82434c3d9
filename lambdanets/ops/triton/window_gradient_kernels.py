"""Triton kernels for larger maps: gradients of lambdas (g), values and the table. Letters as in window_kernels.py."""

import triton
import triton.language as tl

from .window_kernels import GEOMETRY, row_column, small_matrices, tile_origin, tile_query, window


@triton.jit(do_not_specialize=["B", "N", "b_first", "splits"])
def spread_window(
    q_ptr, dy_ptr, g_ptr, dc_ptr,
    B, V, N, b_first, columns, splits, sqb, sqn, sqh, syb, syn, syh,
    K: tl.constexpr, H: tl.constexpr, T: tl.constexpr, KP: tl.constexpr, HP: tl.constexpr, VP: tl.constexpr,
    VT: tl.constexpr, BB: tl.constexpr, WITH_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """g [(n, k), (b, v)] of the batch elements from b_first on: [k, h] [h, v] per query. VP: v with its padding.

    WITH_C: also its sum over the queries of this program's share, dc [splits, B, K, V].
    Grid: (shares of the queries, batch tiles, value tiles); T queries a turn.
    """
    index = tl.arange(0, T * BB)
    b_local = tl.program_id(1) * BB + index % BB
    b = b_first + b_local
    v0 = tl.program_id(2) * VT
    col = tl.program_id(1) * (BB * VP) + v0 + tl.arange(0, BB * VT)  # several examples: VT is VP
    total = tl.zeros((T * BB, KP, VT), dtype=tl.float32)
    for block in range(tl.program_id(0), (N + T - 1) // T, splits):
        n = block * T + index // BB
        nothing = tl.zeros_like(n)
        exists = (n < N) & (b < B)
        queries = small_matrices(q_ptr, b, n, nothing, exists, K, H, sqb, sqn, sqh, HP, KP, True)
        dy = small_matrices(dy_ptr, b, n, nothing + v0, exists, V, H, syb, syn, syh, HP, VT, False)
        g = tl.dot(queries, dy, input_precision=PRECISION)
        if WITH_C:
            total += g
        # Examples side by side: whole lines of memory, not 32 bytes here and there.
        g = tl.permute(tl.reshape(g.to(g_ptr.dtype.element_ty), (T, BB, KP, VT)), (0, 2, 1, 3))
        line = block * (T * KP) + tl.arange(0, T * KP)
        mask = (line < N * KP)[:, None] & (col < columns)[None, :]
        place = line.to(tl.int64)[:, None] * columns + col[None, :]
        tl.store(g_ptr + place, tl.reshape(g, (T * KP, BB * VT)), mask=mask)
    if WITH_C:
        summed = tl.sum(tl.reshape(total, (T, BB * KP * VT)), axis=0)
        place = tl.arange(0, BB * KP * VT)
        b_own = b_first + tl.program_id(1) * BB + place // (KP * VT)
        k_own = place // VT % KP
        v_own = v0 + place % VT
        offset = ((tl.program_id(0).to(tl.int64) * B + b_own) * K + k_own) * V + v_own
        tl.store(dc_ptr + offset, summed, mask=(b_own < B) & (k_own < K) & (v_own < V))


@triton.jit
def add_products(
    acc, g_ptr, d_ptr, col, columns, first, last, n0, d0, width, query_width, span,
    KP: tl.constexpr, MT: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc [bv, m] with g^T D of rows first to last of a window of queries; as many columns of D, of MT, as acc has."""
    for start in range(first * width * KP, last * width * KP, C):
        line = start + tl.arange(0, C)
        row, _ = row_column(line // KP, width)
        exists = line < last * width * KP
        n_line = n0 * KP + line + row * ((query_width - width) * KP)  # as in tile_lambdas, for lines (query, depth)
        mask_g = exists[:, None] & (col < columns)[None, :]
        g = tl.load(g_ptr + ((n_line * columns)[:, None] + col[None, :]), mask=mask_g, other=0.0)
        d_line = tl.where(exists, d0 * KP + line + row * ((span - width) * KP), 0)
        d = tl.load(d_ptr + (d_line[:, None] * MT + tl.arange(0, acc.shape[1])[None, :]))
        acc = tl.dot(tl.trans(g), d, acc, input_precision=PRECISION)
    return acc


@triton.jit
def store_values(dv_ptr, acc, col, columns, b_first, y0, x0, B, V, CH, CW, CX: tl.constexpr, VP: tl.constexpr):
    """dv^T [bv, m] of the context positions from y0, x0 on."""
    b = b_first + col // VP
    v = col % VP
    m, inside = tile_query(tl.arange(0, acc.shape[1]), y0, x0, CH, CW, CX)
    mask = inside[:, None] & ((col < columns) & (b < B) & (v < V))[None, :]
    offset = (b.to(tl.int64) * (CH * CW) * V + v)[None, :] + (m * V)[:, None]
    tl.store(dv_ptr + offset, tl.trans(acc).to(dv_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["B", *GEOMETRY, "b_first"])
def value_gradients_window(
    g_ptr, d_ptr, dv_ptr,
    B, V, QH, QW, CH, CW, back_y, back_x, forward_y, forward_x, b_first, columns,
    CY: tl.constexpr, CX: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    HALVES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv^T [bv, m] of a tile of CY x CX context positions: a sum of g^T [bv, nk] D [nk, m] over the queries in reach.

    D [(window of queries, K), CY*CX] is the table, expanded for one tile of context (tables.py). HALVES: the first rows
    of the window see the upper half of the tile alone, the last ones the lower half, and multiply no more than that.
    Grid: (blocks of BV columns of g, context tiles).
    """
    MT: tl.constexpr = CY * CX
    y0, x0 = tile_origin(tl.program_id(1), CW, CY, CX)
    low_y, height = window(y0, CY, QH, forward_y, back_y)
    low_x, width = window(x0, CX, QW, forward_x, back_x)
    span = CX + back_x + forward_x
    n0 = low_y * QW + low_x
    d0 = (low_y - y0 + forward_y) * span + low_x - x0 + forward_x
    col = tl.program_id(0) * BV + tl.arange(0, BV)
    acc = tl.zeros((BV, MT), dtype=tl.float32)
    if HALVES:
        HALF: tl.constexpr = CY // 2
        both = tl.minimum(tl.maximum(y0 + HALF - forward_y - low_y, 0), height)  # first row that sees the lower half
        lower = tl.minimum(tl.maximum(y0 + HALF + back_y - low_y, 0), height)  # first that no longer sees the upper one
        acc = add_products(acc, g_ptr, d_ptr, col, columns, both, lower, n0, d0, width, QW, span, KP, MT, C, PRECISION)
        up, down = tl.split(tl.permute(tl.reshape(acc, (BV, 2, MT // 2)), (0, 2, 1)))
        up = add_products(up, g_ptr, d_ptr, col, columns, 0, both, n0, d0, width, QW, span, KP, MT, C, PRECISION)
        store_values(dv_ptr, up, col, columns, b_first, y0, x0, B, V, CH, CW, CX, VP)
        d_ptr += MT // 2
        down = add_products(
            down, g_ptr, d_ptr, col, columns, lower, height, n0, d0, width, QW, span, KP, MT, C, PRECISION
        )
        store_values(dv_ptr, down, col, columns, b_first, y0 + HALF, x0, B, V, CH, CW, CX, VP)
    else:
        acc = add_products(acc, g_ptr, d_ptr, col, columns, 0, height, n0, d0, width, QW, span, KP, MT, C, PRECISION)
        store_values(dv_ptr, acc, col, columns, b_first, y0, x0, B, V, CH, CW, CX, VP)


@triton.jit(do_not_specialize=["B", *GEOMETRY, "splits", "b_first", "blocks"])
def table_gradients_window(
    g_ptr, v_ptr, de_ptr,
    B, V, QH, QW, CH, CW, back_y, back_x, forward_y, forward_x, splits, b_first, columns, blocks, svb, svm,
    TY: tl.constexpr, TX: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dT [nk, C positions of the window] of one column of query tiles over a share of (its tiles, columns of g).

    A sum of g [nk, bv] V^T [bv, C]. Tiles of one column see the same columns of the map, so only those positions are
    packed into blocks of C; rows of tiles whose window has this block off the map are skipped. All that a turn adds
    to addresses are scalars. Programs that run together want the same g in the same order, so it comes from the cache.
    Grid: (columns of tiles * blocks of the window, splits). Each program adds to what it summed for earlier parts of
    the batch.
    """
    T: tl.constexpr = TY * TX
    PER_ELEMENT: tl.constexpr = VP // BV if VP > BV else 1  # blocks of columns of one batch element
    x0 = tl.program_id(0) // blocks * TX
    first_position = tl.program_id(0) % blocks * C
    low_x, width = window(x0, TX, CW, back_x, forward_x)
    count = (TY + back_y + forward_y) * width
    j = first_position + tl.arange(0, C)
    row, column = row_column(j, tl.maximum(width, 1))
    # Rows of query tiles for which this block of the window touches the map.
    first = first_position // tl.maximum(width, 1)
    last = tl.minimum(first_position + C, count) // tl.maximum(width, 1)
    low = tl.maximum(back_y - last + TY - 1, 0) // TY
    high = tl.minimum((QH + TY - 1) // TY, (tl.maximum(CH + back_y - first, 0) + TY - 1) // TY)
    rows = tl.where(first_position < count, tl.maximum(high - low, 0), 0)
    column_blocks = (columns + BV - 1) // BV
    steps = rows * column_blocks
    share = (steps + splits - 1) // splits
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, steps)
    tile_y, block = low + begin % tl.maximum(rows, 1), begin // tl.maximum(rows, 1)

    nk = tl.arange(0, T * KP)
    col = tl.arange(0, BV)
    query_y = tl.where(x0 + nk // KP % TX < QW, nk // KP // TX, QH)  # no row of the map where the query does not exist
    g_offset = ((nk // KP // TX * QW + nk // KP % TX) * KP + nk % KP) * columns
    context_y = tl.where(j < count, row - back_y, -QH)
    v_offset = ((row - back_y) * CW + low_x + column) * svm
    g_ptr += x0 * KP * columns
    # [splits, columns of tiles, nk, blocks, C]: a block is written as it was packed; sum_table_parts takes it apart.
    de_ptr += (tl.program_id(1) * (tl.num_programs(0) // blocks) + x0 // TX).to(tl.int64) * (T * KP) * blocks * C
    de_block = de_ptr + (nk[:, None] * (blocks * C) + j[None, :])
    later = tl.full((T * KP, C), b_first, dtype=tl.int32) > 0
    acc = tl.load(de_block, mask=later, other=0.0)
    for _ in tl.range(begin, end, num_stages=STAGES):
        y0 = tile_y * TY
        mask = (query_y + y0 < QH)[:, None] & (block * BV + col < columns)[None, :]
        g_tile = g_ptr + y0 * QW * KP * columns + block * BV
        g = tl.load(g_tile + (g_offset[:, None] + col[None, :]), mask=mask, other=0.0)
        b0 = b_first + block * BV // VP
        v0 = block % PER_ELEMENT * BV
        # One comparison: rows above the map are large numbers without a sign.
        inside = tl.cast(context_y + y0, tl.uint32, bitcast=True) < tl.cast(CH, tl.uint32, bitcast=True)
        mask = inside[:, None] & ((b0 + col // VP < B) & (v0 + col % VP < V))[None, :]
        v_tile = v_ptr + tl.cast(b0, tl.int64) * svb + (y0 * CW * svm + v0)
        values = tl.load(v_tile + (v_offset[:, None] + (col // VP * svb + col % VP)[None, :]), mask=mask, other=0.0)
        acc = tl.dot(g, tl.trans(values), acc, input_precision=PRECISION)
        tile_y += 1
        block = tl.where(tile_y == high, block + 1, block)
        tile_y = tl.where(tile_y == high, low, tile_y)
    tl.store(de_block, acc)


@triton.jit(do_not_specialize=["width", "back", "forward", "positions", "part_columns", "splits", "across"])
def sum_table_parts(
    part_ptr, de_ptr, width, back, forward, positions, part_columns, splits, across,
    TX: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dT [nk, positions of the window]: the sum of what all columns of tiles and all splits found for a position.

    Grid: (nk, blocks of C positions). S parts a turn, in a fixed order.
    """
    place = tl.program_id(1) * C + tl.arange(0, C)
    row, column = row_column(place, TX + back + forward)
    total = tl.zeros((S, C), dtype=tl.float32)
    for start in range(0, across * splits, S):
        part = start + tl.arange(0, S)
        tile_x = part % across
        low, clipped = window(tile_x * TX, TX, width, back, forward)
        own = column[None, :] - (low - tile_x * TX + back)[:, None]
        exists = (
            (part < across * splits)[:, None] & (place < positions)[None, :] & (own >= 0) & (own < clipped[:, None])
        )
        line = (part.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * part_columns
        offset = line[:, None] + (row[None, :] * clipped[:, None] + own)
        total += tl.load(part_ptr + offset, mask=exists, other=0.0)
    tl.store(de_ptr + tl.program_id(0) * positions + place, tl.sum(total, axis=0), mask=place < positions)

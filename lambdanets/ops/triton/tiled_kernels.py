"""Triton kernels of the tiled mode. Letters as in expanded_kernels.py; `tile` is a tiled.Tile.

All tiles of rows x width queries read the same small table T [positions of a tile's window, nk] (README.md). y0, x0 is
the first query of a tile; back and forward are the reach of the scope. QH x QW is the grid of queries, CH x CW that of
the context.
"""

import triton
import triton.language as tl

from .expanded_kernels import add_content, zeros

# Sizes that do not compile new variants.
EXTENT = ["QH", "QW", "CH", "CW", "back_y", "back_x", "forward_y", "forward_x"]


@triton.jit
def tile_origin(tile, query_width, TY: tl.constexpr, TX: tl.constexpr):
    """Return the first row and column of a tile of TY x TX queries."""
    across = (query_width + TX - 1) // TX
    return (tile // across) * TY, (tile % across) * TX


@triton.jit
def tile_query(t, y0, x0, query_height, query_width, TX: tl.constexpr):
    """Return the flat position of query t of a tile, and whether it exists."""
    y = y0 + t // TX
    x = x0 + t % TX
    return y * query_width + x, (y < query_height) & (x < query_width)


@triton.jit
def window(origin, size: tl.constexpr, limit, back, forward):
    """Return the first position in reach of `size` neighbours from `origin`, and the count, clipped to [0, limit)."""
    low = tl.maximum(origin - back, 0)
    high = tl.minimum(origin + size + forward, limit)
    return low, tl.maximum(high - low, 0)


@triton.jit
def row_column(j, width):
    """Return j // width and j % width without an integer division (exact below 2**22)."""
    row = ((j.to(tl.float32) + 0.5) * (1.0 / width.to(tl.float32))).to(tl.int32)
    return row, j - row * width


@triton.jit
def values_at(v_ptr, m, exists, b0, v0, B, V, svb, svm, tile: tl.constexpr):
    """Load values [m, bv] of any context positions; zero where they do not exist.

    A scalar base and 32-bit offsets need half of the registers and instructions of 64-bit pointers.
    """
    col = tl.arange(0, tile.columns)
    v = v0 + col % tile.VT
    mask = exists[:, None] & ((v < V) & (b0 + col // tile.VT < B))[None, :]
    v_ptr += tl.cast(b0, tl.int64) * svb
    return tl.load(v_ptr + ((col // tile.VT * svb + v)[None, :] + (m * svm)[:, None]), mask=mask, other=0.0)


@triton.jit
def tile_lambdas(
    v_ptr, c_ptr, t_ptr, b0, v0, y0, x0, B, V, CH, CW, back_y, back_x, forward_y, forward_x, svb, svm,
    VALUE_ROWS: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Compute lambda^T [bv, nk] (VALUE_ROWS) or lambda [nk, bv] of a tile of queries.

    The sum runs over the part of the tile's window that lies on the map, packed without gaps.
    """
    ROWS: tl.constexpr = tile.T * tile.KP
    low_y, height = window(y0, tile.rows, CH, back_y, forward_y)
    low_x, width = window(x0, tile.width, CW, back_x, forward_x)
    span = tile.width + back_x + forward_x
    m0 = low_y * CW + low_x
    t0 = (low_y - y0 + back_y) * span + low_x - x0 + back_x
    count = height * width
    lambdas = zeros(tile.columns if VALUE_ROWS else ROWS, ROWS if VALUE_ROWS else tile.columns)
    for start in range(0, count, tile.block):
        j = start + tl.arange(0, tile.block)
        row, _ = row_column(j, width)  # j % width + row * pitch of map or table equals j + row * (pitch - width)
        exists = j < count
        x = values_at(v_ptr, m0 + j + row * (CW - width), exists, b0, v0, B, V, svb, svm, tile)
        line = tl.where(exists, t0 + j + row * (span - width), 0)
        e = tl.load(t_ptr + (line[:, None] * ROWS + tl.arange(0, ROWS)[None, :]))
        if VALUE_ROWS:
            lambdas = tl.dot(tl.trans(x), e, lambdas, input_precision=tile.precision)
        else:
            lambdas = tl.dot(tl.trans(e), x, lambdas, input_precision=tile.precision)
    if tile.content:
        lambdas = add_content(lambdas, c_ptr, b0, v0, B, V, VALUE_ROWS, t_ptr.dtype.element_ty, tile)
    return lambdas


@triton.jit
def small_matrices(
    ptr, b, n, d0, exists, limit, heads, sb, sn, sh, R: tl.constexpr, W: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Load a matrix of R heads by W depths from d0 on, or its transpose, for every (b, n, d0) of three vectors."""
    h = tl.arange(0, R)
    d = tl.arange(0, W)
    base = b.to(tl.int64) * sb + n * sn + d0
    if TRANSPOSED:
        mask = exists[:, None, None] & (h < heads)[None, None, :] & (d0[:, None, None] + d[None, :, None] < limit)
        offset = base[:, None, None] + (h * sh)[None, None, :] + d[None, :, None]
    else:
        mask = exists[:, None, None] & (h < heads)[None, :, None] & (d0[:, None, None] + d[None, None, :] < limit)
        offset = base[:, None, None] + (h * sh)[None, :, None] + d[None, None, :]
    return tl.load(ptr + offset, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["B", *EXTENT, "copies"])
def forward_window(
    q_ptr, v_ptr, c_ptr, t_ptr, y_ptr,
    B, V, QH, QW, CH, CW, back_y, back_x, forward_y, forward_x, copies, copy, sqb, sqn, sqh, svb, svm,
    tile: tl.constexpr,
):  # fmt: skip
    """Compute the output y [B, N, H, V].

    Neighbouring programs read different copies of T, `copy` numbers apart, to avoid contention. Grid: (batch tiles,
    query tiles, value tiles), with tile.tiles_first (query tiles, batch tiles, value tiles).
    """
    dtype: tl.constexpr = t_ptr.dtype.element_ty
    t_ptr += tl.program_id(0) % copies * copy
    b0 = tl.program_id(1 if tile.tiles_first else 0) * tile.BB
    v0 = tl.program_id(2) * tile.VT
    y0, x0 = tile_origin(tl.program_id(0 if tile.tiles_first else 1), QW, tile.rows, tile.width)
    lambdas = tile_lambdas(
        v_ptr, c_ptr, t_ptr, b0, v0, y0, x0, B, V, CH, CW, back_y, back_x, forward_y, forward_x, svb, svm, True, tile
    )
    # One small product [16 values, k] [k, h] per query and group of 16 rows. In this order (queries outside, groups
    # inside) every warp already has its left operands in registers.
    G: tl.constexpr = tile.columns // 16
    own = tl.permute(tl.reshape(lambdas.to(dtype), (G, 16, tile.T, tile.KP)), (2, 0, 1, 3))
    index = tl.arange(0, tile.T * G)
    b = b0 + (index % G) * 16 // tile.VT
    first_v = v0 + (index % G) * 16 % tile.VT
    n, exists = tile_query(index // G, y0, x0, QH, QW, tile.width)
    exists = exists & (b < B)
    queries = small_matrices(
        q_ptr, b, n, tl.zeros_like(n), exists, tile.K, tile.H, sqb, sqn, sqh, tile.HP, tile.KP, False
    )
    own = tl.reshape(own, (tile.T * G, 16, tile.KP))
    y = tl.dot(own, tl.permute(queries, (0, 2, 1)), input_precision=tile.precision)
    h = tl.arange(0, tile.HP)
    v = tl.arange(0, 16)
    mask = exists[:, None, None] & (h < tile.H)[None, :, None] & (first_v[:, None, None] + v[None, None, :] < V)
    offset = ((b.to(tl.int64) * (QH * QW) + n) * tile.H * V + first_v)[:, None, None]
    offset = offset + (h * V)[None, :, None] + v[None, None, :]
    tl.store(y_ptr + offset, tl.permute(y.to(dtype), (0, 2, 1)), mask=mask)


@triton.jit(do_not_specialize=["B", *EXTENT, "copies"])
def query_gradients_window(
    dy_ptr, v_ptr, c_ptr, t_ptr, dq_ptr,
    B, V, QH, QW, CH, CW, back_y, back_x, forward_y, forward_x, copies, copy, syb, syn, syh, svb, svm,
    tile: tl.constexpr,
):  # fmt: skip
    """Recompute the lambdas, then dq^T [k, h] = lambda [k, 16 values] dy^T [16 values, h] per query.

    Grid: (batch tiles, query tiles), with tile.tiles_first (query tiles, batch tiles).
    """
    T: tl.constexpr = tile.T
    KP: tl.constexpr = tile.KP
    G: tl.constexpr = tile.columns // 16
    t_ptr += tl.program_id(0) % copies * copy
    b0 = tl.program_id(1 if tile.tiles_first else 0) * tile.BB
    y0, x0 = tile_origin(tl.program_id(0 if tile.tiles_first else 1), QW, tile.rows, tile.width)
    index = tl.arange(0, G * T)
    group = index // T
    n_group, exists_group = tile_query(index % T, y0, x0, QH, QW, tile.width)
    b_group = b0 + group * 16 // tile.VT
    exists_group = exists_group & (b_group < B)
    dq = tl.full((G * T, KP, tile.HP), 0.0, dtype=tl.float32)
    NV: tl.constexpr = tile.NV
    for value_tile in tl.static_range(NV):
        v0 = value_tile * tile.VT
        lambdas = tile_lambdas(
            v_ptr, c_ptr, t_ptr, b0, v0, y0, x0, B, V, CH, CW, back_y, back_x, forward_y, forward_x, svb, svm,
            False, tile,
        )  # fmt: skip
        first_v = v0 + group * 16 % tile.VT
        dy = small_matrices(
            dy_ptr, b_group, n_group, first_v, exists_group, V, tile.H, syb, syn, syh, tile.HP, 16, False
        )
        own = tl.permute(tl.reshape(lambdas.to(t_ptr.dtype.element_ty), (T, KP, G, 16)), (2, 0, 1, 3))
        own = tl.reshape(own, (G * T, KP, 16))
        dq = tl.dot(own, tl.permute(dy, (0, 2, 1)), dq, input_precision=tile.precision)
    if tile.VT > 16:
        dq = tl.sum(tl.reshape(dq, (tile.BB, G // tile.BB, T, KP, tile.HP)), axis=1)
        dq = tl.reshape(dq, (tile.BB * T, KP, tile.HP))
    bt = tl.arange(0, tile.BB * T)
    n, exists = tile_query(bt % T, y0, x0, QH, QW, tile.width)
    b = b0 + bt // T
    h = tl.arange(0, tile.HP)
    k = tl.arange(0, KP)
    mask = (exists & (b < B))[:, None, None] & (h < tile.H)[None, :, None] & (k < tile.K)[None, None, :]
    offset = ((b.to(tl.int64) * (QH * QW) + n) * tile.H * tile.K)[:, None, None]
    offset = offset + (h * tile.K)[None, :, None] + k[None, None, :]
    tl.store(dq_ptr + offset, tl.permute(dq, (0, 2, 1)).to(dq_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["B", "N", "b_first", "splits"])
def lambda_gradients(
    q_ptr, dy_ptr, g_ptr, dc_ptr, B, V, N, b_first, columns, splits, sqb, sqn, sqh, syb, syn, syh, tile: tl.constexpr
):
    """Compute g [(n, k), (b, v)] of the batch elements from b_first on: [k, h] [h, v] per query, v with its padding.

    With tile.content also its sum over the queries of this program's share, dc [splits, B, K, V]. Grid: (shares of the
    queries, batch tiles, value tiles); T queries per step.
    """
    T: tl.constexpr = tile.T
    BB: tl.constexpr = tile.BB
    KP: tl.constexpr = tile.KP
    VT: tl.constexpr = tile.VT
    index = tl.arange(0, T * BB)
    b_local = tl.program_id(1) * BB + index % BB
    b = b_first + b_local
    v0 = tl.program_id(2) * VT
    col = tl.program_id(1) * (BB * tile.VP) + v0 + tl.arange(0, BB * VT)  # with several batch elements VT equals VP
    total = tl.zeros((T * BB, KP, VT), dtype=tl.float32)
    for block in range(tl.program_id(0), (N + T - 1) // T, splits):
        n = block * T + index // BB
        nothing = tl.zeros_like(n)
        exists = (n < N) & (b < B)
        queries = small_matrices(q_ptr, b, n, nothing, exists, tile.K, tile.H, sqb, sqn, sqh, tile.HP, KP, True)
        dy = small_matrices(dy_ptr, b, n, nothing + v0, exists, V, tile.H, syb, syn, syh, tile.HP, VT, False)
        g = tl.dot(queries, dy, input_precision=tile.precision)
        if tile.content:
            total += g
        # Neighbouring batch elements, so that whole cache lines are written instead of 32 bytes at a time.
        g = tl.permute(tl.reshape(g.to(g_ptr.dtype.element_ty), (T, BB, KP, VT)), (0, 2, 1, 3))
        line = block * (T * KP) + tl.arange(0, T * KP)
        mask = (line < N * KP)[:, None] & (col < columns)[None, :]
        place = line.to(tl.int64)[:, None] * columns + col[None, :]
        tl.store(g_ptr + place, tl.reshape(g, (T * KP, BB * VT)), mask=mask)
    if tile.content:
        summed = tl.sum(tl.reshape(total, (T, BB * KP * VT)), axis=0)
        place = tl.arange(0, BB * KP * VT)
        b_own = b_first + tl.program_id(1) * BB + place // (KP * VT)
        k_own = place // VT % KP
        v_own = v0 + place % VT
        offset = ((tl.program_id(0).to(tl.int64) * B + b_own) * tile.K + k_own) * V + v_own
        tl.store(dc_ptr + offset, summed, mask=(b_own < B) & (k_own < tile.K) & (v_own < V))


@triton.jit
def add_products(
    acc, g_ptr, d_ptr, col, columns, first, last, n0, d0, width, QW, span, MT: tl.constexpr, tile: tl.constexpr
):
    """Add g^T D of rows first to last of a window of queries to acc [bv, m]. D has MT columns, acc may have fewer."""
    KP: tl.constexpr = tile.KP
    for start in range(first * width * KP, last * width * KP, tile.block):
        line = start + tl.arange(0, tile.block)
        row, _ = row_column(line // KP, width)
        exists = line < last * width * KP
        n_line = n0 * KP + line + row * ((QW - width) * KP)  # as in tile_lambdas, for lines (query, depth)
        mask_g = exists[:, None] & (col < columns)[None, :]
        g = tl.load(g_ptr + ((n_line * columns)[:, None] + col[None, :]), mask=mask_g, other=0.0)
        d_line = tl.where(exists, d0 * KP + line + row * ((span - width) * KP), 0)
        d = tl.load(d_ptr + (d_line[:, None] * MT + tl.arange(0, acc.shape[1])[None, :]))
        acc = tl.dot(tl.trans(g), d, acc, input_precision=tile.precision)
    return acc


@triton.jit
def store_values(dv_ptr, acc, col, columns, b_first, y0, x0, B, V, CH, CW, tile: tl.constexpr):
    """Store dv^T [bv, m] of the context positions from y0, x0 on."""
    b = b_first + col // tile.VP
    v = col % tile.VP
    m, inside = tile_query(tl.arange(0, acc.shape[1]), y0, x0, CH, CW, tile.width)
    mask = inside[:, None] & ((col < columns) & (b < B) & (v < V))[None, :]
    offset = (b.to(tl.int64) * (CH * CW) * V + v)[None, :] + (m * V)[:, None]
    tl.store(dv_ptr + offset, tl.trans(acc).to(dv_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["B", *EXTENT, "b_first"])
def value_gradients_window(
    g_ptr, d_ptr, dv_ptr,
    B, V, QH, QW, CH, CW, back_y, back_x, forward_y, forward_x, b_first, columns, tile: tl.constexpr,
):  # fmt: skip
    """Compute dv^T [bv, m] of a tile of context positions: the sum of g^T [bv, nk] D [nk, m] over the queries in reach.

    D [(window of queries, K), positions] is the table, expanded for one tile of context. With tile.halves, the first
    rows of the window, which reach only the upper half of the tile, and the last rows, which reach only the lower half,
    are multiplied with that half. Grid: (blocks of columns of g, context tiles).
    """
    MT: tl.constexpr = tile.T
    BV: tl.constexpr = tile.columns
    y0, x0 = tile_origin(tl.program_id(1), CW, tile.rows, tile.width)
    low_y, height = window(y0, tile.rows, QH, forward_y, back_y)
    low_x, width = window(x0, tile.width, QW, forward_x, back_x)
    span = tile.width + back_x + forward_x
    n0 = low_y * QW + low_x
    d0 = (low_y - y0 + forward_y) * span + low_x - x0 + forward_x
    col = tl.program_id(0) * BV + tl.arange(0, BV)
    acc = tl.zeros((BV, MT), dtype=tl.float32)
    if tile.halves:
        HALF: tl.constexpr = tile.rows // 2
        both = tl.minimum(tl.maximum(y0 + HALF - forward_y - low_y, 0), height)  # first row that reaches the lower half
        lower = tl.minimum(tl.maximum(y0 + HALF + back_y - low_y, 0), height)  # first row beyond the upper half
        acc = add_products(acc, g_ptr, d_ptr, col, columns, both, lower, n0, d0, width, QW, span, MT, tile)
        up, down = tl.split(tl.permute(tl.reshape(acc, (BV, 2, MT // 2)), (0, 2, 1)))
        up = add_products(up, g_ptr, d_ptr, col, columns, 0, both, n0, d0, width, QW, span, MT, tile)
        store_values(dv_ptr, up, col, columns, b_first, y0, x0, B, V, CH, CW, tile)
        d_ptr += MT // 2
        down = add_products(down, g_ptr, d_ptr, col, columns, lower, height, n0, d0, width, QW, span, MT, tile)
        store_values(dv_ptr, down, col, columns, b_first, y0 + HALF, x0, B, V, CH, CW, tile)
    else:
        acc = add_products(acc, g_ptr, d_ptr, col, columns, 0, height, n0, d0, width, QW, span, MT, tile)
        store_values(dv_ptr, acc, col, columns, b_first, y0, x0, B, V, CH, CW, tile)


@triton.jit(do_not_specialize=["B", *EXTENT, "splits", "b_first", "blocks"])
def table_gradients_window(
    g_ptr, v_ptr, de_ptr,
    B, V, QH, QW, CH, CW, back_y, back_x, forward_y, forward_x, splits, b_first, columns, blocks, svb, svm,
    tile: tl.constexpr,
):  # fmt: skip
    """Compute dT [nk, C positions of the window] of a column of query tiles over a share of (its tiles, columns of g).

    It is a sum of g [nk, bv] V^T [bv, C]. Tiles of one column reach the same columns of the map, so only those
    positions are packed into blocks of C; rows of tiles for which this block of the window is outside the map are
    skipped. A step adds only scalars to addresses. Concurrent programs read the same g in the same order, from the
    cache. Grid: (columns of tiles * blocks of the window, splits). Each program adds to its sums for earlier parts of
    the batch.
    """
    TY: tl.constexpr = tile.rows
    TX: tl.constexpr = tile.width
    T: tl.constexpr = tile.T
    KP: tl.constexpr = tile.KP
    VP: tl.constexpr = tile.VP
    BV: tl.constexpr = tile.columns
    C: tl.constexpr = tile.block
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
    query_y = tl.where(x0 + nk // KP % TX < QW, nk // KP // TX, QH)  # outside the map if the query does not exist
    g_offset = ((nk // KP // TX * QW + nk // KP % TX) * KP + nk % KP) * columns
    context_y = tl.where(j < count, row - back_y, -QH)
    v_offset = ((row - back_y) * CW + low_x + column) * svm
    g_ptr += x0 * KP * columns
    # [splits, columns of tiles, nk, blocks, C]: blocks are written as packed; sum_table_parts unpacks them.
    de_ptr += (tl.program_id(1) * (tl.num_programs(0) // blocks) + x0 // TX).to(tl.int64) * (T * KP) * blocks * C
    de_block = de_ptr + (nk[:, None] * (blocks * C) + j[None, :])
    later = tl.full((T * KP, C), b_first, dtype=tl.int32) > 0
    acc = tl.load(de_block, mask=later, other=0.0)
    for _ in tl.range(begin, end, num_stages=tile.stages):
        y0 = tile_y * TY
        mask = (query_y + y0 < QH)[:, None] & (block * BV + col < columns)[None, :]
        g_tile = g_ptr + y0 * QW * KP * columns + block * BV
        g = tl.load(g_tile + (g_offset[:, None] + col[None, :]), mask=mask, other=0.0)
        b0 = b_first + block * BV // VP
        v0 = block % PER_ELEMENT * BV
        # One comparison is enough: as unsigned numbers, rows above the map are large.
        inside = tl.cast(context_y + y0, tl.uint32, bitcast=True) < tl.cast(CH, tl.uint32, bitcast=True)
        mask = inside[:, None] & ((b0 + col // VP < B) & (v0 + col % VP < V))[None, :]
        v_tile = v_ptr + tl.cast(b0, tl.int64) * svb + (y0 * CW * svm + v0)
        values = tl.load(v_tile + (v_offset[:, None] + (col // VP * svb + col % VP)[None, :]), mask=mask, other=0.0)
        acc = tl.dot(g, tl.trans(values), acc, input_precision=tile.precision)
        tile_y += 1
        block = tl.where(tile_y == high, block + 1, block)
        tile_y = tl.where(tile_y == high, low, tile_y)
    tl.store(de_block, acc)


@triton.jit(do_not_specialize=["width", "back", "forward", "positions", "part_columns", "splits", "across"])
def sum_table_parts(
    part_ptr, de_ptr, width, back, forward, positions, part_columns, splits, across,
    TX: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Sum the parts of all columns of tiles and splits to dT [nk, positions of the window].

    Grid: (nk, blocks of C positions). S parts per step, in a fixed order.
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

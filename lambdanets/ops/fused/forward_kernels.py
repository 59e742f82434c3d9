"""Triton kernels that compute lambdas tile by tile and apply them to their queries.

Letters (shape suffixes): B batch, N queries, M context positions (intra-depth already folded in: m*U+u),
H heads, K key depth, V value depth.
Tile letters: T queries per tile, KP / HP = K / H padded to a power of two, VT a tile of the value depth,
BB batch elements per tile.
  "nk" is a row (query of the tile, depth)          T*KP of them
  "nh" is a row (query of the tile, head)           T*HP
  "bv" is a row (batch element of the tile, value)  BB*VT
  "bnh" is a row (batch element, query, head)       BB*T*HP
Kernels named "window" serve larger maps (README.md): T [positions of a tile's window, nk] is their table, TY x TX
queries are a tile; y0, x0 is its first query, back and forward how far the scope reaches.
E is the expanded table, [ME, NK] with NK = (all queries, depth) contiguous, zero where nothing is in scope and in
its padding (see tables.py), so no load of E needs a mask.

Every matrix that tensor cores read from shared memory is at least 64 half (32 float) elements wide in its contiguous
axis: from Triton 3.6 on, narrower ones can be read out of bounds on Hopper (triton-lang/triton issue 11366).
"""

import triton
import triton.language as tl


@triton.jit
def diagonal_queries(
    q_ptr, b0, n0, B, N, sqb, sqn, sqh,
    BB: tl.constexpr, T: tl.constexpr, KP: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Queries as a matrix [bnh, nk] that is zero unless both sides speak of the same query.

    Multiplying by it applies (or spreads over) many queries' own lambdas with one tensor-core product.
    """
    row = tl.arange(0, BB * T * HP)
    col = tl.arange(0, T * KP)
    row_b = b0 + row // (T * HP)
    row_n = (row // HP) % T
    row_h = row % HP
    col_n = col // KP
    col_k = col % KP
    row_mask = (n0 + row_n < N) & (row_h < H)
    offset = (n0 + row_n) * sqn + row_h * sqh
    if BB == 1:  # one scalar base and 32-bit offsets that do not change from turn to turn: far fewer registers
        q_ptr += tl.cast(b0, tl.int64) * sqb
    else:
        row_mask = row_mask & (row_b < B)
        offset = row_b.to(tl.int64) * sqb + offset
    mask = (row_n[:, None] == col_n[None, :]) & row_mask[:, None] & (col_k < K)[None, :]
    return tl.load(q_ptr + (offset[:, None] + col_k[None, :]), mask=mask, other=0.0)


@triton.jit
def content_block(
    c_ptr, b0, v0, B, V,
    BB: tl.constexpr, VT: tl.constexpr, KC: tl.constexpr, K: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Content lambdas [KC, bv]. They join as KC further context positions, whose embeddings are unit vectors."""
    k = tl.arange(0, KC)
    col = tl.arange(0, BB * VT)
    b = b0 + col // VT
    v = v0 + col % VT
    mask = (k < K)[:, None] & (v < V)[None, :]
    if BB == 1:
        c_ptr += tl.cast(b0, tl.int64) * K * V
    else:
        mask = mask & (b < B)[None, :]
        v = b.to(tl.int64) * K * V + v
    return tl.load(c_ptr + (v[None, :] + (k * V)[:, None]), mask=mask, other=0.0).to(dtype)


@triton.jit
def unit_vectors(T: tl.constexpr, KP: tl.constexpr, KC: tl.constexpr, dtype: tl.constexpr):
    """Embeddings of the content lambda's rows: [KC, nk], one where the depth is the row's."""
    depth = tl.arange(0, T * KP) % KP
    return (tl.arange(0, KC)[:, None] == depth[None, :]).to(dtype)


@triton.jit
def output_rows(
    y_ptr, b0, n0, v0, B, N, V, syb, syn, syh,
    BB: tl.constexpr, T: tl.constexpr, HP: tl.constexpr, VT: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Gradients of the output [bnh, bv], zero unless both sides speak of the same batch element."""
    row = tl.arange(0, BB * T * HP)
    col = tl.arange(0, BB * VT)
    row_n = n0 + (row // HP) % T
    row_h = row % HP
    row_b = row // (T * HP)
    col_b = col // VT
    v = v0 + col % VT
    mask = ((row_n < N) & (row_h < H))[:, None] & (v < V)[None, :]
    offset = row_n * syn + row_h * syh
    if BB == 1:
        y_ptr += tl.cast(b0, tl.int64) * syb
    else:
        mask = mask & (row_b[:, None] == col_b[None, :]) & (b0 + row_b < B)[:, None]
        offset = (b0 + row_b).to(tl.int64) * syb + offset
    return tl.load(y_ptr + (offset[:, None] + v[None, :]), mask=mask, other=0.0)


@triton.jit
def context_values(v_ptr, b0, v0, m0, B, M, V, svb, svm, BB: tl.constexpr, VT: tl.constexpr, C: tl.constexpr):
    """Values [C, bv] of C neighbouring context positions; zero outside the context."""
    m = m0 + tl.arange(0, C)
    col = tl.arange(0, BB * VT)
    b = b0 + col // VT
    v = v0 + col % VT
    mask = (m < M)[:, None] & (v < V)[None, :]
    if BB == 1:
        v_ptr += tl.cast(b0, tl.int64) * svb
    else:
        mask = mask & (b < B)[None, :]
        v = b.to(tl.int64) * svb + v
    return tl.load(v_ptr + (v[None, :] + m[:, None] * svm), mask=mask, other=0.0)


@triton.jit
def table_block(e_ptr, m0, NK, ROWS: tl.constexpr, C: tl.constexpr):
    """E [C, nk] of one query tile (e_ptr points at the tile's first column)."""
    row = m0 + tl.arange(0, C)
    return tl.load(e_ptr + (row[:, None] * NK + tl.arange(0, ROWS)[None, :]))


@triton.jit
def band(n0, T: tl.constexpr, N, M, band_width, query_width, reach_back, reach_forward, stride, MT: tl.constexpr):
    """Context blocks [low, high) of MT positions that a tile of T queries can see.

    band_width: flat positions per context row (width * intra-depth); 0 where there is no band (dense embeddings).
    """
    low = 0
    high = M
    if band_width > 0:
        first_row = n0 // query_width
        last_row = tl.minimum(n0 + T - 1, N - 1) // query_width
        low = tl.maximum(first_row * stride - reach_back, 0) * band_width
        high = tl.minimum((last_row * stride + reach_forward + 1) * band_width, M)
    return low // MT, (high + MT - 1) // MT


@triton.jit
def apply_and_store(
    y_ptr, lambdas, queries, b0, n0, v0, B, N, V,
    BB: tl.constexpr, T: tl.constexpr, HP: tl.constexpr, VT: tl.constexpr, H: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """lambda^T [bv, nk] times the diagonal queries [bnh, nk] -> y [B, N, H, V], contiguous.

    The product pairs every batch element of the tile with every other; the equal ones are kept, in registers.
    """
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    y = tl.dot(lambdas.to(dtype), tl.trans(queries), input_precision=PRECISION)  # [bv, bnh]
    if BB > 1:
        pairs = tl.reshape(y, (BB, VT, BB, T * HP))
        left = tl.reshape(tl.arange(0, BB), (BB, 1, 1, 1))
        right = tl.reshape(tl.arange(0, BB), (1, 1, BB, 1))
        y = tl.reshape(tl.sum(tl.where(left == right, pairs, 0.0), axis=2), (BB * VT, T * HP))
    value = tl.arange(0, BB * VT)
    b = value // VT
    v = v0 + value % VT
    row = tl.arange(0, T * HP)
    n = n0 + row // HP
    h = row % HP
    mask = ((n < N) & (h < H))[:, None] & (v < V)[None, :]
    offset = ((n * H + h) * V)[:, None] + v[None, :]
    y_ptr += tl.cast(b0, tl.int64) * N * H * V
    if BB > 1:
        mask = mask & (b0 + b < B)[None, :]
        offset = offset + (b.to(tl.int64) * N * H * V)[None, :]
    tl.store(y_ptr + offset, tl.trans(y).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["B", "N", "M", "splits"])
def forward_small(
    q_ptr, v_ptr, c_ptr, e_ptr, y_ptr,
    B, N, M, V, NK, splits, sqb, sqn, sqh, svb, svm,
    K: tl.constexpr, H: tl.constexpr, T: tl.constexpr, KP: tl.constexpr, HP: tl.constexpr, VT: tl.constexpr,
    BB: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr, HAS_C: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Small contexts (M <= C0+C1+C2): one batch element's values stay in shared memory while tiles of E stream by.

    lambda^T [bv, nk] = V^T E, rounded to the input type, then y^T [bv, nh] = lambda^T Q with Q block-diagonal.
    Grid: (batch tiles, value tiles, shares of the query tiles).
    """
    ROWS: tl.constexpr = T * KP
    KC: tl.constexpr = KP if KP >= 16 else 16
    dtype: tl.constexpr = e_ptr.dtype.element_ty
    b0 = tl.program_id(0) * BB
    v0 = tl.program_id(1) * VT
    tiles = (N + T - 1) // T
    share = (tiles + splits - 1) // splits
    low = tl.program_id(2) * share
    high = tl.minimum(low + share, tiles)

    # Transposed before the loop: a transpose inside it makes Triton copy to shared memory in every turn.
    x0 = tl.trans(context_values(v_ptr, b0, v0, 0, B, M, V, svb, svm, BB, VT, C0))
    if C1 > 0:
        x1 = tl.trans(context_values(v_ptr, b0, v0, C0, B, M, V, svb, svm, BB, VT, C1))
    if C2 > 0:
        x2 = tl.trans(context_values(v_ptr, b0, v0, C0 + C1, B, M, V, svb, svm, BB, VT, C2))
    if HAS_C:  # every tile starts from the same content lambdas
        content = content_block(c_ptr, b0, v0, B, V, BB, VT, KC, K, dtype)
        start = tl.dot(tl.trans(content), unit_vectors(T, KP, KC, dtype), input_precision=PRECISION)
    else:
        start = tl.zeros((BB * VT, ROWS), dtype=tl.float32)

    for tile in tl.range(low, high, num_stages=STAGES):
        n0 = tile * T
        queries = diagonal_queries(q_ptr, b0, n0, B, N, sqb, sqn, sqh, BB, T, KP, HP, K, H)
        e_tile = e_ptr + n0 * KP
        lambdas = tl.dot(x0, table_block(e_tile, 0, NK, ROWS, C0), start, input_precision=PRECISION)
        if C1 > 0:
            lambdas = tl.dot(x1, table_block(e_tile, C0, NK, ROWS, C1), lambdas, input_precision=PRECISION)
        if C2 > 0:
            lambdas = tl.dot(x2, table_block(e_tile, C0 + C1, NK, ROWS, C2), lambdas, input_precision=PRECISION)
        apply_and_store(y_ptr, lambdas, queries, b0, n0, v0, B, N, V, BB, T, HP, VT, H, PRECISION)


@triton.jit(do_not_specialize=["B", "N", "M", "band_width", "query_width", "reach_back", "reach_forward", "stride"])
def forward_large(
    q_ptr, v_ptr, c_ptr, e_ptr, y_ptr,
    B, N, M, V, NK, band_width, query_width, reach_back, reach_forward, stride, sqb, sqn, sqh, svb, svm,
    K: tl.constexpr, H: tl.constexpr, T: tl.constexpr, KP: tl.constexpr, HP: tl.constexpr, VT: tl.constexpr,
    BB: tl.constexpr, C0: tl.constexpr, HAS_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Large contexts: lambda^T [bv, nk] over the blocks of context in reach, then one product with Q [nk, bnh].

    Grid: (batch tiles, query tiles, value tiles); batch tiles first, so that neighbours share E in the cache.
    """
    ROWS: tl.constexpr = T * KP
    KC: tl.constexpr = KP if KP >= 16 else 16
    dtype: tl.constexpr = e_ptr.dtype.element_ty
    b0 = tl.program_id(0) * BB
    n0 = tl.program_id(1) * T
    v0 = tl.program_id(2) * VT
    low, high = band(n0, T, N, M, band_width, query_width, reach_back, reach_forward, stride, C0)
    e_tile = e_ptr + n0 * KP

    lambdas = tl.zeros((BB * VT, ROWS), dtype=tl.float32)
    for block in range(low, high):
        x = context_values(v_ptr, b0, v0, block * C0, B, M, V, svb, svm, BB, VT, C0)
        e = table_block(e_tile + tl.cast(block * C0, tl.int64) * NK, 0, NK, ROWS, C0)
        lambdas = tl.dot(tl.trans(x), e, lambdas, input_precision=PRECISION)
    if HAS_C:
        content = content_block(c_ptr, b0, v0, B, V, BB, VT, KC, K, dtype)
        lambdas = tl.dot(tl.trans(content), unit_vectors(T, KP, KC, dtype), lambdas, input_precision=PRECISION)

    queries = diagonal_queries(q_ptr, b0, n0, B, N, sqb, sqn, sqh, BB, T, KP, HP, K, H)
    apply_and_store(y_ptr, lambdas, queries, b0, n0, v0, B, N, V, BB, T, HP, VT, H, PRECISION)


@triton.jit
def tile_origin(tile, query_width, TY: tl.constexpr, TX: tl.constexpr):
    """First row and column of a tile of TY x TX queries."""
    across = (query_width + TX - 1) // TX
    return (tile // across) * TY, (tile % across) * TX


@triton.jit
def tile_query(t, y0, x0, query_height, query_width, TX: tl.constexpr):
    """Flat position of query t of a tile, and whether it exists."""
    y = y0 + t // TX
    x = x0 + t % TX
    return y * query_width + x, (y < query_height) & (x < query_width)


@triton.jit
def window(origin, size: tl.constexpr, limit, back, forward):
    """First position within reach of `size` neighbours from `origin` on, and how many; clipped to [0, limit)."""
    low = tl.maximum(origin - back, 0)
    high = tl.minimum(origin + size + forward, limit)
    return low, tl.maximum(high - low, 0)


@triton.jit
def row_column(j, width):
    """j // width and j % width without an integer division (exact below 2**22)."""
    row = ((j.to(tl.float32) + 0.5) * (1.0 / width.to(tl.float32))).to(tl.int32)
    return row, j - row * width


@triton.jit
def values_at(
    v_ptr, m, exists, b0, v0, B, V, svb, svm, BB: tl.constexpr, VT: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """Values [m, bv] of any context positions; zero where they do not exist. PACKED: stored as [m, bv], too.

    A scalar base and 32-bit offsets: pointers of 64 bits take twice the registers and instructions.
    """
    col = tl.arange(0, BB * VT)
    if PACKED:
        mask = exists[:, None] & (col < (B - b0) * VT)[None, :]
        return tl.load(v_ptr + b0 * VT + (col[None, :] + (m * svm)[:, None]), mask=mask, other=0.0)
    v = v0 + col % VT
    mask = exists[:, None] & ((v < V) & (b0 + col // VT < B))[None, :]
    v_ptr += tl.cast(b0, tl.int64) * svb
    return tl.load(v_ptr + ((col // VT * svb + v)[None, :] + (m * svm)[:, None]), mask=mask, other=0.0)


@triton.jit
def tile_lambdas(
    v_ptr, c_ptr, t_ptr, b0, v0, y0, x0, B, V, context_height, context_width, back_y, back_x, forward_y, forward_x,
    svb, svm,
    K: tl.constexpr, TY: tl.constexpr, TX: tl.constexpr, KP: tl.constexpr, VT: tl.constexpr,
    BB: tl.constexpr, C: tl.constexpr, HAS_C: tl.constexpr, VALUE_ROWS: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """lambda^T [bv, nk] (VALUE_ROWS) or lambda [nk, bv] of a tile of queries.

    A sum over the part of the tile's window that lies on the map, packed without gaps.
    """
    ROWS: tl.constexpr = TY * TX * KP
    KC: tl.constexpr = KP if KP >= 16 else 16
    low_y, height = window(y0, TY, context_height, back_y, forward_y)
    low_x, width = window(x0, TX, context_width, back_x, forward_x)
    span = TX + back_x + forward_x
    m0 = low_y * context_width + low_x
    t0 = (low_y - y0 + back_y) * span + low_x - x0 + back_x
    count = height * width
    lambdas = tl.zeros((BB * VT if VALUE_ROWS else ROWS, ROWS if VALUE_ROWS else BB * VT), dtype=tl.float32)
    for start in range(0, count, C):
        j = start + tl.arange(0, C)
        row, column = row_column(j, width)
        exists = j < count
        x = values_at(v_ptr, m0 + row * context_width + column, exists, b0, v0, B, V, svb, svm, BB, VT, PACKED)
        line = tl.where(exists, t0 + row * span + column, 0)
        e = tl.load(t_ptr + (line[:, None] * ROWS + tl.arange(0, ROWS)[None, :]))
        if VALUE_ROWS:
            lambdas = tl.dot(tl.trans(x), e, lambdas, input_precision=PRECISION)
        else:
            lambdas = tl.dot(tl.trans(e), x, lambdas, input_precision=PRECISION)
    if HAS_C:
        content = content_block(c_ptr, b0, v0, B, V, BB, VT, KC, K, t_ptr.dtype.element_ty)
        unit = unit_vectors(TY * TX, KP, KC, t_ptr.dtype.element_ty)
        if VALUE_ROWS:
            lambdas = tl.dot(tl.trans(content), unit, lambdas, input_precision=PRECISION)
        else:
            lambdas = tl.dot(tl.trans(unit), content, lambdas, input_precision=PRECISION)
    return lambdas


@triton.jit
def small_matrices(
    ptr, b, n, d0, exists, limit, heads, sb, sn, sh, R: tl.constexpr, W: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """For every (b, n, d0) of three vectors a matrix of R heads by W depths from d0 on, or its transpose."""
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


@triton.jit(do_not_specialize=["B", "QH", "QW", "CH", "CW", "back_y", "back_x", "forward_y", "forward_x"])
def forward_window(
    q_ptr, v_ptr, c_ptr, t_ptr, y_ptr,
    B, V, QH, QW, CH, CW, back_y, back_x, forward_y, forward_x, sqb, sqn, sqh, svb, svm,
    K: tl.constexpr, H: tl.constexpr, TY: tl.constexpr, TX: tl.constexpr, KP: tl.constexpr, HP: tl.constexpr,
    VT: tl.constexpr, BB: tl.constexpr, C: tl.constexpr, HAS_C: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Relative positions on larger maps: every tile of queries reads the same small table (tables.py, T).

    Grid: (batch tiles, query tiles, value tiles).
    """
    T: tl.constexpr = TY * TX
    dtype: tl.constexpr = t_ptr.dtype.element_ty
    b0 = tl.program_id(0) * BB
    v0 = tl.program_id(2) * VT
    y0, x0 = tile_origin(tl.program_id(1), QW, TY, TX)
    lambdas = tile_lambdas(
        v_ptr, c_ptr, t_ptr, b0, v0, y0, x0, B, V, CH, CW, back_y, back_x, forward_y, forward_x, svb, svm,
        K, TY, TX, KP, VT, BB, C, HAS_C, True, PACKED, PRECISION,
    )  # fmt: skip
    # One small product [16 values, k] [k, h] per query and group of 16 rows. In this order (queries outside, groups
    # inside) every warp already holds its left operands: nothing moves between threads.
    G: tl.constexpr = BB * VT // 16
    own = tl.permute(tl.reshape(lambdas.to(dtype), (G, 16, T, KP)), (2, 0, 1, 3))
    index = tl.arange(0, T * G)
    b = b0 + (index % G) * 16 // VT
    first_v = v0 + (index % G) * 16 % VT
    n, exists = tile_query(index // G, y0, x0, QH, QW, TX)
    exists = exists & (b < B)
    queries = small_matrices(q_ptr, b, n, tl.zeros_like(n), exists, K, H, sqb, sqn, sqh, HP, KP, False)
    y = tl.dot(tl.reshape(own, (T * G, 16, KP)), tl.permute(queries, (0, 2, 1)), input_precision=PRECISION)
    h = tl.arange(0, HP)
    v = tl.arange(0, 16)
    mask = exists[:, None, None] & (h < H)[None, :, None] & (first_v[:, None, None] + v[None, None, :] < V)
    offset = ((b.to(tl.int64) * (QH * QW) + n) * H * V + first_v)[:, None, None]
    offset = offset + (h * V)[None, :, None] + v[None, None, :]
    tl.store(y_ptr + offset, tl.permute(y.to(dtype), (0, 2, 1)), mask=mask)

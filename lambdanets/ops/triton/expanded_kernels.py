"""Triton kernels of the expanded mode: lambdas are computed tile by tile and applied to their queries.

Letters: B batch, N queries, M context positions (with intra-depth merged in: m*U+u), H heads, K key depth, V value
depth. `tile` is an expanded.Tile: T queries, BB batch elements and VT values of a tile, KP / HP = K / H padded to a
power of two.
  "nk" is a row (query of the tile, depth)          T*KP of them
  "nh" is a row (query of the tile, head)           T*HP
  "bv" is a row (batch element of the tile, value)  BB*VT
  "bnh" is a row (batch element, query, head)       BB*T*HP
E is the expanded table, [ME, NK] with NK = (all queries, depth) contiguous. It is zero out of scope and in its padding
(see table_kernels.py), so loads of E need no mask.

With g_bn[k, v] = sum_h q[b,n,h,k] dy[b,n,h,v] (rank H, in registers), the gradients are
  dq[b,n,h,k]  = sum_v dy[b,n,h,v] lambda_bn[k,v]        lambdas are recomputed
  dv[b,m,v]    = sum_{n,k} E[n,k,m] g_bn[k,v]
  dE[n,k,m]    = sum_{b,v} g_bn[k,v] v[b,m,v]            partial sums per batch split, folded by table_kernels.py
  dc[b,k,v]    = sum_n g_bn[k,v]
There are no atomics: every output element has one writer, so results are bitwise reproducible.

Every matrix that tensor cores read from shared memory is at least 64 half (32 float) elements wide along its
contiguous axis. From Triton 3.6 on, narrower ones can be read out of bounds on Hopper (triton-lang/triton issue
11366).
"""

import triton
import triton.language as tl

BAND = ["band_width", "query_width", "reach_back", "reach_forward", "stride"]


@triton.jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.zeros((ROWS, COLUMNS), dtype=tl.float32)


@triton.jit
def columns_bv(b0, v0, tile: tl.constexpr):
    """Return the batch element and the value of each column "bv"."""
    column = tl.arange(0, tile.columns)
    return b0 + column // tile.VT, v0 + column % tile.VT


@triton.jit
def diagonal_queries(q_ptr, b0, n0, B, N, sqb, sqn, sqh, tile: tl.constexpr):
    """Load queries as a matrix [bnh, nk] that is zero unless row and column belong to the same query.

    So one tensor-core product applies the separate lambdas of many queries.
    """
    row = tl.arange(0, tile.heads)
    col = tl.arange(0, tile.rows)
    row_b = b0 + row // (tile.T * tile.HP)
    row_n = (row // tile.HP) % tile.T
    row_h = row % tile.HP
    col_n = col // tile.KP
    col_k = col % tile.KP
    row_mask = (n0 + row_n < N) & (row_h < tile.H)
    offset = (n0 + row_n) * sqn + row_h * sqh
    if tile.BB == 1:  # a scalar base and constant 32-bit offsets need far fewer registers
        q_ptr += tl.cast(b0, tl.int64) * sqb
    else:
        row_mask = row_mask & (row_b < B)
        offset = row_b.to(tl.int64) * sqb + offset
    mask = (row_n[:, None] == col_n[None, :]) & row_mask[:, None] & (col_k < tile.K)[None, :]
    return tl.load(q_ptr + (offset[:, None] + col_k[None, :]), mask=mask, other=0.0)


@triton.jit
def context_values(v_ptr, b0, v0, m0, B, M, V, svb, svm, C: tl.constexpr, tile: tl.constexpr):
    """Load values [C, bv] of C neighbouring context positions; zero outside the context."""
    m = m0 + tl.arange(0, C)
    b, v = columns_bv(b0, v0, tile)
    mask = (m < M)[:, None] & (v < V)[None, :]
    if tile.BB == 1:
        v_ptr += tl.cast(b0, tl.int64) * svb
    else:
        mask = mask & (b < B)[None, :]
        v = b.to(tl.int64) * svb + v
    return tl.load(v_ptr + (v[None, :] + m[:, None] * svm), mask=mask, other=0.0)


@triton.jit
def add_content(lambdas, c_ptr, b0, v0, B, V, VALUE_ROWS: tl.constexpr, dtype: tl.constexpr, tile: tl.constexpr):
    """Add the content lambda of each batch element to lambdas [bv, nk] (VALUE_ROWS) or [nk, bv].

    The content lambda acts as KC more context positions, whose values are its rows and whose embeddings are unit
    vectors.
    """
    KC: tl.constexpr = tile.KP if tile.KP >= 16 else 16
    k = tl.arange(0, KC)
    b, v = columns_bv(b0, v0, tile)
    mask = (k < tile.K)[:, None] & (v < V)[None, :]
    if tile.BB == 1:
        c_ptr += tl.cast(b0, tl.int64) * tile.K * V
    else:
        mask = mask & (b < B)[None, :]
        v = b.to(tl.int64) * tile.K * V + v
    content = tl.load(c_ptr + (v[None, :] + (k * V)[:, None]), mask=mask, other=0.0).to(dtype)
    depth = tl.arange(0, tile.T * tile.KP) % tile.KP
    unit = (k[:, None] == depth[None, :]).to(dtype)  # [KC, nk]
    if VALUE_ROWS:
        lambdas = tl.dot(tl.trans(content), unit, lambdas, input_precision=tile.precision)
    else:
        lambdas = tl.dot(tl.trans(unit), content, lambdas, input_precision=tile.precision)
    return lambdas


@triton.jit
def output_rows(y_ptr, b0, n0, v0, B, N, V, syb, syn, syh, tile: tl.constexpr):
    """Load gradients of the output [bnh, bv], zero unless row and column belong to the same batch element."""
    row = tl.arange(0, tile.heads)
    row_n = n0 + (row // tile.HP) % tile.T
    row_h = row % tile.HP
    row_b = row // (tile.T * tile.HP)
    b, v = columns_bv(0, v0, tile)  # b within the tile
    mask = ((row_n < N) & (row_h < tile.H))[:, None] & (v < V)[None, :]
    offset = row_n * syn + row_h * syh
    if tile.BB == 1:
        y_ptr += tl.cast(b0, tl.int64) * syb
    else:
        mask = mask & (row_b[:, None] == b[None, :]) & (b0 + row_b < B)[:, None]
        offset = (b0 + row_b).to(tl.int64) * syb + offset
    return tl.load(y_ptr + (offset[:, None] + v[None, :]), mask=mask, other=0.0)


@triton.jit
def table_block(e_ptr, m0, NK, C: tl.constexpr, tile: tl.constexpr):
    """Load E [C, nk] of one query tile (e_ptr points to the tile's first column)."""
    row = m0 + tl.arange(0, C)
    return tl.load(e_ptr + (row[:, None] * NK + tl.arange(0, tile.rows)[None, :]))


@triton.jit
def context_chunks(v_ptr, b0, v0, m0, B, M, V, svb, svm, TRANSPOSED: tl.constexpr, tile: tl.constexpr):
    """Load the values of a block of context positions: [C, bv] or [bv, C] for each chunk."""
    x = ()
    for i in tl.static_range(len(tile.chunks)):
        chunk = context_values(v_ptr, b0, v0, m0 + tile.starts[i], B, M, V, svb, svm, tile.chunks[i], tile)
        x = x + ((tl.trans(chunk) if TRANSPOSED else chunk),)
    return x


@triton.jit
def zero_chunks(ROWS: tl.constexpr, tile: tl.constexpr):
    """Return zeros [ROWS, C] for each chunk of a block of context positions."""
    x = ()
    for i in tl.static_range(len(tile.chunks)):
        x = x + (zeros(ROWS, tile.chunks[i]),)
    return x


@triton.jit
def lambdas_of_block(lambdas, x, e_tile, NK, VALUE_ROWS: tl.constexpr, tile: tl.constexpr):
    """Add the sum over one block of context, with chunks x, to lambdas [bv, nk] (VALUE_ROWS) or [nk, bv]."""
    for i in tl.static_range(len(tile.chunks)):
        e = table_block(e_tile, tile.starts[i], NK, tile.chunks[i], tile)
        if VALUE_ROWS:
            lambdas = tl.dot(x[i], e, lambdas, input_precision=tile.precision)
        else:
            lambdas = tl.dot(tl.trans(e), x[i], lambdas, input_precision=tile.precision)
    return lambdas


@triton.jit
def lambdas_of_band(
    v_ptr, c_ptr, e_tile, b0, v0, low, high, B, M, V, NK, svb, svm, VALUE_ROWS: tl.constexpr, tile: tl.constexpr
):
    """Compute lambdas [bv, nk] (VALUE_ROWS) or [nk, bv] of a query tile: a sum over blocks of context, and content."""
    lambdas = zeros(tile.columns if VALUE_ROWS else tile.rows, tile.rows if VALUE_ROWS else tile.columns)
    for block in range(low, high):
        x = context_values(v_ptr, b0, v0, block * tile.context, B, M, V, svb, svm, tile.context, tile)
        e = table_block(e_tile + tl.cast(block * tile.context, tl.int64) * NK, 0, NK, tile.context, tile)
        if VALUE_ROWS:
            lambdas = tl.dot(tl.trans(x), e, lambdas, input_precision=tile.precision)
        else:
            lambdas = tl.dot(tl.trans(e), x, lambdas, input_precision=tile.precision)
    if tile.content:
        lambdas = add_content(lambdas, c_ptr, b0, v0, B, V, VALUE_ROWS, e_tile.dtype.element_ty, tile)
    return lambdas


@triton.jit
def band(n0, T: tl.constexpr, N, M, band_width, query_width, reach_back, reach_forward, stride, MT: tl.constexpr):
    """Return the context blocks [low, high) of MT positions that a tile of T queries can reach.

    band_width is the number of flat positions per context row (width * intra-depth), 0 for no band (dense embeddings).
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
def share_of(N, splits, axis: tl.constexpr, tile: tl.constexpr):
    """Return the query tiles [low, high) of this program."""
    tiles = (N + tile.T - 1) // tile.T
    share = (tiles + splits - 1) // splits
    low = tl.program_id(axis) * share
    return low, tl.minimum(low + share, tiles)


@triton.jit
def apply_and_store(y_ptr, lambdas, queries, b0, n0, v0, B, N, V, tile: tl.constexpr):
    """Multiply lambda^T [bv, nk] by the diagonal queries [bnh, nk], and store to contiguous y [B, N, H, V].

    The product contains all pairs of batch elements of the tile; the equal ones are selected in registers.
    """
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    y = tl.dot(lambdas.to(dtype), tl.trans(queries), input_precision=tile.precision)  # [bv, bnh]
    if tile.BB > 1:
        pairs = tl.reshape(y, (tile.BB, tile.VT, tile.BB, tile.T * tile.HP))
        left = tl.reshape(tl.arange(0, tile.BB), (tile.BB, 1, 1, 1))
        right = tl.reshape(tl.arange(0, tile.BB), (1, 1, tile.BB, 1))
        y = tl.reshape(tl.sum(tl.where(left == right, pairs, 0.0), axis=2), (tile.columns, tile.T * tile.HP))
    b, v = columns_bv(0, v0, tile)  # b within the tile
    row = tl.arange(0, tile.T * tile.HP)
    n = n0 + row // tile.HP
    h = row % tile.HP
    mask = ((n < N) & (h < tile.H))[:, None] & (v < V)[None, :]
    offset = ((n * tile.H + h) * V)[:, None] + v[None, :]
    y_ptr += tl.cast(b0, tl.int64) * N * tile.H * V
    if tile.BB > 1:
        mask = mask & (b0 + b < B)[None, :]
        offset = offset + (b.to(tl.int64) * N * tile.H * V)[None, :]
    tl.store(y_ptr + offset, tl.trans(y).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["B", "N", "M", "splits"])
def forward_small(
    q_ptr, v_ptr, c_ptr, e_ptr, y_ptr, B, N, M, V, NK, splits, sqb, sqn, sqh, svb, svm, tile: tl.constexpr
):
    """Compute the output for small contexts (M <= tile.context), with the values of a batch tile in shared memory.

    lambda^T [bv, nk] = V^T E, rounded to the input dtype, then y^T [bv, nh] = lambda^T Q with Q block-diagonal.
    Grid: (batch tiles, value tiles, shares of the query tiles).
    """
    b0 = tl.program_id(0) * tile.BB
    v0 = tl.program_id(1) * tile.VT
    low, high = share_of(N, splits, 2, tile)
    # Transposed before the loop: inside it Triton would copy to shared memory in every step.
    x = context_chunks(v_ptr, b0, v0, 0, B, M, V, svb, svm, True, tile)
    start = zeros(tile.columns, tile.rows)
    if tile.content:  # the content lambdas are the same for every tile
        start = add_content(start, c_ptr, b0, v0, B, V, True, e_ptr.dtype.element_ty, tile)
    for block in tl.range(low, high, num_stages=tile.stages):
        n0 = block * tile.T
        queries = diagonal_queries(q_ptr, b0, n0, B, N, sqb, sqn, sqh, tile)
        lambdas = lambdas_of_block(start, x, e_ptr + n0 * tile.KP, NK, True, tile)
        apply_and_store(y_ptr, lambdas, queries, b0, n0, v0, B, N, V, tile)


@triton.jit(do_not_specialize=["B", "N", "M", *BAND])
def forward_large(
    q_ptr, v_ptr, c_ptr, e_ptr, y_ptr,
    B, N, M, V, NK, band_width, query_width, reach_back, reach_forward, stride, sqb, sqn, sqh, svb, svm,
    tile: tl.constexpr,
):  # fmt: skip
    """Compute the output for large contexts: lambda^T [bv, nk] over the context blocks in reach, times Q [nk, bnh].

    Grid: (batch tiles, query tiles, value tiles); batch tiles first, so that neighbouring programs share E in the
    cache.
    """
    b0 = tl.program_id(0) * tile.BB
    n0 = tl.program_id(1) * tile.T
    v0 = tl.program_id(2) * tile.VT
    low, high = band(n0, tile.T, N, M, band_width, query_width, reach_back, reach_forward, stride, tile.context)
    e_tile = e_ptr + n0 * tile.KP
    lambdas = lambdas_of_band(v_ptr, c_ptr, e_tile, b0, v0, low, high, B, M, V, NK, svb, svm, True, tile)
    queries = diagonal_queries(q_ptr, b0, n0, B, N, sqb, sqn, sqh, tile)
    apply_and_store(y_ptr, lambdas, queries, b0, n0, v0, B, N, V, tile)


@triton.jit
def store_query_gradients(dq_ptr, wide, b0, n0, B, N, tile: tl.constexpr):
    """Select the pairs of a query with itself from wide [nk, bnh], which has all pairs, and store them."""
    wide = tl.reshape(wide, (tile.T, tile.KP, tile.BB, tile.T, tile.HP))
    left = tl.reshape(tl.arange(0, tile.T), (tile.T, 1, 1, 1, 1))
    right = tl.reshape(tl.arange(0, tile.T), (1, 1, 1, tile.T, 1))
    own = tl.sum(tl.where(left == right, wide, 0.0), axis=3)  # [T, KP, BB, HP]
    n = tl.reshape(n0 + tl.arange(0, tile.T), (tile.T, 1, 1, 1))
    k = tl.reshape(tl.arange(0, tile.KP), (1, tile.KP, 1, 1))
    b = tl.reshape(b0 + tl.arange(0, tile.BB), (1, 1, tile.BB, 1))
    h = tl.reshape(tl.arange(0, tile.HP), (1, 1, 1, tile.HP))
    mask = (n < N) & (k < tile.K) & (b < B) & (h < tile.H)
    offset = ((b.to(tl.int64) * N + n) * tile.H + h) * tile.K + k
    tl.store(dq_ptr + offset, own.to(dq_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["B", "N", "M", "splits"])
def query_gradients_small(
    dy_ptr, v_ptr, c_ptr, e_ptr, dq_ptr, B, N, M, V, NK, splits, syb, syn, syh, svb, svm, tile: tl.constexpr
):
    """Compute dq for small contexts and V <= VT, with the values in shared memory.

    lambda [nk, bv] = E^T V, then dq from lambda dy^T. Grid: (batch tiles, shares of the query tiles).
    """
    dtype: tl.constexpr = e_ptr.dtype.element_ty
    b0 = tl.program_id(0) * tile.BB
    low, high = share_of(N, splits, 1, tile)
    x = context_chunks(v_ptr, b0, 0, 0, B, M, V, svb, svm, False, tile)
    start = zeros(tile.rows, tile.columns)
    if tile.content:
        start = add_content(start, c_ptr, b0, 0, B, V, False, dtype, tile)
    for block in tl.range(low, high, num_stages=tile.stages):
        n0 = block * tile.T
        dy = output_rows(dy_ptr, b0, n0, 0, B, N, V, syb, syn, syh, tile)
        lambdas = lambdas_of_block(start, x, e_ptr + n0 * tile.KP, NK, False, tile)
        wide = tl.dot(lambdas.to(dtype), tl.trans(dy), input_precision=tile.precision)
        store_query_gradients(dq_ptr, wide, b0, n0, B, N, tile)


@triton.jit(do_not_specialize=["B", "N", "M", *BAND])
def query_gradients_large(
    dy_ptr, v_ptr, c_ptr, e_ptr, dq_ptr,
    B, N, M, V, NK, band_width, query_width, reach_back, reach_forward, stride, syb, syn, syh, svb, svm,
    tile: tl.constexpr,
):  # fmt: skip
    """Compute dq for large contexts: lambda [nk, bv] over the blocks in reach, then one product with dy.

    Grid: (batch tiles, query tiles).
    """
    b0 = tl.program_id(0) * tile.BB
    n0 = tl.program_id(1) * tile.T
    low, high = band(n0, tile.T, N, M, band_width, query_width, reach_back, reach_forward, stride, tile.context)
    e_tile = e_ptr + n0 * tile.KP
    wide = zeros(tile.rows, tile.heads)
    NV: tl.constexpr = tile.NV
    for value_tile in tl.static_range(NV):
        v0 = value_tile * tile.VT
        lambdas = lambdas_of_band(v_ptr, c_ptr, e_tile, b0, v0, low, high, B, M, V, NK, svb, svm, False, tile)
        dy = output_rows(dy_ptr, b0, n0, v0, B, N, V, syb, syn, syh, tile)
        wide = tl.dot(lambdas.to(e_ptr.dtype.element_ty), tl.trans(dy), wide, input_precision=tile.precision)
    store_query_gradients(dq_ptr, wide, b0, n0, B, N, tile)


@triton.jit
def store_by_value(ptr, block, b0, v0, m0, B, M, V, C: tl.constexpr, tile: tl.constexpr):
    """Store a block [bv, C] of rows m0 to m0 + C to contiguous [B, M, V]."""
    b, v = columns_bv(b0, v0, tile)
    m = m0 + tl.arange(0, C)
    mask = (m < M)[:, None] & ((b < B) & (v < V))[None, :]
    offset = (b.to(tl.int64) * M * V + v)[None, :] + m[:, None] * V
    tl.store(ptr + offset, tl.trans(block).to(ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["B", "N", "M", *BAND])
def value_gradients(
    q_ptr, dy_ptr, e_ptr, dv_ptr, dc_ptr,
    B, N, M, V, NK, band_width, query_width, reach_back, reach_forward, stride, sqb, sqn, sqh, syb, syn, syh,
    tile: tl.constexpr,
):  # fmt: skip
    """Compute dv^T [bv, m] = sum over query tiles of g^T [bv, nk] E [nk, m], and dc if one block has the whole context.

    Grid: (batch tiles, context blocks, value tiles).
    """
    b0 = tl.program_id(0) * tile.BB
    m0 = tl.program_id(1) * tile.context
    v0 = tl.program_id(2) * tile.VT
    low = 0
    high = (N + tile.T - 1) // tile.T
    if band_width > 0:
        # Queries whose scope includes context rows of this block.
        first_row = m0 // band_width
        last_row = tl.minimum(m0 + tile.context - 1, M - 1) // band_width
        first_query_row = tl.maximum(first_row - reach_forward, 0) // stride
        last_query_row = (last_row + reach_back) // stride
        low = tl.minimum(first_query_row * query_width, N) // tile.T
        high = tl.minimum(((last_query_row + 1) * query_width + tile.T - 1) // tile.T, high)
    sums = zero_chunks(tile.columns, tile)
    dc = zeros(tile.columns, tile.KP)
    for block in tl.range(low, high, num_stages=tile.stages):
        n0 = block * tile.T
        queries = diagonal_queries(q_ptr, b0, n0, B, N, sqb, sqn, sqh, tile)
        dy = output_rows(dy_ptr, b0, n0, v0, B, N, V, syb, syn, syh, tile)
        g = tl.dot(tl.trans(dy), queries, input_precision=tile.precision)  # [bv, nk]
        if tile.content:  # sum over the queries of the tile, within a thread
            dc += tl.sum(tl.reshape(g, (tile.columns, tile.T, tile.KP)), axis=1)
        g = g.to(e_ptr.dtype.element_ty)
        e_tile = e_ptr + tl.cast(m0, tl.int64) * NK + n0 * tile.KP
        more = ()
        for i in tl.static_range(len(tile.chunks)):
            e = table_block(e_tile, tile.starts[i], NK, tile.chunks[i], tile)
            more = more + (tl.dot(g, tl.trans(e), sums[i], input_precision=tile.precision),)
        sums = more
    for i in tl.static_range(len(tile.chunks)):
        store_by_value(dv_ptr, sums[i], b0, v0, m0 + tile.starts[i], B, M, V, tile.chunks[i], tile)
    if tile.content:
        store_by_value(dc_ptr, dc, b0, v0, 0, B, tile.K, V, tile.KP, tile)


@triton.jit(do_not_specialize=["B", "N", "M", "rows", "splits", *BAND])
def table_gradients(
    q_ptr, dy_ptr, v_ptr, de_ptr,
    B, N, M, V, ME, rows, splits, band_width, query_width, reach_back, reach_forward, stride,
    sqb, sqn, sqh, syb, syn, syh, svb, svm, tile: tl.constexpr,
):  # fmt: skip
    """Compute dE [nk, m] of one query tile over a share of the batch: sum of g [nk, bv] V^T [bv, m].

    Grid: (query tiles, context blocks, batch splits). Blocks out of reach are neither written nor read.
    """
    n0 = tl.program_id(0) * tile.T
    m0 = tl.program_id(1) * tile.context
    low, high = band(n0, tile.T, N, M, band_width, query_width, reach_back, reach_forward, stride, tile.context)
    if (tl.program_id(1) >= low) & (tl.program_id(1) < high):
        groups = (B + tile.BB - 1) // tile.BB
        share = (groups + splits - 1) // splits
        group_low = tl.program_id(2) * share
        group_high = tl.minimum(group_low + share, groups)
        sums = zero_chunks(tile.rows, tile)
        for step in tl.range(group_low * tile.NV, group_high * tile.NV, num_stages=tile.stages):
            b0 = (step // tile.NV) * tile.BB
            v0 = (step % tile.NV) * tile.VT
            queries = diagonal_queries(q_ptr, b0, n0, B, N, sqb, sqn, sqh, tile)
            dy = output_rows(dy_ptr, b0, n0, v0, B, N, V, syb, syn, syh, tile)
            g = tl.dot(tl.trans(queries), dy, input_precision=tile.precision).to(v_ptr.dtype.element_ty)  # [nk, bv]
            more = ()
            for i in tl.static_range(len(tile.chunks)):
                x = context_values(v_ptr, b0, v0, m0 + tile.starts[i], B, M, V, svb, svm, tile.chunks[i], tile)
                more = more + (tl.dot(g, tl.trans(x), sums[i], input_precision=tile.precision),)
            sums = more
        de_tile = de_ptr + (tl.program_id(2).to(tl.int64) * rows + tl.program_id(0) * tile.rows) * ME
        for i in tl.static_range(len(tile.chunks)):
            row, col = tl.arange(0, tile.rows), m0 + tile.starts[i] + tl.arange(0, tile.chunks[i])
            tl.store(de_tile + row[:, None] * ME + col[None, :], sums[i])

"""Triton kernels that compute lambdas tile by tile and apply them to their queries.

Letters (shape suffixes): B batch, N queries, M context positions (intra-depth already folded in: m*U+u),
H heads, K key depth, V value depth.
Tile letters: T queries per tile, KP / HP = K / H padded to a power of two, VT a tile of the value depth,
BB batch elements per tile.
  "nk" is a row (query of the tile, depth)          T*KP of them
  "nh" is a row (query of the tile, head)           T*HP
  "bv" is a row (batch element of the tile, value)  BB*VT
  "bnh" is a row (batch element, query, head)       BB*T*HP
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

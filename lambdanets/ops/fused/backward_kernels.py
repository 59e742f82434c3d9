"""Triton kernels of the backward. Letters as in forward_kernels.py.

With g_bn[k, v] = sum_h q[b,n,h,k] dy[b,n,h,v] (rank H; made in registers, or by spread_window for a part of the batch):
  dq[b,n,h,k]  = sum_v dy[b,n,h,v] lambda_bn[k,v]        lambdas computed again
  dv[b,m,v]    = sum_{n,k} E[n,k,m] g_bn[k,v]
  dE[n,k,m]    = sum_{b,v} g_bn[k,v] v[b,m,v]            partial sums per batch split, folded by tables.py
  dc[b,k,v]    = sum_n g_bn[k,v]
No atomics: every output element has one writer, so results repeat bit for bit.
"""

import triton
import triton.language as tl

from .forward_kernels import (
    band,
    content_block,
    context_values,
    diagonal_queries,
    output_rows,
    row_column,
    small_matrices,
    table_block,
    tile_lambdas,
    tile_origin,
    tile_query,
    unit_vectors,
    window,
)


@triton.jit
def store_query_gradients(
    dq_ptr, wide, b0, n0, B, N,
    BB: tl.constexpr, T: tl.constexpr, KP: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """wide [nk, bnh] holds every pair of queries; keep the pairs of a query with itself and store them."""
    wide = tl.reshape(wide, (T, KP, BB, T, HP))
    left = tl.reshape(tl.arange(0, T), (T, 1, 1, 1, 1))
    right = tl.reshape(tl.arange(0, T), (1, 1, 1, T, 1))
    own = tl.sum(tl.where(left == right, wide, 0.0), axis=3)  # [T, KP, BB, HP]
    n = tl.reshape(n0 + tl.arange(0, T), (T, 1, 1, 1))
    k = tl.reshape(tl.arange(0, KP), (1, KP, 1, 1))
    b = tl.reshape(b0 + tl.arange(0, BB), (1, 1, BB, 1))
    h = tl.reshape(tl.arange(0, HP), (1, 1, 1, HP))
    mask = (n < N) & (k < K) & (b < B) & (h < H)
    offset = ((b.to(tl.int64) * N + n) * H + h) * K + k
    tl.store(dq_ptr + offset, own.to(dq_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["B", "N", "M", "splits"])
def query_gradients_small(
    dy_ptr, v_ptr, c_ptr, e_ptr, dq_ptr,
    B, N, M, V, NK, splits, syb, syn, syh, svb, svm,
    K: tl.constexpr, H: tl.constexpr, T: tl.constexpr, KP: tl.constexpr, HP: tl.constexpr, VT: tl.constexpr,
    BB: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr, HAS_C: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Small contexts, V <= VT: values stay in shared memory, tiles of E stream by.

    lambda [nk, bv] = E^T V, then dq from lambda dy^T.
    Grid: (batch tiles, shares of the query tiles).
    """
    ROWS: tl.constexpr = T * KP
    KC: tl.constexpr = KP if KP >= 16 else 16
    dtype: tl.constexpr = e_ptr.dtype.element_ty
    b0 = tl.program_id(0) * BB
    tiles = (N + T - 1) // T
    share = (tiles + splits - 1) // splits
    low = tl.program_id(1) * share
    high = tl.minimum(low + share, tiles)
    x0 = context_values(v_ptr, b0, 0, 0, B, M, V, svb, svm, BB, VT, C0)
    if C1 > 0:
        x1 = context_values(v_ptr, b0, 0, C0, B, M, V, svb, svm, BB, VT, C1)
    if C2 > 0:
        x2 = context_values(v_ptr, b0, 0, C0 + C1, B, M, V, svb, svm, BB, VT, C2)
    if HAS_C:  # every tile starts from the same content lambdas
        content = content_block(c_ptr, b0, 0, B, V, BB, VT, KC, K, dtype)
        start = tl.dot(tl.trans(unit_vectors(T, KP, KC, dtype)), content, input_precision=PRECISION)
    else:
        start = tl.zeros((ROWS, BB * VT), dtype=tl.float32)

    for tile in tl.range(low, high, num_stages=STAGES):
        n0 = tile * T
        dy = output_rows(dy_ptr, b0, n0, 0, B, N, V, syb, syn, syh, BB, T, HP, VT, H)
        e_tile = e_ptr + n0 * KP
        lambdas = tl.dot(tl.trans(table_block(e_tile, 0, NK, ROWS, C0)), x0, start, input_precision=PRECISION)
        if C1 > 0:
            lambdas = tl.dot(tl.trans(table_block(e_tile, C0, NK, ROWS, C1)), x1, lambdas, input_precision=PRECISION)
        if C2 > 0:
            e2 = table_block(e_tile, C0 + C1, NK, ROWS, C2)
            lambdas = tl.dot(tl.trans(e2), x2, lambdas, input_precision=PRECISION)
        wide = tl.dot(lambdas.to(dtype), tl.trans(dy), input_precision=PRECISION)
        store_query_gradients(dq_ptr, wide, b0, n0, B, N, BB, T, KP, HP, K, H)


@triton.jit(do_not_specialize=["B", "N", "M", "band_width", "query_width", "reach_back", "reach_forward", "stride"])
def query_gradients_large(
    dy_ptr, v_ptr, c_ptr, e_ptr, dq_ptr,
    B, N, M, V, NK, band_width, query_width, reach_back, reach_forward, stride, syb, syn, syh, svb, svm,
    K: tl.constexpr, H: tl.constexpr, T: tl.constexpr, KP: tl.constexpr, HP: tl.constexpr, VT: tl.constexpr,
    NV: tl.constexpr, BB: tl.constexpr, C0: tl.constexpr, HAS_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Large contexts: lambda [nk, bv] over the blocks in reach, then one product with dy.

    Grid: (batch tiles, query tiles).
    """
    ROWS: tl.constexpr = T * KP
    KC: tl.constexpr = KP if KP >= 16 else 16
    dtype: tl.constexpr = e_ptr.dtype.element_ty
    b0 = tl.program_id(0) * BB
    n0 = tl.program_id(1) * T
    low, high = band(n0, T, N, M, band_width, query_width, reach_back, reach_forward, stride, C0)
    e_tile = e_ptr + n0 * KP
    wide = tl.zeros((ROWS, BB * T * HP), dtype=tl.float32)
    for tile in tl.static_range(NV):
        v0 = tile * VT
        lambdas = tl.zeros((ROWS, BB * VT), dtype=tl.float32)
        for block in range(low, high):
            x = context_values(v_ptr, b0, v0, block * C0, B, M, V, svb, svm, BB, VT, C0)
            e = table_block(e_tile + tl.cast(block * C0, tl.int64) * NK, 0, NK, ROWS, C0)
            lambdas = tl.dot(tl.trans(e), x, lambdas, input_precision=PRECISION)
        if HAS_C:
            content = content_block(c_ptr, b0, v0, B, V, BB, VT, KC, K, dtype)
            lambdas = tl.dot(tl.trans(unit_vectors(T, KP, KC, dtype)), content, lambdas, input_precision=PRECISION)
        dy = output_rows(dy_ptr, b0, n0, v0, B, N, V, syb, syn, syh, BB, T, HP, VT, H)
        wide = tl.dot(lambdas.to(dtype), tl.trans(dy), wide, input_precision=PRECISION)
    store_query_gradients(dq_ptr, wide, b0, n0, B, N, BB, T, KP, HP, K, H)


@triton.jit
def store_value_gradients(dv_ptr, block, b0, v0, m0, B, M, V, BB: tl.constexpr, VT: tl.constexpr, C: tl.constexpr):
    """block [bv, C] -> dv [B, M, V], contiguous."""
    col = tl.arange(0, BB * VT)
    b = b0 + col // VT
    v = v0 + col % VT
    m = m0 + tl.arange(0, C)
    mask = (m < M)[:, None] & ((b < B) & (v < V))[None, :]
    offset = (b.to(tl.int64) * M * V + v)[None, :] + m[:, None] * V
    tl.store(dv_ptr + offset, tl.trans(block).to(dv_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["B", "N", "M", "band_width", "query_width", "reach_back", "reach_forward", "stride"])
def value_gradients(
    q_ptr, dy_ptr, e_ptr, dv_ptr, dc_ptr,
    B, N, M, V, NK, band_width, query_width, reach_back, reach_forward, stride, sqb, sqn, sqh, syb, syn, syh,
    K: tl.constexpr, H: tl.constexpr, T: tl.constexpr, KP: tl.constexpr, HP: tl.constexpr, VT: tl.constexpr,
    BB: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr, WITH_C: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dv^T [bv, m] = sum over query tiles of g^T [bv, nk] E [nk, m]; with dc when one block sees all queries.

    Grid: (batch tiles, context blocks, value tiles).
    """
    ROWS: tl.constexpr = T * KP
    MT: tl.constexpr = C0 + C1 + C2
    dtype: tl.constexpr = e_ptr.dtype.element_ty
    b0 = tl.program_id(0) * BB
    m0 = tl.program_id(1) * MT
    v0 = tl.program_id(2) * VT

    low = 0
    high = (N + T - 1) // T
    if band_width > 0:
        # Queries whose scope touches the context rows of this block.
        first_row = m0 // band_width
        last_row = tl.minimum(m0 + MT - 1, M - 1) // band_width
        first_query_row = tl.maximum(first_row - reach_forward, 0) // stride
        last_query_row = (last_row + reach_back) // stride
        low = tl.minimum(first_query_row * query_width, N) // T
        high = tl.minimum(((last_query_row + 1) * query_width + T - 1) // T, high)

    acc0 = tl.zeros((BB * VT, C0), dtype=tl.float32)
    if C1 > 0:
        acc1 = tl.zeros((BB * VT, C1), dtype=tl.float32)
    if C2 > 0:
        acc2 = tl.zeros((BB * VT, C2), dtype=tl.float32)
    if WITH_C:
        acc_c = tl.zeros((BB * VT, KP), dtype=tl.float32)
    for tile in tl.range(low, high, num_stages=STAGES):
        n0 = tile * T
        queries = diagonal_queries(q_ptr, b0, n0, B, N, sqb, sqn, sqh, BB, T, KP, HP, K, H)
        dy = output_rows(dy_ptr, b0, n0, v0, B, N, V, syb, syn, syh, BB, T, HP, VT, H)
        g = tl.dot(tl.trans(dy), queries, input_precision=PRECISION)  # [bv, nk]
        if WITH_C:  # a sum over the tile's queries, which one thread holds
            acc_c += tl.sum(tl.reshape(g, (BB * VT, T, KP)), axis=1)
        g = g.to(dtype)
        e_tile = e_ptr + tl.cast(m0, tl.int64) * NK + n0 * KP
        acc0 = tl.dot(g, tl.trans(table_block(e_tile, 0, NK, ROWS, C0)), acc0, input_precision=PRECISION)
        if C1 > 0:
            acc1 = tl.dot(g, tl.trans(table_block(e_tile, C0, NK, ROWS, C1)), acc1, input_precision=PRECISION)
        if C2 > 0:
            acc2 = tl.dot(g, tl.trans(table_block(e_tile, C0 + C1, NK, ROWS, C2)), acc2, input_precision=PRECISION)

    store_value_gradients(dv_ptr, acc0, b0, v0, m0, B, M, V, BB, VT, C0)
    if C1 > 0:
        store_value_gradients(dv_ptr, acc1, b0, v0, m0 + C0, B, M, V, BB, VT, C1)
    if C2 > 0:
        store_value_gradients(dv_ptr, acc2, b0, v0, m0 + C0 + C1, B, M, V, BB, VT, C2)
    if WITH_C:
        col = tl.arange(0, BB * VT)
        b = b0 + col // VT
        v = v0 + col % VT
        k = tl.arange(0, KP)
        c_mask = (k < K)[:, None] & ((b < B) & (v < V))[None, :]
        c_offset = (b.to(tl.int64) * K * V + v)[None, :] + k[:, None] * V
        tl.store(dc_ptr + c_offset, tl.trans(acc_c), mask=c_mask)


@triton.jit
def store_table_gradients(de_ptr, block, m0, ME, ROWS: tl.constexpr, C: tl.constexpr):
    """block [nk, C] -> the partial dE of this tile and split."""
    row = tl.arange(0, ROWS)
    col = m0 + tl.arange(0, C)
    tl.store(de_ptr + row[:, None] * ME + col[None, :], block)


@triton.jit(
    do_not_specialize=["B", "N", "M", "rows", "splits", "band_width", "query_width", "reach_back", "reach_forward",
                       "stride"]
)  # fmt: skip
def table_gradients(
    q_ptr, dy_ptr, v_ptr, de_ptr,
    B, N, M, V, ME, rows, splits, band_width, query_width, reach_back, reach_forward, stride,
    sqb, sqn, sqh, syb, syn, syh, svb, svm,
    K: tl.constexpr, H: tl.constexpr, T: tl.constexpr, KP: tl.constexpr, HP: tl.constexpr, VT: tl.constexpr,
    NV: tl.constexpr, BB: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dE [nk, m] of one query tile over a share of the batch: sum of g [nk, bv] V^T [bv, m].

    Grid: (query tiles, context blocks, batch splits). Blocks out of reach are not written, and never read.
    """
    ROWS: tl.constexpr = T * KP
    MT: tl.constexpr = C0 + C1 + C2
    dtype: tl.constexpr = v_ptr.dtype.element_ty
    n0 = tl.program_id(0) * T
    m0 = tl.program_id(1) * MT
    low, high = band(n0, T, N, M, band_width, query_width, reach_back, reach_forward, stride, MT)
    if (tl.program_id(1) >= low) & (tl.program_id(1) < high):
        share = ((B + BB - 1) // BB + splits - 1) // splits
        group_low = tl.program_id(2) * share
        group_high = tl.minimum(group_low + share, (B + BB - 1) // BB)
        acc0 = tl.zeros((ROWS, C0), dtype=tl.float32)
        if C1 > 0:
            acc1 = tl.zeros((ROWS, C1), dtype=tl.float32)
        if C2 > 0:
            acc2 = tl.zeros((ROWS, C2), dtype=tl.float32)
        for step in tl.range(group_low * NV, group_high * NV, num_stages=STAGES):
            b0 = (step // NV) * BB
            v0 = (step % NV) * VT
            queries = diagonal_queries(q_ptr, b0, n0, B, N, sqb, sqn, sqh, BB, T, KP, HP, K, H)
            dy = output_rows(dy_ptr, b0, n0, v0, B, N, V, syb, syn, syh, BB, T, HP, VT, H)
            g = tl.dot(tl.trans(queries), dy, input_precision=PRECISION).to(dtype)  # [nk, bv]
            x0 = context_values(v_ptr, b0, v0, m0, B, M, V, svb, svm, BB, VT, C0)
            acc0 = tl.dot(g, tl.trans(x0), acc0, input_precision=PRECISION)
            if C1 > 0:
                x1 = context_values(v_ptr, b0, v0, m0 + C0, B, M, V, svb, svm, BB, VT, C1)
                acc1 = tl.dot(g, tl.trans(x1), acc1, input_precision=PRECISION)
            if C2 > 0:
                x2 = context_values(v_ptr, b0, v0, m0 + C0 + C1, B, M, V, svb, svm, BB, VT, C2)
                acc2 = tl.dot(g, tl.trans(x2), acc2, input_precision=PRECISION)
        de_tile = de_ptr + (tl.program_id(2).to(tl.int64) * rows + tl.program_id(0) * ROWS) * ME
        store_table_gradients(de_tile, acc0, m0, ME, ROWS, C0)
        if C1 > 0:
            store_table_gradients(de_tile, acc1, m0 + C0, ME, ROWS, C1)
        if C2 > 0:
            store_table_gradients(de_tile, acc2, m0 + C0 + C1, ME, ROWS, C2)


@triton.jit(do_not_specialize=["B", "QH", "QW", "CH", "CW", "back_y", "back_x", "forward_y", "forward_x"])
def query_gradients_window(
    dy_ptr, v_ptr, c_ptr, t_ptr, dq_ptr,
    B, V, QH, QW, CH, CW, back_y, back_x, forward_y, forward_x, syb, syn, syh, svb, svm,
    K: tl.constexpr, H: tl.constexpr, TY: tl.constexpr, TX: tl.constexpr, KP: tl.constexpr, HP: tl.constexpr,
    VT: tl.constexpr, NV: tl.constexpr, BB: tl.constexpr, C: tl.constexpr, HAS_C: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The forward's lambdas again, then dq^T [k, h] = lambda [k, 16 values] dy^T [16 values, h] per query.

    Grid: (batch tiles, query tiles).
    """
    T: tl.constexpr = TY * TX
    G: tl.constexpr = BB * VT // 16
    dtype: tl.constexpr = t_ptr.dtype.element_ty
    b0 = tl.program_id(0) * BB
    y0, x0 = tile_origin(tl.program_id(1), QW, TY, TX)
    index = tl.arange(0, G * T)
    group = index // T
    n_group, exists_group = tile_query(index % T, y0, x0, QH, QW, TX)
    b_group = b0 + group * 16 // VT
    exists_group = exists_group & (b_group < B)
    dq = tl.zeros((G * T, KP, HP), dtype=tl.float32)
    for tile in tl.static_range(NV):
        v0 = tile * VT
        lambdas = tile_lambdas(
            v_ptr, c_ptr, t_ptr, b0, v0, y0, x0, B, V, CH, CW, back_y, back_x, forward_y, forward_x, svb, svm,
            K, TY, TX, KP, VT, BB, C, HAS_C, False, PACKED, PRECISION,
        )  # fmt: skip
        first_v = v0 + group * 16 % VT
        dy = small_matrices(dy_ptr, b_group, n_group, first_v, exists_group, V, H, syb, syn, syh, HP, 16, False)
        own = tl.permute(tl.reshape(lambdas.to(dtype), (T, KP, G, 16)), (2, 0, 1, 3))
        own = tl.reshape(own, (G * T, KP, 16))
        dq = tl.dot(own, tl.permute(dy, (0, 2, 1)), dq, input_precision=PRECISION)
    if VT > 16:
        dq = tl.reshape(tl.sum(tl.reshape(dq, (BB, VT // 16, T, KP, HP)), axis=1), (BB * T, KP, HP))
    bt = tl.arange(0, BB * T)
    b = b0 + bt // T
    n, exists = tile_query(bt % T, y0, x0, QH, QW, TX)
    h = tl.arange(0, HP)
    k = tl.arange(0, KP)
    mask = (exists & (b < B))[:, None, None] & (h < H)[None, :, None] & (k < K)[None, None, :]
    offset = ((b.to(tl.int64) * (QH * QW) + n) * H * K)[:, None, None] + (h * K)[None, :, None] + k[None, None, :]
    tl.store(dq_ptr + offset, tl.permute(dq, (0, 2, 1)).to(dq_ptr.dtype.element_ty), mask=mask)


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
    k = tl.arange(0, KP)
    v = v0 + tl.arange(0, VT)
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
        offset = (n.to(tl.int64) * KP * columns + b_local * VP)[:, None, None]
        offset = offset + (k * columns)[None, :, None] + v[None, None, :]
        mask = ((n < N) & (b_local * VP < columns))[:, None, None] & (k < KP)[None, :, None] & (v < VP)[None, None, :]
        tl.store(g_ptr + offset, g.to(g_ptr.dtype.element_ty), mask=mask)
    if WITH_C:
        summed = tl.sum(tl.reshape(total, (T, BB * KP * VT)), axis=0)
        place = tl.arange(0, BB * KP * VT)
        b_own = b_first + tl.program_id(1) * BB + place // (KP * VT)
        k_own = place // VT % KP
        v_own = v0 + place % VT
        offset = ((tl.program_id(0).to(tl.int64) * B + b_own) * K + k_own) * V + v_own
        tl.store(dc_ptr + offset, summed, mask=(b_own < B) & (k_own < K) & (v_own < V))


@triton.jit(
    do_not_specialize=["B", "QH", "QW", "CH", "CW", "back_y", "back_x", "forward_y", "forward_x", "b_first"]
)  # fmt: skip
def value_gradients_window(
    g_ptr, d_ptr, dv_ptr,
    B, V, QH, QW, CH, CW, back_y, back_x, forward_y, forward_x, b_first, columns,
    CY: tl.constexpr, CX: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dv^T [bv, m] of a tile of CY x CX context positions: a sum of g^T [bv, nk] D [nk, m] over the queries in reach.

    D [(window of queries, K), CY*CX] is the table, expanded for one tile of context (tables.py).
    Grid: (blocks of BV columns of g, context tiles).
    """
    MT: tl.constexpr = CY * CX
    y0, x0 = tile_origin(tl.program_id(1), CW, CY, CX)
    low_y, height = window(y0, CY, QH, forward_y, back_y)
    low_x, width = window(x0, CX, QW, forward_x, back_x)
    span = CX + back_x + forward_x
    n0 = low_y * QW + low_x
    d0 = (low_y - y0 + forward_y) * span + low_x - x0 + forward_x
    count = height * width
    col = tl.program_id(0) * BV + tl.arange(0, BV)
    acc = tl.zeros((BV, MT), dtype=tl.float32)
    for start in range(0, count * KP, C):
        line = start + tl.arange(0, C)
        j = line // KP
        k = line % KP
        row, column = row_column(j, width)
        exists = j < count
        n = tl.where(exists, n0 + row * QW + column, 0)
        offset = (n * KP + k) * columns
        mask_g = exists[:, None] & (col < columns)[None, :]
        g = tl.load(g_ptr + (offset[:, None] + col[None, :]), mask=mask_g, other=0.0)
        d_line = tl.where(exists, d0 + row * span + column, 0) * KP + k
        d = tl.load(d_ptr + (d_line[:, None] * MT + tl.arange(0, MT)[None, :]))
        acc = tl.dot(tl.trans(g), d, acc, input_precision=PRECISION)
    b = b_first + col // VP
    v = col % VP
    m, inside = tile_query(tl.arange(0, MT), y0, x0, CH, CW, CX)
    mask = inside[:, None] & ((col < columns) & (b < B) & (v < V))[None, :]
    store_offset = (b.to(tl.int64) * (CH * CW) * V + v)[None, :] + (m * V)[:, None]
    tl.store(dv_ptr + store_offset, tl.trans(acc).to(dv_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["B", "QH", "QW", "CH", "CW", "back_y", "back_x", "forward_y", "forward_x", "splits", "b_first"]
)  # fmt: skip
def table_gradients_window(
    g_ptr, v_ptr, de_ptr,
    B, V, QH, QW, CH, CW, back_y, back_x, forward_y, forward_x, splits, b_first, columns, positions, svb, svm,
    TY: tl.constexpr, TX: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dT [nk, C positions of the window] over a share of (query tiles, columns of g): sum of g [nk, bv] V^T [bv, C].

    Grid: (blocks of the window, splits). Each program adds to what it summed for earlier parts of the batch.
    """
    T: tl.constexpr = TY * TX
    span = TX + back_x + forward_x
    j = tl.program_id(0) * C + tl.arange(0, C)
    row, column = row_column(j, span)
    # Rows of query tiles for which this block of the window touches the map.
    first = (tl.program_id(0) * C) // span
    last = (tl.program_id(0) * C + C - 1) // span
    across = (QW + TX - 1) // TX
    low = tl.maximum(back_y - last + TY - 1, 0) // TY
    high = tl.minimum((QH + TY - 1) // TY, (tl.maximum(CH + back_y - first, 0) + TY - 1) // TY)
    blocks = (columns + BV - 1) // BV
    steps = tl.maximum(high - low, 0) * across * blocks
    share = (steps + splits - 1) // splits
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, steps)
    nk = tl.arange(0, T * KP)
    acc = tl.zeros((T * KP, C), dtype=tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        col = (step % blocks) * BV + tl.arange(0, BV)
        y0, x0 = tile_origin(low * across + step // blocks, QW, TY, TX)
        n, exists = tile_query(nk // KP, y0, x0, QH, QW, TX)
        line = (n * KP + nk % KP) * columns
        g = tl.load(g_ptr + (line[:, None] + col[None, :]), mask=exists[:, None] & (col < columns)[None, :], other=0.0)
        y = y0 - back_y + row
        x = x0 - back_x + column
        inside = (y >= 0) & (y < CH) & (x >= 0) & (x < CW)
        if PACKED:  # values are stored as [m, bv]
            mask = inside[:, None] & (col < tl.minimum(columns, (B - b_first) * VP))[None, :]
            offset = col[None, :] + ((y * CW + x) * svm)[:, None]
            values = tl.load(v_ptr + b_first * VP + offset, mask=mask, other=0.0)
        else:
            b0 = (step % blocks) * BV // VP
            v = col % VP
            offset = ((col // VP - b0) * svb + v)[None, :] + ((y * CW + x) * svm)[:, None]
            mask = inside[:, None] & ((col < columns) & (b_first + col // VP < B) & (v < V))[None, :]
            values = tl.load(v_ptr + tl.cast(b_first + b0, tl.int64) * svb + offset, mask=mask, other=0.0)
        acc = tl.dot(g, tl.trans(values), acc, input_precision=PRECISION)
    de_ptr += tl.program_id(1).to(tl.int64) * (T * KP) * positions
    de_block = de_ptr + (nk[:, None] * positions + j[None, :])
    if b_first > 0:
        acc += tl.load(de_block)
    tl.store(de_block, acc)

"""Triton kernels of the backward. Letters as in forward_kernels.py.

With g_bn[k, v] = sum_h q[b,n,h,k] dy[b,n,h,v] (rank H, in registers; window_gradient_kernels.py writes parts of it):
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
    table_block,
    unit_vectors,
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

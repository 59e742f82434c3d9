"""Triton kernels that expand a table of relative positions (or dense embeddings) to E and fold gradients of E back.

Letters: N queries, M context positions, K key depth, U intra-depth, R relative positions.
E [ME, NK] has in row m*U + u and column n*KP + k the embedding of the pair (n, m), and zero out of scope and in the
padding. It depends on neither batch nor value depth; at 14x14 it fits into the L2 cache. For larger maps the table is
expanded only for one tile and its window, as if that were the map (README.md, windows).
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["N", "M", "query_width", "context_width", "scope_y", "scope_x", "centre_y", "centre_x",
                       "stride"]
)  # fmt: skip
def expand(
    table_ptr, e_ptr,
    N, M, NK, copy, row_stride, column_stride, query_width, context_width, scope_y, scope_x, centre_y, centre_x, stride,
    K: tl.constexpr, U: tl.constexpr, KP: tl.constexpr, DENSE: tl.constexpr,
    ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr,
):  # fmt: skip
    """Expand a table [scope_y, scope_x, K, U], or embeddings [N, M, K, U] if DENSE, to copies of E.

    Grid: (column blocks, row blocks, copies). E has whole blocks of rows. A mask for rows would hide from the compiler
    that their number is a multiple of eight, and stores of E by columns would have 2 bytes instead of 16.
    """
    row = tl.program_id(1) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    column = tl.program_id(0) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)
    n = column // KP
    k = column % KP
    m = row // U
    u = row % U
    inside = (m < M)[:, None] & ((n < N) & (k < K))[None, :]
    if DENSE:
        pair = n.to(tl.int64)[None, :] * M + m[:, None]
    else:
        i_y = (m // context_width)[:, None] - (n // query_width)[None, :] * stride + centre_y
        i_x = (m % context_width)[:, None] - (n % query_width)[None, :] * stride + centre_x
        inside = inside & (i_y >= 0) & (i_y < scope_y) & (i_x >= 0) & (i_x < scope_x)
        pair = i_y * scope_x + i_x
    embedding = tl.load(table_ptr + (pair * K + k[None, :]) * U + u[:, None], mask=inside, other=0.0)
    offset = row.to(tl.int64)[:, None] * row_stride + column[None, :] * column_stride
    e_ptr += tl.program_id(2).to(tl.int64) * copy
    tl.store(e_ptr + offset, embedding.to(e_ptr.dtype.element_ty), mask=(column < NK)[None, :])


@triton.jit(
    do_not_specialize=["rows", "splits", "query_height", "query_width", "context_height", "context_width", "scope_y",
                       "scope_x", "centre_y", "centre_x", "stride"]
)  # fmt: skip
def fold(
    de_ptr, dtable_ptr,
    ME, rows, splits, query_height, query_width, context_height, context_width, scope_y, scope_x, centre_y, centre_x,
    stride,
    K: tl.constexpr, U: tl.constexpr, KP: tl.constexpr, R: tl.constexpr, NX: tl.constexpr, D: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Sum partial dE [splits, nk, ME] over equal relative positions to dtable [blocks, scope_y, scope_x, K, U].

    Each step loads pairs with the program's D relative columns, for NX columns of queries and R pairs (split, row of
    queries), so that sums need no exchange between threads. The order of summation is fixed, so results are
    reproducible. Grid: (scope_y * blocks of D relative columns * blocks of NX columns of queries, K*U).
    """
    across = (scope_x + D - 1) // D
    i_y = tl.program_id(0) % scope_y
    strip = tl.program_id(0) // scope_y % across
    block = tl.program_id(0) // scope_y // across
    k = tl.program_id(1) // U
    u = tl.program_id(1) % U
    n_x = block * NX + tl.arange(0, NX)
    i_x = strip * D + tl.arange(0, D)
    m_x = n_x[:, None] * stride + (i_x - centre_x)[None, :]
    shift = i_y - centre_y  # context row = query row * stride + shift
    first = tl.maximum(stride - 1 - shift, 0) // stride
    last = tl.minimum(tl.maximum(context_height - 1 - shift + stride, 0) // stride, query_height)
    count = tl.maximum(last - first, 0)
    column = (n_x * KP * ME)[:, None] + m_x * U
    if WIDE:
        column = (n_x.to(tl.int64) * KP * ME)[:, None] + m_x * U
    exists = (n_x < query_width)[:, None] & (m_x >= 0) & (m_x < context_width) & (i_x < scope_x)[None, :]
    total = tl.zeros((R, NX, D), dtype=tl.float32)
    for start in range(0, splits * count, R):
        place = start + tl.arange(0, R)
        split = place // count
        n_y = first + place % count
        if WIDE:
            split = split.to(tl.int64)
        row = (split * rows + n_y * query_width * KP + k) * ME + (n_y * stride + shift) * context_width * U + u
        mask = (split < splits)[:, None, None] & exists[None, :, :]
        total += tl.load(de_ptr + (row[:, None, None] + column[None, :, :]), mask=mask, other=0.0)
    found = tl.sum(tl.reshape(total, (R * NX, D)), axis=0).to(dtable_ptr.dtype.element_ty)
    offset = (((block * scope_y + i_y) * scope_x + i_x) * K + k) * U + u
    tl.store(dtable_ptr + offset, found, mask=i_x < scope_x)

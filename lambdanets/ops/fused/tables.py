"""Expanding a table of relative positions (or dense embeddings) to E, and folding gradients of E back.

Letters: N queries, M context positions, K key depth, U intra-depth, R relative positions.
E [ME, NK] holds in row m*U + u and column n*KP + k the embedding of the pair (n, m), or zero where the pair is out
of scope and in the padding. It depends on neither batch nor value depth; at 14x14 it lives in the L2 cache.
Larger maps expand the table for one tile and its window only, as if that were the map (README.md, windows).
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["N", "M", "ME", "query_width", "context_width", "scope_y", "scope_x", "centre_y", "centre_x",
                       "stride"]
)  # fmt: skip
def expand(
    table_ptr, e_ptr,
    N, M, ME, NK, query_width, context_width, scope_y, scope_x, centre_y, centre_x, stride,
    K: tl.constexpr, U: tl.constexpr, KP: tl.constexpr, DENSE: tl.constexpr,
    ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr,
):  # fmt: skip
    """table [scope_y, scope_x, K, U], or embeddings [N, M, K, U] if DENSE -> E. Grid: (column blocks, row blocks)."""
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
    offset = row.to(tl.int64)[:, None] * NK + column[None, :]
    tl.store(e_ptr + offset, embedding.to(e_ptr.dtype.element_ty), mask=(row < ME)[:, None] & (column < NK)[None, :])


@triton.jit(
    do_not_specialize=["rows", "splits", "query_height", "query_width", "context_height", "context_width", "scope_y",
                       "scope_x", "centre_y", "centre_x", "stride"]
)  # fmt: skip
def fold(
    de_ptr, dtable_ptr,
    ME, rows, splits, query_height, query_width, context_height, context_width, scope_y, scope_x, centre_y, centre_x,
    stride,
    K: tl.constexpr, U: tl.constexpr, KP: tl.constexpr, QUERIES: tl.constexpr, SCOPE: tl.constexpr,
    PARTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Partial dE [splits, nk, ME] -> dtable [PARTS, scope_y, scope_x, K, U]: sums along equal relative positions.

    A fixed order of summation by one program per output, so the result repeats exactly.
    Grid: (scope_y * scope_x blocks, K*U, PARTS).
    """
    blocks = (scope_x + SCOPE - 1) // SCOPE
    i_y = tl.program_id(0) // blocks
    i_x = (tl.program_id(0) % blocks) * SCOPE + tl.arange(0, SCOPE)
    k = tl.program_id(1) // U
    u = tl.program_id(1) % U
    shift = i_y - centre_y  # context row = query row * stride + shift
    first = tl.maximum(stride - 1 - shift, 0) // stride
    last = tl.minimum(tl.maximum(context_height - 1 - shift + stride, 0) // stride, query_height)
    queries = tl.maximum(last - first, 0) * query_width
    total = tl.zeros((SCOPE,), dtype=tl.float32)
    # Splits and queries are one axis, dealt to the parts in turn: many loads in flight.
    for start in range(tl.program_id(2) * QUERIES, splits * queries, QUERIES * PARTS):
        place = start + tl.arange(0, QUERIES)
        split = place // queries
        n = first * query_width + place % queries
        x = (n % query_width) * stride - centre_x
        m = ((n // query_width) * stride + shift) * context_width + x
        mask = (split < splits)[:, None] & (i_x < scope_x)[None, :]
        context_x = x[:, None] + i_x[None, :]
        mask = mask & (context_x >= 0) & (context_x < context_width)
        if WIDE:
            row = (split.to(tl.int64) * rows + n * KP + k) * ME + m * U + u
        else:
            row = (split * rows + n * KP + k) * ME + m * U + u
        total += tl.sum(tl.load(de_ptr + (row[:, None] + (i_x * U)[None, :]), mask=mask, other=0.0), axis=0)
    offset = (((tl.program_id(2) * scope_y + i_y) * scope_x + i_x) * K + k) * U + u
    tl.store(dtable_ptr + offset, total, mask=i_x < scope_x)

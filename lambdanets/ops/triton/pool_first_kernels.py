"""Triton kernels for the mode "pool first" (pool_first.py): embeddings and queries of windows.

Letters: B batch, N = height x width queries and context positions, P = rows x across windows, H heads, K key depth.
Windows have stride 2 and 3 x 3 places: place (j_y, j_x) of window (p_y, p_x) is query
(2 p_y + j_y - 1, 2 p_x + j_x - 1).
"""

import triton
import triton.language as tl


@triton.jit
def place_of(p, j, across):
    """Return row and column of place j of window p, which may lie outside the map."""
    return p // across * 2 + j // 3 - 1, p % across * 2 + j % 3 - 1


@triton.jit(do_not_specialize=["P", "height", "width", "across", "scope_y", "scope_x", "centre_y", "centre_x"])
def expand_windows(
    table_ptr, e_ptr, P, height, width, across, scope_y, scope_x, centre_y, centre_x, first,
    K: tl.constexpr, ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr,
):  # fmt: skip
    """Expand a table [scope_y, scope_x, K] to E [rows, P, 9, K]. Grid: (column blocks, row blocks).

    Row m has the embeddings of context position m for each place, zero out of scope. Rows from `first` on are unit
    vectors of the depth.
    """
    row = tl.program_id(1) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    column = tl.program_id(0) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)
    k = column % K
    p = column // K // 9  # in this order Triton infers that K neighbours share it
    y, x = place_of(p, column // K % 9, across)
    i_y = (row // width)[:, None] - y[None, :] + centre_y
    i_x = (row % width)[:, None] - x[None, :] + centre_x
    inside = (i_y >= 0) & (i_y < scope_y) & (i_x >= 0) & (i_x < scope_x)
    inside = inside & (row < height * width)[:, None] & (p < P)[None, :]
    embedding = tl.load(table_ptr + ((i_y * scope_x + i_x) * K + k[None, :]), mask=inside, other=0.0)
    embedding = tl.where((row - first)[:, None] == k[None, :], 1.0, embedding)
    place = row.to(tl.int64)[:, None] * (P * 9 * K) + column[None, :]
    tl.store(e_ptr + place, embedding.to(e_ptr.dtype.element_ty), mask=(p < P)[None, :])


@triton.jit(do_not_specialize=["B", "height", "width", "across"])
def gather(
    q_ptr, w_ptr, B, height, width, across, sqb, sqn,
    H: tl.constexpr, K: tl.constexpr, JK: tl.constexpr, RB: tl.constexpr,
):  # fmt: skip
    """Gather q [B, N, H, K] to w [P, H, B, 9, K], zero outside the map.

    JK is 9 * K padded to a power of two. Grid: (P, blocks of RB rows (head, example)).
    """
    p = tl.program_id(0)
    rows = tl.program_id(1) * RB + tl.arange(0, RB)
    jk = tl.arange(0, JK)
    y, x = place_of(p, jk // K, across)
    inside = (jk < 9 * K) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    exists = (rows < H * B)[:, None]
    q_row = (rows % B).to(tl.int64) * sqb + rows // B * K
    q_place = (y * width + x) * sqn + jk % K
    q = tl.load(q_ptr + q_row[:, None] + q_place[None, :], mask=exists & inside[None, :], other=0.0)
    w_row = (p.to(tl.int64) * H * B + rows) * (9 * K)
    tl.store(w_ptr + w_row[:, None] + jk[None, :], q, mask=exists & (jk < 9 * K)[None, :])


@triton.jit(do_not_specialize=["B", "width", "rows", "across"])
def scatter(
    dw_ptr, dq_ptr, B, width, rows, across,
    H: tl.constexpr, K: tl.constexpr, HK: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Sum dw [P, H, B, 9, K] over the windows of each query to dq [B, N, H, K]. Grid: (N, blocks of BB of B).

    Along an axis, an even position is the centre of one window; an odd position is the last of one window and the first
    of the next. HK is H * K padded to a power of two.
    """
    n = tl.program_id(0)
    y, x = n // width, n % width
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    hk = tl.arange(0, HK)
    mask = (b < B)[:, None] & (hk < H * K)[None, :]
    row = (hk // K).to(tl.int64)[None, :] * B + b[:, None]
    total = tl.zeros((BB, HK), dtype=tl.float32)
    for next_y in tl.static_range(2):
        p_y, j_y = y // 2 + next_y, 1 + y % 2 - 2 * next_y
        for next_x in tl.static_range(2):
            p_x, j_x = x // 2 + next_x, 1 + x % 2 - 2 * next_x
            end = tl.where((p_y < rows) & (p_x < across) & (j_y >= 0) & (j_x >= 0), B, 0)
            place = ((p_y * across + p_x).to(tl.int64) * H * B + row) * (9 * K) + (j_y * 3 + j_x) * K
            total += tl.load(dw_ptr + place + (hk % K)[None, :], mask=mask & (b < end)[:, None], other=0.0)
    n_row = (b.to(tl.int64)[:, None] * tl.num_programs(0) + n) * (H * K) + hk[None, :]
    tl.store(dq_ptr + n_row, total.to(dq_ptr.dtype.element_ty), mask=mask)

"""Triton kernels for larger maps: forward and dq. Letters as in forward_kernels.py, gradients in backward_kernels.py.

Every tile of TY x TX queries reads the same small table T [positions of a tile's window, nk] (README.md, windows);
y0, x0 is a tile's first query, back and forward are how far the scope reaches.
"""

import triton
import triton.language as tl

from .forward_kernels import content_block, unit_vectors

GEOMETRY = ["QH", "QW", "CH", "CW", "back_y", "back_x", "forward_y", "forward_x"]  # sizes that compile nothing again


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
def values_at(v_ptr, m, exists, b0, v0, B, V, svb, svm, BB: tl.constexpr, VT: tl.constexpr):
    """Values [m, bv] of any context positions; zero where they do not exist.

    A scalar base and 32-bit offsets: pointers of 64 bits take twice the registers and instructions.
    """
    col = tl.arange(0, BB * VT)
    v = v0 + col % VT
    mask = exists[:, None] & ((v < V) & (b0 + col // VT < B))[None, :]
    v_ptr += tl.cast(b0, tl.int64) * svb
    return tl.load(v_ptr + ((col // VT * svb + v)[None, :] + (m * svm)[:, None]), mask=mask, other=0.0)


@triton.jit
def tile_lambdas(
    v_ptr, c_ptr, t_ptr, b0, v0, y0, x0, B, V, context_height, context_width, back_y, back_x, forward_y, forward_x,
    svb, svm,
    K: tl.constexpr, TY: tl.constexpr, TX: tl.constexpr, KP: tl.constexpr, VT: tl.constexpr,
    BB: tl.constexpr, C: tl.constexpr, HAS_C: tl.constexpr, VALUE_ROWS: tl.constexpr, PRECISION: tl.constexpr,
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
        row, _ = row_column(j, width)  # j % width + row * pitch, of the map or the table, is j + row * (pitch - width)
        exists = j < count
        x = values_at(v_ptr, m0 + j + row * (context_width - width), exists, b0, v0, B, V, svb, svm, BB, VT)
        line = tl.where(exists, t0 + j + row * (span - width), 0)
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


@triton.jit(do_not_specialize=["B", *GEOMETRY, "copies"])
def forward_window(
    q_ptr, v_ptr, c_ptr, t_ptr, y_ptr,
    B, V, QH, QW, CH, CW, back_y, back_x, forward_y, forward_x, copies, copy, sqb, sqn, sqh, svb, svm,
    K: tl.constexpr, H: tl.constexpr, TY: tl.constexpr, TX: tl.constexpr, KP: tl.constexpr, HP: tl.constexpr,
    VT: tl.constexpr, BB: tl.constexpr, C: tl.constexpr, HAS_C: tl.constexpr, TILES_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Relative positions on larger maps: every tile of queries reads the same small table (tables.py, T).

    There are copies of it, `copy` numbers apart, for neighbouring programs: one would be asked for by all at once.
    Grid: (batch tiles, query tiles, value tiles), or with TILES_FIRST query tiles before batch tiles.
    """
    T: tl.constexpr = TY * TX
    dtype: tl.constexpr = t_ptr.dtype.element_ty
    t_ptr += tl.program_id(0) % copies * copy
    b0 = tl.program_id(1 if TILES_FIRST else 0) * BB
    v0 = tl.program_id(2) * VT
    y0, x0 = tile_origin(tl.program_id(0 if TILES_FIRST else 1), QW, TY, TX)
    lambdas = tile_lambdas(
        v_ptr, c_ptr, t_ptr, b0, v0, y0, x0, B, V, CH, CW, back_y, back_x, forward_y, forward_x, svb, svm,
        K, TY, TX, KP, VT, BB, C, HAS_C, True, PRECISION,
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


@triton.jit(do_not_specialize=["B", *GEOMETRY, "copies"])
def query_gradients_window(
    dy_ptr, v_ptr, c_ptr, t_ptr, dq_ptr,
    B, V, QH, QW, CH, CW, back_y, back_x, forward_y, forward_x, copies, copy, syb, syn, syh, svb, svm,
    K: tl.constexpr, H: tl.constexpr, TY: tl.constexpr, TX: tl.constexpr, KP: tl.constexpr, HP: tl.constexpr,
    VT: tl.constexpr, NV: tl.constexpr, BB: tl.constexpr, C: tl.constexpr, HAS_C: tl.constexpr,
    TILES_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The forward's lambdas again, then dq^T [k, h] = lambda [k, 16 values] dy^T [16 values, h] per query.

    Grid: (batch tiles, query tiles), or with TILES_FIRST the other way round.
    """
    T: tl.constexpr = TY * TX
    G: tl.constexpr = BB * VT // 16
    dtype: tl.constexpr = t_ptr.dtype.element_ty
    t_ptr += tl.program_id(0) % copies * copy
    b0 = tl.program_id(1 if TILES_FIRST else 0) * BB
    y0, x0 = tile_origin(tl.program_id(0 if TILES_FIRST else 1), QW, TY, TX)
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
            K, TY, TX, KP, VT, BB, C, HAS_C, False, PRECISION,
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

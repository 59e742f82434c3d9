"""Triton kernels for batch norm of queries and values, read from one projection and written apart.

The projection is rows [R, S]: FIRST channels of queries, then values up to NORMED, then keys, which have no norm.
Tile letters: ROWS x COLS a tile, P shares of the rows, each with its own sums; SHARES is the most there are.
"""

import triton
import triton.language as tl

# Vectors with a number a channel: one kernel for all of them, wherever they lie in somebody's flat buffer.
PARAMETERS = ["weight_q", "weight_v", "bias_q", "bias_v"]
STATISTICS = ["mean_q", "mean_v", "var_q", "var_v", "count_q", "count_v"]
GRADIENTS = ["weight_q", "weight_v", "dweight_q", "dweight_v", "dbias_q", "dbias_v"]


@triton.jit
def of_parts(first_ptr, second_ptr, c, FIRST: tl.constexpr, NORMED: tl.constexpr):
    """One number a channel from two vectors, one after the other, in float32."""
    first = tl.load(first_ptr + c, mask=c < FIRST, other=0.0).to(tl.float32)
    return first + tl.load(second_ptr + (c - FIRST), mask=(c >= FIRST) & (c < NORMED), other=0.0).to(tl.float32)


@triton.jit
def to_parts(first_ptr, second_ptr, c, x, FIRST: tl.constexpr, NORMED: tl.constexpr):
    """The reverse of of_parts."""
    tl.store(first_ptr + c, x.to(first_ptr.dtype.element_ty), mask=c < FIRST)
    second = (c >= FIRST) & (c < NORMED)
    tl.store(second_ptr + (c - FIRST), x.to(second_ptr.dtype.element_ty), mask=second)


@triton.jit
def rows_of_parts(
    q_ptr, v_ptr, k_ptr, r, c, exists, FIRST: tl.constexpr, NORMED: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """Rows [ROWS, COLS] of three tensors side by side, in float32; keys (none where S == NORMED) included."""
    r = r.to(tl.int64)[:, None]
    second, third = (c >= FIRST) & (c < NORMED), (c >= NORMED) & (c < S)
    x = tl.load(q_ptr + (r * FIRST + c[None, :]), mask=exists & (c < FIRST)[None, :], other=0.0).to(tl.float32)
    v = tl.load(v_ptr + (r * (NORMED - FIRST) + (c - FIRST)[None, :]), mask=exists & second[None, :], other=0.0)
    x += v.to(tl.float32)
    if S > NORMED:
        k = tl.load(k_ptr + (r * (S - NORMED) + (c - NORMED)[None, :]), mask=exists & third[None, :], other=0.0)
        x += k.to(tl.float32)
    return x


@triton.jit
def rows_of_share(x_ptr, r, last, c, NORMED: tl.constexpr, S: tl.constexpr):
    """Rows [ROWS, COLS] of the projection before `last`, without keys, in float32; zero elsewhere."""
    exists = (r < last)[:, None] & (c < NORMED)[None, :]
    return tl.load(x_ptr + (r.to(tl.int64)[:, None] * S + c[None, :]), mask=exists, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["R", "share"])
def batch_moments(
    x_ptr, mean_ptr, square_ptr, R, share,
    FIRST: tl.constexpr, NORMED: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """For each share of the rows: mean [P, NORMED] and sum of squared distances from it. Grid: (columns, P).

    Sums are of distances from the mean of the share's first tile, so no large squares are subtracted: that tile is part
    of the share, and cannot lie further from its mean than sqrt(tiles) deviations.
    """
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, R)
    rows = tl.arange(0, ROWS)
    x = rows_of_share(x_ptr, first + rows, last, c, NORMED, S)
    origin = tl.sum(x, axis=0) / tl.minimum(ROWS, last - first)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)  # summed over rows at the end: threads wait for each other once
    square = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for start in range(first, last, ROWS):
        r = start + rows
        apart = rows_of_share(x_ptr, r, last, c, NORMED, S) - origin[None, :]
        apart = tl.where((r < last)[:, None], apart, 0.0)
        total += apart
        square += apart * apart
    count = (last - first).to(tl.float32)
    step = tl.sum(total, axis=0) / count
    place = tl.program_id(1) * NORMED + c
    tl.store(mean_ptr + place, origin + step, mask=c < NORMED)
    squares = tl.maximum(tl.sum(square, axis=0) - step * step * count, 0.0)
    tl.store(square_ptr + place, squares, mask=c < NORMED)


@triton.jit
def of_shares(x_ptr, c, P, NORMED: tl.constexpr, SHARES: tl.constexpr):
    """[P, NORMED] -> [SHARES, COLS], with 0 where there is no share."""
    p = tl.arange(0, SHARES)
    mask = (p < P)[:, None] & (c < NORMED)[None, :]
    return tl.load(x_ptr + (p[:, None] * NORMED + c[None, :]), mask=mask, other=0.0)


@triton.jit
def merged_moments(mean_ptr, square_ptr, c, R, share, P, NORMED: tl.constexpr, SHARES: tl.constexpr):
    """Mean and sum of squared distances of all rows, from those of the shares."""
    p = tl.arange(0, SHARES)
    count = tl.where(p < P, tl.minimum(share, R - p * share), 0).to(tl.float32)[:, None]
    means = of_shares(mean_ptr, c, P, NORMED, SHARES)
    mean = tl.sum(means * count, axis=0) / R
    apart = means - mean[None, :]
    return mean, tl.sum(of_shares(square_ptr, c, P, NORMED, SHARES) + apart * apart * count, axis=0)


@triton.jit(do_not_specialize=["R", "share", "P", *PARAMETERS, *STATISTICS])
def normalise_parts(
    x_ptr, q_ptr, v_ptr, k_ptr, mean_ptr, square_ptr, moments_ptr,
    weight_q, weight_v, bias_q, bias_v, mean_q, mean_v, var_q, var_v, count_q, count_v,
    R, share, P, eps_q, eps_v, momentum_q, momentum_v,
    FIRST: tl.constexpr, NORMED: tl.constexpr, S: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Queries and values, normed, and keys, each a tensor of its own; running statistics on the way.

    moments [2, NORMED]: mean and 1 / deviation, for the backward. Grid: (columns, programs that share the rows).
    """
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    mean, square = merged_moments(mean_ptr, square_ptr, c, R, share, P, NORMED, SHARES)
    eps = tl.where(c < FIRST, eps_q, eps_v)
    inverse = 1.0 / tl.sqrt_rn(square / R + eps)
    if tl.program_id(1) == 0:
        tl.store(moments_ptr + c, mean, mask=c < NORMED)
        tl.store(moments_ptr + NORMED + c, inverse, mask=c < NORMED)
        momentum = tl.where(c < FIRST, momentum_q, momentum_v)
        running = of_parts(mean_q, mean_v, c, FIRST, NORMED)
        to_parts(mean_q, mean_v, c, running + momentum * (mean - running), FIRST, NORMED)
        running = of_parts(var_q, var_v, c, FIRST, NORMED)
        to_parts(var_q, var_v, c, running + momentum * (square / (R - 1) - running), FIRST, NORMED)
        if tl.program_id(0) == 0:
            tl.store(count_q, tl.load(count_q) + 1)
            tl.store(count_v, tl.load(count_v) + 1)
    normed = c < NORMED
    mean = tl.where(normed, mean, 0.0)
    scale = tl.where(normed, inverse * of_parts(weight_q, weight_v, c, FIRST, NORMED), 1.0)
    bias = of_parts(bias_q, bias_v, c, FIRST, NORMED)
    for start in range(tl.program_id(1) * ROWS, R, tl.num_programs(1) * ROWS):
        rows = start + tl.arange(0, ROWS)
        exists = (rows < R)[:, None] & (c < S)[None, :]
        r = rows.to(tl.int64)[:, None]
        x = tl.load(x_ptr + (r * S + c[None, :]), mask=exists, other=0.0).to(tl.float32)
        y = ((x - mean[None, :]) * scale[None, :] + bias[None, :]).to(q_ptr.dtype.element_ty)
        second, third = (c >= FIRST) & (c < NORMED), c >= NORMED
        tl.store(q_ptr + (r * FIRST + c[None, :]), y, mask=exists & (c < FIRST)[None, :])
        tl.store(v_ptr + (r * (NORMED - FIRST) + (c - FIRST)[None, :]), y, mask=exists & second[None, :])
        if S > NORMED:
            tl.store(k_ptr + (r * (S - NORMED) + (c - NORMED)[None, :]), y, mask=exists & third[None, :])


@triton.jit(do_not_specialize=["R", "share"])
def gradient_moments(
    x_ptr, dq_ptr, dv_ptr, moments_ptr, sum_ptr, product_ptr, R, share,
    FIRST: tl.constexpr, NORMED: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """For each share of the rows: sums [P, NORMED] of dy and of dy times the normed x. Grid: (columns, P)."""
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    mean = tl.load(moments_ptr + c, mask=c < NORMED, other=0.0)
    inverse = tl.load(moments_ptr + NORMED + c, mask=c < NORMED, other=0.0)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, R)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)  # summed at the end, as in batch_moments
    product = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for start in range(first, last, ROWS):
        r = start + tl.arange(0, ROWS)
        x = rows_of_share(x_ptr, r, last, c, NORMED, S)
        exists = (r < last)[:, None]
        dy = rows_of_parts(dq_ptr, dv_ptr, dv_ptr, r, c, exists, FIRST, NORMED, NORMED)
        total += dy
        product += dy * (x - mean[None, :])
    place = tl.program_id(1) * NORMED + c
    tl.store(sum_ptr + place, tl.sum(total, axis=0), mask=c < NORMED)
    tl.store(product_ptr + place, tl.sum(product, axis=0) * inverse, mask=c < NORMED)


@triton.jit(do_not_specialize=["R", "P", *GRADIENTS])
def gradients_of_parts(
    x_ptr, dq_ptr, dv_ptr, dk_ptr, dx_ptr, moments_ptr, sum_ptr, product_ptr,
    weight_q, weight_v, dweight_q, dweight_v, dbias_q, dbias_v, R, P,
    FIRST: tl.constexpr, NORMED: tl.constexpr, S: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """The gradient of the whole projection, and of weights and biases. Grid: (columns, programs that share the rows).

    dx = weight / deviation * (dy - mean of dy - normed x * mean of (dy * normed x)).
    """
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.sum(of_shares(sum_ptr, c, P, NORMED, SHARES), axis=0)
    product = tl.sum(of_shares(product_ptr, c, P, NORMED, SHARES), axis=0)
    if tl.program_id(1) == 0:
        to_parts(dweight_q, dweight_v, c, product, FIRST, NORMED)
        to_parts(dbias_q, dbias_v, c, total, FIRST, NORMED)
    normed = c < NORMED
    mean = tl.load(moments_ptr + c, mask=normed, other=0.0)
    inverse = tl.load(moments_ptr + NORMED + c, mask=normed, other=0.0)
    scale = tl.where(normed, inverse * of_parts(weight_q, weight_v, c, FIRST, NORMED), 1.0)
    total /= R
    product *= inverse / R
    for start in range(tl.program_id(1) * ROWS, R, tl.num_programs(1) * ROWS):
        rows = start + tl.arange(0, ROWS)
        exists = (rows < R)[:, None] & (c < S)[None, :]
        place = rows.to(tl.int64)[:, None] * S + c[None, :]
        x = tl.load(x_ptr + place, mask=exists & normed[None, :], other=0.0).to(tl.float32)
        dy = rows_of_parts(dq_ptr, dv_ptr, dk_ptr, rows, c, exists, FIRST, NORMED, S)
        dx = scale[None, :] * (dy - total[None, :] - (x - mean[None, :]) * product[None, :])
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=exists)

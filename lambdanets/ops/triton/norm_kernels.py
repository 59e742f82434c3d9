"""Triton kernels for batch norm of queries and values, which read one projection and write separate tensors.

The projection has rows [R, S]: FIRST channels of queries, then values up to NORMED, then keys, which have no norm.
A strip is up to COLS neighbouring channels of one of the three parts; strips of queries come first, then values, then
keys. Tile letters: ROWS x COLS a tile, P shares of the rows, each with separate sums; SHARES is their maximum.
"""

import triton
import triton.language as tl

# Vectors with one number per channel: not specialised, because they may be slices of a buffer with any alignment.
PARAMETERS = ["weight_q", "weight_v", "bias_q", "bias_v"]
STATISTICS = ["mean_q", "mean_v", "var_q", "var_v", "count_q", "count_v"]
GRADIENTS = ["weight_q", "weight_v", "dweight_q", "dweight_v", "dbias_q", "dbias_v"]


@triton.jit
def strip_of(FIRST: tl.constexpr, NORMED: tl.constexpr, S: tl.constexpr, COLS: tl.constexpr):
    """Return the part (0 queries, 1 values, 2 keys) of this program's strip, the first channel and size of the part,
    and the channels of the strip, counted within the part.
    """
    QUERY: tl.constexpr = (FIRST + COLS - 1) // COLS
    VALUE: tl.constexpr = QUERY + (NORMED - FIRST + COLS - 1) // COLS
    strip = tl.program_id(0)
    part = tl.where(strip < QUERY, 0, tl.where(strip < VALUE, 1, 2))
    before = tl.where(part == 0, 0, tl.where(part == 1, QUERY, VALUE))
    start = tl.where(part == 0, 0, tl.where(part == 1, FIRST, NORMED))
    size = tl.where(part == 0, FIRST, tl.where(part == 1, NORMED - FIRST, S - NORMED))
    return part, start, size, (strip - before) * COLS + tl.arange(0, COLS)


@triton.jit
def one_of(part, first, second, third):
    """Return the pointer for queries, values or keys."""
    found = first
    if part == 1:
        found = second
    if part == 2:
        found = third
    return found


@triton.jit
def channels(ptr, c, exists):
    return tl.load(ptr + c, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def rows_of(ptr, r, exists, pitch, c, inside):
    """Load rows [ROWS, COLS] of a tensor with `pitch` channels in float32; zero outside the tensor."""
    place = r.to(tl.int64)[:, None] * pitch + c[None, :]
    return tl.load(ptr + place, mask=exists[:, None] & inside[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["R", "share"])
def batch_moments(
    x_ptr, mean_ptr, square_ptr, R, share,
    FIRST: tl.constexpr, NORMED: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute mean [P, NORMED] and sum of squared deviations for each share of the rows. Grid: (normed strips, P).

    The sums are of deviations from the mean of the first tile of a share, which avoids cancellation: the mean of that
    tile is at most sqrt(tiles) standard deviations from the mean of the share.
    """
    _, start, size, c = strip_of(FIRST, NORMED, S, COLS)
    inside = c < size
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, R)
    rows = tl.arange(0, ROWS)
    x = rows_of(x_ptr, first + rows, first + rows < last, S, start + c, inside)
    origin = tl.sum(x, axis=0) / tl.minimum(ROWS, last - first)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)  # summed over rows at the end: one synchronisation of threads
    square = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for low in tl.range(first, last, ROWS, num_stages=STAGES):
        r = low + rows
        apart = rows_of(x_ptr, r, r < last, S, start + c, inside) - origin[None, :]
        apart = tl.where((r < last)[:, None], apart, 0.0)
        total += apart
        square += apart * apart
    count = (last - first).to(tl.float32)
    step = tl.sum(total, axis=0) / count
    place = tl.program_id(1) * NORMED + start + c
    tl.store(mean_ptr + place, origin + step, mask=inside)
    squares = tl.maximum(tl.sum(square, axis=0) - step * step * count, 0.0)
    tl.store(square_ptr + place, squares, mask=inside)


@triton.jit
def of_shares(x_ptr, c, exists, P, NORMED: tl.constexpr, SHARES: tl.constexpr):
    """Load [SHARES, COLS] of [P, NORMED], with 0 where there is no share."""
    p = tl.arange(0, SHARES)
    return tl.load(x_ptr + (p[:, None] * NORMED + c[None, :]), mask=(p < P)[:, None] & exists[None, :], other=0.0)


@triton.jit
def merged_moments(mean_ptr, square_ptr, c, exists, R, share, P, NORMED: tl.constexpr, SHARES: tl.constexpr):
    """Combine the means and sums of squared deviations of the shares to those of all rows."""
    p = tl.arange(0, SHARES)
    count = tl.where(p < P, tl.minimum(share, R - p * share), 0).to(tl.float32)[:, None]
    means = of_shares(mean_ptr, c, exists, P, NORMED, SHARES)
    mean = tl.sum(means * count, axis=0) / R
    apart = means - mean[None, :]
    return mean, tl.sum(of_shares(square_ptr, c, exists, P, NORMED, SHARES) + apart * apart * count, axis=0)


@triton.jit(do_not_specialize=["R", "share", "P", *PARAMETERS, *STATISTICS])
def normalise_parts(
    x_ptr, q_ptr, v_ptr, k_ptr, mean_ptr, square_ptr, moments_ptr,
    weight_q, weight_v, bias_q, bias_v, mean_q, mean_v, var_q, var_v, count_q, count_v,
    R, share, P, eps_q, eps_v, momentum_q, momentum_v,
    FIRST: tl.constexpr, NORMED: tl.constexpr, S: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Write normalised queries and values, and keys, to separate tensors, and update the running statistics.

    moments [2, NORMED] gets mean and 1 / standard deviation for the backward pass. Grid: (strips, programs that share
    the rows).
    """
    part, start, size, c = strip_of(FIRST, NORMED, S, COLS)
    inside = c < size
    scale = tl.full((COLS,), 1.0, dtype=tl.float32)
    bias = tl.zeros((COLS,), dtype=tl.float32)
    mean = tl.zeros((COLS,), dtype=tl.float32)
    if part < 2:
        mean, square = merged_moments(mean_ptr, square_ptr, start + c, inside, R, share, P, NORMED, SHARES)
        inverse = 1.0 / tl.sqrt_rn(square / R + tl.where(part == 0, eps_q, eps_v))
        if tl.program_id(1) == 0:
            tl.store(moments_ptr + start + c, mean, mask=inside)
            tl.store(moments_ptr + NORMED + start + c, inverse, mask=inside)
            momentum = tl.where(part == 0, momentum_q, momentum_v)
            running_ptr = one_of(part, mean_q, mean_v, mean_v)
            running = channels(running_ptr, c, inside)
            running += momentum * (mean - running)
            tl.store(running_ptr + c, running.to(running_ptr.dtype.element_ty), mask=inside)
            running_ptr = one_of(part, var_q, var_v, var_v)
            running = channels(running_ptr, c, inside)
            running += momentum * (square / (R - 1) - running)
            tl.store(running_ptr + c, running.to(running_ptr.dtype.element_ty), mask=inside)
            if tl.program_id(0) == 0:
                tl.store(count_q, tl.load(count_q) + 1)
                tl.store(count_v, tl.load(count_v) + 1)
        scale = inverse * channels(one_of(part, weight_q, weight_v, weight_v), c, inside)
        bias = channels(one_of(part, bias_q, bias_v, bias_v), c, inside)
    y_ptr = one_of(part, q_ptr, v_ptr, k_ptr)
    for low in tl.range(tl.program_id(1) * ROWS, R, tl.num_programs(1) * ROWS, num_stages=STAGES):
        r = low + tl.arange(0, ROWS)
        x = rows_of(x_ptr, r, r < R, S, start + c, inside)
        y = ((x - mean[None, :]) * scale[None, :] + bias[None, :]).to(y_ptr.dtype.element_ty)
        place = r.to(tl.int64)[:, None] * size + c[None, :]
        tl.store(y_ptr + place, y, mask=(r < R)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["R", "share"])
def gradient_moments(
    x_ptr, dq_ptr, dv_ptr, moments_ptr, sum_ptr, product_ptr, R, share,
    FIRST: tl.constexpr, NORMED: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute sums [P, NORMED] of dy and of dy * normalised x for each share of the rows. Grid: (normed strips, P)."""
    part, start, size, c = strip_of(FIRST, NORMED, S, COLS)
    inside = c < size
    mean = channels(moments_ptr + start, c, inside)
    inverse = channels(moments_ptr + NORMED + start, c, inside)
    dy_ptr = one_of(part, dq_ptr, dv_ptr, dv_ptr)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, R)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)  # summed at the end, as in batch_moments
    product = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for low in tl.range(first, last, ROWS, num_stages=STAGES):
        r = low + tl.arange(0, ROWS)
        x = rows_of(x_ptr, r, r < last, S, start + c, inside)
        dy = rows_of(dy_ptr, r, r < last, size, c, inside)
        total += dy
        product += dy * (x - mean[None, :])
    place = tl.program_id(1) * NORMED + start + c
    tl.store(sum_ptr + place, tl.sum(total, axis=0), mask=inside)
    tl.store(product_ptr + place, tl.sum(product, axis=0) * inverse, mask=inside)


@triton.jit(do_not_specialize=["R", "P", *GRADIENTS])
def gradients_of_parts(
    x_ptr, dq_ptr, dv_ptr, dk_ptr, dx_ptr, moments_ptr, sum_ptr, product_ptr,
    weight_q, weight_v, dweight_q, dweight_v, dbias_q, dbias_v, R, P,
    FIRST: tl.constexpr, NORMED: tl.constexpr, S: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the whole projection, the weights and the biases.

    dx = weight / deviation * (dy - mean of dy - normalised x * mean of (dy * normalised x)). Grid: (strips, programs
    that share the rows).
    """
    part, start, size, c = strip_of(FIRST, NORMED, S, COLS)
    inside = c < size
    normed = c < tl.where(part == 2, 0, size)
    total = tl.sum(of_shares(sum_ptr, start + c, normed, P, NORMED, SHARES), axis=0)
    product = tl.sum(of_shares(product_ptr, start + c, normed, P, NORMED, SHARES), axis=0)
    if (tl.program_id(1) == 0) & (part < 2):
        dweight, dbias = one_of(part, dweight_q, dweight_v, dweight_v), one_of(part, dbias_q, dbias_v, dbias_v)
        tl.store(dweight + c, product.to(dweight.dtype.element_ty), mask=inside)
        tl.store(dbias + c, total.to(dbias.dtype.element_ty), mask=inside)
    mean = channels(moments_ptr + start, c, normed)
    inverse = channels(moments_ptr + NORMED + start, c, normed)
    scale = tl.where(normed, inverse * channels(one_of(part, weight_q, weight_v, weight_v), c, normed), 1.0)
    total /= R
    product *= inverse / R
    dy_ptr = one_of(part, dq_ptr, dv_ptr, dk_ptr)
    for low in tl.range(tl.program_id(1) * ROWS, R, tl.num_programs(1) * ROWS, num_stages=STAGES):
        r = low + tl.arange(0, ROWS)
        x = rows_of(x_ptr, r, r < R, S, start + c, normed)
        dy = rows_of(dy_ptr, r, r < R, size, c, inside)
        dx = scale[None, :] * (dy - total[None, :] - (x - mean[None, :]) * product[None, :])
        place = r.to(tl.int64)[:, None] * S + (start + c)[None, :]
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=(r < R)[:, None] & inside[None, :])

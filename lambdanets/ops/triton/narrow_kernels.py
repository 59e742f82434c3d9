"""Triton kernels for queries, values and keys of a narrow layer: y = x W^T with batch norm behind it, y never written.

x [R, C] are rows of the input, W [S, C] the weights: FIRST rows for queries, then values up to NORMED, then keys, which
have no norm. A product with so few channels costs less than a pass over its result, so each kernel that wants y makes
it anew. With g the gradients of the three results, and for every channel numbers that do not depend on the row,

    results       y scale + shift
    dy            g scale + y slope + offset
    dx            dy W
    dW            scale (sum of g (x - mean)) + slope W (sum of (x - mean) (x - mean)^T)

with scale 1, slope 0 and for dW no mean where there is no norm. So all sums over rows that the backward needs are in
x x^T, g x^T, x and g: one pass (`products_of_gradients`).
Tile letters: ROWS a tile of rows; CP, QP, VP, KP the channels of x and of the parts, padded to powers of two; SIDE
those of values and of keys where they stand side by side; P shares of the rows. CP and QP are at least 64, and in the
backward values and keys are one operand: so none in shared memory is narrower than forward_kernels.py allows.
"""

import triton
import triton.language as tl

from .norm_kernels import GRADIENTS, PARAMETERS, STATISTICS, merged_moments


@triton.jit
def tile(ptr, r, exists, c, inside, pitch):
    """Rows r and columns c of a matrix with `pitch` columns; zero where there are none."""
    return tl.load(
        ptr + (r.to(tl.int64)[:, None] * pitch + c[None, :]), mask=exists[:, None] & inside[None, :], other=0.0
    )


@triton.jit
def numbers(ptr, c, inside):
    return tl.load(ptr + c, mask=inside, other=0.0)


@triton.jit
def of_channels(first_ptr, second_ptr, c, FIRST: tl.constexpr, NORMED: tl.constexpr):
    """A number for each channel, from queries' vector or from values'; zero for keys."""
    first = tl.load(first_ptr + c, mask=c < FIRST, other=0.0).to(tl.float32)
    return first + tl.load(second_ptr + (c - FIRST), mask=(c >= FIRST) & (c < NORMED), other=0.0).to(tl.float32)


@triton.jit
def to_channels(first_ptr, second_ptr, c, x, FIRST: tl.constexpr, NORMED: tl.constexpr):
    tl.store(first_ptr + c, x.to(first_ptr.dtype.element_ty), mask=c < FIRST)
    tl.store(second_ptr + (c - FIRST), x.to(second_ptr.dtype.element_ty), mask=(c >= FIRST) & (c < NORMED))


@triton.jit
def store_moments(mean_ptr, square_ptr, total, square, origin, count, c, inside):
    step = tl.sum(total, axis=0) / count
    tl.store(mean_ptr + c, origin + step, mask=inside)
    tl.store(square_ptr + c, tl.maximum(tl.sum(square, axis=0) - step * step * count, 0.0), mask=inside)


@triton.jit(do_not_specialize=["R", "share"])
def moments_of_product(
    x_ptr, w_ptr, mean_ptr, square_ptr, R, share,
    C: tl.constexpr, FIRST: tl.constexpr, NORMED: tl.constexpr, S: tl.constexpr,
    CP: tl.constexpr, QP: tl.constexpr, VP: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """For each share of the rows: mean [P, NORMED] of y and sum of squared distances from it. Grid: (P,).

    Sums are of distances from the mean of the share's first tile, as in norm_kernels.batch_moments.
    """
    k, q, v = tl.arange(0, CP), tl.arange(0, QP), tl.arange(0, VP)
    in_x, in_q, in_v = k < C, q < FIRST, v < NORMED - FIRST
    weight_q = tl.trans(tile(w_ptr, q, in_q, k, in_x, C))
    weight_v = tl.trans(tile(w_ptr, FIRST + v, in_v, k, in_x, C))
    first = tl.program_id(0) * share
    last = tl.minimum(first + share, R)
    r = first + tl.arange(0, ROWS)
    x = tile(x_ptr, r, r < last, k, in_x, C)
    some = tl.minimum(ROWS, last - first)
    origin_q = tl.sum(tl.dot(x, weight_q), axis=0) / some
    origin_v = tl.sum(tl.dot(x, weight_v), axis=0) / some
    total_q = tl.zeros((ROWS, QP), dtype=tl.float32)  # summed over rows at the end: threads wait for each other once
    square_q = tl.zeros((ROWS, QP), dtype=tl.float32)
    total_v = tl.zeros((ROWS, VP), dtype=tl.float32)
    square_v = tl.zeros((ROWS, VP), dtype=tl.float32)
    for low in tl.range(first, last, ROWS, num_stages=STAGES):
        r = low + tl.arange(0, ROWS)
        x = tile(x_ptr, r, r < last, k, in_x, C)
        apart_q = tl.where((r < last)[:, None], tl.dot(x, weight_q) - origin_q[None, :], 0.0)
        apart_v = tl.where((r < last)[:, None], tl.dot(x, weight_v) - origin_v[None, :], 0.0)
        total_q += apart_q
        square_q += apart_q * apart_q
        total_v += apart_v
        square_v += apart_v * apart_v
    count = (last - first).to(tl.float32)
    mean_ptr += tl.program_id(0) * NORMED
    square_ptr += tl.program_id(0) * NORMED
    store_moments(mean_ptr, square_ptr, total_q, square_q, origin_q, count, q, in_q)
    store_moments(mean_ptr + FIRST, square_ptr + FIRST, total_v, square_v, origin_v, count, v, in_v)


@triton.jit(do_not_specialize=["R", "share", "P", *PARAMETERS, *STATISTICS])
def merge_moments(
    mean_ptr, square_ptr, moments_ptr, line_ptr,
    weight_q, weight_v, bias_q, bias_v, mean_q, mean_v, var_q, var_v, count_q, count_v,
    R, share, P, eps_q, eps_v, momentum_q, momentum_v,
    FIRST: tl.constexpr, NORMED: tl.constexpr, S: tl.constexpr, SHARES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """moments [2, NORMED]: mean and 1 / deviation; line [2, S]: scale and shift of every channel. Running statistics on
    the way. Grid: (blocks of COLS channels,).
    """
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    normed = c < NORMED
    mean, square = merged_moments(mean_ptr, square_ptr, c, normed, R, share, P, NORMED, SHARES)
    inverse = 1.0 / tl.sqrt_rn(square / R + tl.where(c < FIRST, eps_q, eps_v))
    tl.store(moments_ptr + c, mean, mask=normed)
    tl.store(moments_ptr + NORMED + c, inverse, mask=normed)
    momentum = tl.where(c < FIRST, momentum_q, momentum_v)
    running = of_channels(mean_q, mean_v, c, FIRST, NORMED)
    to_channels(mean_q, mean_v, c, running + momentum * (mean - running), FIRST, NORMED)
    running = of_channels(var_q, var_v, c, FIRST, NORMED)
    to_channels(var_q, var_v, c, running + momentum * (square / (R - 1) - running), FIRST, NORMED)
    if tl.program_id(0) == 0:
        tl.store(count_q, tl.load(count_q) + 1)
        tl.store(count_v, tl.load(count_v) + 1)
    scale = tl.where(normed, inverse * of_channels(weight_q, weight_v, c, FIRST, NORMED), 1.0)
    shift = tl.where(normed, of_channels(bias_q, bias_v, c, FIRST, NORMED) - mean * scale, 0.0)
    tl.store(line_ptr + c, scale, mask=c < S)
    tl.store(line_ptr + S + c, shift, mask=c < S)


@triton.jit
def store_part(y_ptr, x, weight, scale, shift, r, exists, c, inside, size):
    y = tl.dot(x, weight) * scale[None, :] + shift[None, :]
    place = r.to(tl.int64)[:, None] * size + c[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=exists[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["R"])
def parts_of_product(
    x_ptr, w_ptr, line_ptr, q_ptr, v_ptr, k_ptr, R,
    C: tl.constexpr, FIRST: tl.constexpr, NORMED: tl.constexpr, S: tl.constexpr,
    CP: tl.constexpr, QP: tl.constexpr, VP: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Queries and values, normed, and keys, each a tensor of its own. Grid: (programs that share the rows,)."""
    k, q, v, keys = tl.arange(0, CP), tl.arange(0, QP), tl.arange(0, VP), tl.arange(0, KP)
    in_x, in_q, in_v, in_k = k < C, q < FIRST, v < NORMED - FIRST, keys < S - NORMED
    weight_q = tl.trans(tile(w_ptr, q, in_q, k, in_x, C))
    weight_v = tl.trans(tile(w_ptr, FIRST + v, in_v, k, in_x, C))
    weight_k = tl.trans(tile(w_ptr, NORMED + keys, in_k, k, in_x, C))
    scale_q, shift_q = numbers(line_ptr, q, in_q), numbers(line_ptr + S, q, in_q)
    scale_v, shift_v = numbers(line_ptr + FIRST, v, in_v), numbers(line_ptr + S + FIRST, v, in_v)
    scale_k, shift_k = numbers(line_ptr + NORMED, keys, in_k), numbers(line_ptr + S + NORMED, keys, in_k)
    for low in tl.range(tl.program_id(0) * ROWS, R, tl.num_programs(0) * ROWS, num_stages=STAGES):
        r = low + tl.arange(0, ROWS)
        x = tile(x_ptr, r, r < R, k, in_x, C)
        store_part(q_ptr, x, weight_q, scale_q, shift_q, r, r < R, q, in_q, FIRST)
        store_part(v_ptr, x, weight_v, scale_v, shift_v, r, r < R, v, in_v, NORMED - FIRST)
        store_part(k_ptr, x, weight_k, scale_k, shift_k, r, r < R, keys, in_k, S - NORMED)


@triton.jit
def rest_rows(dv_ptr, dk_ptr, r, exists, c, in_v, in_k, values, keys):
    """Rows of the gradients of values and keys, side by side: SIDE columns of values, SIDE of keys."""
    both = tl.join(tile(dv_ptr, r, exists, c, in_v, values), tile(dk_ptr, r, exists, c, in_k, keys))  # [ROWS, SIDE, 2]
    return tl.reshape(tl.permute(both, (0, 2, 1)), (both.shape[0], 2 * both.shape[1]))


@triton.jit
def rest_channels(FIRST: tl.constexpr, NORMED: tl.constexpr, S: tl.constexpr, SIDE: tl.constexpr):
    """The channels of `rest_rows`' columns, and whether there is such a channel."""
    c = tl.arange(0, 2 * SIDE)
    channel = tl.where(c < SIDE, FIRST + c, NORMED + c - SIDE)
    return channel, channel < tl.where(c < SIDE, NORMED, S)


@triton.jit
def store_products(part_ptr, products, c, inside, k, C: tl.constexpr, LAST: tl.constexpr):
    """Those of the first half of the rows; LAST: of all of them, when the second sum began at minus the first."""
    place = part_ptr + (k[:, None] + c[None, :] * C)
    mask = (k < C)[:, None] & inside[None, :]
    if LAST:
        products += 2 * tl.load(place, mask=mask, other=0.0)
    tl.store(place, products, mask=mask)


@triton.jit(do_not_specialize=["R"])
def products_of_gradients(
    x_ptr, dq_ptr, dv_ptr, dk_ptr, part_ptr, R,
    C: tl.constexpr, FIRST: tl.constexpr, NORMED: tl.constexpr, S: tl.constexpr,
    CP: tl.constexpr, QP: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """For each program: sums over its rows of x x^T [C, C], g x^T [S, C], x [C] and g [S], one behind the other.

    Tensor cores round sums towards zero, and means are taken off later (gradients_of_weights), so what sums lose would
    be much of what is left. Hence two halves of the rows: the second sum begins at minus the first and ends about at
    zero, so it loses as much in the other direction. Grid: (programs that share the rows,).
    """
    k, q, h = tl.arange(0, CP), tl.arange(0, QP), tl.arange(0, SIDE)
    rest, in_rest = rest_channels(FIRST, NORMED, S, SIDE)
    in_x, in_q, in_v, in_k = k < C, q < FIRST, h < NORMED - FIRST, h < S - NORMED
    products_x = tl.zeros((CP, CP), dtype=tl.float32)
    products_q = tl.zeros((CP, QP), dtype=tl.float32)
    products_rest = tl.zeros((CP, 2 * SIDE), dtype=tl.float32)
    total_x = tl.zeros((ROWS, CP), dtype=tl.float32)
    total_q = tl.zeros((ROWS, QP), dtype=tl.float32)
    total_rest = tl.zeros((ROWS, 2 * SIDE), dtype=tl.float32)
    part_ptr += tl.program_id(0).to(tl.int64) * (C * C + S * C + C + S)
    step = tl.num_programs(0) * ROWS
    first = tl.program_id(0) * ROWS
    middle = first + (R - first + step - 1) // step // 2 * step
    for half in tl.static_range(2):
        for low in tl.range(middle if half else first, R if half else middle, step, num_stages=STAGES):
            r = low + tl.arange(0, ROWS)
            x = tile(x_ptr, r, r < R, k, in_x, C)
            dq = tile(dq_ptr, r, r < R, q, in_q, FIRST)
            d_rest = rest_rows(dv_ptr, dk_ptr, r, r < R, h, in_v, in_k, NORMED - FIRST, S - NORMED)
            products_x = tl.dot(tl.trans(x), x, products_x)
            products_q = tl.dot(tl.trans(x), dq, products_q)
            products_rest = tl.dot(tl.trans(x), d_rest, products_rest)
            total_x += x.to(tl.float32)
            total_q += dq.to(tl.float32)
            total_rest += d_rest.to(tl.float32)
        if half == 1:
            tl.debug_barrier()  # perhaps other threads stored the first half
        store_products(part_ptr, products_x, k, in_x, k, C, half == 1)
        store_products(part_ptr + C * C, products_q, q, in_q, k, C, half == 1)
        store_products(part_ptr + C * C, products_rest, rest, in_rest, k, C, half == 1)
        products_x, products_q, products_rest = -products_x, -products_q, -products_rest
    part_ptr += C * C + S * C
    tl.store(part_ptr + k, tl.sum(total_x, axis=0), mask=in_x)
    tl.store(part_ptr + C + q, tl.sum(total_q, axis=0), mask=in_q)
    tl.store(part_ptr + C + rest, tl.sum(total_rest, axis=0), mask=in_rest)


@triton.jit(do_not_specialize=["P", "size"])
def sum_parts(part_ptr, sum_ptr, P, size, TURN: tl.constexpr, COLS: tl.constexpr):
    """[P, size] -> [size], TURN parts a turn, in a fixed order. Grid: (blocks of COLS,)."""
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((TURN, COLS), dtype=tl.float32)
    for low in range(0, P, TURN):
        p = low + tl.arange(0, TURN)
        total += tile(part_ptr, p, p < P, c, c < size, size)
    tl.store(sum_ptr + c, tl.sum(total, axis=0), mask=c < size)


@triton.jit(do_not_specialize=["R", *GRADIENTS])
def gradients_of_weights(
    sum_ptr, w_ptr, dw_ptr, moments_ptr, line_ptr, weight_q, weight_v, dweight_q, dweight_v, dbias_q, dbias_v, R,
    C: tl.constexpr, FIRST: tl.constexpr, NORMED: tl.constexpr, S: tl.constexpr, CP: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """dW [S, C], gradients of the norms' weights and biases, and line [3, S]: scale, slope and offset of every channel.

    Grid: (blocks of COLS channels,).
    """
    k = tl.arange(0, CP)
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    in_x, there, normed = k < C, c < S, c < NORMED
    weight = tile(w_ptr, c, there, k, in_x, C).to(tl.float32)
    xx = tile(sum_ptr, k, in_x, k, in_x, C)
    gx = tile(sum_ptr + C * C, c, there, k, in_x, C)
    sum_ptr += C * C + S * C
    x = numbers(sum_ptr, k, in_x)
    g = numbers(sum_ptr + C, c, normed)
    mean, inverse = numbers(moments_ptr, c, normed), numbers(moments_ptr + NORMED, c, normed)
    gx -= (g / R)[:, None] * x[None, :]  # of g and x's distances from their mean: keys have no g to subtract
    xx -= (x / R)[:, None] * x[None, :]
    product = tl.sum(gx * weight, axis=1) * inverse  # of g and the normed y
    scale = tl.where(normed, inverse * of_channels(weight_q, weight_v, c, FIRST, NORMED), 1.0)
    slope = -scale * product * inverse / R
    dw = scale[:, None] * gx + slope[:, None] * tl.dot(weight, xx, input_precision="tf32x3")
    tl.store(
        dw_ptr + (c[:, None] * C + k[None, :]), dw.to(dw_ptr.dtype.element_ty), mask=there[:, None] & in_x[None, :]
    )
    to_channels(dweight_q, dweight_v, c, product, FIRST, NORMED)
    to_channels(dbias_q, dbias_v, c, g, FIRST, NORMED)
    tl.store(line_ptr + c, scale, mask=there)
    tl.store(line_ptr + S + c, slope, mask=there)
    tl.store(line_ptr + 2 * S + c, -scale * g / R - slope * mean, mask=there)


@triton.jit
def three(line_ptr, c, inside, S: tl.constexpr):
    return numbers(line_ptr, c, inside), numbers(line_ptr + S, c, inside), numbers(line_ptr + 2 * S, c, inside)


@triton.jit
def gradient_of_part(g, x, weight, scale, slope, offset):
    """dy of queries, or of values and keys."""
    y = tl.dot(x, tl.trans(weight))
    return (g.to(tl.float32) * scale[None, :] + y * slope[None, :] + offset[None, :]).to(g.dtype)


@triton.jit(do_not_specialize=["R"])
def gradients_of_inputs(
    x_ptr, w_ptr, line_ptr, dq_ptr, dv_ptr, dk_ptr, dx_ptr, R,
    C: tl.constexpr, FIRST: tl.constexpr, NORMED: tl.constexpr, S: tl.constexpr,
    CP: tl.constexpr, QP: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx [R, C]. Grid: (programs that share the rows,)."""
    k, q, h = tl.arange(0, CP), tl.arange(0, QP), tl.arange(0, SIDE)
    rest, in_rest = rest_channels(FIRST, NORMED, S, SIDE)
    in_x, in_q, in_v, in_k = k < C, q < FIRST, h < NORMED - FIRST, h < S - NORMED
    weight_q = tile(w_ptr, q, in_q, k, in_x, C)
    weight_rest = tile(w_ptr, rest, in_rest, k, in_x, C)
    scale_q, slope_q, offset_q = three(line_ptr, q, in_q, S)
    scale_rest, slope_rest, offset_rest = three(line_ptr, rest, in_rest, S)
    for low in tl.range(tl.program_id(0) * ROWS, R, tl.num_programs(0) * ROWS, num_stages=STAGES):
        r = low + tl.arange(0, ROWS)
        x = tile(x_ptr, r, r < R, k, in_x, C)
        dq = tile(dq_ptr, r, r < R, q, in_q, FIRST)
        dx = tl.dot(gradient_of_part(dq, x, weight_q, scale_q, slope_q, offset_q), weight_q)
        d_rest = rest_rows(dv_ptr, dk_ptr, r, r < R, h, in_v, in_k, NORMED - FIRST, S - NORMED)
        dx = tl.dot(gradient_of_part(d_rest, x, weight_rest, scale_rest, slope_rest, offset_rest), weight_rest, dx)
        place = r.to(tl.int64)[:, None] * C + k[None, :]
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=(r < R)[:, None] & in_x[None, :])

"""Triton kernels for average pooling with stride 2: windows of 3x3 with zero padding of 1, or 2x2.

Letters: B batch, H x W the map, P x Q the pooled map, C channels; images are [B, H, W, C], channels innermost.
Tile letters: ROWS x COLS neighbouring positions of the pooled map, row by row, and CH channels.
Addresses of rows have 64 bits, offsets within a row 32 bits. Of the sizes only C compiles new variants: by its
divisibility by 16 (then a thread loads and stores 16 bytes at a time) and by the tile for it.
"""

import triton
import triton.language as tl

SIZES = ["H", "W", "P", "Q"]


@triton.jit
def tile_of(rows, columns, C, ROWS: tl.constexpr, COLS: tl.constexpr, CH: tl.constexpr):
    """Return the image, first row, columns [COLS] and channels [CH] of this program of a one-dimensional grid.

    Channels vary fastest, then columns, rows and images, so that concurrent programs access neighbouring memory.
    """
    tile = tl.program_id(0)
    strips, across, down = tl.cdiv(C, CH), tl.cdiv(columns, COLS), tl.cdiv(rows, ROWS)
    c = tile % strips * CH + tl.arange(0, CH)
    tile = tile // strips
    q = tile % across * COLS + tl.arange(0, COLS)
    tile = tile // across
    return (tile // down).to(tl.int64), tile % down * ROWS, q, c


@triton.jit
def pixels(image_ptr, i, j, height, width, c, C):
    """Load pixels [COLS, CH] of row i and columns j in float32; zero outside the map."""
    end = tl.where((i >= 0) & (i < height), width, 0)
    mask = ((j >= 0) & (j < end))[:, None] & (c < C)[None, :]
    row_ptr = image_ptr + i.to(tl.int64) * width * C
    return tl.load(row_ptr + (j[:, None] * C + c[None, :]), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def sum_along_row(image_ptr, i, q, H, W, c, C, KERNEL: tl.constexpr):
    """Sum the two or three pixels of row i that lie in the windows q: [COLS, CH]."""
    total = pixels(image_ptr, i, 2 * q, H, W, c, C) + pixels(image_ptr, i, 2 * q + 1, H, W, c, C)
    if KERNEL == 3:
        total += pixels(image_ptr, i, 2 * q - 1, H, W, c, C)
    return total


@triton.jit(do_not_specialize=SIZES)
def pool_forward(
    x_ptr, y_ptr, H, W, P, Q, C,
    KERNEL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CH: tl.constexpr,
):  # fmt: skip
    """Compute y [B, P, Q, C]. Window p has rows 2p and 2p + 1, with 3x3 also row 2p - 1, shared with window p - 1."""
    b, first, q, c = tile_of(P, Q, C, ROWS, COLS, CH)
    image_ptr, pooled_ptr = x_ptr + b * H * W * C, y_ptr + b * P * Q * C
    above = tl.zeros((COLS, CH), dtype=tl.float32)
    if KERNEL == 3:
        above = sum_along_row(image_ptr, 2 * first - 1, q, H, W, c, C, KERNEL)
    for step in tl.static_range(ROWS):
        p = first + step
        total = above + sum_along_row(image_ptr, 2 * p, q, H, W, c, C, KERNEL)
        last = sum_along_row(image_ptr, 2 * p + 1, q, H, W, c, C, KERNEL)
        y = ((total + last) * (1.0 / (KERNEL * KERNEL))).to(y_ptr.dtype.element_ty)
        row_ptr = pooled_ptr + p.to(tl.int64) * Q * C
        inside = (q < tl.where(p < P, Q, 0))[:, None] & (c < C)[None, :]
        tl.store(row_ptr + (q[:, None] * C + c[None, :]), y, mask=inside)
        if KERNEL == 3:
            above = last


@triton.jit
def gradients_along_row(image_ptr, p, q, P, Q, c, C, KERNEL: tl.constexpr):
    """Return gradients [COLS, CH] of columns 2q and 2q + 1 from windows of row p; with 3x3 odd columns are in two."""
    even = pixels(image_ptr, p, q, P, Q, c, C)
    odd = even
    if KERNEL == 3:
        odd += pixels(image_ptr, p, q + 1, P, Q, c, C)
    return even, odd


@triton.jit
def store_pair(image_ptr, i, even, odd, q, H, W, c, C, KERNEL: tl.constexpr):
    """Store columns 2q and 2q + 1 of row i."""
    scale = 1.0 / (KERNEL * KERNEL)
    dtype: tl.constexpr = image_ptr.dtype.element_ty
    row_ptr = image_ptr + i.to(tl.int64) * W * C
    place = (2 * q * C)[:, None] + c[None, :]
    end = tl.where(i < H, W, 0)
    tl.store(row_ptr + place, (even * scale).to(dtype), mask=(2 * q < end)[:, None] & (c < C)[None, :])
    tl.store(row_ptr + C + place, (odd * scale).to(dtype), mask=(2 * q + 1 < end)[:, None] & (c < C)[None, :])


@triton.jit(do_not_specialize=SIZES)
def pool_backward(
    dy_ptr, dx_ptr, H, W, P, Q, C,
    KERNEL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CH: tl.constexpr,
):  # fmt: skip
    """Compute dx [B, H, W, C], four pixels for each p and q.

    Rows 2p and 2p + 1 lie in the windows of row p; with 3x3, row 2p + 1 also lies in those of row p + 1. Pixels outside
    all windows (at an odd edge with 2x2) get zero.
    """
    b, first, q, c = tile_of(tl.cdiv(H, 2), tl.cdiv(W, 2), C, ROWS, COLS, CH)
    image_ptr, pooled_ptr = dx_ptr + b * H * W * C, dy_ptr + b * P * Q * C
    even, odd = gradients_along_row(pooled_ptr, first, q, P, Q, c, C, KERNEL)
    for step in tl.static_range(ROWS):
        p = first + step
        store_pair(image_ptr, 2 * p, even, odd, q, H, W, c, C, KERNEL)
        if KERNEL == 3:
            next_even, next_odd = gradients_along_row(pooled_ptr, p + 1, q, P, Q, c, C, KERNEL)
            even += next_even
            odd += next_odd
        store_pair(image_ptr, 2 * p + 1, even, odd, q, H, W, c, C, KERNEL)
        if KERNEL == 3:
            even, odd = next_even, next_odd
        elif step + 1 < ROWS:
            even, odd = gradients_along_row(pooled_ptr, p + 1, q, P, Q, c, C, KERNEL)

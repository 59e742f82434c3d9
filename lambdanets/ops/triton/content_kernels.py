"""Triton kernels for the content lambda: the softmax of the keys over the context, times the values.

Letters: B batch, M context positions, K key depth, V value depth. Tile letters: C context positions per step,
KP = K padded to a power of two, VT a tile of the value depth. "norm" is log(sum of exp(keys)) over the context.
"""

import triton
import triton.language as tl


@triton.jit
def context_block(x_ptr, m, M, depth, DEPTH, stride, other):
    """Load rows [C, depth] of neighbouring context positions; `other` beyond the context and the depth."""
    mask = (m < M)[:, None] & (depth < DEPTH)[None, :]
    return tl.load(x_ptr + (m[:, None] * stride + depth[None, :]), mask=mask, other=other)


@triton.jit(do_not_specialize=["M"])
def content_forward(
    k_ptr, v_ptr, c_ptr, norm_ptr,
    M, V, skb, skm, svb, svm,
    K: tl.constexpr, KP: tl.constexpr, VT: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute c [B, K, V] and norm [B, K]. Grid: (B, value tiles).

    The first pass finds the maxima, the second computes weights and sums: a running maximum would synchronise all
    threads in every step. The second pass reads most keys from the cache, unless they are slices of a larger tensor.
    """
    dtype: tl.constexpr = v_ptr.dtype.element_ty
    b = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, KP)
    v = tl.program_id(1) * VT + tl.arange(0, VT)
    highest = tl.full((C, KP), float("-inf"), dtype=tl.float32)
    for start in tl.range(0, M, C, num_stages=3):
        m = start + tl.arange(0, C)
        keys = context_block(k_ptr + b * skb, m, M, k, K, skm, float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, keys)
    highest = tl.where(k < K, tl.max(highest, axis=0), 0.0)
    total = tl.zeros((C, KP), dtype=tl.float32)
    content = tl.zeros((KP, VT), dtype=tl.float32)
    for start in range(0, M, C):
        m = start + tl.arange(0, C)
        keys = context_block(k_ptr + b * skb, m, M, k, K, skm, float("-inf")).to(tl.float32)
        values = context_block(v_ptr + b * svb, m, M, v, V, svm, 0.0)
        weights = tl.exp(keys - highest[None, :])
        total += weights
        content = tl.dot(tl.trans(weights.to(dtype)), values, content, input_precision=PRECISION)
    total = tl.where(k < K, tl.sum(total, axis=0), 1.0)
    place = b * K * V + (k * V)[:, None] + v[None, :]
    tl.store(c_ptr + place, content / total[:, None], mask=(k < K)[:, None] & (v < V)[None, :])
    if tl.program_id(1) == 0:
        tl.store(norm_ptr + b * K + k, highest + tl.log(total), mask=k < K)


@triton.jit(do_not_specialize=["M"])
def content_backward(
    k_ptr, v_ptr, c_ptr, norm_ptr, dc_ptr, dk_ptr, dv_ptr, before_ptr,
    M, V, skb, skm, svb, svm, sbb,
    K: tl.constexpr, KP: tl.constexpr, VT: tl.constexpr, NV: tl.constexpr, C: tl.constexpr, WITH_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys [B, M, K] and values [B, M, V]. Grid: (blocks of C context positions, B).

    With p the normalised keys: dv = p dc, and dkeys = p (v dc^T - sum over v of dc c), as for any softmax. dv is added
    to `before`, the gradient from the positions, which may be dv itself or have gaps between examples. With VT < 64
    only two warps are used: with four, products of 64 rows would read narrow operands from shared memory
    (expanded_kernels.py).
    """
    dtype: tl.constexpr = v_ptr.dtype.element_ty
    b = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, KP)
    norm = tl.load(norm_ptr + b * K + k, mask=k < K, other=0.0)
    mean = tl.zeros((KP,), dtype=tl.float32)
    for tile in tl.static_range(NV):
        v = tile * VT + tl.arange(0, VT)
        place = b * K * V + (k * V)[:, None] + v[None, :]
        exists = (k < K)[:, None] & (v < V)[None, :]
        # Rounded as below: if one key has all the weight, the two terms must cancel.
        rounded = tl.load(dc_ptr + place, mask=exists, other=0.0).to(dtype).to(tl.float32)
        mean += tl.sum(rounded * tl.load(c_ptr + place, mask=exists, other=0.0), axis=1)
    m = tl.program_id(0) * C + tl.arange(0, C)
    keys = context_block(k_ptr + b * skb, m, M, k, K, skm, 0.0).to(tl.float32)
    weights = tl.exp(keys - norm[None, :])
    asked = tl.zeros((C, KP), dtype=tl.float32)
    for tile in tl.static_range(NV):
        v = tile * VT + tl.arange(0, VT)
        place = b * K * V + (k * V)[:, None] + v[None, :]
        dc = tl.load(dc_ptr + place, mask=(k < K)[:, None] & (v < V)[None, :], other=0.0).to(dtype)
        values = context_block(v_ptr + b * svb, m, M, v, V, svm, 0.0)
        asked = tl.dot(values, tl.trans(dc), asked, input_precision=PRECISION)
        if WITH_V:
            dv_block = dv_ptr + (((b * M + m) * V)[:, None] + v[None, :])
            inside = (m < M)[:, None] & (v < V)[None, :]
            before_block = before_ptr + (b * sbb + (m * V)[:, None] + v[None, :])
            before = tl.load(before_block, mask=inside, other=0.0).to(tl.float32)
            dv = tl.dot(weights.to(dtype), dc, before, input_precision=PRECISION)
            tl.store(dv_block, dv.to(dtype), mask=inside)
    dk = (weights * (asked - mean[None, :])).to(dk_ptr.dtype.element_ty)
    row = (b * M + m) * K
    tl.store(dk_ptr + (row[:, None] + k[None, :]), dk, mask=(m < M)[:, None] & (k < K)[None, :])

"""Triton kernels for the content lambda: keys through a softmax over the context, times the values, in one pass.

Letters: B batch, M context positions, K key depth, V value depth. Tile letters: C context positions per step,
KP = K padded to a power of two, VT a tile of the value depth. "norm" is log(sum of exp(keys)) over the context.
"""

import triton
import triton.language as tl


@triton.jit
def context_block(x_ptr, m, M, depth, DEPTH, stride, other):
    """Rows [C, depth] of neighbouring context positions; `other` beyond the context, 0 beyond the depth."""
    found = tl.load(x_ptr + (m[:, None] * stride + depth[None, :]), mask=(m < M)[:, None] & (depth < DEPTH)[None, :])
    return tl.where((depth < DEPTH)[None, :], tl.where((m < M)[:, None], found, other), 0.0)


@triton.jit(do_not_specialize=["M"])
def content_forward(
    k_ptr, v_ptr, c_ptr, norm_ptr,
    M, V, skb, skm, svb, svm,
    K: tl.constexpr, KP: tl.constexpr, VT: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """c [B, K, V] and norm [B, K], with a running maximum. Grid: (B, value tiles)."""
    dtype: tl.constexpr = v_ptr.dtype.element_ty
    b = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, KP)
    v = tl.program_id(1) * VT + tl.arange(0, VT)
    highest = tl.full((KP,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((KP,), dtype=tl.float32)
    content = tl.zeros((KP, VT), dtype=tl.float32)
    for start in range(0, M, C):
        m = start + tl.arange(0, C)
        keys = context_block(k_ptr + b * skb, m, M, k, K, skm, float("-inf")).to(tl.float32)
        values = context_block(v_ptr + b * svb, m, M, v, V, svm, 0.0).to(dtype)
        higher = tl.maximum(highest, tl.max(keys, axis=0))
        weights = tl.exp(keys - higher[None, :])
        shrink = tl.exp(highest - higher)
        total = total * shrink + tl.sum(weights, axis=0)
        content = tl.dot(tl.trans(weights.to(dtype)), values, content * shrink[:, None], input_precision=PRECISION)
        highest = higher
    place = b * K * V + (k * V)[:, None] + v[None, :]
    tl.store(c_ptr + place, content / total[:, None], mask=(k < K)[:, None] & (v < V)[None, :])
    if tl.program_id(1) == 0:
        tl.store(norm_ptr + b * K + k, highest + tl.log(total), mask=k < K)


@triton.jit(do_not_specialize=["M"])
def content_backward(
    k_ptr, v_ptr, c_ptr, norm_ptr, dc_ptr, dk_ptr, dv_ptr,
    M, V, skb, skm, svb, svm,
    K: tl.constexpr, KP: tl.constexpr, VT: tl.constexpr, NV: tl.constexpr, C: tl.constexpr, TURNS: tl.constexpr,
    WITH_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of keys [B, M, K] and values [B, M, V], C context positions a turn. Grid: (context blocks, B).

    With p the normalised keys: dv = p dc, and dkeys = p (v dc^T - sum over v of dc c), as for any softmax. dv has the
    part of the positions already; this one is added.
    C is 32: products of fewer than 64 rows do not take their narrow operands from shared memory (forward_kernels.py).
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
        # Rounded as below: where one key takes all the weight, the two must cancel.
        rounded = tl.load(dc_ptr + place, mask=exists, other=0.0).to(dtype).to(tl.float32)
        mean += tl.sum(rounded * tl.load(c_ptr + place, mask=exists, other=0.0), axis=1)
    for turn in range(TURNS):
        m = (tl.program_id(0) * TURNS + turn) * C + tl.arange(0, C)
        keys = context_block(k_ptr + b * skb, m, M, k, K, skm, 0.0).to(tl.float32)
        weights = tl.exp(keys - norm[None, :])
        asked = tl.zeros((C, KP), dtype=tl.float32)
        for tile in tl.static_range(NV):
            v = tile * VT + tl.arange(0, VT)
            place = b * K * V + (k * V)[:, None] + v[None, :]
            dc = tl.load(dc_ptr + place, mask=(k < K)[:, None] & (v < V)[None, :], other=0.0).to(dtype)
            values = context_block(v_ptr + b * svb, m, M, v, V, svm, 0.0).to(dtype)
            asked = tl.dot(values, tl.trans(dc), asked, input_precision=PRECISION)
            if WITH_V:
                dv_block = dv_ptr + (((b * M + m) * V)[:, None] + v[None, :])
                inside = (m < M)[:, None] & (v < V)[None, :]
                before = tl.load(dv_block, mask=inside, other=0.0).to(tl.float32)
                dv = tl.dot(weights.to(dtype), dc, before, input_precision=PRECISION)
                tl.store(dv_block, dv.to(dtype), mask=inside)
        dk = (weights * (asked - mean[None, :])).to(dk_ptr.dtype.element_ty)
        row = (b * M + m) * K
        tl.store(dk_ptr + (row[:, None] + k[None, :]), dk, mask=(m < M)[:, None] & (k < K)[None, :])

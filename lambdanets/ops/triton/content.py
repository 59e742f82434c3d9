"""Launch of the kernels for the content lambda: the softmax of the keys over the context, times the values.

Letters: B batch, M context positions, K key depth, V value depth.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# Triton adds num_warps and num_stages to the arguments of kernels.

import torch
from torch import Tensor

from . import content_kernels as kernels
from .problem import ceil_div, on_device, power_of_two, precision_of

BACKWARD_ROWS = {2: 64, 4: 32}  # context positions per program, by bytes per number: more spills registers in float32


def tile_sizes(key_depth: int, value_depth: int, context: int, element_size: int) -> tuple[int, int, int]:
    """Return KP, VT, C. The keys of a block of context must fit into registers, its values into shared memory.

    At most 128 positions: 9.8 us at 28x28x128, compared with 11.2 us for 256 (H200).
    """
    depth, value_tile = max(16, power_of_two(key_depth)), min(128, max(16, power_of_two(value_depth)))
    if depth >= 64:  # minimum width of operands in shared memory, see expanded_kernels.py
        value_tile = max(64, value_tile)
    if element_size == 4:
        value_tile = min(32, value_tile)
    block = max(16, min(128, 4096 // depth, 16384 // (value_tile * element_size)))
    return depth, value_tile, min(block, 64) if context <= 64 else block


def content_lambda(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the content lambda [B,K,V] of keys [B,M,K] and values [B,M,V], and log(sum of exp(keys)) [B,K].

    Both are float32.
    """
    (B, M, K), V = keys.shape, values.shape[2]
    depth, value_tile, block = tile_sizes(K, V, M, values.element_size())
    found = torch.empty(B, K, V, device=values.device, dtype=torch.float32)
    norm = torch.empty(B, K, device=values.device, dtype=torch.float32)
    with on_device(values):
        kernels.content_forward[(B, ceil_div(V, value_tile))](
            keys, values, found, norm, M, V, *keys.stride()[:2], *values.stride()[:2],
            K=K, KP=depth, VT=value_tile, C=block, PRECISION=precision_of(values.dtype), num_warps=4,
        )  # fmt: skip
    return found, norm


def content_gradients(
    gradient: Tensor, keys: Tensor, values: Tensor, found: Tensor, norm: Tensor, before: Tensor | None, dk: Tensor
) -> Tensor | None:
    """Write the gradient of the keys to dk, and add the gradient of the values to `before` [B,M,V].

    The addition is in place if `before` is contiguous. Without `before` the gradient of the values is not computed.
    """
    (B, M, K), V = keys.shape, values.shape[2]
    depth, value_tile, _ = tile_sizes(K, V, M, values.element_size())
    rows = BACKWARD_ROWS[values.element_size()]
    dv = before
    if before is not None and not before.is_contiguous():
        dv = torch.empty(B, M, V, device=before.device, dtype=before.dtype)
    with on_device(values):
        kernels.content_backward[(ceil_div(M, rows), B)](
            keys, values, found, norm, gradient, dk, dk if dv is None else dv, dk if before is None else before, M, V,
            *keys.stride()[:2], *values.stride()[:2], 0 if before is None else before.stride(0),
            K=K, KP=depth, VT=value_tile, NV=ceil_div(V, value_tile), C=rows,
            WITH_V=dv is not None, PRECISION=precision_of(values.dtype),
            num_warps=2 if rows == 64 and value_tile < 64 else 4,
        )  # fmt: skip
    return dv

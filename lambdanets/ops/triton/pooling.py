"""Average pooling by half of channels-last images: when kernels do it, and the call. Kernels: pooling_operators.py."""

import torch
from torch import Tensor

from . import interpreted, why_not
from .norms import only_torch


def takes(x_BCHW: Tensor) -> bool:
    """Whether the kernels may pool these images."""
    if not (x_BCHW.is_cuda or interpreted()) or type(x_BCHW) is not Tensor or x_BCHW.ndim != 4 or only_torch():
        return False
    last = x_BCHW.is_contiguous(memory_format=torch.channels_last)
    return last and why_not(x_BCHW.device, x_BCHW.dtype, 1, 1, 1) is None


def average_pool(x_BCHW: Tensor, kernel: int) -> Tensor:
    """Channels-last images [B, C, P, Q], rounded once. `kernel`: 3, with a border of zeros, or 2."""
    from . import pooling_operators as operators

    # The compiler needs the operator, which ends in the function too; for eager calls the dispatcher is a detour.
    call = operators.average_pool if torch.compiler.is_dynamo_compiling() else operators.AveragePool.apply
    return call(x_BCHW, kernel)


def pooled_side(side: int, kernel: int) -> int:
    return (side + kernel - 2) // 2

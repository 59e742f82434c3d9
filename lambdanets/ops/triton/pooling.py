"""Average pooling with stride 2 of channels-last images: conditions for the kernels, and the call."""

import torch
from torch import Tensor

from . import interpreted, why_not
from .norms import only_torch


def takes(x_BCHW: Tensor) -> bool:
    """Return whether the kernels can pool these images."""
    if not (x_BCHW.is_cuda or interpreted()) or type(x_BCHW) is not Tensor or x_BCHW.ndim != 4 or only_torch():
        return False
    last = x_BCHW.is_contiguous(memory_format=torch.channels_last)
    return last and why_not(x_BCHW.device, x_BCHW.dtype, 1, 1, 1) is None


def average_pool(x_BCHW: Tensor, kernel: int) -> Tensor:
    """Average-pool images with stride 2 to [B, C, P, Q], channels-last. `kernel` is 3, with zero padding of 1, or 2."""
    from . import pooling_operators as operators

    # torch.compile needs the operator. Eager calls skip the dispatcher.
    call = operators.average_pool if torch.compiler.is_dynamo_compiling() else operators.AveragePool.apply
    return call(x_BCHW, kernel)


def pooled_side(side: int, kernel: int) -> int:
    return (side + kernel - 2) // 2

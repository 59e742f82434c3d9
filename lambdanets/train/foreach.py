"""Operations on lists of tensors with a few kernel launches, from torch's foreach functions, which are not public."""

from typing import Any

import torch
from torch import Tensor

torch_: Any = torch
mul_ = torch_._foreach_mul_
LARGE = 2.0**64
PIECE = 2**19  # elements whose squares are summed in float32 without losing accuracy


def total_norm(tensors: list[Tensor]) -> Tensor:
    """Return the norm of all tensors of one device, like torch's get_total_norm but with fewer allocations.

    A single norm over all elements is wrong in the third digit on a CPU, which sums sequentially, so it uses pieces.
    """
    dense = [t.permute(0, 2, 3, 1) if is_channels_last(t) else t for t in tensors]  # memory order avoids copies
    flat = torch_._utils._flatten_dense_tensors(dense)
    if flat.is_cuda:
        return torch.linalg.vector_norm(flat)
    pieces = flat.split(PIECE)
    return torch.linalg.vector_norm(torch.stack(torch_._foreach_norm(pieces)))


def unscaled_(tensors: list[Tensor], factor: Tensor) -> Tensor:
    """Multiply all tensors by `factor`, a power of two, and return whether all elements and their squares are finite.

    Uses GradScaler's kernel twice: it scales up so far that elements whose squares are not finite overflow, and back,
    which does not change other elements. This has less launch overhead than computing the norm.
    """
    found = torch.zeros_like(factor)
    torch_._amp_foreach_non_finite_check_and_unscale_(tensors, found, factor * LARGE)
    torch_._amp_foreach_non_finite_check_and_unscale_(tensors, found, torch.full_like(factor, 1 / LARGE))
    return found == 0


def is_channels_last(tensor: Tensor) -> bool:
    return not tensor.is_contiguous() and tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def approach_(mine: list[Tensor], theirs: list[Tensor], weight: float | Tensor, skip: Tensor) -> None:
    """Compute mine += weight * (theirs - mine), unless `skip` (float32 on the device) is 1.

    This equals an SGD step that maximises with the gradient `theirs` and a weight decay of 1: one fused kernel without
    extra memory, which can be skipped by a flag on the device. Both lists must have the same memory layout.
    """
    torch_._fused_sgd_(
        mine,
        theirs,
        [],
        weight_decay=1.0,
        momentum=0.0,
        lr=weight,
        dampening=0.0,
        nesterov=False,
        maximize=True,
        is_first_step=False,
        found_inf=skip,
    )

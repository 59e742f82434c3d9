"""torch's operations on many tensors at once: a few launches in place of hundreds. They have no public name yet."""

from typing import Any

import torch
from torch import Tensor

torch_: Any = torch
mul_ = torch_._foreach_mul_
LARGE = 2.0**64
PIECE = 2**19  # numbers whose squares a float32 can sum up


def total_norm(tensors: list[Tensor]) -> Tensor:
    """As torch's get_total_norm, for tensors of one device: hundreds of norms would be hundreds of allocations.

    One norm of all would be wrong in the third digit on a CPU, which adds up in order: pieces are not.
    """
    dense = [t.permute(0, 2, 3, 1) if is_channels_last(t) else t for t in tensors]  # as they lie: no copy of each
    flat = torch_._utils._flatten_dense_tensors(dense)
    if flat.is_cuda:
        return torch.linalg.vector_norm(flat)
    pieces = flat.split(PIECE)
    return torch.linalg.vector_norm(torch.stack(torch_._foreach_norm(pieces)))


def unscaled_(tensors: list[Tensor], factor: Tensor) -> Tensor:
    """Multiplies all tensors by `factor`, a power of two; returns whether all numbers and their squares are finite.

    By what GradScaler has for it, twice: up until a number whose square would not be finite overflows, and back, which
    changes no other number. The host has less to do than for the norm.
    """
    found = torch.zeros_like(factor)
    torch_._amp_foreach_non_finite_check_and_unscale_(tensors, found, factor * LARGE)
    torch_._amp_foreach_non_finite_check_and_unscale_(tensors, found, torch.full_like(factor, 1 / LARGE))
    return found == 0


def is_channels_last(tensor: Tensor) -> bool:
    return not tensor.is_contiguous() and tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def approach_(mine: list[Tensor], theirs: list[Tensor], weight: float | Tensor, skip: Tensor) -> None:
    """mine += weight * (theirs - mine), unless `skip` is 1 (a float32 on the device).

    That is a step of SGD whose gradient is `theirs`, to be maximised, with a weight decay of 1: one kernel that needs
    no memory, and that torch made to do nothing where the device says so. Tensors lie in memory in the same order.
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

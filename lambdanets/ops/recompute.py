"""Chunks that are computed again in the backward pass instead of being kept."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Tensor], *args) -> Tensor:
    """Runs `function` without keeping what is inside it for the backward pass."""
    if not torch.is_grad_enabled():
        return function(*args)
    result = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(result, Tensor)
    return result

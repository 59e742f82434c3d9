"""Activation checkpointing of chunks."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Tensor], *args) -> Tensor:
    """Call `function` without storing its intermediates; the backward pass computes them again."""
    if not torch.is_grad_enabled():
        return function(*args)
    result = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(result, Tensor)
    return result

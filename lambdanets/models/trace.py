"""Record the modules that a network calls and their shapes, for the formulas of FLOPs and memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lambdanets.layers.lambda_layer import LambdaLayer


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module."""

    name: str
    module: nn.Module
    inputs: tuple[tuple[int, ...], ...]  # shapes of tensors among the positional arguments
    output: tuple[int, ...]


def trace(network: nn.Module, shape: Sequence[int], kinds: tuple[type[nn.Module], ...]) -> list[Call]:
    """Return the calls of modules of these kinds for an input of `shape`, in order.

    The network runs once; on the meta device this computes nothing. Modules inside a lambda layer are omitted, since
    the layer merges its projections.
    """
    calls: list[Call] = []
    layers = [module for module in network.modules() if isinstance(module, LambdaLayer)]
    inside = {id(part) for layer in layers for part in layer.modules() if part is not layer}

    def record(name: str, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        shapes = tuple(tuple(a.shape) for a in arguments if isinstance(a, Tensor))
        calls.append(Call(name, module, shapes, tuple(output.shape)))

    hooks = []
    for name, module in network.named_modules():
        if isinstance(module, kinds) and id(module) not in inside:
            hooks.append(module.register_forward_hook(partial(record, name)))
    like = next(network.parameters())
    try:
        with torch.no_grad(), evaluating(network):
            network(torch.zeros(tuple(shape), device=like.device, dtype=like.dtype))
    finally:
        for hook in hooks:
            hook.remove()
    return calls


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set eval mode inside the context, so that test inputs do not change the running statistics."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True

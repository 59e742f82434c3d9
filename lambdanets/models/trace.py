"""Which modules a network calls, with which shapes: what the formulas for FLOPs and memory walk over."""

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
    inputs: tuple[tuple[int, ...], ...]  # shapes of the tensors among the positional arguments
    output: tuple[int, ...]


def trace(network: nn.Module, shape: Sequence[int], kinds: tuple[type[nn.Module], ...]) -> list[Call]:
    """The calls of modules of these kinds for one input of `shape`, in order.

    A network on the meta device computes nothing; any other one runs. What is inside a lambda layer is left out: it
    merges its projections, unless a hook makes it call them.
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
    """Eval mode while it lasts: zeros, or a single image, must not enter the running statistics."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True

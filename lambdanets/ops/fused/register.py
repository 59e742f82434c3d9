"""Operators with little between the caller and the kernel.

`torch.library.custom_op` with `register_autograd` checks and repacks all arguments several times in each call, which
takes longer than a small kernel runs. Here the dispatcher calls the function itself.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "lambdanets"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def operator(name: str, shape: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Registers the decorated function as lambdanets::name; `shape` makes empty results like its own."""

    def register(function: Callable[..., Any]) -> Any:
        LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        # The compiler, which calls the operator, must not look into it.
        LIBRARY.impl(name, torch.compiler.disable(function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", shape, lib=LIBRARY)
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    return register


def differentiable(call: Any, function: type[torch.autograd.Function]) -> None:
    """Gradients of an operator by an autograd function, whose forward calls `below_autograd`."""

    def autograd(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in arguments):
            return function.apply(*arguments)
        return below_autograd(call, *arguments)

    LIBRARY.impl(call.overloadpacket.__name__, autograd, "Autograd")


def below_autograd(call: Any, *arguments: Any) -> Any:
    """The operator without its gradients."""
    with torch._C._AutoDispatchBelowAutograd():
        return call(*arguments)

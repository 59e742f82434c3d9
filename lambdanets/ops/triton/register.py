"""Operators with little between the caller and the kernel.

`torch.library.custom_op` with `register_autograd` checks and repacks all arguments several times in each call, which
takes longer than a small kernel runs. Here the dispatcher calls the function itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "lambdanets"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
FUNCTIONS: dict[Any, Callable[..., Any]] = {}  # operator -> what was registered


def operator(name: str, shape: Callable[..., Any], mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Registers the decorated function as lambdanets::name; `shape` makes empty results like its own.

    `mutates`: the arguments that it writes to, which the compiler must know of.
    """

    def register(function: Callable[..., Any]) -> Any:
        LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutates))
        # The compiler, which calls the operator, must not look into it.
        LIBRARY.impl(name, torch.compiler.disable(function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", shape, lib=LIBRARY)
        call = getattr(getattr(torch.ops, NAMESPACE), name).default
        FUNCTIONS[call] = function
        return call

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


def directly(call: Any, *arguments: Any) -> Any:
    """As `below_autograd`; past the dispatcher, which takes as long as a small kernel, if nobody traces or counts."""
    if type(arguments[0]) is Tensor and torch._C._len_torch_dispatch_stack() == 0:
        return FUNCTIONS[call](*arguments)
    return below_autograd(call, *arguments)

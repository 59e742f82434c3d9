"""Registration of operators with low call overhead.

`torch.library.custom_op` with `register_autograd` checks and repacks all arguments several times per call, which takes
longer than a small kernel. Here the dispatcher calls the function directly.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "lambdanets"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
FUNCTIONS: dict[Any, Callable[..., Any]] = {}  # operator -> registered function


def operator(name: str, shape: Callable[..., Any], mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated function as the operator lambdanets::name.

    Args:
        name: the name of the operator.
        shape: a function with the same arguments that returns empty results (the fake implementation).
        mutates: names of the arguments that the function writes to.
    """

    def register(function: Callable[..., Any]) -> Any:
        LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutates))
        # The compiler must not trace into the operator.
        LIBRARY.impl(name, torch.compiler.disable(function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", shape, lib=LIBRARY)
        call = getattr(getattr(torch.ops, NAMESPACE), name).default
        FUNCTIONS[call] = function
        return call

    return register


def differentiable(call: Any, function: type[torch.autograd.Function]) -> None:
    """Register an autograd function, whose forward calls `below_autograd`, for the gradients of an operator."""

    def autograd(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in arguments):
            return function.apply(*arguments)
        return below_autograd(call, *arguments)

    LIBRARY.impl(call.overloadpacket.__name__, autograd, "Autograd")


def below_autograd(call: Any, *arguments: Any) -> Any:
    """Call an operator without its gradients."""
    with torch._C._AutoDispatchBelowAutograd():
        return call(*arguments)


def directly(call: Any, *arguments: Any) -> Any:
    """Call like `below_autograd`, but skip the slow dispatcher if no dispatch mode (tracing, counting) is active."""
    if type(arguments[0]) is Tensor and torch._C._len_torch_dispatch_stack() == 0:
        return FUNCTIONS[call](*arguments)
    return below_autograd(call, *arguments)

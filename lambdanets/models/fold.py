"""Folding of batch norms into the convolutions before them, for inference. Lambda layers fold their own norms."""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.overrides import TorchFunctionMode

from lambdanets.layers.lambda_layer import LambdaLayer


def fold_batch_norm(network: nn.Module, shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """Return a copy in eval mode with norms folded into the convolutions directly before them, and their number.

    A forward pass of zeros with this `shape` finds the norm that follows each convolution, so any network works.
    """
    network = copy.deepcopy(network)
    return network, fold_in_place(network, shape)


def fold_in_place(network: nn.Module, shape: tuple[int, ...]) -> int:
    """Fold norms like `fold_batch_norm`, but in the network itself, and return their number."""
    pairs = followers(network.eval(), shape)
    for norm_name, conv_name in pairs.items():
        conv, norm = network.get_submodule(conv_name), network.get_submodule(norm_name)
        assert isinstance(conv, nn.Conv2d)
        assert isinstance(norm, _BatchNorm)
        # timm's norms may include an activation
        after = nn.Sequential(*(getattr(norm, name) for name in ("drop", "act") if hasattr(norm, name)))
        assert norm.running_mean is not None
        assert norm.running_var is not None
        conv.weight, conv.bias = fuse_conv_bn_weights(  # in place: copying hundreds of convolutions is slow
            conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
        )
        network.set_submodule(norm_name, after if len(after) else nn.Identity())
    for module in network.modules():
        if isinstance(module, LambdaLayer):
            module.fuse()
    return len(pairs)


class Uses(TorchFunctionMode):
    """Counts the functions that use each tensor as an input."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor | tuple | list):
            for given in {id(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)}:
                self.of[given] = self.of.get(given, 0) + 1
        return result


def followers(network: nn.Module, shape: tuple[int, ...]) -> dict[str, str]:
    """Return the convolution before each batch norm that is the only user of its output, by name.

    If something else also uses the output of a convolution, the norm cannot be folded into it.
    """
    made: dict[int, tuple[str, Tensor]] = {}  # keeps the tensors alive, so that ids stay unique
    uses = Uses()
    found: dict[str, str] = {}
    calls: dict[str, int] = {}

    def after_convolution(name: str, module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        calls[name] = calls.get(name, 0) + 1
        made[id(output)] = (name, output)
        uses.of[id(output)] = 0  # the id may have belonged to a freed tensor

    def before_norm(name: str, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        calls[name] = calls.get(name, 0) + 1
        if id(arguments[0]) in made:
            found[name] = made[id(arguments[0])][0]

    hooks = []
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d):
            hooks.append(module.register_forward_hook(partial(after_convolution, name)))
        elif isinstance(module, nn.BatchNorm2d) and module.track_running_stats:
            hooks.append(module.register_forward_pre_hook(partial(before_norm, name)))
    like = next(network.parameters())
    try:
        with torch.no_grad(), uses:
            network(torch.zeros(shape, device=like.device, dtype=like.dtype))
    finally:
        for hook in hooks:
            hook.remove()
    shared = {name for identity, (name, _) in made.items() if uses.of.get(identity, 0) > 1}
    return {norm: conv for norm, conv in found.items() if calls[norm] == calls[conv] == 1 and conv not in shared}

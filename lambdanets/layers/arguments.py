"""Checks of the arguments and inputs of layers, with error messages that name the fix."""

from collections.abc import Callable, Collection, Mapping
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from lambdanets.layers.projection import type_of_product
from lambdanets.typed import checked

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

# Argument names of torch, timm, NATTEN and lucidrains: (our names for the same thing, the layer's own first), hint.
CARRIED: dict[str, tuple[tuple[str, ...], str]] = {
    "dim": (("channels", "key_depth"), ""),
    "embed_dim": (("channels",), ""),
    "in_channels": (("channels",), ""),
    "in_chs": (("channels",), ""),
    "in_features": (("channels",), ""),
    "in_planes": (("channels",), ""),
    "inplanes": (("channels",), ""),
    "d_model": (("channels",), ""),
    "dim_in": (("channels",), ""),
    "out_dim": (("out_channels",), ""),
    "dim_out": (("out_channels",), ""),
    "out_chs": (("out_channels",), ""),
    "out_features": (("out_channels",), ""),
    "out_planes": (("out_channels",), ""),
    "context_dim": (("context_channels",), ""),
    "kdim": (("context_channels",), ""),
    "vdim": (("context_channels",), ""),
    "num_heads": (("heads",), ""),
    "n_heads": (("heads",), ""),
    "nhead": (("heads",), ""),
    "num_head": (("heads",), ""),
    "dim_head": (("key_depth",), ""),
    "head_dim": (("key_depth",), ""),
    "dim_k": (("key_depth",), ""),
    "dim_key": (("key_depth",), ""),
    "qk_dim": (("key_depth",), ""),
    "key_dim": (("key_depth",), ""),
    "qk_ratio": (("key_depth",), ""),
    "dim_u": (("intra_depth",), ""),
    "dim_intra": (("intra_depth",), ""),
    "value_depth": (("out_channels",), "which is heads * value depth"),
    "dim_v": (("out_channels",), "which is heads * value depth"),
    "kernel_size": (("scope",), "the window of position interactions"),
    "window_size": (("scope",), "the window of position interactions"),
    "window": (("scope",), "the window of position interactions"),
    "r": (("scope",), "the window of position interactions"),
    "n": (("input_size",), "with scope=None for a window as large as the input"),
    "feat_size": (("input_size",), "the largest input"),
    "fmap_size": (("input_size",), "the largest input"),
    "image_size": (("input_size",), "the largest input"),
    "img_size": (("input_size",), "the largest input"),
    "strides": (("stride",), ""),
    "is_causal": (("causal",), ""),
    "norm": (("batch_norm",), ""),
    "norm_layer": (("batch_norm",), "True or False"),
    "qkv_bias": (("position_bias",), "projections have no bias"),
    "rel_pos": (("position",), ""),
    "rd_ratio": (("reduction",), "the inverse of the ratio"),
    "rd_channels": (("hidden",), ""),
    "reduction_ratio": (("reduction",), ""),
    "squeeze_channels": (("hidden",), ""),
    "padding": (
        (),
        "padding is automatic: the output has the size of the input, divided by the stride if there is one",
    ),
    "padding_mode": ((), "the padding mode is fixed"),
    "groups": ((), "every output channel depends on every input channel"),
    "bias": ((), "the projections have no bias: add a norm or a bias after the layer"),
    "proj_drop": ((), "the layer has no dropout: add nn.Dropout after it"),
    "attn_drop": ((), "the layer has no dropout: add nn.Dropout after it"),
    "dropout": ((), "the layer has no dropout: add nn.Dropout after it"),
    "batch_first": ((), "inputs are [batch, channels, *space]"),
    "qk_scale": ((), "the scale is part of the initialisation of the queries"),
}


def remedies(known: Collection[str]) -> Mapping[str, str]:
    """Return hints for argument names of other libraries, for a layer that has the arguments `known`."""
    found = {}
    for name, (ours, words) in CARRIED.items():
        ours = tuple(one for one in ours if one in known)
        if ours:
            found[name] = f"use {ours[0]}{f' ({words})' if words else ''}"
        elif words and not CARRIED[name][0]:
            found[name] = words
    return found


layer_arguments = checked(remedies)
INSTEAD = "use torch.compile, torch.export, torch.onnx.export(dynamo=True) or `lambdanets export`"


class NotScriptable(nn.Module):
    """A module that torch.jit.script cannot compile."""

    def __prepare_scriptable__(self) -> None:  # torch.jit.script calls this first
        raise RuntimeError(f"torch.jit.script cannot compile {type(self).__name__}: {INSTEAD}")


class NotTraceable(NotScriptable):
    """A module that torch.jit.trace cannot follow, because sizes are tensors during tracing."""

    def _slow_forward(self, *_: Any, **__: Any) -> None:  # nn.Module calls this instead of forward during tracing
        raise RuntimeError(
            f"torch.jit.trace and torch.onnx.export(dynamo=False) cannot follow {type(self).__name__}: {INSTEAD}"
        )


def fx_leaf(forward: F) -> F:
    """Decorate the `forward` of a module so that torch.fx keeps the module as a single node of a network.

    A subclass that overrides `forward` is traced into, because it may do more than call this one.
    """

    @wraps(forward)
    def kept(self: nn.Module, x: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(x, Proxy):
            tracer: Any = x.tracer
            if type(self).forward is not kept or tracer.root is self:
                check_tensor(x, "x")  # raises
            return tracer.create_proxy("call_module", tracer.path_of_module(self), (x, *arguments), options)
        return forward(self, x, *arguments, **options)

    del kept.__wrapped__  # otherwise torch.fx reads the arguments of this function from the wrapped one's code
    kept.__signature__ = signature(forward)  # type: ignore[attr-defined]
    return kept  # type: ignore[return-value]


def check_tensor(x: Any, name: str) -> None:
    """Raise TypeError unless x is a real floating-point tensor."""
    if isinstance(x, Proxy):
        raise TypeError(
            "torch.fx.symbolic_trace cannot follow this module: use torch.export or `lambdanets export`, or trace a "
            "network that contains it"
        )
    check_is_tensor(x, name)
    if x.is_complex():
        raise TypeError(f"{name} must be floating-point, got {x.dtype}: use {name}.real or {name}.abs()")
    if not x.is_floating_point():
        scale = " / 255" if x.dtype == torch.uint8 else ""
        raise TypeError(f"{name} must be floating-point, got {x.dtype}: use {name}.float(){scale}")


def check_is_tensor(x: Any, name: str) -> None:
    """Raise TypeError unless x is a tensor."""
    if not isinstance(x, Tensor):
        hint = f": use torch.as_tensor({name})" if hasattr(x, "__array__") or isinstance(x, list | tuple) else ""
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}{hint}")


def check_type(x: Tensor, linear: nn.Module, name: str) -> None:
    """Raise TypeError if the dtype of x and of the weights differ and torch would reject the product."""
    weight = linear._parameters.get("weight")  # `linear.weight` would run a parametrization
    if type(weight) is not nn.Parameter or x.dtype == weight.dtype or type_of_product(x, weight) is not None:
        return
    raise TypeError(
        f"{name} is {x.dtype}, but the weights of this layer are {weight.dtype}: use {name}.to({weight.dtype}), "
        f"layer.to({x.dtype}), or torch.autocast"
    )


def check_map(x: Any, channels: int, linear: nn.Module, dims: int | None = 2, name: str = "x") -> None:
    """Raise an error unless x is [batch, channels, height, width]; with `dims` None, [batch, channels, *space]."""
    check_tensor(x, name)
    if x.ndim < 3 or (dims is not None and x.ndim != dims + 2) or x.shape[1] != channels:
        axes = "*space" if dims is None else "height, width"
        raise ValueError(f"{name} must be [batch, {channels}, {axes}], got {list(x.shape)}")
    check_type(x, linear, name)


def check_odd(kernel_size: int) -> None:
    """Raise ValueError if the kernel size is even, because the output would not have the size of the input."""
    if kernel_size % 2 == 0:
        raise ValueError(f"kernel_size must be odd, got {kernel_size}: use {kernel_size + 1}")

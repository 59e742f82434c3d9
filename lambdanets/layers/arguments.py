"""What layers say about arguments and inputs that they cannot take."""

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

# Names from torch, timm, NATTEN and lucidrains: our names for the same thing, as far as a layer has one, or why none.
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
    "kernel_size": (("scope",), "the window in which positions interact"),
    "window_size": (("scope",), "the window in which positions interact"),
    "window": (("scope",), "the window in which positions interact"),
    "r": (("scope",), "the window in which positions interact"),
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
        "a layer pads by itself: its output has the size of its input, divided by the stride if it has one",
    ),
    "padding_mode": ((), "what is outside of the input counts as zero, or not at all"),
    "groups": ((), "every channel of the output sees every channel of the input"),
    "bias": ((), "the projections have no bias: put a norm or a bias behind the layer"),
    "proj_drop": ((), "it has no dropout: put nn.Dropout behind the layer"),
    "attn_drop": ((), "it has no dropout: put nn.Dropout behind the layer"),
    "dropout": ((), "it has no dropout: put nn.Dropout behind the layer"),
    "batch_first": ((), "inputs are [batch, channels, *space]"),
    "qk_scale": ((), "the initialisation of the queries has the scale"),
}


def remedies(known: Collection[str]) -> Mapping[str, str]:
    """For a layer with the arguments `known`: what to use instead of names of other libraries."""
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
    """A module that TorchScript's compiler cannot read."""

    def __prepare_scriptable__(self) -> None:  # what torch.jit.script calls first
        raise RuntimeError(f"torch.jit.script cannot compile {type(self).__name__}: {INSTEAD}")


class NotTraceable(NotScriptable):
    """A module that torch.jit.trace cannot follow: sizes are tensors there."""

    def _slow_forward(self, *_: Any, **__: Any) -> None:  # what a module calls while it is traced
        raise RuntimeError(
            f"torch.jit.trace and torch.onnx.export(dynamo=False) cannot follow {type(self).__name__}: {INSTEAD}"
        )


def fx_leaf(forward: F) -> F:
    """Decorate the `forward` of a module that torch.fx shall keep whole, as a single node, inside of a network.

    A subclass with a `forward` of its own is not one node: it may do more than call this one.
    """

    @wraps(forward)
    def kept(self: nn.Module, x: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(x, Proxy):
            tracer: Any = x.tracer
            if type(self).forward is not kept or tracer.root is self:
                check_tensor(x, "x")  # refuses it
            return tracer.create_proxy("call_module", tracer.path_of_module(self), (x, *arguments), options)
        return forward(self, x, *arguments, **options)

    del kept.__wrapped__  # torch.fx would read the arguments of this function from the other one's code
    kept.__signature__ = signature(forward)  # type: ignore[attr-defined]
    return kept  # type: ignore[return-value]


def check_tensor(x: Any, name: str) -> None:
    """Refuse what is not a tensor of floating-point numbers, with what to do about it."""
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
    """Refuse what is not a tensor, with what to do about it."""
    if not isinstance(x, Tensor):
        hint = f": use torch.as_tensor({name})" if hasattr(x, "__array__") or isinstance(x, list | tuple) else ""
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}{hint}")


def check_type(x: Tensor, linear: nn.Module, name: str) -> None:
    """Refuse an input whose dtype is not that of the weights, where torch would."""
    weight = linear._parameters.get("weight")  # not of a parametrization, which reading it would run
    if type(weight) is not nn.Parameter or x.dtype == weight.dtype or type_of_product(x, weight) is not None:
        return
    raise TypeError(
        f"{name} is {x.dtype}, but the weights of this layer are {weight.dtype}: use {name}.to({weight.dtype}), "
        f"layer.to({x.dtype}), or torch.autocast"
    )


def check_map(x: Any, channels: int, linear: nn.Module, dims: int | None = 2, name: str = "x") -> None:
    """Refuse what is no [batch, channels, height, width]; `dims` None: [batch, channels, *space]."""
    check_tensor(x, name)
    if x.ndim < 3 or (dims is not None and x.ndim != dims + 2) or x.shape[1] != channels:
        axes = "*space" if dims is None else "height, width"
        raise ValueError(f"{name} must be [batch, {channels}, {axes}], got {list(x.shape)}")
    check_type(x, linear, name)


def check_odd(kernel_size: int) -> None:
    if kernel_size % 2 == 0:
        raise ValueError(f"kernel_size={kernel_size} is even: the map would change its size, use {kernel_size + 1}")

"""Layers that can replace spatial convolutions in networks: lambda layers and the layers that the paper compares."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal

from torch import nn

from lambdanets.layers import (
    AugmentedConvolution2d,
    AxialAttention2d,
    ConvolutionLinearAttention2d,
    GlobalAttention2d,
    LambdaLayer2d,
    LinearAttention,
    LocalAttention2d,
    PairwiseAttention2d,
    PatchwiseAttention2d,
    RelativePositions,
)
from lambdanets.models.blocks import Step, average_by_half
from lambdanets.models.config import Scope, ScopePerStage, SpatialOptions

SCOPE_WITH_INTRA_DEPTH = 7  # as in the paper, since intra-depth multiplies the cost
LAMBDA_OPTIONS = frozenset(f.name for f in fields(SpatialOptions)) - {"layer"}


@dataclass(frozen=True)
class Kind:
    """A named layer: its constructor, its options, and whether it needs the input size."""

    build: Callable[..., nn.Module]
    options: frozenset[str] = frozenset({"key_depth", "heads"})
    needs_size: bool = False


LAYERS = {
    "lambda": Kind(LambdaLayer2d, LAMBDA_OPTIONS),
    "linear_attention": Kind(LinearAttention),
    "multi_query_linear_attention": Kind(partial(LinearAttention, multi_query=True)),
    "convolution_linear_attention": Kind(ConvolutionLinearAttention2d),
    "augmented_convolution": Kind(AugmentedConvolution2d, needs_size=True),
    "global_attention": Kind(GlobalAttention2d, needs_size=True),
    "axial_attention": Kind(AxialAttention2d, needs_size=True),
    "local_attention": Kind(LocalAttention2d, frozenset({"key_depth", "heads", "scope"})),
    "pairwise_attention": Kind(PairwiseAttention2d, frozenset({"key_depth", "scope"})),
    "patchwise_attention": Kind(PatchwiseAttention2d, frozenset({"key_depth", "scope"})),
}


def kind_of(layer: str) -> Kind:
    if layer not in LAYERS:
        hint = "; for squeeze-and-excitation use se=True" if layer.startswith(("se", "squeeze")) else ""
        raise ValueError(f"unknown layer {layer!r}; choose one of {', '.join(map(repr, LAYERS))}, or a function{hint}")
    return LAYERS[layer]


def check_options(layer: str | Callable[[int], nn.Module], given: Sequence[str]) -> None:
    """Raise a ValueError for options that the layer would ignore."""
    understood = kind_of(layer).options if isinstance(layer, str) else frozenset()
    ignored = sorted((LAMBDA_OPTIONS & set(given)) - understood)
    if ignored:
        name = f"layer={layer!r}" if isinstance(layer, str) else "a layer given as a function"
        raise ValueError(
            f"{name} has no option {', '.join(ignored)}; it takes {', '.join(sorted(understood)) or 'none'}"
        )


def scope_of_stage(scope: ScopePerStage, stage: int, stages: int) -> Scope | str:
    """Return the scope of one stage, from a scope for all stages (a pair is height and width) or a tuple of scopes."""
    if not isinstance(scope, tuple):
        return scope
    if len(scope) == stages and stages > 1:
        return scope[stage]
    height, *width = scope
    if len(width) == 1 and isinstance(height, int) and isinstance(width[0], int):
        return height, width[0]
    raise ValueError(
        f"scope must be an int, (height, width), None, or one of these for each of {stages} stages, got {scope}"
    )


def spatial_layer(
    channels: int,
    options: SpatialOptions,
    scope: Scope | str,
    input_size: tuple[int, int],
    positions: RelativePositions | None = None,
    *,
    out_channels: int | None = None,
    downsample: bool = False,
    dilation: int = 1,
) -> nn.Module:
    """Build a layer [B, channels, height, width] -> [B, out_channels, height, width].

    Args:
        channels: number of input channels.
        options: the kind of layer and its options.
        scope: scope of this stage.
        input_size: largest size of the input map, (height, width).
        positions: position embeddings shared by the stage, if any.
        out_channels: number of output channels, default `channels`; a layer given as a function keeps the channels.
        downsample: whether a lambda layer halves the map by 3x3 average pooling; others keep it (see `pool_behind`).
        dilation: dilation of the scope of lambda layers.
    """
    if dilation > 1 and (options.layer != "lambda" or scope is None):
        what = "a global scope" if options.layer == "lambda" else f"layer={options.layer!r}"
        raise ValueError(f"{what} cannot be dilated: use output_stride=32, or lambda layers with a local scope")
    if dilation > 1 and options.share_positions:
        raise ValueError("share_positions=True needs output_stride=32: blocks of a dilated stage differ in dilation")
    if not isinstance(options.layer, str):
        if out_channels is not None:
            raise ValueError("layer must be a name, not a function: the layers of this network change the channels")
        return options.layer(channels)
    kind = kind_of(options.layer)
    chosen = {name: getattr(options, name) for name in kind.options - {"scope", "share_positions"}}
    chosen = {name: value for name, value in chosen.items() if value is not None or name == "key_norm"}
    if options.layer == "lambda":
        chosen |= {"positions": positions, "downsample": "avg" if downsample else None, "dilation": dilation}
    if scope == "auto" and options.intra_depth > 1:
        scope = SCOPE_WITH_INTRA_DEPTH
    if "scope" in kind.options and scope != "auto":
        if isinstance(scope, str):
            raise ValueError(f"unknown scope {scope!r}: use 'auto', an int, (height, width) or 'global'")
        if scope is None and options.layer != "lambda":
            raise ValueError(f"layer={options.layer!r} is local: set a scope, or use layer='global_attention'")
        chosen["scope"] = scope
    if kind.needs_size or chosen.get("scope", 0) is None:
        chosen["input_size"] = input_size
    if out_channels is not None:
        chosen["out_channels"] = out_channels
    return kind.build(channels, **chosen)


def pool_behind(spatial: nn.Module, step: Step, window: Literal[2, 3] = 3) -> nn.Module:
    """Return the average pooling after a spatial layer of a block, or an identity if the layer includes it."""
    if isinstance(spatial, LambdaLayer2d) and spatial.downsample is not None:
        return nn.Identity()
    return average_by_half(window, step)

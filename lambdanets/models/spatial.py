"""What can stand where a spatial convolution would: lambda layers and what the paper compares them with."""

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

SCOPE_WITH_INTRA_DEPTH = 7  # the paper's, to reduce the work that intra-depth multiplies
LAMBDA_OPTIONS = frozenset(f.name for f in fields(SpatialOptions)) - {"layer"}


@dataclass(frozen=True)
class Kind:
    """A layer that networks know by name: how to build it, which options it has, whether it must know the size."""

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
        hint = "; squeeze-and-excitation is se=True" if layer.startswith(("se", "squeeze")) else ""
        raise ValueError(f"unknown layer {layer!r}; choose one of {', '.join(map(repr, LAYERS))}, or a function{hint}")
    return LAYERS[layer]


def check_options(layer: str | Callable[[int], nn.Module], given: Sequence[str]) -> None:
    """Refuses options that the layer would silently ignore."""
    understood = kind_of(layer).options if isinstance(layer, str) else frozenset()
    ignored = sorted((LAMBDA_OPTIONS & set(given)) - understood)
    if ignored:
        name = f"layer={layer!r}" if isinstance(layer, str) else "a layer given as a function"
        raise ValueError(
            f"{name} has no option {', '.join(ignored)}; it takes {', '.join(sorted(understood)) or 'none'}"
        )


def scope_of_stage(scope: ScopePerStage, stage: int, stages: int) -> Scope | str:
    """The scope of one stage, from one for all of them (a pair is height and width) or a tuple of `stages`."""
    if not isinstance(scope, tuple):
        return scope
    if len(scope) == stages and stages > 1:
        return scope[stage]
    height, *width = scope
    if len(width) == 1 and isinstance(height, int) and isinstance(width[0], int):
        return height, width[0]
    raise ValueError(
        f"scope must be an int, (height, width), None, or one of these for each of {stages} stages: {scope}"
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
    """A layer [B, channels, height, width] -> [B, out_channels, height, width].

    Args:
        channels: in, and out if `out_channels` is None.
        options: which layer, and its options.
        scope: of this stage.
        input_size: the largest map it will see, as (height, width).
        positions: the stage's, if they are shared.
        out_channels: of the output; a layer given as a function keeps the channels.
        downsample: whether a lambda layer halves the map by 3x3 average pooling; others keep it (see `pool_behind`).
        dilation: of the scope, for lambda layers.
    """
    if dilation > 1 and (options.layer != "lambda" or scope is None):
        what = "a global scope" if options.layer == "lambda" else f"layer={options.layer!r}"
        raise ValueError(f"{what} cannot be dilated: use output_stride=32, or lambda layers with a local scope")
    if dilation > 1 and options.share_positions:
        raise ValueError("share_positions=True needs output_stride=32: blocks of a dilated stage differ in dilation")
    if not isinstance(options.layer, str):
        if out_channels is not None:
            raise ValueError("this network's layers change the number of channels: give layer a name, not a function")
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
            raise ValueError(f"unknown scope {scope!r}: give 'auto', an int, (height, width) or 'global'")
        if scope is None and options.layer != "lambda":
            raise ValueError(f"layer={options.layer!r} is local: give a scope, or use layer='global_attention'")
        chosen["scope"] = scope
    if kind.needs_size or chosen.get("scope", 0) is None:
        chosen["input_size"] = input_size
    if out_channels is not None:
        chosen["out_channels"] = out_channels
    return kind.build(channels, **chosen)


def pool_behind(spatial: nn.Module, step: Step, window: Literal[2, 3] = 3) -> nn.Module:
    """The average pooling behind a spatial layer of a block, unless the layer does it itself."""
    if isinstance(spatial, LambdaLayer2d) and spatial.downsample is not None:
        return nn.Identity()
    return average_by_half(window, step)

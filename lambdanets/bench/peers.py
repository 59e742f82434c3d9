"""The layers to measure: our layer, public lambda layers, convolutions, and attention.

A contender is data: how to build it for a case, the modes in which it runs, and the reasons why it cannot run.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from lambdanets import LambdaLayer2d
from lambdanets.bench.attention import AxialAttention, GlobalAttention
from lambdanets.bench.cases import BenchCase
from lambdanets.machine import installed
from lambdanets.ops.choose import BACKENDS

MODES = ("inference", "training")
LARGEST_EXPANSION = 2**31  # bytes: public layers that would expand embeddings to more are not measured


@dataclass(frozen=True)
class Contender:
    """A layer to measure. `twin` returns our layer with its weights, if both compute the same function."""

    name: str
    family: str  # ours, public, convolution, attention
    build: Callable[[BenchCase], nn.Module]
    modes: tuple[str, ...] = MODES
    why_not: Callable[[BenchCase], str | None] = field(default=lambda case: None)
    twin: Callable[[nn.Module, BenchCase], nn.Module] | None = None


def ours(case: BenchCase, backend: str = "auto") -> LambdaLayer2d:
    return LambdaLayer2d(
        case.shape.channels,
        heads=case.heads,
        key_depth=case.key_depth,
        scope=case.scope,
        input_size=case.grid,
        downsample="avg" if case.pooled else None,
        backend=backend,
    )


def timm_layer(case: BenchCase, local: bool) -> nn.Module:
    from timm.layers.lambda_layer import LambdaLayer

    return LambdaLayer(
        case.shape.channels,
        feat_size=case.grid,
        num_heads=case.heads,
        dim_head=case.key_depth,
        r=case.scope if local else None,  # type: ignore[arg-type]  # None means global, its annotation says int
    )


def lucidrains_layer(case: BenchCase, local: bool) -> nn.Module:
    from lambda_networks import LambdaLayer

    size: dict[str, Any] = {"r": case.scope} if local else {"n": case.shape.height}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls torch.meshgrid without `indexing`
        return LambdaLayer(case.shape.channels, dim_k=case.key_depth, heads=case.heads, **size)


def without_position_bias(peer: nn.Module) -> nn.Module:
    """Set the bias of the position lambdas of a public layer to zero; the paper has none."""
    for name in ("conv_lambda", "pos_conv"):
        convolution = getattr(peer, name, None)
        if isinstance(convolution, nn.Conv3d) and convolution.bias is not None:
            nn.init.zeros_(convolution.bias)
    return peer


@torch.no_grad()
def twin_of_timm(peer: nn.Module, case: BenchCase) -> nn.Module:
    layer, heads_depth = ours(case), case.heads * case.key_depth
    weight = peer.get_parameter("qkv.weight").flatten(1)
    queries, keys, values = weight.split([heads_depth, case.key_depth, len(weight) - heads_depth - case.key_depth])
    if getattr(peer, "conv_lambda", None) is None:
        table = peer.get_parameter("pos_emb")
    else:
        table = peer.get_parameter("conv_lambda.weight")[:, 0, :, :, 0].permute(1, 2, 0)
    return with_weights(layer, queries, keys, values, table)


@torch.no_grad()
def twin_of_lucidrains(peer: nn.Module, case: BenchCase) -> nn.Module:
    queries, keys, values = (peer.get_parameter(f"to_{letter}.weight").flatten(1) for letter in "qkv")
    if hasattr(peer, "pos_conv"):
        table = peer.get_parameter("pos_conv.weight")[:, 0, 0].permute(1, 2, 0)
    else:
        table = peer.get_parameter("rel_pos_emb")[..., 0]
    return with_weights(ours(case), queries, keys, values, table)


def with_weights(layer: LambdaLayer2d, queries: Tensor, keys: Tensor, values: Tensor, table: Tensor) -> LambdaLayer2d:
    assert layer.to_keys is not None
    assert layer.positions is not None
    layer.to_queries.weight.copy_(queries)
    layer.to_keys.weight.copy_(keys)
    layer.to_values.weight.copy_(values)
    # The table of a global scope is the middle of a table with a larger scope.
    middle = [
        slice((mine - theirs) // 2, (mine + theirs) // 2)
        for mine, theirs in zip(layer.positions.scope, table.shape[:2], strict=True)
    ]
    layer.positions.table.zero_()
    layer.positions.table[middle[0], middle[1]] = table
    return layer


def convolution(case: BenchCase) -> nn.Sequential:
    channels, stride = case.shape.channels, 2 if case.pooled else 1
    conv = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels))


def large_depthwise(case: BenchCase) -> nn.Sequential:
    """Return a depthwise convolution as large as the scope, followed by a 1x1 convolution and batch norm."""
    channels = case.shape.channels
    scope = min(case.scopes)
    spatial = nn.Conv2d(channels, channels, scope, padding=scope // 2, groups=channels, bias=False)
    return nn.Sequential(spatial, nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels))


def folded_convolution(case: BenchCase) -> nn.Module:
    conv, norm = convolution(case).eval()
    return fuse_conv_bn_eval(conv, norm)  # type: ignore[return-value]


def compiled(module: nn.Module) -> nn.Module:
    torch.compiler.reset()  # otherwise the graphs of earlier cases count as recompilations
    # Not `module.compile()`, which leaves modules of torch.nn, such as nn.Sequential, eager.
    return torch.compile(module)  # type: ignore[return-value]


def compiled_convolution(case: BenchCase) -> nn.Module:
    return compiled(convolution(case))


def compiled_ours(case: BenchCase) -> nn.Module:
    return compiled(ours(case))


def folded_ours(case: BenchCase) -> nn.Module:
    return ours(case).fuse()


def halo(case: BenchCase) -> nn.Module:
    from timm.layers.halo_attn import HaloAttn

    return HaloAttn(case.shape.channels, feat_size=case.grid, num_heads=case.heads, block_size=7, halo_size=3)


def bottleneck(case: BenchCase) -> nn.Module:
    from timm.layers.bottleneck_attn import BottleneckAttn

    return BottleneckAttn(case.shape.channels, feat_size=case.grid, num_heads=case.heads)


def needs(package: str, *reasons: Callable[[BenchCase], str | None]) -> Callable[[BenchCase], str | None]:
    """Return the `why_not` of a layer of another package."""

    def why_not(case: BenchCase) -> str | None:
        if installed(package) is None:
            return f"{package} is not installed (pip install 'lambdanets[bench]')"
        return next((reason for check in reasons if (reason := check(case))), None)

    return why_not


def odd_scope(case: BenchCase) -> str | None:
    return f"supports odd scopes only, not {case.scope}" if case.scope is not None and case.scope % 2 == 0 else None


def square(case: BenchCase) -> str | None:
    return None if case.shape.height == case.shape.width else f"supports square maps only, not {case.grid}"


def local(case: BenchCase) -> str | None:
    return "supports local scopes only" if case.scope is None else odd_scope(case)


def whole_map(case: BenchCase) -> str | None:
    """Return None if the scope covers the whole map from every position, which makes it equivalent to a global one."""
    if case.scope is None or all(case.scope >= 2 * side - 1 for side in case.grid):
        return None
    return "supports a global scope only"


def writes_out(copies: Callable[[BenchCase], int]) -> Callable[[BenchCase], str | None]:
    """Return the `why_not` of layers that expand embeddings to all pairs of positions, some once per example."""

    def why_not(case: BenchCase) -> str | None:
        size = copies(case) * case.positions**2 * case.key_depth * torch.empty(0, dtype=case.torch_dtype).element_size()
        return f"would need {size / 2**30:.1f} GiB for expanded embeddings" if size > LARGEST_EXPANSION else None

    return why_not


def divides(block: int) -> Callable[[BenchCase], str | None]:
    return lambda case: (
        f"{case.grid} is not divisible by its block size {block}" if any(s % block for s in case.grid) else None
    )


def cuda_only(device: torch.device, why: str) -> Callable[[BenchCase], str | None]:
    return lambda case: None if device.type == "cuda" else why


def contenders(device: torch.device, all_backends: bool) -> list[Contender]:
    """Return all contenders, ours first."""
    found = [Contender("ours", "ours", ours)]
    if all_backends:
        found += [Contender(f"ours, {name}", "ours", partial(ours, backend=name)) for name in BACKENDS]
    # For comparison with the folded and compiled convolutions
    found.append(Contender("ours, folded", "ours", folded_ours, modes=("inference",)))
    if device.type == "cuda":
        found.append(Contender("ours, compiled", "ours", compiled_ours, modes=("training",)))
    one_copy, copy_per_example = writes_out(lambda case: 1), writes_out(lambda case: case.batch)
    compiles = cuda_only(device, "compiled baselines are for GPUs")
    return [
        *found,
        Contender("timm", "public", partial(timm_layer, local=True), why_not=needs("timm", local), twin=twin_of_timm),
        Contender(
            "timm, global",
            "public",
            partial(timm_layer, local=False),
            why_not=needs("timm", whole_map, copy_per_example),
            twin=twin_of_timm,
        ),
        Contender(
            "lucidrains",
            "public",
            partial(lucidrains_layer, local=True),
            why_not=needs("lambda-networks", local),
            twin=twin_of_lucidrains,
        ),
        Contender(
            "lucidrains, global",
            "public",
            partial(lucidrains_layer, local=False),
            why_not=needs("lambda-networks", whole_map, square, one_copy),
            twin=twin_of_lucidrains,
        ),
        Contender("conv3x3 + BN", "convolution", convolution),
        Contender("conv3x3, BN folded", "convolution", folded_convolution, modes=("inference",)),
        Contender("conv3x3 + BN, compiled", "convolution", compiled_convolution, ("training",), why_not=compiles),
        Contender("depthwise + 1x1 + BN", "depthwise", large_depthwise, why_not=odd_scope),
        *attentions(device),
    ]


def attentions(device: torch.device) -> list[Contender]:
    if device.type != "cuda":
        return []
    return [
        Contender("attention (SDPA)", "attention", lambda case: GlobalAttention(case.shape.channels, case.heads)),
        Contender("axial attention", "attention", lambda case: AxialAttention(case.shape.channels, case.heads)),
        Contender("halo attention", "attention", halo, why_not=needs("timm", divides(7))),
        Contender("bottleneck attention", "attention", bottleneck, why_not=needs("timm")),
    ]

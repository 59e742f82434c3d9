"""FLOPs of networks: by formulas in the paper's convention, and as executed according to torch's counter.

The paper counts a multiply-add as 2 FLOPs, and ignores norms, activations and pooling. Position lambdas cost
n * min(scope, side)^2 * k * v * u multiply-adds, which includes context positions outside the border but not the zeros
of dense embeddings.

Letters: B batch, N queries, M context positions, H heads, K key depth, V value depth, U intra-depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lambdanets.layers import AxialAttention2d, GlobalAttention2d, LinearAttention, LocalAttention2d
from lambdanets.layers.lambda_layer import LambdaLayer
from lambdanets.models.trace import Call, evaluating, trace


@dataclass(frozen=True)
class ModuleFlops:
    """FLOPs of one call of a module.

    Attributes:
        name: name of the module in the network.
        kind: its class.
        flops: its FLOPs, without submodules that are counted separately.
    """

    name: str
    kind: str
    flops: int


@dataclass(frozen=True)
class Flops:
    """FLOPs of one forward pass, by module.

    Attributes:
        modules: FLOPs of every call, in order.
    """

    modules: tuple[ModuleFlops, ...]

    @property
    def total(self) -> int:
        """FLOPs of all modules."""
        return sum(m.flops for m in self.modules)

    def by_kind(self) -> dict[str, int]:
        """Return the FLOPs of each class of modules."""
        kinds = dict.fromkeys(m.kind for m in self.modules)
        return {kind: sum(m.flops for m in self.modules if m.kind == kind) for kind in kinds}


def convolution(call: Call) -> int:
    module = call.module
    assert isinstance(module, nn.modules.conv._ConvNd)
    return prod(call.output) * module.in_channels // module.groups * prod(module.kernel_size)


def linear(call: Call) -> int:
    module = call.module
    assert isinstance(module, nn.Linear)
    return prod(call.output) * module.in_features


def lambda_layer(call: Call) -> int:
    """Count a lambda layer with its projections, which are merged into one product and not called as modules."""
    layer = call.module
    assert isinstance(layer, LambdaLayer)
    B, context_grid = call.inputs[0][0], call.inputs[-1][2:]
    N, M = prod(layer.query_grid(call.inputs[0][2:])), prod(context_grid)
    H, K, V, U = layer.heads, layer.key_depth, layer.value_depth, layer.intra_depth
    groups = H if layer.multi_head else 1  # lambdas for each position
    macs = N * layer.channels * H * K + M * layer.context_channels * groups * V * U
    apply = N * H * K * V  # the paper's code applies content and position lambdas separately, not their sum
    if layer.to_keys is not None:
        macs += M * layer.context_channels * groups * K * U + groups * M * K * V * U + apply
    if layer.positions is not None:
        reach = prod(min(s, side) for s, side in zip(layer.positions.scope, context_grid, strict=True))
        macs += groups * N * reach * K * V * U + apply
    return B * macs


def linear_attention(call: Call) -> int:
    layer = call.module
    assert isinstance(layer, LinearAttention)
    B, N = call.inputs[0][0], prod(call.inputs[0][2:])
    groups = 1 if layer.multi_query else layer.heads
    return B * N * layer.key_depth * layer.value_depth * (groups + layer.heads)


def global_attention(call: Call) -> int:
    layer = call.module
    assert isinstance(layer, GlobalAttention2d)
    B, height, width = call.inputs[0][0], *call.inputs[0][2:]
    N = height * width
    logits = layer.key_depth * (N + height + width)  # content logits, and relative logits along each axis
    return B * layer.heads * N * (logits + layer.value_depth * N)


def axial_attention(call: Call) -> int:
    layer = call.module
    assert isinstance(layer, AxialAttention2d)
    B, height, width = call.inputs[0][0], *call.inputs[0][2:]
    along = ((layer.columns, height), (layer.rows, width))
    return B * height * width * sum(a.heads * side * (2 * a.key_depth + a.value_depth) for a, side in along)


def local_attention(call: Call) -> int:
    layer = call.module
    assert isinstance(layer, LocalAttention2d)
    B, N = call.inputs[0][0], prod(call.inputs[0][2:])
    return B * layer.heads * N * prod(layer.scope) * (2 * layer.key_depth + layer.value_depth)


FORMULAS = {
    nn.modules.conv._ConvNd: convolution,
    nn.Linear: linear,
    LambdaLayer: lambda_layer,
    LinearAttention: linear_attention,
    GlobalAttention2d: global_attention,
    AxialAttention2d: axial_attention,
    LocalAttention2d: local_attention,
}


def paper_flops(network: nn.Module, shape: Sequence[int]) -> Flops:
    """Count the FLOPs of a forward pass in the paper's convention (2 per multiply-add).

    Args:
        network: any network; on the meta device nothing is computed.
        shape: shape of the input, [B, C, height, width].

    >>> from lambdanets.models.counts import meta_network
    >>> from lambdanets.models.flops import paper_flops
    >>> paper_flops(meta_network("resnet50"), (1, 3, 224, 224)).total
    8178368512
    """
    found = []
    for call in trace(network, shape, tuple(FORMULAS)):
        formula = next(formula for kind, formula in FORMULAS.items() if isinstance(call.module, kind))
        found.append(ModuleFlops(call.name, type(call.module).__name__, 2 * formula(call)))
    return Flops(tuple(found))


def executed_flops(network: nn.Module, shape: Sequence[int]) -> int:
    """Count the FLOPs that run, with torch's FLOP counter; for lambda layers they depend on the implementation.

    Padding is included. Fourier transforms, which some implementations use on the CPU, are not counted.

    Args:
        network: any network.
        shape: shape of the input, [B, C, height, width].

    >>> from lambdanets import create_model
    >>> from lambdanets.models.flops import executed_flops
    >>> executed_flops(create_model("resnet_tiny"), (1, 3, 32, 32)) > 0
    True
    """
    like = next(network.parameters())
    with torch.no_grad(), evaluating(network), FlopCounterMode(display=False) as counter:
        network(torch.zeros(tuple(shape), device=like.device, dtype=like.dtype))
    return counter.get_total_flops()

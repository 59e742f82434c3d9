"""Memory of interactions, as the paper counts it: attention maps for each example, embeddings for the whole batch.

Lambdas themselves are as large as activations elsewhere in the network, and are left out as in the paper.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isqrt, prod

from torch import nn

from lambdanets.layers import AxialAttention2d, GlobalAttention2d
from lambdanets.layers.lambda_layer import LambdaLayer
from lambdanets.models.trace import trace

FLOAT32, BFLOAT16 = 4, 2
MB, GB = 2**20, 2**30  # what the paper's numbers are in


@dataclass(frozen=True)
class Maps:
    """`layers` layers on square maps of `positions` positions."""

    positions: int
    layers: int


# ResNet-50 at 224x224. The paper's table counts every layer at its stage's OUTPUT resolution; the networks, also the
# paper's, run the first block of c3, c4 and c5 at the resolution before.
RESNET50 = (Maps(56 * 56, 3), Maps(28 * 28, 4), Maps(14 * 14, 6), Maps(7 * 7, 3))


def global_attention_bytes(maps: Iterable[Maps], *, batch: int, heads: int = 8, size: int = FLOAT32) -> int:
    """b l h n^2 numbers."""
    return size * batch * heads * sum(m.layers * m.positions**2 for m in maps)


def axial_attention_bytes(maps: Iterable[Maps], *, batch: int, heads: int = 8, size: int = FLOAT32) -> int:
    """b l h n sqrt(n) numbers, for each of the two axes."""
    return size * batch * heads * sum(2 * m.layers * m.positions * isqrt(m.positions) for m in maps)


def lambda_bytes(maps: Iterable[Maps], *, key_depth: int = 16, shared: bool = False, size: int = FLOAT32) -> int:
    """l k n^2 numbers, whatever the batch; layers of a stage may share them."""
    return size * key_depth * sum((1 if shared else m.layers) * m.positions**2 for m in maps)


@dataclass(frozen=True)
class Interactions:
    """What the layers of a network would keep if they wrote everything out, in bytes."""

    embeddings: int  # of lambda layers, [N, M, K, U] each
    attention: int  # maps, for each example and head


def network_interactions(network: nn.Module, shape: Sequence[int], *, size: int = FLOAT32) -> Interactions:
    """Of a network as it is built, for one input of `shape`: each layer at the resolution where it runs."""
    dense: dict[object, int] = {}
    attention = 0
    for call in trace(network, shape, (LambdaLayer, GlobalAttention2d, AxialAttention2d)):
        layer, (batch, _, height, width) = call.module, call.inputs[0]
        if isinstance(layer, LambdaLayer) and layer.positions is not None:
            pairs = prod(layer.query_grid(call.inputs[0][2:])) * prod(call.inputs[-1][2:])
            heads = layer.heads if layer.multi_head else 1
            # layers that share a table share what it is written out to, if the maps are alike
            dense[id(layer.positions), call.inputs[0][2:]] = pairs * layer.key_depth * layer.intra_depth * heads
        elif isinstance(layer, GlobalAttention2d):
            attention += batch * layer.heads * (height * width) ** 2
        elif isinstance(layer, AxialAttention2d):
            attention += batch * height * width * (layer.columns.heads * height + layer.rows.heads * width)
    return Interactions(size * sum(dense.values()), size * attention)

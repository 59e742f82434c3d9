"""Memory of interactions as the paper counts it: attention maps per example, embeddings once for the whole batch.

Like the paper, it does not count the lambdas, which are as large as other activations of the network.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isqrt, prod

from torch import nn

from lambdanets.layers import AxialAttention2d, GlobalAttention2d
from lambdanets.layers.lambda_layer import LambdaLayer
from lambdanets.models.trace import trace

FLOAT32, BFLOAT16 = 4, 2
MB, GB = 2**20, 2**30  # the units of the paper


@dataclass(frozen=True)
class Maps:
    """A number of layers on square maps of the same size.

    Attributes:
        positions: number of positions of a map.
        layers: number of layers.
    """

    positions: int
    layers: int


# ResNet-50 at 224x224. The paper's table counts every layer at the OUTPUT resolution of its stage, although the first
# blocks of c3, c4 and c5 run at the resolution of the previous stage.
RESNET50 = (Maps(56 * 56, 3), Maps(28 * 28, 4), Maps(14 * 14, 6), Maps(7 * 7, 3))


def global_attention_bytes(maps: Iterable[Maps], *, batch: int, heads: int = 8, size: int = FLOAT32) -> int:
    """Return the bytes of the attention maps of global attention, b l h n^2 numbers.

    Args:
        maps: the layers, by size of map.
        batch: batch size.
        heads: number of attention heads.
        size: bytes per number.

    Example:
        >>> from lambdanets.bench.memory import GB, Maps, global_attention_bytes
        >>> global_attention_bytes([Maps(56 * 56, 3)], batch=128) / GB
        112.546875
    """
    return size * batch * heads * sum(m.layers * m.positions**2 for m in maps)


def axial_attention_bytes(maps: Iterable[Maps], *, batch: int, heads: int = 8, size: int = FLOAT32) -> int:
    """Return the bytes of the attention maps of axial attention, b l h n sqrt(n) numbers per axis.

    Args:
        maps: the layers, by size of map.
        batch: batch size.
        heads: number of attention heads.
        size: bytes per number.

    Example:
        >>> from lambdanets.bench.memory import GB, Maps, axial_attention_bytes
        >>> axial_attention_bytes([Maps(56 * 56, 3)], batch=128) / GB
        4.01953125
    """
    return size * batch * heads * sum(2 * m.layers * m.positions * isqrt(m.positions) for m in maps)


def lambda_bytes(maps: Iterable[Maps], *, key_depth: int = 16, shared: bool = False, size: int = FLOAT32) -> int:
    """Return the bytes of the expanded position embeddings of lambda layers, l k n^2 numbers for any batch size.

    Args:
        maps: the layers, by size of map.
        key_depth: depth of the embeddings.
        shared: whether layers on maps of the same size share their embeddings.
        size: bytes per number.

    Example:
        >>> from lambdanets.bench.memory import GB, Maps, lambda_bytes
        >>> lambda_bytes([Maps(56 * 56, 3)]) / GB
        1.758544921875
    """
    return size * key_depth * sum((1 if shared else m.layers) * m.positions**2 for m in maps)


@dataclass(frozen=True)
class Interactions:
    """Bytes of the interactions of a network if all of them were stored.

    Attributes:
        embeddings: expanded embeddings of lambda layers, [N, M, K, U] each.
        attention: attention maps of all examples and heads.
    """

    embeddings: int
    attention: int


def network_interactions(network: nn.Module, shape: Sequence[int], *, size: int = FLOAT32) -> Interactions:
    """Return the memory of the interactions of a network, with each layer at the resolution at which it runs.

    Args:
        network: a network with lambda or attention layers.
        shape: shape of the input, [batch, channels, height, width].
        size: bytes per number.

    Example:
        >>> from torch import nn
        >>> from lambdanets.layers import GlobalAttention2d
        >>> from lambdanets.bench.memory import network_interactions
        >>> network_interactions(nn.Sequential(GlobalAttention2d(16, input_size=8)), (2, 16, 8, 8))
        Interactions(embeddings=0, attention=262144)
    """
    dense: dict[object, int] = {}
    attention = 0
    for call in trace(network, shape, (LambdaLayer, GlobalAttention2d, AxialAttention2d)):
        layer, (batch, _, height, width) = call.module, call.inputs[0]
        if isinstance(layer, LambdaLayer) and layer.positions is not None:
            pairs = prod(layer.query_grid(call.inputs[0][2:])) * prod(call.inputs[-1][2:])
            heads = layer.heads if layer.multi_head else 1
            # layers that share a table share its expanded form if their maps have the same size
            dense[id(layer.positions), call.inputs[0][2:]] = pairs * layer.key_depth * layer.intra_depth * heads
        elif isinstance(layer, GlobalAttention2d):
            attention += batch * layer.heads * (height * width) ** 2
        elif isinstance(layer, AxialAttention2d):
            attention += batch * height * width * (layer.columns.heads * height + layer.rows.heads * width)
    return Interactions(size * sum(dense.values()), size * attention)

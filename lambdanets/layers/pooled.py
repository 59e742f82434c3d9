"""A lambda layer and the average pooling that follows it in blocks that halve their map, in one step.

Letters: B batch, C channels.
"""

from torch import Tensor

from lambdanets.layers.lambda_layer import LambdaLayer2d
from lambdanets.layers.projection import is_plain, type_of_product
from lambdanets.ops.fused import fused_relative, pool, why_not


def forward_pooled(layer: LambdaLayer2d, x: Tensor) -> Tensor | None:
    """What 3x3 average pooling at every other position, with a border of zeros, makes of layer(x).

    None where the fused kernels cannot: whoever asks then pools the layer's output.
    """
    if not takes(layer, x):
        return None
    layer._check_inputs(x, None)
    queries, keys, values, grid, _ = layer.project(x, None)
    placed = layer._place(grid, grid)
    assert placed is not None
    output = fused_relative(queries, values, None, placed.table, grid, grid, keys=keys, pooled=True)
    height, width = (pool.pooled_side(side, 3) for side in grid)
    return output.reshape(x.shape[0], height, width, layer.out_channels).movedim(-1, 1)


def takes(layer: LambdaLayer2d, x: Tensor) -> bool:
    """Whether the fused kernels can: channels-last images, and the layer's usual options."""
    if not pool.takes(x) or x.shape[0] == 0:
        return False
    if layer.positions is None or layer.backend not in ("auto", "fused"):
        return False
    if layer.multi_head or layer.causal or layer.query_softmax or layer.intra_depth > 1:
        return False
    if layer.position_bias is not None or max(*layer.stride, *layer.positions.dilation) > 1:
        return False
    if layer.to_keys is not None and layer.key_norm != "softmax":
        return False
    # Something else in the place of a projection, or of a step of the layer, may do anything.
    if (
        not all(is_plain(*pair) for pair in layer._projections())
        or "interact" in vars(layer)
        or "project" in vars(layer)
    ):
        return False
    dtype = type_of_product(x, layer.to_queries.weight)
    return dtype is not None and why_not(x.device, dtype, layer.key_depth, layer.value_depth, layer.heads) is None

"""Layers: the lambda layer in 1, 2 and 3 dimensions, and its positions."""

from lambdanets.layers.lambda_layer import LambdaLayer2d, LambdaLayer3d
from lambdanets.layers.positions import RelativePositions
from lambdanets.layers.sequence import LambdaLayer1d, StreamState

__all__ = ["LambdaLayer1d", "LambdaLayer2d", "LambdaLayer3d", "RelativePositions", "StreamState"]

"""Lambda layers in one, two and three dimensions, position embeddings, and the layers that the paper compares with."""

from lambdanets.layers.attention import AxialAttention2d, GlobalAttention2d, LocalAttention2d
from lambdanets.layers.augmented import AugmentedConvolution2d
from lambdanets.layers.convolved_attention import ConvolutionLinearAttention2d
from lambdanets.layers.lambda_layer import LambdaLayer2d, LambdaLayer3d
from lambdanets.layers.linear_attention import LinearAttention
from lambdanets.layers.positions import RelativePositions
from lambdanets.layers.sequence import LambdaLayer1d, StreamState
from lambdanets.layers.squeeze_excitation import SqueezeExcitation2d
from lambdanets.layers.vector_attention import PairwiseAttention2d, PatchwiseAttention2d

__all__ = [
    "AugmentedConvolution2d",
    "AxialAttention2d",
    "ConvolutionLinearAttention2d",
    "GlobalAttention2d",
    "LambdaLayer1d",
    "LambdaLayer2d",
    "LambdaLayer3d",
    "LinearAttention",
    "LocalAttention2d",
    "PairwiseAttention2d",
    "PatchwiseAttention2d",
    "RelativePositions",
    "SqueezeExcitation2d",
    "StreamState",
]

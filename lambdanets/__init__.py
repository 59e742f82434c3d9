"""LambdaNetworks (Bello, ICLR 2021) in PyTorch."""

from lambdanets.layers import LambdaLayer1d, LambdaLayer2d, LambdaLayer3d, RelativePositions

__version__ = "0.1.0"
__all__ = ["LambdaLayer1d", "LambdaLayer2d", "LambdaLayer3d", "RelativePositions"]

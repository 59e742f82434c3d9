"""LambdaNetworks (Bello, ICLR 2021) in PyTorch."""

from lambdanets.accelerate import accelerate
from lambdanets.layers import LambdaLayer1d, LambdaLayer2d, LambdaLayer3d, RelativePositions
from lambdanets.models import create_model, list_models

__version__ = "0.1.0"
__all__ = [
    "LambdaLayer1d",
    "LambdaLayer2d",
    "LambdaLayer3d",
    "RelativePositions",
    "accelerate",
    "create_model",
    "list_models",
]

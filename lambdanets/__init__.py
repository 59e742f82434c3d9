"""LambdaNetworks (Bello, ICLR 2021) in PyTorch."""

from typing import TYPE_CHECKING, Any

from lambdanets.accelerate import accelerate
from lambdanets.layers import LambdaLayer1d, LambdaLayer2d, LambdaLayer3d, RelativePositions
from lambdanets.models import create_model, list_models

if TYPE_CHECKING:
    from lambdanets.train.own import fit

__version__ = "0.2.0"
__all__ = [
    "LambdaLayer1d",
    "LambdaLayer2d",
    "LambdaLayer3d",
    "RelativePositions",
    "accelerate",
    "create_model",
    "fit",
    "list_models",
]


def __getattr__(name: str) -> Any:
    if name == "fit":  # imported on first use, so that `import lambdanets` stays light
        from lambdanets.train.own import fit

        return fit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

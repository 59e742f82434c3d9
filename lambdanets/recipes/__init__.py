"""Training recipes: each function returns a configuration; its docstring gives command, hardware, time and accuracy."""

from lambdanets.recipes.imagenet import (
    ROWS_350,
    UNPUBLISHED_350,
    imagenet_90,
    imagenet_350,
    imagenet_350_unpublished,
    mobilenet_350,
)
from lambdanets.recipes.pseudo import cotrain, cotrain_350, distill
from lambdanets.recipes.small import debug, digits, imagenette

__all__ = [
    "ROWS_350",
    "UNPUBLISHED_350",
    "cotrain",
    "cotrain_350",
    "debug",
    "digits",
    "distill",
    "imagenet_90",
    "imagenet_350",
    "imagenet_350_unpublished",
    "imagenette",
    "mobilenet_350",
]

"""Networks that can tell a mistake: at initialisation every residual branch is zero."""

import warnings
from typing import TypeVar

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from lambdanets.models import FeatureNetwork, Network, create_model

M = TypeVar("M", bound=nn.Module)

# One per family, small enough for a real forward and backward in float64.
SMALL = {
    "vanilla": ("resnet26", {"placement": "CLLL", "num_classes": 7}),
    "deep": ("resnet26_d", {"placement": ((2,), "C", "L", "C"), "se": True, "num_classes": 7, "drop_rate": 0.1}),
    "lambda_resnet": ("lambda_resnet50", {"num_classes": 7, "share_positions": True}),
    "small images": ("lambda_resnet_tiny", {"scope": (3, 3, (5, 7), None)}),
    "mobilenet": ("lambda_mobilenet_v2", {"num_classes": 7}),
    "patch": ("lambda_patch_tiny", {"share_positions": True}),
    "attention": ("san10", {"depths": (1, 1, 2, 1, 1), "widths": (32, 32, 64, 64, 64), "scope": 3, "num_classes": 7}),
}
# Odd rectangles; "small images" has one global stage, for images up to 32x32.
SIZES = {name: (31, 21) if name in ("small images", "patch") else (61, 83) for name in SMALL}


def small(case: str, **more: object) -> Network:
    name, arguments = SMALL[case]
    torch.manual_seed(0)
    return settled(randomized(create_model(name, **{**arguments, **more})), images(case))


def images(case: str, batch: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(batch, 3, *SIZES[case], dtype=dtype, generator=torch.Generator().manual_seed(1))


def randomized(model: M) -> M:
    """Norms with weights and statistics that are not those of the start."""
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor, low in ((module.weight, 0.5), (module.running_var, 0.5), (module.bias, -0.5)):
                tensor.data.copy_(low + torch.rand(tensor.shape, generator=generator))
            module.running_mean.copy_(torch.rand(module.running_mean.shape, generator=generator) - 0.5)
    return model


def settled(network: M, x: torch.Tensor) -> M:
    """Running statistics that fit: a lambda layer amplifies, and without its norms a deep network overflows."""
    norms = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        network.train()(x)
    for norm in norms:
        norm.momentum = 0.1
    return network


def fake(name: str, height: int, width: int, **arguments: object) -> torch.Tensor | list[torch.Tensor]:
    """The output for one image without computing it."""
    with FakeTensorMode(), torch.no_grad():
        return create_model(name, **arguments)(torch.randn(1, 3, height, width))


def meta(name: str, **arguments: object) -> Network | FeatureNetwork:
    with torch.device("meta"), warnings.catch_warnings():
        return create_model(name, **arguments)


def parameters(name: str, **arguments: object) -> int:
    return sum(p.numel() for p in meta(name, **arguments).parameters())

"""Networks with random weights that compute as trained ones do, for benchmarks and exports without weights."""

import torch
from torch import Tensor, nn


def settle(network: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Norms as after training: branches that start at zero do something, and running statistics fit.

    What a branch adds stays small, as there. A lambda layer multiplies two things that grow with its input, so what is
    a little too large after one block is much too large after ten: networks of lambda layers alone gave NaN.
    """
    norms = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
        if norm.affine:
            adds = not norm.weight.any()  # the last of a branch
            nn.init.uniform_(norm.weight, *((0.1, 0.3) if adds else (0.5, 1.0)))
    with torch.no_grad():
        network.train()(some_images(network, shape))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return network.eval()


def some_images(network: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Always the same ones: statistics of a few random images fit no others through many lambda layers."""
    like = next(network.parameters())
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)

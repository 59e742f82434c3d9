"""Networks with random weights and realistic activations, for benchmarks and exports without weights."""

import torch
from torch import Tensor, nn


def settle(network: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Set norms like after training: weights of zero-initialised branches are not zero, running statistics match.

    The outputs of branches are kept small. A lambda layer multiplies two functions of its input, so large activations
    grow quickly over several blocks and would become NaN.
    """
    norms = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
        if norm.affine:
            adds = not norm.weight.any()  # the last norm of a branch
            nn.init.uniform_(norm.weight, *((0.1, 0.3) if adds else (0.5, 1.0)))
    with torch.no_grad():
        network.train()(some_images(network, shape))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return network.eval()


def some_images(network: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Return fixed random images: after many lambda layers, statistics of a few images do not fit other images."""
    like = next(network.parameters())
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)

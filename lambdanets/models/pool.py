"""Average pooling by half, with a backward pass that is faster than torch's own.

That takes 0.8 ms for 256 channels-last maps of 28x28x256 on an H200, thirty times as long as reading them.
"""

from typing import Any

import torch
from torch import Tensor, nn

SIDE = 2  # of windows that do not overlap


class AveragePool(nn.AvgPool2d):
    """`nn.AvgPool2d`; where 2x2 windows cover the image without overlap on a GPU, gradients are spread by a copy."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not input.is_cuda or not self.is_halving(input):
            return super().forward(input)  # the compiler writes good kernels, and so has the CPU
        return Halved.apply(input)

    def is_halving(self, x_BCHW: Tensor) -> bool:
        """Whether `Halved` computes the same."""
        whole = x_BCHW.ndim == 4 and all(side % SIDE == 0 for side in x_BCHW.shape[-2:])
        return whole and self.kernel_size == self.stride == SIDE and not self.padding and not self.divisor_override


class Halved(torch.autograd.Function):
    """The mean of every 2x2 pixels. Each of the four gets a quarter of the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_BCHW: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(x_BCHW, SIDE)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        share_BHWC = gradients[0].permute(0, 2, 3, 1) / SIDE**2
        B, H, W, C = share_BHWC.shape
        spread = share_BHWC[:, :, None, :, None].expand(B, H, SIDE, W, SIDE, C)
        return spread.reshape(B, SIDE * H, SIDE * W, C).permute(0, 3, 1, 2)

"""Average pooling by half, where torch's own is slow: its backward pass for channels-last images on a GPU takes 0.8 ms
for 256 maps of 28x28x256, thirty times as long as reading them.

Pooling is a linear map of positions, so a small map is pooled by one matrix product, and so are its gradients.

Letters: B batch, C channels, H and W the map, N = H * W positions, P positions of the result.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

STRIDE = 2
PRODUCT_POSITIONS = 4096  # of larger maps the product would be more work than reading them


class AveragePool(nn.AvgPool2d):
    """`nn.AvgPool2d` of 2x2 or 3x3 windows with a stride of 2."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.has_faster_way(input):
            return super().forward(input)
        return Halved.apply(input, self.kernel_size)

    def has_faster_way(self, x_BCHW: Tensor) -> bool:
        """On a GPU without torch.compile (which writes good kernels), for channels-last images of half precision."""
        if torch.compiler.is_compiling() or not x_BCHW.is_cuda or x_BCHW.dtype not in (torch.bfloat16, torch.float16):
            return False
        return self.is_halving(x_BCHW) and x_BCHW.is_contiguous(memory_format=torch.channels_last)

    def is_halving(self, x_BCHW: Tensor) -> bool:
        """Whether `Halved` computes the same."""
        height, width = x_BCHW.shape[-2:]
        if self.stride != STRIDE or x_BCHW.ndim != 4 or self.divisor_override is not None:
            return False
        if self.kernel_size == 2:
            return self.padding == 0 and height % 2 == width % 2 == 0
        whole = self.padding == 1 and self.count_include_pad and not self.ceil_mode
        return self.kernel_size == 3 and whole and height * width <= PRODUCT_POSITIONS


class Halved(torch.autograd.Function):
    """Windows of 2x2, or of 3x3 with a border of zeros, at every other position of channels-last images."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_BCHW: Tensor, kernel: int) -> Tensor:
        if kernel == 2:
            return nn.functional.avg_pool2d(x_BCHW, kernel, STRIDE)
        height, width = x_BCHW.shape[-2:]
        pool_PN = windows(height, width, x_BCHW.dtype, x_BCHW.device)
        pooled_BPC = scaled_product(pool_PN, positions_last_but_one(x_BCHW), 1 / kernel**2)
        return as_images(pooled_BPC, (height + 1) // STRIDE, (width + 1) // STRIDE)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.grid, ctx.kernel = inputs[0].shape[-2:], inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient_BCHW,) = gradients
        height, width = ctx.grid
        if ctx.kernel == 2:
            share_BHWC = gradient_BCHW.permute(0, 2, 3, 1) / ctx.kernel**2
            B, H, W, C = share_BHWC.shape
            spread = share_BHWC[:, :, None, :, None].expand(B, H, 2, W, 2, C).reshape(B, height, width, C)
            return spread.permute(0, 3, 1, 2), None
        pool_PN = windows(height, width, gradient_BCHW.dtype, gradient_BCHW.device)
        spread_BNC = scaled_product(pool_PN.t(), positions_last_but_one(gradient_BCHW), 1 / ctx.kernel**2)
        return as_images(spread_BNC, height, width), None


def positions_last_but_one(x_BCHW: Tensor) -> Tensor:
    """[B, H * W, C], a view of channels-last images."""
    return x_BCHW.permute(0, 2, 3, 1).flatten(1, 2)


def as_images(x_BNC: Tensor, height: int, width: int) -> Tensor:
    return x_BNC.unflatten(1, (height, width)).permute(0, 3, 1, 2)


def scaled_product(matrix: Tensor, x_BNC: Tensor, scale: float) -> Tensor:
    """scale * matrix @ x for every example, rounded once: 1 / 9 is no number of half precision."""
    ignored = x_BNC.new_empty(1, 1, 1)
    return torch.baddbmm(ignored, matrix.expand(len(x_BNC), -1, -1), x_BNC, beta=0, alpha=scale)


@lru_cache(maxsize=32)
def windows(height: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[P, N]: 1 where position n lies in the 3x3 window of p, whose centre is at twice its row and column."""

    def along(side: int) -> Tensor:
        centres = STRIDE * torch.arange((side + 1) // STRIDE, device=device)
        return (centres[:, None] - torch.arange(side, device=device)).abs() <= 1

    with torch.inference_mode(False):
        return torch.kron(along(height).to(dtype), along(width).to(dtype))

"""Average pooling by half, without torch's backward pass for channels-last images on a GPU.

That one is wrong where there is padding, in torch 2.11 and before (https://github.com/pytorch/pytorch/issues/188344:
every pixel gets the gradient of its neighbour's windows, without an error), and slow: 0.8 ms for 256 maps of 28x28x256
on an H200, thirty times as long as reading them.

Pooling is a linear map of positions, so a small map is pooled by one matrix product, and so are its gradients.

Letters: B batch, C channels, H and W the map, N = H * W positions, P positions of the result.
"""

from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

STRIDE = 2
PRODUCT_POSITIONS = 4096  # for larger maps the product becomes more work than copies into the other layout
HALF = (torch.bfloat16, torch.float16)  # a product in float32 may be one in TF32


class AveragePool(nn.AvgPool2d):
    """`nn.AvgPool2d`, with right gradients on CUDA GPUs too."""

    def forward(self, input: Tensor) -> Tensor:
        # torch.compile writes its own kernels (inductor, its default, does).
        way = "torch" if torch.compiler.is_compiling() or not input.is_cuda else self.way(input)
        if way == "halved":
            return Halved.apply(input, self.kernel_size)
        if way == "torch":
            return super().forward(input)
        pooled = super().forward(input.clone(memory_format=torch.contiguous_format))
        return pooled.contiguous(memory_format=torch.channels_last)

    def way(self, x_BCHW: Tensor) -> Literal["halved", "torch", "copied"]:
        """How images are pooled on a GPU: `Halved`, torch's kernels, or those after a copy into the other layout."""
        if x_BCHW.ndim != 4:
            return "torch"
        exact = self.kernel_size == STRIDE or x_BCHW.dtype in HALF
        if exact and x_BCHW.is_contiguous(memory_format=torch.channels_last) and self.is_halving(x_BCHW):
            return "halved"
        return "torch" if not self.padding or is_plain(x_BCHW) else "copied"

    def is_halving(self, x_BCHW: Tensor) -> bool:
        """Whether `Halved` computes the same."""
        height, width = x_BCHW.shape[-2:]
        if self.stride != STRIDE or self.divisor_override is not None:
            return False
        if self.kernel_size == STRIDE:
            return not self.padding and height % STRIDE == width % STRIDE == 0
        whole = self.padding == 1 and self.count_include_pad and not self.ceil_mode
        return self.kernel_size == 3 and whole and height * width <= PRODUCT_POSITIONS


def is_plain(x_BCHW: Tensor) -> bool:
    """Whether torch does not take the images for channels-last ones: with a single channel they may be both."""
    return x_BCHW.is_contiguous() and x_BCHW.stride(1) != 1


class Halved(torch.autograd.Function):
    """Windows of 2x2, or of 3x3 with a border of zeros, at every other position of channels-last images."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_BCHW: Tensor, kernel: int) -> Tensor:
        if kernel == STRIDE:
            return nn.functional.avg_pool2d(x_BCHW, kernel)
        height, width = x_BCHW.shape[-2:]
        pool_PN = windows_of(x_BCHW, height, width)
        pooled_BPC = scaled_product(pool_PN, positions_last_but_one(x_BCHW), 1 / kernel**2)
        return as_images(pooled_BPC, (height + 1) // STRIDE, (width + 1) // STRIDE)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.grid, ctx.kernel = inputs[0].shape[-2:], inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient_BCHW,) = gradients
        height, width = ctx.grid
        if ctx.kernel == STRIDE:  # each of the four gets a quarter
            share_BHWC = gradient_BCHW.permute(0, 2, 3, 1) / ctx.kernel**2
            B, H, W, C = share_BHWC.shape
            spread = share_BHWC[:, :, None, :, None].expand(B, H, 2, W, 2, C).reshape(B, height, width, C)
            return spread.permute(0, 3, 1, 2), None
        pool_PN = windows_of(gradient_BCHW, height, width)
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


def windows_of(x: Tensor, height: int, width: int) -> Tensor:
    """`windows` for a tensor; nothing is kept of fake ones, which would be met again later."""
    make = windows if type(x) is Tensor else windows.__wrapped__
    return make(height, width, x.dtype, x.device)


@lru_cache(maxsize=16)
def windows(height: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[P, N]: 1 where position n lies in the 3x3 window of p, whose centre is at twice its row and column."""

    def along(side: int) -> Tensor:
        centres = STRIDE * torch.arange((side + 1) // STRIDE, device=device)
        return (centres[:, None] - torch.arange(side, device=device)).abs() <= 1

    with torch.inference_mode(False):
        return torch.kron(along(height).to(dtype), along(width).to(dtype))

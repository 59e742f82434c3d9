"""Average pooling by half, with correct and fast gradients for channels-last images on a GPU.

torch's backward pass for such images is wrong where there is padding, in torch 2.11 and before
(https://github.com/pytorch/pytorch/issues/188344: every pixel gets the gradient of its neighbour's windows, without an
error), and slow: 0.8 ms for 256 maps of 28x28x256 on an H200, thirty times as long as reading them. The code that
torch.compile generates for it is correct, but slow as well.

The kernels of this package (lambdanets/ops/triton/pooling.py) pool such images; in compiled networks those with
padding. Where they cannot run, eager networks copy images into the other layout, for which torch is correct.
Lambda layers with `downsample="avg"` pool through this module, or inside their own kernels.

Letters: B batch, C channels, H and W the map.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lambdanets.layers.arguments import fx_leaf
from lambdanets.ops.triton import pooling

STRIDE = 2


class AveragePool(nn.AvgPool2d):
    """`nn.AvgPool2d` with correct gradients on CUDA GPUs too."""

    @fx_leaf
    def forward(self, input: Tensor) -> Tensor:
        # 2x2 windows stand in shortcuts: the compiler adds their gradients to the block's without writing them first.
        compiling = torch.compiler.is_compiling()
        if (self.padding or not compiling) and pooling.takes(input) and self.is_halving(input):
            return pooling.average_pool(input, 3 if self.padding else STRIDE)
        # torch.compile writes its own kernels (inductor, its default, does).
        if compiling or not input.is_cuda or self.is_safe(input):
            return super().forward(input)
        pooled = super().forward(input.clone(memory_format=torch.contiguous_format))
        # torch.vmap knows no contiguous(memory_format=torch.channels_last).
        return pooled.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)

    def is_safe(self, x_BCHW: Tensor) -> bool:
        """Whether torch's gradients are correct on a GPU too."""
        return x_BCHW.ndim != 4 or not self.padding or is_plain(x_BCHW)

    def is_halving(self, x_BCHW: Tensor) -> bool:
        """Whether the kernels compute the same."""
        height, width = x_BCHW.shape[-2:]
        if self.stride != STRIDE or self.divisor_override is not None:
            return False
        if self.kernel_size == STRIDE:
            return not self.padding and height % STRIDE == width % STRIDE == 0
        return self.kernel_size == 3 and self.padding == 1 and self.count_include_pad and not self.ceil_mode


HALVING = AveragePool(3, STRIDE, padding=1)  # without state: layers share it


def halved(images: Tensor) -> Tensor:
    """Average pooling [B, C, *space] -> [B, C, *ceil(space / 2)]: windows of 3 with stride 2 and a border of zeros."""
    if images.ndim == 4:
        return HALVING.forward(images)  # no module of the network: hooks for all modules do not see it
    if images.ndim == 3:
        return F.avg_pool1d(images, 3, STRIDE, padding=1)
    padded = F.pad(images, [1] * 6)  # torch's own padding refuses maps that are smaller than the window
    pooled = F.avg_pool3d(padded, 3, STRIDE)  # on a GPU contiguous, whatever it was given
    last = images.is_contiguous(memory_format=torch.channels_last_3d) and not images.is_contiguous()
    return pooled.contiguous(memory_format=torch.channels_last_3d) if last else pooled


def is_plain(x_BCHW: Tensor) -> bool:
    """Whether torch does not take the images for channels-last ones: with a single channel they may be both."""
    return x_BCHW.is_contiguous() and x_BCHW.stride(1) != 1

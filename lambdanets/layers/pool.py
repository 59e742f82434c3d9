"""Average pooling with stride 2, with correct and fast gradients for channels-last images on a GPU.

In torch 2.11 and earlier, the backward pass of padded average pooling of channels-last images on a GPU is silently
wrong (https://github.com/pytorch/pytorch/issues/188344: every pixel gets the gradient of its neighbour's windows). It
is also slow: 0.8 ms for 256 maps of 28x28x256 on an H200, thirty times the time to read them. The code that
torch.compile generates is correct, but slow too.

Triton kernels (lambdanets/ops/triton/pooling.py) pool such images; in compiled networks only those with padding. Where
the kernels cannot run, eager networks copy images to the contiguous layout, for which torch is correct. Lambda layers
with `downsample="avg"` pool through this module or inside their own kernels.

Letters: B batch, C channels, H and W the map.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lambdanets.layers.arguments import fx_leaf
from lambdanets.ops.triton import pooling

STRIDE = 2


class AveragePool(nn.AvgPool2d):
    """`nn.AvgPool2d` whose gradients are also correct on CUDA GPUs."""

    @fx_leaf
    def forward(self, input: Tensor) -> Tensor:
        # 2x2 windows are in shortcuts: the compiler fuses their gradients with the sum of the two branches.
        compiling = torch.compiler.is_compiling()
        if (self.padding or not compiling) and pooling.takes(input) and self.is_halving(input):
            return pooling.average_pool(input, 3 if self.padding else STRIDE)
        # The kernels that torch.compile generates are correct.
        if compiling or not input.is_cuda or self.is_safe(input):
            return super().forward(input)
        pooled = super().forward(input.clone(memory_format=torch.contiguous_format))
        # torch.vmap does not support contiguous(memory_format=torch.channels_last).
        return pooled.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)

    def is_safe(self, x_BCHW: Tensor) -> bool:
        """Return whether torch's gradients are correct on a GPU."""
        return x_BCHW.ndim != 4 or not self.padding or is_plain(x_BCHW)

    def is_halving(self, x_BCHW: Tensor) -> bool:
        """Return whether the Triton kernels compute the same function."""
        height, width = x_BCHW.shape[-2:]
        if self.stride != STRIDE or self.divisor_override is not None:
            return False
        if self.kernel_size == STRIDE:
            return not self.padding and height % STRIDE == width % STRIDE == 0
        return self.kernel_size == 3 and self.padding == 1 and self.count_include_pad and not self.ceil_mode


HALVING = AveragePool(3, STRIDE, padding=1)  # has no state, so layers share it


def halved(images: Tensor) -> Tensor:
    """Average-pool [B, C, *space] to [B, C, *ceil(space / 2)] with windows of 3, stride 2 and zero padding of 1."""
    if images.ndim == 4:
        return HALVING.forward(images)  # not a module of the network: global module hooks must not run
    if images.ndim == 3:
        return F.avg_pool1d(images, 3, STRIDE, padding=1)
    padded = F.pad(images, [1] * 6)  # avg_pool3d with padding rejects maps that are smaller than the window
    pooled = F.avg_pool3d(padded, 3, STRIDE)  # always contiguous on a GPU
    last = images.is_contiguous(memory_format=torch.channels_last_3d) and not images.is_contiguous()
    return pooled.contiguous(memory_format=torch.channels_last_3d) if last else pooled


def is_plain(x_BCHW: Tensor) -> bool:
    """Return whether torch treats the images as contiguous and not as channels-last (with one channel both hold)."""
    return x_BCHW.is_contiguous() and x_BCHW.stride(1) != 1

"""Average pooling by half, without torch's backward pass for channels-last images on a GPU.

That one is wrong where there is padding, in torch 2.11 and before (https://github.com/pytorch/pytorch/issues/188344:
every pixel gets the gradient of its neighbour's windows, without an error), and slow: 0.8 ms for 256 maps of 28x28x256
on an H200, thirty times as long as reading them. What the compiler writes for it is right, but slow as well.

The library's own kernels (lambdanets/ops/fused/pool.py) pool such images; in compiled networks those with padding.
Where they cannot run, eager networks copy images into the other layout, for which torch is right.
A lambda layer and the pooling after it are one step where that is possible: `pool_after`.

Letters: B batch, C channels, H and W the map.
"""

import torch
from torch import Tensor, nn

from lambdanets.layers import LambdaLayer2d
from lambdanets.layers.pooled import forward_pooled
from lambdanets.ops.fused import constant_when_compiling, pool
from lambdanets.ops.fused.norms import is_hooked

STRIDE = 2


class AveragePool(nn.AvgPool2d):
    """`nn.AvgPool2d`, with right gradients on CUDA GPUs too."""

    def forward(self, input: Tensor) -> Tensor:
        # 2x2 windows stand in shortcuts: the compiler adds their gradients to the block's without writing them first.
        compiling = torch.compiler.is_compiling()
        if (self.padding or not compiling) and pool.takes(input) and self.is_halving(input):
            return pool.average_pool(input, 3 if self.padding else STRIDE)
        # torch.compile writes its own kernels (inductor, its default, does).
        if compiling or not input.is_cuda or self.is_safe(input):
            return super().forward(input)
        pooled = super().forward(input.clone(memory_format=torch.contiguous_format))
        # torch.vmap knows no contiguous(memory_format=torch.channels_last).
        return pooled.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)

    def is_safe(self, x_BCHW: Tensor) -> bool:
        """Whether torch's gradients are right on a GPU too."""
        return x_BCHW.ndim != 4 or not self.padding or is_plain(x_BCHW)

    def is_halving(self, x_BCHW: Tensor) -> bool:
        """Whether the kernels compute the same."""
        height, width = x_BCHW.shape[-2:]
        if self.stride != STRIDE or self.divisor_override is not None:
            return False
        if self.kernel_size == STRIDE:
            return not self.padding and height % STRIDE == width % STRIDE == 0
        return self.kernel_size == 3 and self.padding == 1 and self.count_include_pad and not self.ceil_mode


def pool_after(layer: nn.Module, pooling: nn.Module, x_BCHW: Tensor) -> Tensor:
    """pooling(layer(x)); of a lambda layer in one step where kernels can, and nobody watches or changes the two."""
    pooled = None
    if type(layer) is LambdaLayer2d and type(pooling) is AveragePool and type(x_BCHW) is Tensor:
        halves = pooling.padding and pooling.is_halving(x_BCHW) and not is_watched(layer, pooling)
        pooled = forward_pooled(layer, x_BCHW) if halves else None
    return pooling(layer(x_BCHW)) if pooled is None else pooled


def is_watched(*modules: nn.Module) -> bool:
    """Whether somebody wants to know of calls of these modules, or has them compiled by themselves."""
    return has_global_hooks() or any(is_hooked(one) or one._compiled_call_impl is not None for one in modules)


@constant_when_compiling
def has_global_hooks() -> bool:
    """Whether somebody wants to know of calls of all modules, as torch's FlopCounterMode does."""
    return bool(nn.modules.module._has_any_global_hook())


def is_plain(x_BCHW: Tensor) -> bool:
    """Whether torch does not take the images for channels-last ones: with a single channel they may be both."""
    return x_BCHW.is_contiguous() and x_BCHW.stride(1) != 1

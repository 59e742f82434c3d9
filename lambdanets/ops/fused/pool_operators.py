"""Average pooling by half as registered operators: lambdanets::average_pool and lambdanets::average_pool_backward.

Pooling is linear, so each is the other's gradient, as often as anybody differentiates.

Letters: B batch, H x W the map, P x Q the pooled map, C channels.
"""

import torch
from torch import Tensor

from . import pool
from .register import differentiable, directly, operator


def pooled_shape(x_BHWC: Tensor, kernel: int) -> Tensor:
    B, H, W, C = x_BHWC.shape
    return x_BHWC.new_empty(B, pool.pooled_side(H, kernel), pool.pooled_side(W, kernel), C)


def gradient_shape(gradient_BPQC: Tensor, height: int, width: int, kernel: int) -> Tensor:
    return gradient_BPQC.new_empty(gradient_BPQC.shape[0], height, width, gradient_BPQC.shape[3])


average_pool = operator("average_pool", pooled_shape)(pool.forward)
average_pool_backward = operator("average_pool_backward", gradient_shape)(pool.backward)


class AveragePool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BHWC, kernel):
        ctx.sizes = (*x_BHWC.shape[1:3], kernel)
        return directly(average_pool, x_BHWC, kernel)

    @staticmethod
    def backward(ctx, gradient_BPQC):  # pyright: ignore[reportIncompatibleMethodOverride]
        return average_pool_backward(gradient_BPQC, *ctx.sizes), None


class AveragePoolBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient_BPQC, height, width, kernel):
        ctx.kernel = kernel
        return directly(average_pool_backward, gradient_BPQC, height, width, kernel)

    @staticmethod
    def backward(ctx, gradient_BHWC):  # pyright: ignore[reportIncompatibleMethodOverride]
        return average_pool(gradient_BHWC, ctx.kernel), None, None, None


differentiable(average_pool, AveragePool)
differentiable(average_pool_backward, AveragePoolBackward)

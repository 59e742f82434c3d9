"""Average pooling by half as registered operators: lambdanets::average_pool and lambdanets::average_pool_backward.

Pooling is linear, so each is the other's gradient, as often as anybody differentiates.

Letters: B batch, H x W the map, P x Q the pooled map, C channels.
"""

import torch
from torch import Tensor

from . import pooling
from .register import differentiable, directly, operator


def pooled_shape(x_BCHW: Tensor, kernel: int) -> Tensor:
    B, C, H, W = x_BCHW.shape
    return pooling.images(x_BCHW, B, C, pooling.pooled_side(H, kernel), pooling.pooled_side(W, kernel))


def gradient_shape(gradient_BCPQ: Tensor, height: int, width: int, kernel: int) -> Tensor:
    return pooling.images(gradient_BCPQ, *gradient_BCPQ.shape[:2], height, width)


average_pool = operator("average_pool", pooled_shape)(pooling.forward)
average_pool_backward = operator("average_pool_backward", gradient_shape)(pooling.backward)


class AveragePool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BCHW, kernel):
        ctx.sizes = (*x_BCHW.shape[2:], kernel)
        return directly(average_pool, x_BCHW, kernel)

    @staticmethod
    def backward(ctx, gradient_BCPQ):  # pyright: ignore[reportIncompatibleMethodOverride]
        return average_pool_backward(gradient_BCPQ, *ctx.sizes), None


class AveragePoolBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient_BCPQ, height, width, kernel):
        ctx.kernel = kernel
        return directly(average_pool_backward, gradient_BCPQ, height, width, kernel)

    @staticmethod
    def backward(ctx, gradient_BCHW):  # pyright: ignore[reportIncompatibleMethodOverride]
        return average_pool(gradient_BCHW, ctx.kernel), None, None, None


differentiable(average_pool, AveragePool)
differentiable(average_pool_backward, AveragePoolBackward)

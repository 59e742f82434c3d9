"""Batch norm of queries and values as registered operators: lambdanets::normed_parts and normed_parts_backward.

Letters: B batch, N positions, S channels of the projection. `sizes`: channels of queries, values and keys (0: no keys).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from . import norms
from .register import differentiable, directly, operator


def normed_parts_shape(product: Tensor, *others) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sizes = others[-1]
    queries, values, keys = (product.new_empty(*product.shape[:2], size) for size in sizes)
    return queries, values, keys, product.new_empty(2, sizes[0] + sizes[1], dtype=torch.float32)


def normed_parts_backward_shape(dq: Tensor, dv: Tensor, dk: Tensor, *kept) -> tuple[Tensor, ...]:
    return tuple(one.new_empty(one.shape) for one in kept[:5])


STATISTICS = ("mean_q", "mean_v", "var_q", "var_v", "count_q", "count_v")
normed_parts = operator("normed_parts", normed_parts_shape, mutates=STATISTICS)(norms.forward)
normed_parts_backward = operator("normed_parts_backward", normed_parts_backward_shape)(norms.backward)


class NormedParts(torch.autograd.Function):
    """Keeps the projection, the weights, and mean and deviation of each channel."""

    @staticmethod
    def forward(ctx, *inputs):
        *parts, moments = directly(normed_parts, *inputs)
        ctx.save_for_backward(*inputs[:5], moments)
        ctx.eps, ctx.sizes = inputs[-3], inputs[-1]
        ctx.mark_non_differentiable(moments)
        ctx.set_materialize_grads(False)  # there is none of the moments
        return *parts, moments

    @staticmethod
    def backward(ctx, *gradients):
        product, *parameters, moments = ctx.saved_tensors
        gradients = [
            product.new_zeros(*product.shape[:2], size) if one is None else one
            for one, size in zip(gradients, ctx.sizes, strict=False)
        ]
        # create_graph=True, is_grads_batched=True, torch.vmap: by what torch can differentiate again, and in batches
        if torch.is_grad_enabled() or any(map(is_batched, gradients)):
            needs, inputs = ctx.needs_input_grad[:5], [product, *parameters]
            create_graph = torch.is_grad_enabled()
            with torch.enable_grad():
                parts = plain_parts(product, parameters[:2], parameters[2:], ctx.eps, ctx.sizes)
            wanted = [one for one, needed in zip(inputs, needs, strict=True) if needed]
            pairs = [pair for pair in zip(parts, gradients, strict=True) if pair[0].requires_grad]  # others are frozen
            outputs, upstream = zip(*pairs, strict=True)
            again = iter(torch.autograd.grad(outputs, wanted, upstream, create_graph=create_graph))
            found = [next(again) if needed else None for needed in needs]
        else:
            found = directly(normed_parts_backward, *gradients, product, *parameters, moments, ctx.sizes)
        return *found, *(None,) * 9


differentiable(normed_parts, NormedParts)


def is_batched(gradient: Tensor) -> bool:
    kinds = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return kinds.is_batchedtensor(gradient) or kinds.is_legacy_batchedtensor(gradient)


def plain_parts(
    product_BNS: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], eps: Sequence[float], sizes: Sequence[int]
) -> list[Tensor]:
    """What `normed_parts` gives, by torch, without running statistics."""
    parts = list(product_BNS.split(list(sizes), dim=-1))
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        rows_RC = parts[i].flatten(0, 1)
        normed_RC = nn.functional.batch_norm(rows_RC, None, None, weight, bias, training=True, eps=eps[i])
        parts[i] = normed_RC.view_as(parts[i])
    return parts

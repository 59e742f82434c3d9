"""Batch norm of queries and values as a registered operator: lambdanets::normed_parts and its backward.

Letters: B batch, N positions, S channels of the projection. `sizes`: channels of queries, values and keys (0: no keys).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from . import norms
from .register import differentiable, directly, operator


def parts_shape(product_BNS: Tensor, *others) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sizes = others[-1]
    queries, values, keys = (product_BNS.new_empty(*product_BNS.shape[:2], size) for size in sizes)
    return queries, values, keys, product_BNS.new_empty(2, sizes[0] + sizes[1], dtype=torch.float32)


def gradients_shape(dq: Tensor, dv: Tensor, dk: Tensor, *kept) -> tuple[Tensor, ...]:
    """Of all that was kept but the moments and the sizes."""
    return tuple(one.new_empty(one.shape) for one in kept[:-2])


STATISTICS = ("mean_q", "mean_v", "var_q", "var_v", "count_q", "count_v")
normed_parts = operator("normed_parts", parts_shape, mutates=STATISTICS)(norms.forward)
normed_parts_backward = operator("normed_parts_backward", gradients_shape)(norms.backward)


def plain_parts(
    product_BNS: Tensor, weight_q: Tensor, weight_v: Tensor, bias_q: Tensor, bias_v: Tensor, eps: Sequence[float],
    sizes: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """What `normed_parts` returns, computed by torch, without running statistics."""
    parts = list(product_BNS.split(list(sizes), dim=-1))
    for i, (weight, bias) in enumerate(((weight_q, bias_q), (weight_v, bias_v))):
        rows_RC = parts[i].flatten(0, 1)
        normed_RC = nn.functional.batch_norm(rows_RC, None, None, weight, bias, training=True, eps=eps[i])
        parts[i] = normed_RC.view_as(parts[i])
    return parts


class NormedParts(torch.autograd.Function):
    """Saves the projection, weights and biases, and mean and deviation of each channel."""

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
        *inputs, moments = ctx.saved_tensors
        gradients = [
            inputs[0].new_zeros(*inputs[0].shape[:2], size) if one is None else one
            for one, size in zip(gradients, ctx.sizes, strict=False)
        ]
        # create_graph=True, is_grads_batched=True, torch.vmap: by torch, which can differentiate again, in batches
        if torch.is_grad_enabled() or any(map(is_batched, gradients)):
            needs, create_graph = ctx.needs_input_grad[:5], torch.is_grad_enabled()
            with torch.enable_grad():
                parts = plain_parts(*inputs, ctx.eps, ctx.sizes)  # pyright: ignore[reportCallIssue]
            wanted = [one for one, needed in zip(inputs, needs, strict=True) if needed]
            pairs = [pair for pair in zip(parts, gradients, strict=True) if pair[0].requires_grad]  # not frozen
            outputs, upstream = zip(*pairs, strict=True)
            again = iter(torch.autograd.grad(outputs, wanted, upstream, create_graph=create_graph))
            found = [next(again) if needed else None for needed in needs]
        else:
            found = directly(normed_parts_backward, *gradients, *inputs, moments, ctx.sizes)
        return *found, *(None,) * 9


def is_batched(gradient: Tensor) -> bool:
    kinds = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return kinds.is_batchedtensor(gradient) or kinds.is_legacy_batchedtensor(gradient)


differentiable(normed_parts, NormedParts)

"""Batch norm of queries and values as registered operators, each with its backward:

lambdanets::normed_parts      of a projection that holds queries, values and keys
lambdanets::projected_parts   of the projection's input and weights, for narrow layers

Letters: B batch, N positions, C channels, S channels of the projection. `sizes`: channels of queries, values and keys
(0: no keys).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from . import narrow, norms
from .register import differentiable, directly, operator

STATISTICS = ("mean_q", "mean_v", "var_q", "var_v", "count_q", "count_v")


def parts_shape(source_BNX: Tensor, *others) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sizes = others[-1]
    queries, values, keys = (source_BNX.new_empty(*source_BNX.shape[:2], size) for size in sizes)
    return queries, values, keys, source_BNX.new_empty(2, sizes[0] + sizes[1], dtype=torch.float32)


def gradients_shape(dq: Tensor, dv: Tensor, dk: Tensor, *kept) -> tuple[Tensor, ...]:
    """Of all that was kept but the moments and the sizes."""
    return tuple(one.new_empty(one.shape) for one in kept[:-2])


normed_parts = operator("normed_parts", parts_shape, mutates=STATISTICS)(norms.forward)
normed_parts_backward = operator("normed_parts_backward", gradients_shape)(norms.backward)
projected_parts = operator("projected_parts", parts_shape, mutates=STATISTICS)(narrow.forward)
projected_parts_backward = operator("projected_parts_backward", gradients_shape)(narrow.backward)


def plain_parts(
    product_BNS: Tensor, weight_q: Tensor, weight_v: Tensor, bias_q: Tensor, bias_v: Tensor, eps: Sequence[float],
    sizes: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """What `normed_parts` gives, by torch, without running statistics."""
    parts = list(product_BNS.split(list(sizes), dim=-1))
    for i, (weight, bias) in enumerate(((weight_q, bias_q), (weight_v, bias_v))):
        rows_RC = parts[i].flatten(0, 1)
        normed_RC = nn.functional.batch_norm(rows_RC, None, None, weight, bias, training=True, eps=eps[i])
        parts[i] = normed_RC.view_as(parts[i])
    return parts


def plain_projected_parts(inputs_BNC: Tensor, weight: Tensor, *others) -> list[Tensor]:
    return plain_parts(nn.functional.linear(inputs_BNC, weight), *others)


def with_gradients(
    forward: Any, backward: Any, plain: Callable[..., list[Tensor]], count: int
) -> type[torch.autograd.Function]:
    """The operator with its backward. Keeps its first `count` inputs, and mean and deviation of each channel."""

    class Parts(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            *parts, moments = directly(forward, *inputs)
            ctx.save_for_backward(*inputs[:count], moments)
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
            # create_graph=True, is_grads_batched=True, torch.vmap: by what torch can differentiate again, in batches
            if torch.is_grad_enabled() or any(map(is_batched, gradients)):
                needs = ctx.needs_input_grad[:count]
                create_graph = torch.is_grad_enabled()
                with torch.enable_grad():
                    parts = plain(*inputs, ctx.eps, ctx.sizes)
                wanted = [one for one, needed in zip(inputs, needs, strict=True) if needed]
                pairs = [pair for pair in zip(parts, gradients, strict=True) if pair[0].requires_grad]  # not frozen
                outputs, upstream = zip(*pairs, strict=True)
                again = iter(torch.autograd.grad(outputs, wanted, upstream, create_graph=create_graph))
                found = [next(again) if needed else None for needed in needs]
            else:
                found = directly(backward, *gradients, *inputs, moments, ctx.sizes)
            return *found, *(None,) * 9

    differentiable(forward, Parts)
    return Parts


def is_batched(gradient: Tensor) -> bool:
    kinds = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return kinds.is_batchedtensor(gradient) or kinds.is_legacy_batchedtensor(gradient)


NormedParts = with_gradients(normed_parts, normed_parts_backward, plain_parts, count=5)
ProjectedParts = with_gradients(projected_parts, projected_parts_backward, plain_projected_parts, count=6)


@register_flop_formula(torch.ops.lambdanets.projected_parts)
def projection_flops(inputs, weight, *args, **kwargs) -> int:
    return 2 * inputs[0] * inputs[1] * weight[0] * weight[1]


@register_flop_formula(torch.ops.lambdanets.projected_parts_backward)
def projection_gradient_flops(dq, dv, dk, inputs, weight, *args, **kwargs) -> int:
    """Of the input and of the weights; what the kernels make anew is not counted."""
    return 2 * projection_flops(inputs, weight)

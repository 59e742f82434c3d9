"""The lambda operation as a registered operator, for `torch.compile`.

For the compiler it is an opaque call with known shapes. The implementation is chosen at run time, so that a new batch
size or image size does not recompile. Only the inputs are saved for the backward pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lambdanets.ops.positions import Dense, Positions, Relation, Relative
from lambdanets.ops.problem import Options, embeddings_of

GEOMETRY = ("query_grid", "context_grid", "dilation", "stride")
CAUSAL = {"False": False, "True": True, "strict": "strict"}


def lambda_op(
    queries: Tensor, keys: Tensor | None, values: Tensor, positions: Positions | None, options: Options
) -> Tensor:
    """Call `lambdanets.ops.operation.compute` through the operator, which takes only tensors, numbers and strings."""
    geometry = [getattr(positions, name) if isinstance(positions, Relative) else [] for name in GEOMETRY]
    return torch.ops.lambdanets.lambda_op(
        queries,
        keys if options.content else None,
        values,
        embeddings_of(positions),
        positions.index if isinstance(positions, Relation) else None,
        options.mask,
        options.context_mask,
        *geometry,
        options.key_norm or "none",
        options.query_softmax,
        options.multi_head,
        "strict" if options.causal == "strict" else str(bool(options.causal)),
        options.backend,
    )


def _forward(
    queries: Tensor,
    keys: Tensor | None,
    values: Tensor,
    embeddings: Tensor | None,
    index: Tensor | None,
    mask: Tensor | None,
    context_mask: Tensor | None,
    query_grid: Sequence[int],
    context_grid: Sequence[int],
    dilation: Sequence[int],
    stride: Sequence[int],
    key_norm: str,
    query_softmax: bool,
    multi_head: bool,
    causal: str,
    backend: str,
) -> Tensor:
    from lambdanets.ops.operation import compute  # not at the top: circular import

    if embeddings is None:
        positions = None
    elif index is not None:
        positions = Relation(embeddings, index)
    elif query_grid:
        positions = Relative(embeddings, query_grid, context_grid, dilation, stride)
    else:
        positions = Dense(embeddings)
    options = Options(
        content=keys is not None,
        key_norm=None if key_norm == "none" else key_norm,
        query_softmax=query_softmax,
        multi_head=multi_head,
        mask=mask,
        context_mask=context_mask,
        causal=CAUSAL[causal],
        backend=backend,
    )
    return compute(queries, keys, values, positions, options).contiguous()


_lambda_op = torch.library.custom_op("lambdanets::lambda_op", _forward, mutates_args=())


@_lambda_op.register_fake
def _(queries, keys, values, embeddings, index, mask, context_mask, *options):
    multi_head = options[6]
    value_depth = values.shape[3 if multi_head else 2]
    dtype = torch.promote_types(queries.dtype, values.dtype)
    return queries.new_empty((*queries.shape[:3], value_depth), dtype=dtype)


def _backward(grad: Tensor, *arguments: Any) -> list[Tensor]:
    """Run the operation again with autograd, and return the gradients of its inputs."""
    inputs = [None if t is None else t.detach().requires_grad_() for t in arguments[:4]]
    with torch.enable_grad():
        run: Any = torch.compiler.disable(_forward)
        output = run(*inputs, *arguments[4:])
    wanted = [t for t in inputs if t is not None]
    grads = iter(torch.autograd.grad(output, wanted, grad, allow_unused=True))
    results = []
    for tensor in inputs:
        gradient = None if tensor is None else next(grads)
        if gradient is None:  # no such input, or the output does not depend on it
            gradient = grad.new_empty(0) if tensor is None else torch.zeros_like(tensor)
        results.append(gradient.contiguous())
    return results


# Not with `custom_op`, which runs the kernel below autograd: this kernel uses autograd itself.
_NAME = "lambda_op_backward"
_LIBRARY = torch.library.Library("lambdanets", "FRAGMENT")
_ARGUMENTS = torch.library.infer_schema(_forward, mutates_args=()).removeprefix("(").partition(") -> ")[0]
_LIBRARY.define(f"{_NAME}(Tensor grad, {_ARGUMENTS}) -> Tensor[]")
_LIBRARY.impl(_NAME, _backward, "CompositeExplicitAutograd")
_LIBRARY.impl(_NAME, torch.library.fallthrough_kernel, "Autograd")


@torch.library.register_fake("lambdanets::lambda_op_backward")
def _(grad, queries, keys, values, embeddings, *rest):
    return [
        grad.new_empty(0) if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)
        for t in (queries, keys, values, embeddings)
    ]


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.options = inputs[7:]


def _gradients(ctx, grad):
    tensors = ctx.saved_tensors
    grads = torch.ops.lambdanets.lambda_op_backward(grad, *tensors, *ctx.options)
    grads = [None if t is None else g for t, g in zip(tensors[:4], grads, strict=True)]
    return (*grads, *[None] * (3 + len(ctx.options)))


_lambda_op.register_autograd(_gradients, setup_context=_setup_context)

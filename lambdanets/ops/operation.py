"""The lambda operation on tensors, with the choice of the fastest implementation that can run.

Letters: B batch, N queries, M context positions, H heads, K key depth, V value depth, U intra-depth, R relations.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from lambdanets.ops import choose, conv, registered
from lambdanets.ops import triton as fused
from lambdanets.ops.content import add_content, content_output
from lambdanets.ops.positions import Positions
from lambdanets.ops.problem import Options, Problem, check, embeddings_of, problems, with_embeddings
from lambdanets.ops.reference import lambda_reference
from lambdanets.ops.triton import backend as fused_backend
from lambdanets.typed import named

# Hints for argument names of our layers and of functions of torch and NATTEN
REMEDIES = {
    "attn_mask": "use mask",
    "dilation": "use positions=Relative(table, query_grid, dilation=...)",
    "dim_head": "the key depth is the last axis of the queries [B, N, H, K]",
    "embeddings": "use positions, with Dense, Relative or Relation embeddings",
    "enable_gqa": "keys without a head axis are shared by the heads",
    "heads": "the heads are an axis of the queries [B, N, H, K]",
    "input_size": "use positions=Relative(table, query_grid)",
    "intra_depth": "give keys and values a last axis U",
    "is_causal": "use causal",
    "kernel_size": "use positions=Relative(table, query_grid), where the table has the size of the window",
    "key_depth": "the key depth is the last axis of the queries [B, N, H, K]",
    "key_padding_mask": "use context_mask, which is True where there is context",
    "num_heads": "the heads are an axis of the queries [B, N, H, K]",
    "rel_pos": "use positions, with Dense, Relative or Relation embeddings",
    "scale": "lambdas have no scale: multiply the queries",
    "scope": "use positions=Relative(table, query_grid), where the table has the size of the scope",
    "stride": "use positions=Relative(table, query_grid, context_grid, stride=...)",
}


@named(REMEDIES)
def lambda_op(
    queries_BNHK: Tensor,
    keys: Tensor | None,
    values: Tensor,
    positions: Positions | None = None,
    *,
    content: bool = True,
    key_norm: str | None = "softmax",
    query_softmax: bool = False,
    multi_head: bool = False,
    mask: Tensor | None = None,
    context_mask: Tensor | None = None,
    causal: bool | str = False,
    backend: str = "auto",
) -> Tensor:
    """Turn a context into linear functions (lambdas) and apply them to queries.

    Half-precision inputs are accumulated in float32; the result has the dtype of queries and values.

    Args:
        queries_BNHK: the queries. The heads are separate queries for the same lambda (unless `multi_head`).
        keys: raw keys, before their normalisation; may be None if `content` is False.
        values: the values. The optional last axis U (intra-depth) is summed over.
        positions: position embeddings as `Dense`, `Relative` or `Relation`, or None for no position interactions.
        content: use content interactions. They always cover the whole allowed context.
        key_norm: normalisation of the keys over the context positions: "softmax", "l2" or None.
        query_softmax: apply a softmax over the depth K of the queries.
        multi_head: keys, values and embeddings have a head axis.
        mask: bool, True where query n may use context position m; shared by the batch.
        context_mask: bool, True at context and False at padding.
        causal: True (m <= n) or "strict" (m < n) in row-major order. An empty context gives 0.
        backend: "auto", "reference", "gemm", "conv", "depthwise", "dft", "fft" or "fused". The backend computes the
            position part, some also the content part; without positions all are equivalent.

    Shape:
        queries_BNHK: `[B, N, H, K]`
        keys: `[B, M, K(, U)]`, with `multi_head` `[B, M, H, K(, U)]`
        values: `[B, M, V(, U)]`, with `multi_head` `[B, M, H, V(, U)]`
        mask: `[N, M]`
        context_mask: `[B, M]`
        Output: `[B, N, H, V]`

    Raises:
        TypeError: if an input is not a tensor or has an unsupported dtype.
        ValueError: if shapes or options do not match, or the backend cannot run; the message has the reason.

    Example:
        >>> import torch
        >>> from lambdanets.ops import Relative, lambda_op
        >>> queries = torch.randn(2, 8 * 8, 4, 16)  # 4 heads
        >>> keys, values = torch.randn(2, 8 * 8, 16), torch.randn(2, 8 * 8, 32)
        >>> table = torch.randn(7, 7, 16)  # scope 7x7
        >>> lambda_op(queries, keys, values, Relative(table, (8, 8))).shape
        torch.Size([2, 64, 4, 32])
    """
    options = Options(content, key_norm, query_softmax, multi_head, mask, context_mask, causal, backend)
    return apply_lambdas(queries_BNHK, keys, values, positions, options)


def apply_lambdas(
    queries: Tensor, keys: Tensor | None, values: Tensor, positions: Positions | None, options: Options
) -> Tensor:
    """Apply `lambda_op` with its keyword arguments as one value."""
    check(queries, keys, values, positions, options)
    # Not `is_compiling() and not is_exporting()`: in torch 2.11 both are True under torch.compile.
    if torch.compiler.is_dynamo_compiling():
        if options.backend not in ("auto", "fused") or not runs_fused(queries, keys, values, positions, options):
            # An opaque operator: the backend is chosen at run time, with concrete sizes, so that no size recompiles.
            return registered.lambda_op(queries, keys, values, positions, options)
        # The fused operators accept all sizes, and the compiler can fuse the operations around them.
        options = replace(options, backend="fused")
    elif torch._C._get_tracing_state() is not None:  # sizes are tensors during tracing
        raise RuntimeError(
            "torch.jit.trace cannot trace lambda_op: use torch.compile, torch.export or `lambdanets export`"
        )
    return compute(queries, keys, values, positions, options)


def compute(
    queries: Tensor, keys: Tensor | None, values: Tensor, positions: Positions | None, options: Options
) -> Tensor:
    """Compute the operation on checked inputs; differentiable by autograd."""
    if not options.content:
        keys = None
    dtype = accumulation_dtype(queries, keys, values, embeddings_of(positions))
    result_dtype = torch.promote_types(queries.dtype, values.dtype)
    with without_autocast(queries.device.type):  # float32 accumulation must stay float32
        if options.query_softmax:
            queries = queries.softmax(dim=-1, dtype=dtype).to(queries.dtype)
        if options.backend == "reference":
            embeddings = embeddings_of(positions)
            result = lambda_reference(
                queries.to(dtype),
                None if keys is None else keys.to(dtype),
                values.to(dtype),
                with_embeddings(positions, None if embeddings is None else embeddings.to(dtype)),
                content=options.content,
                key_norm=options.key_norm,
                multi_head=options.multi_head,
                mask=options.mask,
                context_mask=options.context_mask,
                causal=options.causal,
            )
        else:
            parts = problems(queries, keys, values, positions, options)
            outputs = [multi_query(part, options.backend, dtype) for part in parts]
            result = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return result.to(result_dtype)


def runs_fused(
    queries: Tensor, keys: Tensor | None, values: Tensor, positions: Positions | None, options: Options
) -> bool:
    """Return whether the fused kernels can run this on a GPU, where they are chosen for all sizes."""
    if queries.device.type == "cpu" and not fused.interpreted():
        return False
    return all(fused_backend.why_not(part) is None for part in problems(queries, keys, values, positions, options))


def multi_query(problem: Problem, backend: str, dtype: torch.dtype) -> Tensor:
    """Return the sum of content and position output of a multi-query problem, accumulated in `dtype`: [B, N, H, V]."""
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():  # export needs a fixed choice
        chosen = choose.BACKENDS["gemm" if conv.why_not(problem) else "conv"]
    else:
        chosen = choose.choose(problem, backend)
        if len(problem.queries_BNHK) == 0:  # an empty batch, which gemm supports
            chosen = choose.BACKENDS["gemm"]
    if chosen.whole_output is not None and problem.positions is not None:
        whole = chosen.whole_output(problem, dtype)
        if whole is not None:
            return whole
    problem = problem.to(dtype)
    if problem.keys_BMKU is None:
        return chosen.position_output(problem)
    if problem.positions is None:
        return content_output(problem)
    position = chosen.position_output(problem)
    return add_content(position, problem) if problem.may_overwrite else position + content_output(problem)


def without_autocast(device_type: str) -> AbstractContextManager:
    """Return a context manager that disables autocast."""
    if device_type == "meta":  # has no autocast
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def accumulation_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Return the dtype in which to accumulate: the promoted dtype of the inputs, at least float32.

    At the paper's initialisation the position part is hundreds of times larger than the content part, so half precision
    would lose the content part or overflow.
    """
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def explain(
    queries_BNHK: Tensor,
    keys: Tensor | None,
    values: Tensor,
    positions: Positions | None = None,
    *,
    content: bool = True,
    key_norm: str | None = "softmax",
    multi_head: bool = False,
    mask: Tensor | None = None,
    context_mask: Tensor | None = None,
    causal: bool | str = False,
) -> dict[str, str | float]:
    """Return the predicted seconds of each backend, fastest first, or the reason why it cannot run.

    The constants of the prediction were measured on a CPU. On a GPU only the order is meaningful: `fused` comes first,
    with 0 seconds, if it can run; the others have the order of a CPU.

    Args:
        queries_BNHK, keys, values, positions: the inputs, as for `lambda_op`.
        content, key_norm, multi_head, mask, context_mask, causal: the options, as for `lambda_op`.

    Returns:
        A dictionary from the name of a backend to the predicted seconds (float) or the reason (str).

    Example:
        >>> import torch
        >>> from lambdanets.ops import Relative, explain
        >>> queries, values = torch.randn(2, 100, 4, 16), torch.randn(2, 100, 32)
        >>> positions = Relative(torch.randn(7, 16), query_grid=100)  # a sequence
        >>> for backend, found in explain(queries, None, values, positions, content=False).items():
        ...     print(backend, found)  # doctest: +ELLIPSIS
        gemm 0.00...
        dft it supports 2-d maps only, got 1-d
        fused the fused kernels need a CUDA GPU ...
    """
    options = Options(content, key_norm, False, multi_head, mask, context_mask, causal)
    return predict(queries_BNHK, keys, values, positions, options)


def predict(
    queries: Tensor, keys: Tensor | None, values: Tensor, positions: Positions | None, options: Options
) -> dict[str, str | float]:
    """Return the result of `explain` with its keyword arguments as one value."""
    check(queries, keys, values, positions, options)
    return choose.reasons(problems(queries, keys, values, positions, options)[0])

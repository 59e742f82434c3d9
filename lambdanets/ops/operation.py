"""`lambda_op`: the lambda operation on tensors, by the fastest implementation that can run.

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

# Arguments of layers and of torch's and NATTEN's functions
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
    """Turn a context into linear functions (lambdas) and apply them to queries: returns [B, N, H, V].

    Args:
        queries_BNHK: the queries; every head is one more query for the same lambda.
        keys: raw keys [B, M, K(, U)]; multi_head: [B, M, H, K(, U)]. May be None if `content` is False.
        values: [B, M, V(, U)]; multi_head: [B, M, H, V(, U)]. The last axis U (intra-depth) is summed over.
        positions: None, or `Dense`, `Relative` or `Relation` embeddings.
        content: whether content lambdas take part. They always see the whole allowed context.
        key_norm: how keys are normalised over the context positions: "softmax", "l2" or None.
        query_softmax: whether queries go through a softmax over their depth K.
        multi_head: whether keys, values and embeddings have heads of their own.
        mask: bool [N, M], True where query n may look at context m; shared by the batch.
        context_mask: bool [B, M], True where an example has context and False where it has padding.
        causal: True: m <= n; "strict": m < n, in row-major order. An empty context gives 0.
        backend: "auto", or one of "reference", "gemm", "conv", "depthwise", "dft", "fft", "fused"; one that cannot
            run says why. It computes the position part, and some of them the content part with it; without positions
            all are the same.

    Half-precision inputs are summed in float32; the result has the dtype of queries and values.
    """
    options = Options(content, key_norm, query_softmax, multi_head, mask, context_mask, causal, backend)
    return apply_lambdas(queries_BNHK, keys, values, positions, options)


def apply_lambdas(
    queries: Tensor, keys: Tensor | None, values: Tensor, positions: Positions | None, options: Options
) -> Tensor:
    """`lambda_op` with its keyword arguments as one value."""
    check(queries, keys, values, positions, options)
    # (Not `is_compiling() and not is_exporting()`: in torch 2.11 both hold under torch.compile.)
    if torch.compiler.is_dynamo_compiling():
        if options.backend not in ("auto", "fused") or not runs_fused(queries, keys, values, positions, options):
            # An opaque operator: the choice is made when it runs, with real sizes, so that no size recompiles.
            return registered.lambda_op(queries, keys, values, positions, options)
        # Operators of their own for every size; what stands around them is fused by the compiler.
        options = replace(options, backend="fused")
    elif torch._C._get_tracing_state() is not None:  # sizes are tensors there
        raise RuntimeError(
            "torch.jit.trace cannot follow lambdas: use torch.compile, torch.export or `lambdanets export`"
        )
    return compute(queries, keys, values, positions, options)


def compute(
    queries: Tensor, keys: Tensor | None, values: Tensor, positions: Positions | None, options: Options
) -> Tensor:
    """The operation on inputs that were checked; differentiable by autograd."""
    if not options.content:
        keys = None
    dtype = accumulation_dtype(queries, keys, values, embeddings_of(positions))
    result_dtype = torch.promote_types(queries.dtype, values.dtype)
    with without_autocast(queries.device.type):  # what is raised to float32 must stay there
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
    """Whether the fused kernels take this on a GPU, where they are always chosen, whatever the sizes."""
    if queries.device.type == "cpu" and not fused.interpreted():
        return False
    return all(fused_backend.why_not(part) is None for part in problems(queries, keys, values, positions, options))


def multi_query(problem: Problem, backend: str, dtype: torch.dtype) -> Tensor:
    """Content plus position output of one multi-query problem, summed in `dtype`: [B, N, H, V]."""
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():  # a fixed rule in plain torch
        chosen = choose.BACKENDS["gemm" if conv.why_not(problem) else "conv"]
    else:
        chosen = choose.choose(problem, backend)
        if len(problem.queries_BNHK) == 0:  # nothing to compute, and the plainest product has no trouble with it
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
    if device_type == "meta":  # it has no autocast to switch off
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def accumulation_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float32 for half-precision inputs: at the paper's initialisation the position part is hundreds of times
    larger than the content part, and half precision loses one or overflows with the other."""
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

    The constants of the prediction were measured on a CPU. On a GPU only the order means something: `fused` is first,
    with 0 seconds, where it can run, and the order of the others is that on a CPU.
    """
    options = Options(content, key_norm, False, multi_head, mask, context_mask, causal)
    return predict(queries_BNHK, keys, values, positions, options)


def predict(
    queries: Tensor, keys: Tensor | None, values: Tensor, positions: Positions | None, options: Options
) -> dict[str, str | float]:
    """`explain` with its keyword arguments as one value."""
    check(queries, keys, values, positions, options)
    return choose.reasons(problems(queries, keys, values, positions, options)[0])

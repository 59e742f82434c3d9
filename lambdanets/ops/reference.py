"""The equations of the paper as einsums: the reference that all other implementations are tested against.

    b: batch, n: queries, m: context positions, k: query/key depth, v: value depth, h: heads, u: intra-depth

    lambda_n = sum_m (normalised key_m + embedding_nm) value_m^T         (Equation 1)
    y_n      = lambda_n^T query_n                                        (Equation 2)

It has no optimisations, supports any floating-point dtype and is differentiable by autograd. It corrects these errors
of the paper's listings:

- The masked listing applies keys that are normalised over the whole context, although its comment says that they
  should be normalised over each query's own context. We follow the comment.
- The masked listing multiplies an undefined `content_lambda`; it means `content_lambdas`, one for each query.
- The intra-depth listing passes an undefined `lambda_conv`; it means `impl`.
- In the multi-head listing the position output must be 'bhnk,bnhkv->bnhv': the head axis of the lambdas is missing.
- In the multi-head complexity table the terms knm and hknm are swapped.
- "The columns of lambda" are its rows: |k| contextual features of depth |v|.
"""

import torch
from torch import Tensor, einsum

from lambdanets.ops.positions import Dense, Positions, Relation, Relative, gather_relations

L2_EPSILON = 1e-12  # lower bound of the norm: keys that are all zero stay zero


def lambda_reference(
    queries: Tensor,
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
) -> Tensor:
    """Compute the lambda operation with the einsums of the paper.

    It is slow, but easy to compare with the paper. Inputs are not checked, and nothing is promoted to float32.

    Args:
        queries, keys, values, positions: the inputs, as for `lambda_op`.
        content, key_norm, query_softmax, multi_head, mask, context_mask, causal: the options, as for `lambda_op`.

    Shape:
        Output: `[B, N, H, V]`

    Example:
        >>> import torch
        >>> from lambdanets.ops import Relative, lambda_op, lambda_reference
        >>> queries, keys, values = torch.randn(2, 64, 4, 16), torch.randn(2, 64, 16), torch.randn(2, 64, 32)
        >>> positions = Relative(torch.randn(7, 7, 16), (8, 8))
        >>> expected = lambda_reference(queries, keys, values, positions)
        >>> torch.allclose(lambda_op(queries, keys, values, positions), expected, atol=1e-3)
        True
    """
    h = "h" if multi_head else ""
    if values.ndim == (4 if multi_head else 3):  # no intra-depth: u = 1
        values = values[..., None]
        keys = None if keys is None else keys[..., None]
        embeddings = None if positions is None else embed(positions)[..., None]
    else:
        embeddings = None if positions is None else embed(positions)
    if query_softmax:
        queries = queries.softmax(dim=-1)

    allowed_bnm = allowed_context(queries, values, positions, mask, context_mask, causal)
    if context_mask is not None:  # padding may contain NaN, which must not reach a sum
        padding = ~context_mask.view(*context_mask.shape, *[1] * (values.ndim - 2))
        values = values.masked_fill(padding, 0)
        keys = None if keys is None else keys.masked_fill(padding, 0)

    output = queries.new_zeros(*queries.shape[:3], values.shape[-2])
    if content and keys is not None:
        if allowed_bnm is None:  # one content lambda for all queries
            normalised = normalise(keys, key_norm)
            content_lambda = einsum(f"bm{h}ku,bm{h}vu->b{h}kv", normalised, values)
            output = output + einsum(f"bnhk,b{h}kv->bnhv", queries, content_lambda)
        else:  # a content lambda for each query, from keys normalised over that query's context
            normalised = normalise_masked(keys, allowed_bnm, key_norm)
            content_lambdas = einsum(f"bnm{h}ku,bm{h}vu->bn{h}kv", normalised, values)
            output = output + einsum(f"bnhk,bn{h}kv->bnhv", queries, content_lambdas)
    if embeddings is not None:
        if allowed_bnm is None:
            position_lambdas = einsum(f"nm{h}ku,bm{h}vu->bn{h}kv", embeddings, values)
        else:
            blocked = allowed_bnm.to(values.dtype)
            position_lambdas = einsum(f"bnm,nm{h}ku,bm{h}vu->bn{h}kv", blocked, embeddings, values)
        output = output + einsum(f"bnhk,bn{h}kv->bnhv", queries, position_lambdas)
    return output


def normalise(keys_bmku: Tensor, key_norm: str | None) -> Tensor:
    """Normalise the keys over the context positions (axis m): the paper's softmax, or its ablations."""
    if key_norm == "softmax":
        return keys_bmku.softmax(dim=1)
    if key_norm == "l2":
        return keys_bmku / keys_bmku.norm(dim=1, keepdim=True).clamp(min=L2_EPSILON)
    return keys_bmku


def normalise_masked(keys_bmku: Tensor, allowed_bnm: Tensor, key_norm: str | None) -> Tensor:
    """Normalise the keys over each query's own context: [b, n, m, (h,) k, u], zero outside it."""
    keys = keys_bmku[:, None]  # [b, 1, m, (h,) k, u]
    allowed = allowed_bnm.view(*allowed_bnm.shape, *[1] * (keys.ndim - 3))
    if key_norm == "softmax":
        logits = keys.masked_fill(~allowed, -torch.inf)
        largest = logits.detach().amax(dim=2, keepdim=True)  # one per query: a global maximum underflows to 0/0
        weights = (logits - largest.masked_fill(largest == -torch.inf, 0)).exp()
        total = weights.sum(dim=2, keepdim=True)
        return weights / total.masked_fill(total == 0, 1)  # an empty context gives 0, never NaN
    kept = keys * allowed
    if key_norm == "l2":
        return kept / kept.norm(dim=2, keepdim=True).clamp(min=L2_EPSILON)
    return kept


def allowed_context(
    queries: Tensor,
    values: Tensor,
    positions: Positions | None,
    mask_nm: Tensor | None,
    context_mask_bm: Tensor | None,
    causal: bool | str,
) -> Tensor | None:
    """Return which context positions each query may use, [b, n, m]; None if there is no restriction."""
    if mask_nm is None and context_mask_bm is None and not causal:
        return None
    batch, n, m = queries.shape[0], queries.shape[1], values.shape[1]
    allowed = torch.ones(batch, n, m, dtype=torch.bool, device=queries.device)
    if mask_nm is not None:
        allowed = allowed & mask_nm
    if context_mask_bm is not None:
        allowed = allowed & context_mask_bm[:, None, :]
    if causal:
        allowed = allowed & causal_mask(n, m, positions, strict=causal == "strict", device=queries.device)
    return allowed


def causal_mask(n: int, m: int, positions: Positions | None, strict: bool, device: torch.device) -> Tensor:
    """Return a mask [n, m]: True where m comes before n in row-major order, or (unless strict) at the same position."""
    if isinstance(positions, Relative):
        query, context = coordinates(positions, device)
    else:
        query = torch.arange(n, device=device)[:, None]
        context = torch.arange(m, device=device)[:, None]
    before = torch.zeros(n, m, dtype=torch.bool, device=device)
    equal = torch.ones(n, m, dtype=torch.bool, device=device)
    for axis in range(query.shape[1]):  # row-major order is the lexicographic order of coordinates
        q, c = query[:, None, axis], context[None, :, axis]
        before = before | (equal & (c < q))
        equal = equal & (c == q)
    return before if strict else before | equal


def coordinates(positions: Relative, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the coordinates of queries [n, dims] and of context positions [m, dims], in units of the context grid."""

    def grid(sizes: tuple[int, ...], steps: tuple[int, ...]) -> Tensor:
        ranges = [torch.arange(s, device=device) * step for s, step in zip(sizes, steps, strict=True)]
        return torch.stack(torch.meshgrid(*ranges, indexing="ij"), dim=-1).flatten(0, -2)

    return grid(positions.query_grid, positions.stride), grid(positions.context_grid, (1,) * positions.dims)


def embed(positions: Positions) -> Tensor:
    """Return the embeddings e_nm of all pairs, [n, m, (h,) k(, u)]; zero for pairs outside the scope."""
    if isinstance(positions, Dense):
        return positions.embeddings
    if isinstance(positions, Relation):
        return gather_relations(positions)
    query, context = coordinates(positions, positions.table.device)
    index = torch.zeros(len(query), len(context), dtype=torch.long, device=query.device)
    inside = torch.ones_like(index, dtype=torch.bool)
    for axis, (scope, dilation) in enumerate(zip(positions.scope, positions.dilation, strict=True)):
        relative = context[None, :, axis] - query[:, None, axis]  # m - n
        entry = relative // dilation + (scope - 1) // 2
        inside &= (relative % dilation == 0) & (entry >= 0) & (entry < scope)
        index = index * scope + entry.clamp(0, scope - 1)
    table = positions.table.flatten(0, positions.dims - 1)
    embeddings = table[index.flatten()].view(*index.shape, *table.shape[1:])
    return embeddings * inside.view(*inside.shape, *[1] * (table.ndim - 1))

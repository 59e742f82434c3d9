"""Content lambdas, which do not depend on positions. All plain-torch implementations share this code.

Letters: B batch, N queries, M context positions, H heads, K key depth, V value depth, U intra-depth, L chunk.

Without a mask all queries share one content lambda. With a mask each query has its own lambda and its own normaliser;
contracting the depth first, (q . key) value, then avoids storing the lambdas.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lambdanets.ops.positions import Relative
from lambdanets.ops.problem import Problem
from lambdanets.ops.recompute import recomputed
from lambdanets.ops.reference import L2_EPSILON, causal_mask, normalise

CAUSAL_CHUNK = 32  # positions per step of the running sum
FACTORED_SPAN = 30.0  # largest difference of maxima that are replaced by one: exp(-30) does not underflow in float32
MASKED_WEIGHTS = 2**22  # maximum elements [B, n, M, K, U] that the masked path holds at a time (at least one query's)


def content_output(problem: Problem) -> Tensor:
    """Return the content output, the sum over m of (query . normalised key_m) value_m: [B, N, H, V]."""
    queries_BNHK, keys_BMKU, values_BMVU = problem.queries_BNHK, problem.keys_BMKU, problem.values_BMVU
    assert keys_BMKU is not None
    if shares_content(problem):
        return apply_shared(queries_BNHK, content_lambda(problem))
    exporting = torch.compiler.is_exporting()  # a loop would fix the length in the exported program
    if problem.mask_NM is None and runs_in_step(problem) and not exporting:
        state = RunningContent.start(keys_BMKU, values_BMVU)
        return running_output(
            queries_BNHK, keys_BMKU, values_BMVU, state, problem.key_norm, problem.strict, problem.context_mask_BM
        )[0]
    return masked_output(problem)


def add_content(output_BNHV: Tensor, problem: Problem) -> Tensor:
    """Add the content output to an output, in place."""
    if not shares_content(problem) or not output_BNHV.is_contiguous():
        return output_BNHV.add_(content_output(problem))
    output_BYV = output_BNHV.flatten(1, 2)  # `out=` because torch's FLOP counter does not support baddbmm_
    torch.baddbmm(output_BYV, problem.queries_BNHK.flatten(1, 2), content_lambda(problem), out=output_BYV)
    return output_BNHV


def shares_content(problem: Problem) -> bool:
    """Return whether all queries of an example share one content lambda."""
    return problem.mask_NM is None and not problem.causal


def content_lambda(problem: Problem) -> Tensor:
    """Return the content lambda that all queries of an example share: [B, K, V]."""
    values = problem.values_BMVU
    # After the normalisation of the keys, intra-depth is equivalent to a longer context: sum over (m, u).
    keys_BKC = normalised_keys(problem).transpose(1, 2).flatten(2)
    values_BCV = values.transpose(2, 3).flatten(1, 2)
    return keys_BKC @ values_BCV


def normalised_keys(problem: Problem) -> Tensor:
    """Return the keys, normalised over the whole context of an example, [B, M, K, U], in the dtype of the values."""
    keys = problem.keys_BMKU
    assert keys is not None
    if problem.context_mask_BM is not None and problem.key_norm == "softmax":
        # The lowest finite number keeps fully masked rows finite; their values are zero.
        padding = ~problem.context_mask_BM[:, :, None, None]
        keys = keys.masked_fill(padding, torch.finfo(keys.dtype).min)
    return normalise(keys, problem.key_norm).to(problem.values_BMVU.dtype)


def apply_shared(queries_BNHK: Tensor, lambda_BKV: Tensor) -> Tensor:
    """Apply one lambda per example to all its queries: [B, N, H, V]."""
    B, N, H, K = queries_BNHK.shape
    return (queries_BNHK.reshape(B, N * H, K) @ lambda_BKV).view(B, N, H, lambda_BKV.shape[2])


def runs_in_step(problem: Problem) -> bool:
    """Return whether query n is at context position n, so that causal contexts grow by one element per query."""
    positions = problem.positions
    if isinstance(positions, Relative):
        return set(positions.stride) == {1} and tuple(positions.query_grid) == tuple(positions.context_grid)
    return True  # check() requires N == M


def masked_output(problem: Problem) -> Tensor:
    """Return the content output for any mask, in chunks of queries with weights [B, n, M, K, U]."""
    B, N, M, _, K, _, U = problem.sizes
    keys, values = problem.keys_BMKU, problem.values_BMVU
    assert keys is not None
    allowed_NM = torch.ones(N, M, dtype=torch.bool, device=problem.device)
    if problem.mask_NM is not None:
        allowed_NM = allowed_NM & problem.mask_NM
    if problem.causal:
        allowed_NM = allowed_NM & causal_mask(N, M, problem.positions, problem.strict, problem.device)
    allowed_BNM = allowed_NM.expand(B, -1, -1)
    if problem.context_mask_BM is not None:
        allowed_BNM = allowed_BNM & problem.context_mask_BM[:, None]
    chunk = N if torch.compiler.is_exporting() else max(1, MASKED_WEIGHTS // max(1, B * M * K * U))
    if chunk >= N:
        return masked_chunk(problem.queries_BNHK, keys, values, allowed_BNM, problem.key_norm)
    parts = zip(problem.queries_BNHK.split(chunk, dim=1), allowed_BNM.split(chunk, dim=1), strict=True)
    return torch.cat([recomputed(masked_chunk, q, keys, values, allowed, problem.key_norm) for q, allowed in parts], 1)


def masked_chunk(
    queries_BNHK: Tensor, keys_BMKU: Tensor, values_BMVU: Tensor, allowed_BNM: Tensor, key_norm: str | None
) -> Tensor:
    """Return the content output of a chunk of queries, each with its own context: [B, n, H, V]."""
    weights, _ = interaction_weights(keys_BMKU, allowed_BNM, key_norm, None)
    return weighted(queries_BNHK, weights, values_BMVU)


def weighted(queries_BNHK: Tensor, weights_BNMKU: Tensor, values_BMVU: Tensor) -> Tensor:
    """Contract the depth first, to attention maps [B, N, H, M, U], then the values: [B, N, H, V]."""
    B, N, H, _ = queries_BNHK.shape
    maps = torch.einsum("bnhk,bnmku->bnhmu", queries_BNHK, weights_BNMKU)
    values_BCV = values_BMVU.transpose(2, 3).flatten(1, 2)
    _, C, V = values_BCV.shape
    return (maps.reshape(B, N * H, C) @ values_BCV).view(B, N, H, V)


def interaction_weights(
    keys_BMKU: Tensor, allowed_BNM: Tensor, key_norm: str | None, state: "RunningContent | None"
) -> tuple[Tensor, Tensor | None]:
    """Return the keys normalised over each query's own context, [B, N, M, K, U], and the weight of the sums in `state`.

    The weight, [B, N, K, U], is None without a state. An empty context gives zeros.
    """
    allowed = allowed_BNM[..., None, None]
    if key_norm == "softmax":
        logits = keys_BMKU[:, None].masked_fill(~allowed, -torch.inf)
        largest = logits.detach().amax(dim=2)  # [B, N, K, U]; the maximum cancels, so no gradient is lost
        if state is not None:
            largest = torch.maximum(largest, state.largest[:, None])
        largest = largest.masked_fill(largest == -torch.inf, 0)
        weights = (logits - largest[:, :, None]).exp()
        total = weights.sum(dim=2)
        before = None
        if state is not None:
            before = (state.largest[:, None] - largest).exp()
            total = total + before * state.total[:, None]
        divisor = total.masked_fill(total == 0, 1)
        return weights / divisor[:, :, None], None if before is None else before / divisor
    weights = keys_BMKU[:, None] * allowed
    if key_norm is None:
        return weights, None if state is None else torch.ones_like(weights[:, :, 0])
    if state is None:
        return weights / weights.norm(dim=2, keepdim=True).clamp(min=L2_EPSILON), None
    earlier = state.total[:, None, None].expand(-1, weights.shape[1], -1, -1, -1)  # norms, not squares
    divisor = torch.cat([weights, earlier], dim=2).norm(dim=2).clamp(min=L2_EPSILON)
    return weights / divisor[:, :, None], 1 / divisor


@dataclass(frozen=True)
class RunningContent:
    """The content lambda of a growing causal context, in memory that does not grow.

    Attributes:
        largest: the maximum of the keys so far, for the softmax.
        total: the normaliser: the sum of exp(key - largest) for the softmax, the norm of the keys for "l2".
        sums: the weighted sum of the values. The normaliser depends on (k, u), so the sum over u comes after the
            division.

    Shape:
        largest: `[B, K, U]`
        total: `[B, K, U]`
        sums: `[B, K, V, U]`
    """

    largest: Tensor
    total: Tensor
    sums: Tensor

    @classmethod
    def start(cls, keys_BMKU: Tensor, values_BMVU: Tensor) -> "RunningContent":
        """Return the state of an empty context, with the sizes of these keys and values."""
        B, _, K, U = keys_BMKU.shape
        V = values_BMVU.shape[2]
        return cls(
            keys_BMKU.new_full((B, K, U), -torch.inf), keys_BMKU.new_zeros(B, K, U), keys_BMKU.new_zeros(B, K, V, U)
        )

    def content_lambda(self, key_norm: str | None) -> Tensor:
        """Return the content lambda of the context so far, [B, K, V]; zeros if the context is empty."""
        if key_norm is None:
            return self.sums.sum(dim=3)
        divisor = self.total.clamp(min=L2_EPSILON)  # no effect for the softmax, whose total is at least 1
        return (self.sums / divisor[:, :, None]).sum(dim=3)

    def add(
        self, keys_BLKU: Tensor, values_BLVU: Tensor, key_norm: str | None, context_mask_BL: Tensor | None
    ) -> "RunningContent":
        """Return the state of the context with L more elements."""
        if key_norm != "softmax":  # masked keys and values are zeros already
            norm = torch.cat([self.total[:, None], keys_BLKU], dim=1).norm(dim=1) if key_norm == "l2" else self.total
            sums = self.sums + torch.einsum("blku,blvu->bkvu", keys_BLKU, values_BLVU)
            return RunningContent(self.largest, norm, sums)
        if context_mask_BL is not None:
            keys_BLKU = keys_BLKU.masked_fill(~context_mask_BL[..., None, None], -torch.inf)
        largest = torch.maximum(self.largest, keys_BLKU.detach().amax(dim=1))
        base = largest.masked_fill(largest == -torch.inf, 0)
        fade = (self.largest - base).exp()
        weights = (keys_BLKU - base[:, None]).exp()
        return RunningContent(
            largest,
            self.total * fade + weights.sum(dim=1),
            self.sums * fade[:, :, None] + torch.einsum("blku,blvu->bkvu", weights, values_BLVU),
        )


def running_output(
    queries_BNHK: Tensor,
    keys_BNKU: Tensor,
    values_BNVU: Tensor,
    state: RunningContent,
    key_norm: str | None,
    strict: bool,
    context_mask_BN: Tensor | None = None,
) -> tuple[Tensor, RunningContent]:
    """Compute causal content by a running sum with a running maximum.

    Returns:
        The outputs [B, N, H, V] and the state after the last query.
    """
    B, N, H, _ = queries_BNHK.shape
    order = torch.ones(CAUSAL_CHUNK, CAUSAL_CHUNK, dtype=torch.bool, device=queries_BNHK.device)
    order = order.tril(-1 if strict else 0)  # [query, context]
    outputs = []
    for start in range(0, N, CAUSAL_CHUNK):
        chunk = slice(start, start + CAUSAL_CHUNK)
        queries, keys, values = queries_BNHK[:, chunk], keys_BNKU[:, chunk], values_BNVU[:, chunk]
        mask = None if context_mask_BN is None else context_mask_BN[:, chunk]
        length = keys.shape[1]
        allowed = order[:length, :length].expand(B, -1, -1)
        if mask is not None:
            allowed = allowed & mask[:, None]
        after = state.add(keys, values, key_norm, mask)
        if key_norm == "softmax" and mask is None and spans_little(keys, state, after, strict):
            outputs.append(factored_output(queries, keys, values, state, after, order[:length, :length]))
        else:
            weights, before = interaction_weights(keys, allowed, key_norm, state)
            assert before is not None
            earlier = torch.einsum("bnhk,bnku,bkvu->bnhv", queries, before, state.sums)
            outputs.append(weighted(queries, weights, values) + earlier)
        state = after
    if not outputs:
        return queries_BNHK.new_zeros(B, 0, H, values_BNVU.shape[2]), state
    return torch.cat(outputs, dim=1), state


def spans_little(keys_BLKU: Tensor, state: RunningContent, after: RunningContent, strict: bool) -> bool:
    """Return whether one maximum can serve all queries of a chunk without underflow.

    Only on a CPU: elsewhere reading the values would synchronise or is impossible.
    """
    if keys_BLKU.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    least = torch.maximum(state.largest, keys_BLKU[:, 0].detach())  # the smallest maximum of a single query
    if strict:
        least = torch.where(state.largest == -torch.inf, least, state.largest)
    try:
        return bool((after.largest - least).amax() <= FACTORED_SPAN)  # False also if keys are not finite
    except RuntimeError:  # tensors without values: torch.func.vmap, fake tensors
        return False


def factored_output(
    queries_BLHK: Tensor,
    keys_BLKU: Tensor,
    values_BLVU: Tensor,
    state: RunningContent,
    after: RunningContent,
    order_LL: Tensor,
) -> Tensor:
    """Return the output of a chunk with one maximum for all its queries: [B, L, H, V].

    exp(key_m - largest_n) / total_n equals exp(key_m - largest) times a factor of n, which is moved into the query. So
    no weights of size [query, context, K, U] are needed.
    """
    weights_BLKU = (keys_BLKU - after.largest[:, None]).exp()
    fade_BKU = (state.largest - after.largest).exp()
    total_BLKU = weights_BLKU.cumsum(dim=1)
    if not order_LL[0, 0]:  # strict: exclude the query's own position
        total_BLKU = nn.functional.pad(total_BLKU[:, :-1], (0, 0, 0, 0, 1, 0))
    total_BLKU = total_BLKU + (state.total * fade_BKU)[:, None]
    divisor_BLKU = total_BLKU.masked_fill(total_BLKU == 0, 1)
    scaled_BLHKU = queries_BLHK[..., None] / divisor_BLKU[:, :, None]
    maps_BLHMU = torch.einsum("bnhku,bmku->bnhmu", scaled_BLHKU, weights_BLKU)
    maps_BLHMU = maps_BLHMU * order_LL[:, None, :, None]
    inside = torch.einsum("bnhmu,bmvu->bnhv", maps_BLHMU, values_BLVU)
    return inside + torch.einsum("bnhku,bkvu->bnhv", scaled_BLHKU, state.sums * fade_BKU[:, :, None])

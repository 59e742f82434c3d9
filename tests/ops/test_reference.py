"""The oracle itself: against explicit loops over the paper's equations 1 and 2, and against finite differences.

Letters: b batch, n queries, m context positions, k key depth, v value depth, h heads, u intra-depth.
"""

import itertools
import math

import pytest
import torch

from lambdanets.ops import lambda_reference
from lambdanets.ops.reference import L2_EPSILON
from tests.cases import VARIANTS, Case, Inputs

TINY = {"heads": 2, "key_depth": 2, "value_depth": 3}


def tiny(case: Case) -> Case:
    """Small enough for Python loops: at most some dozens of positions."""
    return case if math.prod(case.grid) > 40 else case.but(**TINY)


def pairs_of_table(case: Case):
    """(n, m, entry) for every pair that an entry of the table belongs to, from the entry's side.

    The reference asks which entry a pair has; here each entry says which pairs it belongs to:
    entry i means m = n * stride + (i - (scope - 1) // 2) * dilation.
    """

    def per_axis(value):
        return value if isinstance(value, tuple) else (value,) * len(case.grid)

    def flat(place, grid):
        index = 0
        for p, size in zip(place, grid, strict=True):
            index = index * size + p
        return index

    for query in itertools.product(*map(range, case.grid)):
        for entry in itertools.product(*map(range, case.scope)):
            place = [
                q * stride + (i - (scope - 1) // 2) * dilation
                for q, i, scope, stride, dilation in zip(
                    query, entry, case.scope, per_axis(case.stride), per_axis(case.dilation), strict=True
                )
            ]
            if all(0 <= p < size for p, size in zip(place, case.context_grid, strict=True)):
                yield flat(query, case.grid), flat(place, case.context_grid), entry


def embeddings_by_hand(inputs: Inputs) -> dict:
    """{(n, m): embedding} of every pair that has one."""
    case, table = inputs.case, inputs.leaves["embeddings"].detach()
    if case.positions == "relative":
        return {(n, m): table[entry] for n, m, entry in pairs_of_table(case)}
    pairs = itertools.product(range(math.prod(case.grid)), range(math.prod(case.context_grid)))
    if case.positions == "dense":
        return {(n, m): table[n, m] for n, m in pairs}
    return {(n, m): table[inputs.index[n, m]] for n, m in pairs if inputs.index[n, m] >= 0}


def allowed_by_hand(inputs: Inputs, b: int, n: int) -> list[int]:
    """The context positions that query n of example b may look at."""
    case = inputs.case
    mask, context_mask = inputs.options["mask"], inputs.options["context_mask"]

    def places(grid, stride):
        steps = stride if isinstance(stride, tuple) else (stride,) * len(grid)
        return [
            tuple(p * s for p, s in zip(place, steps, strict=True)) for place in itertools.product(*map(range, grid))
        ]

    query = places(case.grid, case.stride)[n]
    kept = []
    for m, context in enumerate(places(case.context_grid, 1)):
        if mask is not None and not mask[n, m]:
            continue
        if context_mask is not None and not context_mask[b, m]:
            continue
        # Tuples compare in the dictionary's order: row-major order.
        if case.causal and not (context < query or (context == query and case.causal is True)):
            continue
        kept.append(m)
    return kept


def normalised_by_hand(column: list[float], key_norm: str | None) -> list[float]:
    if key_norm == "softmax":
        largest = max(column, default=0.0)
        powers = [math.exp(key - largest) for key in column]
        return [power / sum(powers) for power in powers]
    if key_norm == "l2":
        norm = math.sqrt(sum(key * key for key in column))
        return [key / max(norm, L2_EPSILON) for key in column]
    return column


def output_by_hand(inputs: Inputs) -> torch.Tensor:
    """y_n = lambda_n^T q_n with lambda_n = sum_m (normalised key_m + e_nm) v_m^T, one number at a time."""
    case = inputs.case
    queries = inputs.leaves["queries"].detach()
    values = inputs.leaves["values"].detach()
    keys = inputs.leaves["keys"].detach() if case.content else None
    embeddings = embeddings_by_hand(inputs) if case.positions else {}
    B, N, H, K = queries.shape
    output = torch.zeros(B, N, H, case.value_depth, dtype=torch.float64)
    for b, n, h in itertools.product(range(B), range(N), range(H)):
        query = queries[b, n, h].tolist()
        if case.query_softmax:
            query = normalised_by_hand(query, "softmax")
        allowed = allowed_by_hand(inputs, b, n)
        for k, u in itertools.product(range(K), range(case.intra_depth)):
            inner = (h,) if case.multi_head else ()
            depth = (*inner, k) if case.intra_depth == 1 else (*inner, k, u)
            weight = dict.fromkeys(allowed, 0.0)
            if keys is not None:
                column = [keys[(b, m, *depth)].item() for m in allowed]
                weight = dict(zip(allowed, normalised_by_hand(column, case.key_norm), strict=True))
            for m in allowed:
                if (n, m) in embeddings:
                    weight[m] += embeddings[n, m][depth].item()
                for v in range(case.value_depth):
                    place = (*inner, v) if case.intra_depth == 1 else (*inner, v, u)
                    output[b, n, h, v] += query[k] * weight[m] * values[(b, m, *place)].item()
    return output


LOOPED = {name: tiny(case) for name, case in VARIANTS.items() if math.prod(case.grid) <= 40}


@pytest.mark.parametrize("case", LOOPED.values(), ids=LOOPED.keys())
def test_equals_explicit_loops(case):
    inputs = Inputs(case)
    torch.testing.assert_close(inputs.forward("oracle").detach(), output_by_hand(inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [True, "strict"])
def test_huge_keys_are_normalised_by_each_query(causal):
    # exp(-1000) is zero in float64: a maximum over the whole context would leave 0/0 for the first queries.
    inputs = Inputs(Case(grid=(6,), positions=None, causal=causal, **TINY))
    with torch.no_grad():
        inputs.leaves["keys"] += torch.linspace(-1000, 1000, 6, dtype=torch.float64)[:, None]
    found = inputs.forward("oracle").detach()
    assert found.isfinite().all()
    torch.testing.assert_close(found, output_by_hand(inputs), rtol=1e-10, atol=1e-10)


GRADIENTS = [
    "plain",
    "multi_head_intra_depth",
    "mask_l2",
    "mask_causal",
    "strict",
    "no_key_norm",
    "query_softmax",
    "dense_multi_head_intra_depth",
    "relation_intra_depth",
    "stride_dilation_even",
]


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradcheck(name):
    case = VARIANTS[name]
    grid = case.grid if case.context else (3, 3)
    inputs = Inputs(case.but(grid=grid, batch=1, heads=2, key_depth=2, value_depth=2))
    names = list(inputs.leaves)

    def function(*leaves):
        inputs.leaves = dict(zip(names, leaves, strict=True))
        return inputs.forward("oracle")

    assert torch.autograd.gradcheck(function, tuple(inputs.leaves.values()))


def test_zero_keys_with_l2_give_zero():
    queries, values = torch.randn(1, 3, 2, 4), torch.randn(1, 3, 5)
    found = lambda_reference(queries, torch.zeros(1, 3, 4), values, key_norm="l2")
    assert found.abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_any_float_dtype(dtype):
    inputs = Inputs(VARIANTS["plain"], dtype=dtype)
    found, exact = inputs.forward("oracle"), Inputs(VARIANTS["plain"]).forward("oracle")
    assert found.dtype == dtype
    bound = 20 * torch.finfo(dtype).eps * exact.abs().max()
    assert (found.double() - exact).abs().max() <= bound

"""Every implementation in plain torch against the reference: values and every gradient, in float64."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from lambdanets.bench.timing import peak_bytes
from lambdanets.ops import dft, gemm
from lambdanets.ops.problem import Options, Problem, problems
from tests.cases import VARIANTS, Case, Inputs, assert_agree

PAIRS = [
    pytest.param(case, backend, id=f"{name}-{backend}")
    for name, case in VARIANTS.items()
    for backend in [*case.backends(), "auto"]
]


@pytest.mark.parametrize(("case", "backend"), PAIRS)
def test_variant(case, backend):
    assert_agree(case, backend)


@st.composite
def cases(draw, dims=(1, 2, 3)):
    """Any relative case that is small enough for the reference."""
    count = draw(st.sampled_from(dims))
    side = {1: 14, 2: 6, 3: 3}[count]

    def sizes(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(count))

    stride = sizes(1, 3) if draw(st.booleans()) else (1,) * count
    return Case(
        grid=sizes(1, side),
        context=sizes(1, side) if max(stride) > 1 or draw(st.booleans()) else None,
        scope=sizes(1, side + 2),
        dilation=sizes(1, 3) if draw(st.booleans()) else 1,
        stride=stride,
        batch=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        key_depth=draw(st.integers(1, 4)),
        value_depth=draw(st.integers(1, 4)),
        intra_depth=draw(st.integers(1, 2)),
        content=draw(st.booleans()),
        key_norm=draw(st.sampled_from(["softmax", "l2", None])),
        query_softmax=draw(st.booleans()),
        multi_head=draw(st.booleans()),
        causal=draw(st.sampled_from([False, False, True, "strict"])),
        context_mask=draw(st.booleans()),
    )


@pytest.mark.parametrize("backend", ["gemm", "conv", "depthwise", "fft", "auto"])
@given(case=cases(), seed=st.integers(0, 2**16))
def test_any_relative_case(backend, case, seed):
    assert_agree(case, backend, seed)


@given(case=cases(dims=(2,)), seed=st.integers(0, 2**16), tile=st.integers(1, 4))
def test_any_planar_case_by_dft(monkeypatch, case, seed, tile):
    monkeypatch.setattr(dft, "TILE", tile)  # small maps in several tiles
    assert_agree(case, "dft", seed)


@given(
    case=cases(),
    positions=st.sampled_from(["dense", "relation", "relative", None]),
    mask=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_mask_and_positions(case, positions, mask, seed):
    causal = case.causal if positions == "relative" or case.context is None else False
    content = case.content or positions is None
    assert_agree(case.but(positions=positions, mask=mask, causal=causal, content=content), "gemm", seed)


def problem_of(case: Case) -> Problem:
    inputs = Inputs(case)
    return problems(*inputs.arguments(), Options(**inputs.options))[0]


JOINT = Case(grid=(3, 2), context=(2, 3), scope=(4, 3), heads=2, key_depth=8, value_depth=16)


@pytest.mark.parametrize("positions", ["relative", "dense", "relation"])
@pytest.mark.parametrize("intra_depth", [1, 2])
@pytest.mark.parametrize("context_mask", [False, True])
@pytest.mark.parametrize("key_norm", ["softmax", "l2", None])
def test_content_joins_the_maps_of_positions(monkeypatch, positions, intra_depth, context_mask, key_norm):
    monkeypatch.delattr("lambdanets.ops.operation.content_output")  # nobody else computes it
    case = JOINT.but(positions=positions, intra_depth=intra_depth, context_mask=context_mask, key_norm=key_norm)
    assert_agree(case, "gemm")


@pytest.mark.parametrize(
    "changes",
    [{"mask": True}, {"causal": True, "context": None}, {"content": False}, {"value_depth": 5}, {"heads": 16}],
    ids=str,
)
def test_content_stands_alone_where_it_cannot_join(changes):
    """Queries with contexts of their own; no content; a context longer than values are deep; lambdas are cheaper."""
    case = JOINT.but(**changes)
    assert gemm.whole_output(problem_of(case), torch.float64) is None
    assert_agree(case, "gemm")


@pytest.mark.parametrize("tile", [1, 2, 5])
@pytest.mark.parametrize("changes", [{}, {"intra_depth": 2}, {"context": (4, 6)}, {"key_norm": "l2", "scope": (2, 6)}])
def test_content_joins_the_first_frequency(monkeypatch, tile, changes):
    """Without gradients; in several tiles, and the batch in several parts."""
    monkeypatch.setattr(dft, "TILE", tile)
    monkeypatch.setattr(dft, "WORKSPACE", 1)
    case = Case(grid=(5, 4), scope=(3, 3), batch=3).but(**changes)
    assert_agree(case, "dft")
    monkeypatch.delattr("lambdanets.ops.operation.add_content")  # nobody else computes it
    with torch.no_grad():
        Inputs(case).forward("dft")
    assert dft.whole_output(problem_of(case), torch.float64) is None  # with gradients


@pytest.mark.parametrize("positions", ["relative", "dense"])
def test_maps_of_some_queries_at_a_time(monkeypatch, positions):
    """Of single queries, of as many as do not divide them all, of all: equal, and fewer take less memory."""
    case = Case(grid=(5, 4), scope=(5, 5), heads=2, key_depth=8, value_depth=16, batch=3, positions=positions)
    peaks = []
    for part in (1, 1000, 10**6):
        monkeypatch.setattr(gemm, "PART", part)
        assert_agree(case, "gemm")
        inputs = Inputs(case)
        with torch.no_grad():  # where nothing is kept
            peaks.append(peak_bytes(partial(inputs.forward, "gemm"), torch.device("cpu")))
    assert peaks[0] < peaks[1] < peaks[2]


@pytest.mark.parametrize("backend", ["gemm", "conv"])
def test_content_is_counted_where_it_is_added_in_place(backend):
    inputs = Inputs(Case(grid=(5, 4), scope=(5, 5), heads=2, key_depth=8, value_depth=16))
    with FlopCounterMode(display=False) as kept:
        inputs.forward(backend)
    with torch.no_grad(), FlopCounterMode(display=False) as overwritten:
        inputs.forward(backend)
    assert overwritten.get_total_flops() == kept.get_total_flops()


def test_content_does_not_join_maps_that_need_chunks(monkeypatch):
    problem = problem_of(JOINT)
    assert gemm.whole_output(problem, torch.float64) is not None
    monkeypatch.setattr(gemm, "WORKSPACE", 100)
    assert gemm.whole_output(problem, torch.float64) is None


@pytest.mark.parametrize("backend", ["reference", "gemm", "conv", "dft", "fft"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_sums_in_float32(backend, dtype):
    inputs = Inputs(Case(grid=(12, 12), scope=(23, 23), key_depth=16), dtype=dtype)
    found = inputs.results(backend)
    exact = Inputs(Case(grid=(12, 12), scope=(23, 23), key_depth=16))
    for name, leaf in inputs.leaves.items():  # the same rounded numbers, in float64
        exact.leaves[name] = leaf.detach().double().requires_grad_()
    exact.gradient = inputs.gradient.double()
    for name, expected in exact.results("oracle").items():
        assert found[name].dtype == dtype
        # One rounding at the end: half a unit in the last place of the largest.
        error = (found[name].double() - expected).abs().max() / expected.abs().max()
        assert error <= torch.finfo(dtype).eps, name


def test_result_has_the_wider_dtype():
    inputs = Inputs(VARIANTS["plain"], dtype=torch.float32)
    inputs.leaves["values"] = inputs.leaves["values"].detach().double()
    assert inputs.forward("gemm").dtype == torch.float64

"""Which implementation runs: reasons that are said, choices that can run."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lambdanets.ops import Relative, choose, explain
from lambdanets.ops.problem import Problem
from tests.cases import VARIANTS, Case, Inputs

PLAIN_TORCH = {"gemm", "conv", "depthwise", "dft", "fft"}
REASONS = {  # backend, case: words of the reason
    ("conv", "mask"): "cannot apply a mask, which differs between queries",
    ("depthwise", "mask"): "cannot apply a mask, which differs between queries",
    ("dft", "mask"): "cannot apply a mask, which differs between queries",
    ("fft", "mask"): "cannot apply a mask, which differs between queries",
    ("conv", "dense"): "relative positions",
    ("dft", "relation"): "relative positions",
    ("fft", "dense"): "relative positions",
    ("dft", "1d"): "2-d maps only, got 1-d",
    ("dft", "3d"): "2-d maps only, got 3-d",
    ("conv", "4d"): "up to 3 axes, got 4",
    ("depthwise", "dense"): "relative positions",
    ("depthwise", "4d"): "up to 3 axes, got 4",
}


def explained(inputs: Inputs) -> dict:
    options = {name: value for name, value in inputs.options.items() if name != "query_softmax"}
    return explain(*inputs.arguments(), **options)


@pytest.mark.parametrize("name", VARIANTS)
def test_explain_lists_every_backend(name):
    case = VARIANTS[name]
    found = explained(Inputs(case))
    assert found.keys() >= PLAIN_TORCH
    can = {backend for backend in PLAIN_TORCH if not isinstance(found[backend], str)}
    assert can == PLAIN_TORCH & {*case.backends()} or case.positions is None
    for reason in found.values():
        assert reason if isinstance(reason, str) else reason >= 0


@pytest.mark.parametrize(("backend", "name"), REASONS, ids="-".join)
def test_backend_that_cannot_run_says_why(backend, name):
    inputs = Inputs(VARIANTS[name])
    words = REASONS[backend, name]
    assert words in explained(inputs)[backend]
    with pytest.raises(ValueError, match=f"'{backend}' cannot run here: .*{words}.*gemm: can run"):
        inputs.forward(backend)


@pytest.mark.parametrize("name", ["plain", "content_only", "mask", "dense"])
def test_unknown_backend_lists_the_choices(name):
    with pytest.raises(ValueError, match=r"unknown backend 'cudnn'; choose one of 'auto', 'reference', 'gemm'.*gemm: "):
        Inputs(VARIANTS[name]).forward("cudnn")


def test_predicted_time_grows_with_the_work():
    small, large = explained(Inputs(Case())), explained(Inputs(Case(grid=(16, 16), scope=(9, 9), key_depth=16)))
    for backend in PLAIN_TORCH:
        assert large[backend] > small[backend]


def test_a_training_step_costs_more_than_inference():
    inputs = Inputs(Case())
    training = explained(inputs)
    with torch.no_grad():
        inference = explained(inputs)
    for backend in PLAIN_TORCH:
        assert training[backend] > inference[backend]


def test_auto_takes_the_fastest(monkeypatch):
    inputs = Inputs(Case())
    times = {name: time for name, time in explained(inputs).items() if not isinstance(time, str)}
    ran = []
    for name, backend in choose.BACKENDS.items():
        counted = replace(
            backend,
            position_output=lambda problem, name=name, run=backend.position_output: ran.append(name) or run(problem),
        )
        monkeypatch.setitem(choose.BACKENDS, name, counted)
    inputs.forward("auto")
    assert ran == [min(times, key=times.get)]


@given(
    case=st.sampled_from(list(VARIANTS.values())),
    grid=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    scope=st.tuples(st.integers(1, 50), st.integers(1, 50)),
    stride=st.integers(1, 3),
    batch=st.integers(0, 2),
)
def test_auto_always_finds_one(case, grid, scope, stride, batch):
    """The choice alone, on sizes that would take long to compute."""
    case = case.but(grid=grid, scope=scope, batch=batch, dilation=1, context=None, stride=1)
    if case.positions == "relative":
        case = case.but(stride=stride, context=tuple(side * stride for side in grid))
    if case.positions in ("dense", "relation") or case.mask:
        case = case.but(grid=(4, 5), context=None, stride=1)
    found = explained(Inputs(case, dtype=torch.float32))
    assert any(not isinstance(time, str) for time in found.values())
    assert not isinstance(found["gemm"], str)  # the one that takes everything


def test_a_remembered_choice_is_the_fastest():
    """Of every two problems that differ in one size or option the second is not taken for the first."""
    grids = ((4, 4), (14, 14), (2, 98), (98, 2), (56, 56))
    sizes = dict(grid=grids, scope=(3, 23), batch=(1, 16), depth=(4, 64), intra=(1, 4), stride=(1, 2))
    options = dict(grad=(False, True), keys=(False, True), dtype=(torch.float32, torch.float64))
    for values in product(*sizes.values(), *options.values()):
        (height, width), scope, batch, depth, intra, stride, grad, keys, dtype = values
        new = lambda *shape, dtype=dtype: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
        table = new(scope, scope, 8, intra).requires_grad_(grad)
        positions = Relative(table, (height, width), (height * stride, width * stride), stride=stride)
        N, M = height * width, height * width * stride**2
        keys_BMKU = new(batch, M, 8, intra) if keys else None
        queries_BNHK, values_BMVU = new(batch, N, 4, 8), new(batch, M, depth, intra)
        problem = Problem(queries_BNHK, keys_BMKU, values_BMVU, positions, "softmax", None, None, False)
        right = choose.fastest(problem).name
        assert [choose.choose(problem, "auto").name for _ in range(2)] == [right, right], values


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("side", [5, 28, 56])
def test_depthwise_is_never_chosen_on_a_gpu(monkeypatch, side, grad):
    """It is not measured there. On the CPU it is fast on small scopes."""
    inputs = Inputs(Case(grid=(side, side), scope=(7, 7), key_depth=16, value_depth=16), dtype=torch.float32)
    with torch.set_grad_enabled(grad):
        on_cpu = explained(inputs)
        monkeypatch.setitem(choose.RATES, "cpu", choose.CUDA_RATES)
        names = [name for name, time in explained(inputs).items() if not isinstance(time, str) and name != "fused"]
    assert on_cpu["depthwise"] < 1
    assert names[-1] == "depthwise"

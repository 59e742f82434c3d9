"""The self-test passes on what is right, and notices what is wrong."""

import io
import re
import shlex
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from lambdanets.cli import main
from lambdanets.selftest import Selftest, selftest
from lambdanets.selftest.agreement import Verdict, judge, oracle, run_backend
from lambdanets.selftest.cases import KERNEL_GRID, build, draw
from lambdanets.selftest.run import Tally, why_not
from tests.support.broken_backend import break_backend

CPU = torch.device("cpu")


def run(**options):
    out = io.StringIO()
    code = selftest(Selftest(device="cpu", **options), Console(file=out, width=200))
    return code, out.getvalue()


def test_all_backends_pass():
    code, text = run(cases=60, seed=7)
    assert code == 0, text
    for name in ("auto", "reference", "gemm", "conv", "depthwise", "dft", "fft"):
        row = next(line for line in text.splitlines() if f" {name} " in line)
        assert int(re.findall(r"\d+", row)[0]) >= 10


@pytest.mark.parametrize(
    "change",
    [
        lambda output: output * 1.001,  # the result
        lambda output: output + 1e-3 * (output - output.detach()),  # only gradients
        lambda output: output.to(torch.bfloat16).to(output.dtype),  # too little precision
        lambda output: output * torch.nan,
    ],
)
def test_a_wrong_backend_fails_and_the_printed_line_reproduces_it(change, monkeypatch, capsys):
    break_backend(monkeypatch, "conv", change)
    code, text = run(cases=30)
    assert code == 1
    again = re.findall(r"reproduce: lambdanets (.*)", text)
    assert again
    assert all("--backend conv" in line or "--backend auto" in line for line in again)
    line = next(line for line in again if "--backend conv" in line)
    assert main(shlex.split(line)) == 1
    assert "FAILED conv" in capsys.readouterr().out
    monkeypatch.undo()
    assert main(shlex.split(line)) == 0


def test_a_crash_is_a_failure_of_its_own(monkeypatch):
    def crash(output):
        raise RuntimeError("out of luck")

    break_backend(monkeypatch, "fft", crash)
    code, text = run(cases=12, backend="fft")
    assert code == 1
    assert "RuntimeError: out of luck" in text


def test_memory_that_nobody_writes_is_noticed(monkeypatch):
    def forget_a_row(output):
        result = torch.empty_like(output)
        result[1:] = output[1:]
        return result

    break_backend(monkeypatch, "gemm", forget_a_row)
    number = next(n for n in range(100) if draw(0, n).poisoned and draw(0, n).positions == "relative")
    code, text = run(case=number, backend="gemm")
    assert code == 1, text


def test_a_backend_that_ran_no_case_is_reported():
    seed = next(s for s in range(100) if draw(s, 0).positions == "dense")
    code, text = run(cases=1, seed=seed, backend="conv")
    assert code == 1
    assert "ran no case: conv" in text


def test_one_case_is_not_blamed_for_backends_it_is_not_for():
    number = next(n for n in range(100) if draw(0, n).positions == "dense")
    assert run(case=number, backend="conv")[0] == 0


def test_stops_after_minutes():
    _, text = run(minutes=0.0)
    assert "0 cases" in text


def test_cases_depend_on_seed_and_number_alone():
    assert draw(3, 14) == draw(3, 14)
    assert draw(3, 14) != draw(4, 14)
    first, second = build(draw(3, 14), CPU), build(draw(3, 14), CPU)
    assert torch.equal(first.gradient, second.gradient)


def test_cases_cover_every_variant():
    cases = [draw(0, number) for number in range(600)]
    assert {c.positions for c in cases} == {"none", "dense", "relation", "relative"}
    assert {c.dtype for c in cases} == {"float64", "float32", "bfloat16", "float16"}
    assert {c.key_norm for c in cases} == {"softmax", "l2", None}
    assert {c.causal for c in cases} == {False, True, "strict"}
    relative = [c for c in cases if c.positions == "relative"]
    assert {len(c.query_grid) for c in relative} == {1, 2, 3}
    for wanted in (
        lambda c: any(s % 2 == 0 for s in c.scope),
        lambda c: any(s > m for s, m in zip(c.scope, c.context_grid, strict=True)),
        lambda c: max(c.dilation) > 1,
        lambda c: max(c.stride) > 1,
        lambda c: c.query_grid != c.context_grid and max(c.stride) == 1,
        lambda c: c.multi_head and c.intra_depth > 1,
        lambda c: c.mask,
        lambda c: c.context_mask,
        lambda c: c.query_softmax,
        lambda c: not c.content,
    ):
        assert sum(map(wanted, relative)) >= 5
    names = ("dtype", "heads", "key_depth", "value_depth", "content", "wide_embeddings")
    drawn = {tuple(getattr(c, name) for name in names) for c in cases if c.kernel_sizes}
    assert drawn == {tuple(getattr(sizes, name) for name in names) for sizes in KERNEL_GRID}
    assert any(c.kernel_sizes and c.positions == "dense" for c in cases)


def test_a_missing_gradient_is_wrong():
    case = draw(0, next(n for n in range(100) if not draw(0, n).frozen and draw(0, n).positions == "relative"))
    inputs = build(case, CPU)
    found = run_backend(case, inputs, "gemm")
    del found["embeddings"]
    verdicts = {v.tensor: v.passed for v in judge(oracle(case, inputs), found, "gemm")}
    assert verdicts.pop("embeddings") is False
    assert all(verdicts.values())


def test_on_a_gpu_the_sizes_of_kernels_are_for_kernels_that_can_run_them():
    ours, others = draw(0, 0), draw(0, 1)
    assert (ours.kernel_sizes, others.kernel_sizes) == (True, False)
    can, cannot = {"fused": 0.0, "gemm": 1.0}, {"gemm": 1.0, "fused": "no"}
    assert why_not(ours, "fused", can, True) is None
    assert why_not(ours, "gemm", can, True) is not None
    assert why_not(ours, "gemm", can, False) is None
    assert why_not(ours, "gemm", cannot, True) is None
    assert why_not(others, "fused", can, True) is not None


def test_an_exact_plain_result_is_no_measure_of_others():
    """A relation of one: plain PyTorch has next to no error, and rounding allows others a thousand times as much."""
    lucky = Verdict("output", error=1e-3, plain=1e-12, allowed=2e-3)
    usual = Verdict("output", error=1.5e-3, plain=1e-3, allowed=2e-3)
    assert (lucky.by_plain, usual.by_plain) == (False, True)
    assert not Verdict("output", error=0.0, plain=0.0, allowed=0.0).by_plain
    tally = Tally()
    tally.add(replace(draw(0, 0), dtype="bfloat16"), [lucky, usual])
    assert (tally.worst, tally.worst_half) == (pytest.approx(0.75), pytest.approx(1.5))

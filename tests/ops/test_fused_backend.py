"""When the fused kernels say no, and in which words: no GPU is needed to ask."""

import re
from pathlib import Path

import pytest
import torch

from lambdanets.ops import Dense, Relation, Relative, explain, lambda_op
from lambdanets.ops import triton as fused
from lambdanets.ops.problem import Options, problems
from lambdanets.ops.triton import backend

GPU = torch.device("cuda", 0)


@pytest.fixture
def a_gpu(monkeypatch):
    """A machine that says it has a GPU of the kind that the kernels were written for."""
    monkeypatch.setattr(fused, "capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(fused, "has_triton", lambda: True)


def asked(**changes):
    usual = {"dtype": torch.bfloat16, "key_depth": 16, "value_depth": 64, "heads": 4}
    return fused.why_not(GPU, **usual | changes)


def test_the_papers_layers_can(a_gpu):
    assert asked() is None
    assert asked(dtype=torch.float16, key_depth=4, value_depth=8, heads=1, intra_depth=4, dims=1) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float64}, "not float64"),
        ({"dims": 3}, "not 3-d"),
        ({"dilation": 2}, "no dilation"),
        ({"key_depth": 65}, "not 65"),
        ({"value_depth": 2000}, "not 2000"),
        ({"heads": 500}, "not 500"),
        ({"intra_depth": 100}, "not 100"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_they_do_not_cover(a_gpu, changes, reason):
    assert reason in asked(**changes)


def test_the_documents_have_the_limits(a_gpu, monkeypatch):
    """Each limit that it names can run, and one more cannot."""
    text = (Path(__file__).parents[2] / "docs" / "operation.md").read_text()
    (refused,) = re.findall(r"`fused` does not support: ([^\n]*?)\. In these cases", text)
    limits = dict.fromkeys(("key_depth", "value_depth", "intra_depth", "heads"))
    for name in limits:
        words = name.replace("_", ".")
        (limit,) = re.findall(rf"{words}s above (\d+)|more than (\d+) {words}", refused)
        limits[name] = int(max(limit))
        assert asked(**{name: limits[name]}) is None
        assert asked(**{name: limits[name] + 1})
    (least,) = re.findall(r"GPUs below compute capability (\d)\.(\d)", refused)
    monkeypatch.setattr(fused, "capability", lambda index: tuple(map(int, least)))
    assert asked() is None
    for word in ("`mask`", "causal", "relations", "no positions", "float64", "different dtypes", "3-d", "dilation"):
        assert word in refused
    assert "different strides per axis" in refused
    assert "AMD" in refused


def test_other_gpus_get_a_reason(a_gpu, monkeypatch):
    monkeypatch.setattr(fused, "capability", lambda index: (7, 5))
    assert "this GPU has 7.5" in asked()
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "AMD" in asked()
    monkeypatch.setattr(fused, "has_triton", lambda: False)
    assert "Triton, which is not installed" in asked()


def test_a_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=r"here: the fused kernels need a CUDA GPU .*, not cpu\. For this input: auto"):
        lambda_op(torch.randn(2, 12, 4, 16), torch.randn(2, 12, 16), torch.randn(2, 12, 8), grid(), backend="fused")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert fused.why_not(torch.device("cpu"), torch.float32, 16, 16, 4) is None
    assert "bfloat16" in fused.why_not(torch.device("cpu"), torch.bfloat16, 16, 16, 4)


def problem(positions, values_dtype=torch.float32, **changes):
    N = 12
    queries, keys, values = torch.randn(2, N, 4, 16), torch.randn(2, N, 16), torch.randn(2, N, 8).to(values_dtype)
    return problems(queries, keys, values, positions, Options(**changes))[0]


def grid(**changes):
    return Relative(torch.randn(3, 3, 16), (3, 4), (3, 4), **changes)


@pytest.mark.parametrize(
    ("positions", "changes", "reason"),
    [
        (None, {}, "nothing to fuse"),
        (Relation(torch.randn(2, 16), torch.zeros(12, 12, dtype=torch.long)), {}, "not relations"),
        (grid(), {"mask": torch.ones(12, 12, dtype=torch.bool)}, "no masks"),
        (grid(), {"causal": "strict"}, "no causal order"),
        (grid(stride=(1, 2)), {}, "one stride for all axes, got (1, 2)"),
        (grid(dilation=2), {}, "no dilation"),
        (grid(), {"values_dtype": torch.float16}, "make them one dtype"),
    ],
    ids=["none", "relation", "mask", "causal", "strides", "dilation", "dtypes"],
)
def test_problems_they_do_not_take(monkeypatch, positions, changes, reason):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert reason in backend.why_not(problem(positions, **changes))


def test_problems_they_take(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for positions in (grid(), Dense(torch.randn(12, 12, 16))):
        assert backend.why_not(problem(positions)) is None
        macs, elements = backend.work(problem(positions))
        assert macs >= 2 * 16 * 8 * 12 * 12
        assert elements > 0
    # Under the interpreter they can run, and are never what auto takes.
    queries, keys, values = torch.randn(2, 12, 4, 16), torch.randn(2, 12, 16), torch.randn(2, 12, 8)
    said = explain(queries, keys, values, grid())
    assert isinstance(said["fused"], float)
    assert next(iter(said)) != "fused"

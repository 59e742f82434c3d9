"""Kernels side by side: the same results bit for bit, and no memory that another stream could give away."""

import contextlib

import pytest
import torch

from lambdanets.measure.timing import captured
from lambdanets.ops import Dense, Relative, lambda_op
from lambdanets.ops.fused import beside, launch, why_not, windows

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
REASON = why_not(DEVICE, torch.float32, 16, 16, 4)
kernels = pytest.mark.skipif(REASON is not None, reason=str(REASON))
gpu = pytest.mark.skipif(not CUDA, reason="streams are a GPU's")
DTYPE = torch.bfloat16 if CUDA else torch.float16
CASES = {"small": (5, 5), "windows": (18, 17), "dense": None}


def step_of(case, batch=3):
    """A function that gives the output and all gradients."""
    generator = torch.Generator().manual_seed(0)
    grid, H, K, V = CASES[case], 4, 16, 16
    count = 40 if grid is None else grid[0] * grid[1]
    half = [(batch, count, H, K), (batch, count, K), (batch, count, V)]
    table = torch.randn((count, count, K) if grid is None else (7, 7, K), generator=generator)
    inputs = [torch.randn(shape, generator=generator).to(DEVICE, DTYPE) for shape in half] + [table.to(DEVICE)]
    for one in inputs:
        one.requires_grad_()

    def step():
        *parts, embeddings = inputs
        positions = Dense(embeddings) if grid is None else Relative(embeddings, grid)
        y = lambda_op(*parts, positions, backend="fused")
        return y.detach(), *torch.autograd.grad(y.square().sum(), inputs)

    return step


@kernels
@pytest.mark.parametrize("case", CASES)
def test_no_memory_is_asked_for_on_a_side_stream(case, monkeypatch):
    """It would belong to that stream, which may give it away while the current one still reads it."""
    step, entered = step_of(case), []

    @contextlib.contextmanager
    def side():
        def refuse(*args, **kwargs):
            raise AssertionError("memory was asked for on a side stream")

        entered.append(True)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", refuse)
            patch.setattr(torch, "empty_like", refuse)
            yield

    @contextlib.contextmanager
    def watched(device, work):
        yield beside.Sides(side(), side(), side(), side())

    expected = step()
    for mode in (launch, windows):
        monkeypatch.setattr(mode, "beside", watched)
    for found, one in zip(step(), expected, strict=True):
        assert found.equal(one)
    assert len(entered) == (3 if case == "dense" else 4)


@gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("where", ["usual", "own stream", "graph"])
def test_side_by_side_is_bit_for_bit_one_by_one(case, where):
    step = step_of(case, batch=64)
    with beside.from_work(beside.NEVER):
        expected = step()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if where == "own stream" else torch.cuda.current_stream()
    with beside.from_work(0), torch.cuda.stream(stream):
        if where == "graph":
            kept = []
            replay = captured(lambda: kept.append(step()), required=True)
            found = kept[-1]
            for one in found:
                one.fill_(float("nan"))
            replay()
        else:
            found = step()
            for _ in range(20):  # memory that is given back comes round again
                found = step()
    torch.cuda.synchronize()
    for one, other in zip(found, expected, strict=True):
        assert one.equal(other)


@gpu
@pytest.mark.parametrize("side", ["first", "second", "after_first", "after_second"])
def test_a_side_stream_waits_and_is_waited_for(side):
    before, after = torch.zeros(2, 2**26, device=DEVICE).unbind()
    seen = torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize()
    for _ in range(100):
        before += 1
    with beside.from_work(0), beside.beside(DEVICE, 1) as sides:
        here = torch.cuda.current_stream()
        with getattr(sides, side):
            assert torch.cuda.current_stream() != here
            seen += before[-1]
            for _ in range(100):
                after += 1
    assert (seen.item(), after[-1].item()) == (100, 100)


@gpu
@pytest.mark.parametrize("side", ["first", "second"])
def test_what_comes_after_waits(side):
    big, seen = torch.zeros(2**26, device=DEVICE), torch.zeros(1, device=DEVICE)
    with beside.from_work(0), beside.beside(DEVICE, 1) as sides:
        with getattr(sides, side):
            for _ in range(100):
                big += 1
        with getattr(sides, "after_" + side):
            seen += big[-1]
    assert seen.item() == 100


def test_a_cpu_has_no_streams():
    with beside.from_work(0), beside.beside(torch.device("cpu"), 1e12) as side:
        contexts = (side.first, side.second, side.after_first, side.after_second)
    assert all(isinstance(one, contextlib.nullcontext) for one in contexts)


def test_what_was_asked_for_ends_with_the_block():
    with pytest.raises(KeyError), beside.from_work(0):
        raise KeyError
    assert beside._least_work == beside.LEAST_WORK

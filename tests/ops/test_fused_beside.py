"""Kernels side by side: the same results bit for bit, in every order, and no memory that another stream gives away."""

import contextlib

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from lambdanets.measure.timing import captured
from lambdanets.ops.fused import (
    beside,
    content_kernels,
    operators,
    tables,
    why_not,
    window_gradients,
    window_kernels,
    windows,
)
from lambdanets.ops.fused.content import content_lambda

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
REASON = why_not(DEVICE, torch.float32, 16, 16, 4)
kernels = pytest.mark.skipif(REASON is not None, reason=str(REASON))
gpu = pytest.mark.skipif(not CUDA, reason="streams are a GPU's")
DTYPE = torch.bfloat16 if CUDA else torch.float16
GRID = [6, 7]
NEEDS = {"all": (True, True, True, False, True), "keys": (False, False, True, False, False)}


@pytest.fixture(autouse=True)
def small_maps_take_windows(monkeypatch):
    monkeypatch.setattr(windows, "WINDOW_CONTEXT", 16)


def step_of(batch=2, needs="all"):
    """A function that gives the gradients that are needed."""
    torch.manual_seed(0)
    count, H, K, V = GRID[0] * GRID[1], 2, 16, 16
    new = lambda *shape: torch.randn(shape).to(DEVICE, DTYPE)  # noqa: E731
    gradient, queries, values, keys = new(batch, count, H * V), *(new(batch, count, d) for d in (H * K, V, K))
    content, norm = content_lambda(keys, values)
    table = torch.randn(3, 5, K, 1).to(DEVICE)
    inputs = (gradient, queries, values, keys, content, norm, table, GRID, GRID, 1, False, NEEDS[needs])
    return lambda: operators.fused_backward(*inputs)


class Late(beside.Sides):
    """Kernels run at the end of the block, as their streams and waits allow: always of the first stream that can go on.

    A list of streams, of which each waits for as few others as it can: what GPUs may do at worst.
    """

    def __init__(self, order):
        super().__init__({}, [])
        self.queues = {name: [] for name in order}  # of launches, and of (another stream, how many of its are over)
        self.done = dict.fromkeys(order, 0)
        self.current = ["here"]

    def __call__(self, name, after=None):
        if after is not None:
            self.queues[name].append((after, len(self.queues[after])))

        @contextlib.contextmanager
        def inside():
            self.current.append(name)
            yield
            self.current.pop()

        return inside()

    def launch(self, run):
        self.queues[self.current[-1]].append(run)

    def step(self):
        """One launch or wait of the first stream that can go on; False when all is done."""
        for name, queue in self.queues.items():
            if self.done[name] == len(queue):
                continue
            item = queue[self.done[name]]
            if isinstance(item, tuple):
                if self.done[item[0]] < item[1]:
                    continue
            else:
                item()
            self.done[name] += 1
            return True
        assert all(self.done[name] == len(queue) for name, queue in self.queues.items())
        return False


class LateKernel:
    def __init__(self, sides, kernel):
        self.sides, self.kernel = sides, kernel

    def __getitem__(self, grid):
        return lambda *args, **options: self.sides.launch(lambda: self.kernel[grid](*args, **options))


@kernels
@pytest.mark.skipif(CUDA, reason="kernels are held back, which a GPU's own streams do")
@pytest.mark.parametrize(
    ("order", "parts"), [("values here table", 2), ("table here values", 2), ("here table values", 1)]
)
def test_streams_wait_for_all_they_need(order, parts, monkeypatch, poisoned_memory):
    """Every stream as early as its waits allow. Memory that nobody has filled yet is NaN."""
    step = step_of()
    if parts == 2:  # g of one example at a time
        monkeypatch.setattr(window_gradients, "WORKSPACE", 1)
    expected, launches = step(), []

    @contextlib.contextmanager
    def forked(device, work):
        sides = Late(order.split())
        with monkeypatch.context() as patch:
            for module, name in (
                *((window_kernels, name) for name in dir(window_kernels) if name.endswith("_window")),
                (window_kernels, "sum_table_parts"), (content_kernels, "content_backward"),
                (tables, "expand"), (tables, "fold"),
            ):  # fmt: skip
                patch.setattr(module, name, LateKernel(sides, getattr(module, name)))
            total = torch.sum
            patch.setattr(torch, "sum", lambda *args, **options: sides.launch(lambda: total(*args, **options)))
            yield sides
        while sides.step():
            pass
        launches.extend(len([one for one in queue if callable(one)]) for queue in sides.queues.values())

    monkeypatch.setattr(beside, "forked", forked)
    for found, one in zip(step(), expected, strict=True):
        assert found.equal(one)
    here, values, table = 3, 2 + 2 * parts, 2 + parts  # two tables and dq; g and dv, dc and dk; dT, its sum, its fold
    assert dict(zip(order.split(), launches, strict=True)) == {"here": here, "values": values, "table": table}


@kernels
@pytest.mark.parametrize("needs", NEEDS)
def test_no_memory_is_asked_for_on_a_side_stream(needs, monkeypatch):
    """It would belong to that stream, which may give it away while the current one still reads it."""
    step, entered = step_of(needs=needs), []

    class Watched(beside.Sides):
        def __call__(self, name, after=None):
            return side()

    @contextlib.contextmanager
    def side():
        def refuse(*args, **kwargs):
            raise AssertionError("memory was asked for on a side stream")

        entered.append(True)
        with monkeypatch.context() as patch:
            for name in ("empty", "empty_like", "zeros"):
                patch.setattr(torch, name, refuse)
            yield

    expected = step()
    monkeypatch.setattr(beside, "forked", lambda device, work: contextlib.nullcontext(Watched()))
    for found, one in zip(step(), expected, strict=True):
        assert found.equal(one)
    assert entered


@gpu
@pytest.mark.parametrize("where", ["usual", "own stream", "urgent stream", "graph"])
def test_side_by_side_is_bit_for_bit_one_by_one(where):
    step = step_of(batch=64)
    with beside.from_work(beside.NEVER):
        expected = step()
    torch.cuda.synchronize()
    own = {"own stream": 0, "urgent stream": -1}
    stream = torch.cuda.Stream(priority=own[where]) if where in own else torch.cuda.current_stream()
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
@pytest.mark.parametrize("name", ["values", "table"])
def test_a_side_stream_waits_and_is_waited_for(name):
    before, after = torch.zeros(2, 2**26, device=DEVICE).unbind()
    seen = torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize()
    for _ in range(100):
        before += 1
    with beside.from_work(0), beside.forked(DEVICE, 1) as side:
        here = torch.cuda.current_stream()
        with side(name):
            assert torch.cuda.current_stream() != here
            seen += before[-1]
            for _ in range(100):
                after += 1
    assert (seen.item(), after[-1].item()) == (100, 100)


@gpu
def test_a_side_waits_for_another():
    big, seen = torch.zeros(2**26, device=DEVICE), torch.zeros(1, device=DEVICE)
    with beside.from_work(0), beside.forked(DEVICE, 1) as side:
        with side("values"):
            for _ in range(100):
                big += 1
        with side("table", after="values"):
            seen += big[-1]
    assert seen.item() == 100


def test_a_cpu_has_no_streams():
    with beside.from_work(0), beside.forked(torch.device("cpu"), 1e12) as side:
        assert side is beside.ONE_BY_ONE
        assert isinstance(side("values", after="here"), contextlib.nullcontext)
        side.keep(torch.zeros(1))
    assert not side.kept


def test_what_was_asked_for_ends_with_the_block():
    with pytest.raises(KeyError), beside.from_work(0):
        raise KeyError
    assert beside._least_work == beside.LEAST_WORK

"""Kernels side by side: the same results bit for bit, in every order, and no memory that another stream gives away."""

import contextlib

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

pytest.importorskip("triton", reason="Triton is not installed")

from lambdanets.bench.timing import captured
from lambdanets.ops.triton import (
    content_kernels,
    operators,
    streams,
    table_kernels,
    tiled,
    tiled_kernels,
    why_not,
)
from lambdanets.ops.triton.content import content_lambda

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
REASON = why_not(DEVICE, torch.float32, 16, 16, 4)
kernels = pytest.mark.skipif(REASON is not None, reason=str(REASON))
gpu = pytest.mark.skipif(not CUDA, reason="streams are a GPU's")
DTYPE = torch.bfloat16 if CUDA else torch.float16
GRID = [6, 7]
NEEDS = {
    "all": (True, True, True, False, True), "queries": (True, False, False, False, False),
    "values": (False, True, False, False, False), "keys": (False, False, True, False, False),
    "table": (False, False, False, False, True),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_maps_are_tiled(monkeypatch):
    monkeypatch.setattr(tiled, "SMALL_CONTEXT", 16)


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


class Named(streams.Sides):
    """Knows on which stream launches are."""

    def __init__(self):
        super().__init__({"no stream": None}, [])
        self.current = ["here"]

    @contextlib.contextmanager
    def __call__(self, name):
        self.current.append(name)
        yield
        self.current.pop()

    def wait(self, name, other):
        pass


class Late(Named):
    """Kernels run at the end of the block, as their streams and waits allow: always of the first stream that can go on.

    So each stream, in turn, is as early as it can be: the worst that a GPU may do.
    """

    def __init__(self, order):
        super().__init__()
        self.queues = {name: [] for name in order}  # of launches, and of (another stream, how many of its must be over)
        self.done = dict.fromkeys(order, 0)

    def wait(self, name, other):
        self.queues[name].append((other, len(self.queues[other])))

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


class Launched:
    """A kernel whose launches go to `launch`, as functions, with their arguments."""

    def __init__(self, kernel, launch):
        self.kernel, self.launch = kernel, launch

    def __getitem__(self, grid):
        return lambda *args, **options: self.launch(lambda: self.kernel[grid](*args, **options), args)


def launches_go_to(launch, patch):
    """Those of all kernels that a backward of the tiled mode launches."""
    tiles = ("query_gradients", "value_gradients", "table_gradients")
    names = ["lambda_gradients", "sum_table_parts", *(f"{name}_window" for name in tiles)]
    others = [(content_kernels, "content_backward"), (table_kernels, "expand"), (table_kernels, "fold")]
    for module, name in [*((tiled_kernels, name) for name in names), *others]:
        patch.setattr(module, name, Launched(getattr(module, name), launch))


def late_step(step, order, monkeypatch):
    """The gradients, with every stream as early as its waits allow.

    New memory is filled with NaN by a kernel of its own, as torch does in deterministic mode.
    """
    forks = []

    @contextlib.contextmanager
    def forked(device, work):
        sides = Late(order.split())
        forks.append(sides)
        with monkeypatch.context() as patch:
            launches_go_to(lambda run, args: sides.launch(run), patch)
            total, product, empty = torch.sum, torch.bmm, torch.empty

            def late_empty(*args, **options):
                memory = empty(*args, **options)
                sides.launch(lambda: memory.fill_(float("nan")))
                return memory

            def late_product(a, b):
                result = empty(a.shape[0], a.shape[1], b.shape[2])
                sides.launch(lambda: torch.Tensor.copy_(result, product(a.float(), b.float())))
                return result

            patch.setattr(torch, "empty", late_empty)
            patch.setattr(torch, "sum", lambda *args, **options: sides.launch(lambda: total(*args, **options)))
            patch.setattr(torch, "bmm", late_product)
            yield sides
        while sides.step():
            pass

    with monkeypatch.context() as patch:
        patch.setattr(streams, "forked", forked)
        found = step()
    assert len(forks) == 1
    return found


on_cpu = pytest.mark.skipif(CUDA, reason="kernels are held back, which a GPU's own streams do")


@kernels
@on_cpu
@pytest.mark.parametrize(
    ("order", "parts"),
    [("values here table", 2), ("table here values", 2), ("here table values", 1), ("values table here", 1)],
)
def test_streams_wait_for_all_they_need(order, parts, monkeypatch):
    step = step_of()
    if parts == 2:  # g of one example at a time
        monkeypatch.setattr(tiled, "WORKSPACE", 1)
    expected = step()
    for found, one in zip(late_step(step, order, monkeypatch), expected, strict=True):
        assert found.equal(one)


@kernels
@on_cpu
@pytest.mark.parametrize("needs", ["queries", "values", "keys", "table"])
def test_one_gradient_alone(needs, monkeypatch):
    """What is needed, of its type, and nothing else; each stream waits for it in time."""
    found = late_step(step_of(needs=needs), "values here table", monkeypatch)
    for one, whole, need in zip(found, step_of()(), NEEDS[needs], strict=True):
        assert one.dtype == (torch.float32 if need and needs == "table" else DTYPE)  # as the input's
        torch.testing.assert_close(one, whole if need else one.new_empty(0), rtol=5e-3, atol=5e-3)


@kernels
@pytest.mark.parametrize("needs", ["all", "keys"])
def test_no_memory_is_asked_for_on_a_side_stream(needs, monkeypatch):
    """It would belong to that stream, which may give it away while the current one still reads it."""
    step, asked = step_of(needs=needs), []
    sides = Named()
    for name in ("empty", "empty_like", "zeros"):
        new = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, new=new, **o: asked.append(sides.current[-1]) or new(*args, **o))
    monkeypatch.setattr(streams, "forked", lambda device, work: contextlib.nullcontext(sides))
    step()
    assert set(asked) == {"here"}


@kernels
def test_memory_is_kept_while_a_side_uses_it(monkeypatch):
    step, used = step_of(), []

    @contextlib.contextmanager
    def forked(device, work):
        sides = Named()

        def launch(run, args):
            if sides.current[-1] != "here":
                used.extend(StorageWeakRef(one.untyped_storage()) for one in args if isinstance(one, torch.Tensor))
            run()

        with monkeypatch.context() as patch:
            launches_go_to(launch, patch)
            yield sides
        assert used
        assert not any(one.expired() for one in used)

    monkeypatch.setattr(streams, "forked", forked)
    step()


class FakeStream:
    made = 0

    def __init__(self, device=None, priority=0):
        self.cuda_stream, self.waits = FakeStream.made, []
        FakeStream.made += 1

    def wait_stream(self, other):
        self.waits.append(other)


@pytest.mark.parametrize(
    ("work", "least", "capturing", "forks"),
    [(2, 1, False, True), (1, 2, False, False), (1, 2, True, True), (1, streams.NEVER, True, False)],
)
def test_when_kernels_run_side_by_side(work, least, capturing, forks, monkeypatch):
    """With enough work, or in a CUDA graph. All sides wait, and are waited for, whatever happens."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    here = FakeStream()
    FakeStream.made = here.cuda_stream  # the first that torch makes is the current one: it has gone round
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    streams.side_streams.cache_clear()
    with pytest.raises(KeyError), streams.from_work(least), streams.forked(torch.device("cuda", 7), work) as side:
        raise KeyError
    streams.side_streams.cache_clear()
    assert (side is not streams.ONE_BY_ONE) == forks
    if forks:
        sides = [side.streams["values"], side.streams["table"]]
        assert len({here.cuda_stream, *(one.cuda_stream for one in sides)}) == 3
        assert [one.waits for one in sides] == [[here], [here]]
        assert here.waits == sides


@gpu
@pytest.mark.parametrize("where", ["usual", "own stream", "urgent stream", "graph"])
def test_side_by_side_is_bit_for_bit_one_by_one(where):
    step = step_of(batch=64)
    with streams.from_work(streams.NEVER):
        expected = step()
    torch.cuda.synchronize()
    own = {"own stream": 0, "urgent stream": -1}
    stream = torch.cuda.Stream(priority=own[where]) if where in own else torch.cuda.current_stream()
    with streams.from_work(0 if where != "graph" else 1e12), torch.cuda.stream(stream):
        if where == "graph":  # with little work
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
    with streams.from_work(0), streams.forked(DEVICE, 1) as side:
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
    with streams.from_work(0), streams.forked(DEVICE, 1) as side:
        with side("values"):
            for _ in range(100):
                big += 1
        side.wait("table", "values")
        with side("table"):
            seen += big[-1]
    assert seen.item() == 100


def test_a_cpu_has_no_streams():
    with streams.from_work(0), streams.forked(torch.device("cpu"), 1e12) as side:
        assert side is streams.ONE_BY_ONE
        assert isinstance(side("values"), contextlib.nullcontext)
        side.wait("values", "here")
        side.keep(torch.zeros(1))
    assert not side.kept


def test_what_was_asked_for_ends_with_the_block():
    with pytest.raises(KeyError), streams.from_work(0):
        raise KeyError
    assert streams._least_work == streams.LEAST_WORK

"""Time and memory of functions: medians of interleaved repeats, and the peak of what was allocated."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

TRIED = 4  # algorithms of cuDNN for a convolution, its best guesses first: of ten, some take a second for one trial


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def fastest(self) -> float:
        return min(self.seconds)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def once(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call. On a GPU between two events, so that the queue in front of it does not count."""
    if device.type != "cuda":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    before.record()
    function()
    after.record()
    torch.cuda.synchronize(device)
    return before.elapsed_time(after) * 1e-3


def interleaved(
    functions: Mapping[str, Callable[[], object]], device: torch.device, repeats: int, seconds: float
) -> dict[str, Timing]:
    """Times functions round-robin: what disturbs the machine for a while disturbs all of them.

    Stops after `repeats` rounds, or after `seconds` once every function ran three times (a function that takes
    more than `seconds` by itself runs once).
    """
    if device.type == "cuda":
        return {name: Timing(cuda_repeats(function, repeats)) for name, function in functions.items()}
    found: dict[str, list[float]] = {name: [] for name in functions}
    spent = 0.0
    for turn in range(repeats):
        if turn >= 3 and spent > seconds:
            break
        for name, function in functions.items():
            if turn and found[name][0] > seconds:
                continue
            found[name].append(once(function, device))
            spent += found[name][-1]
    return {name: Timing(tuple(times)) for name, times in found.items()}


def cuda_repeats(function: Callable[[], object], repeats: int) -> tuple[float, ...]:
    """GPU clocks are steady, caches are not: triton's do_bench clears the second-level cache between calls."""
    from triton.testing import do_bench

    times = do_bench(captured(function), warmup=50, rep=20 * repeats, return_mode="all")
    assert isinstance(times, list)
    return tuple(t * 1e-3 for t in times)


def captured(function: Callable[[], object], *, required: bool = False) -> Callable[[], object]:
    """The function as a CUDA graph, so that Python's launches do not count.

    Where it cannot be captured: itself, or the error (`required`).
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles and allocates what the graph will use
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    problem: RuntimeError | None = None
    try:
        # a capture that fails at its end leaves its stream as the current one: the outer context takes the old one back
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            try:
                function()
            except RuntimeError as error:  # the end of a capture that failed raises another error, which would hide it
                problem = error
    except RuntimeError as error:
        problem = problem or error
    if problem is None:
        return graph.replay
    torch.cuda.synchronize()
    if required:
        raise problem
    return function


@contextlib.contextmanager
def fastest_convolutions() -> Iterator[None]:
    """cuDNN tries its algorithms on each new shape: worth it where a shape comes many times."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = True, TRIED
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """The most memory that a call holds at a time, beyond what was there before it.

    CUDA: `max_memory_allocated`. CPU: every allocation and release of torch's CPU allocator, summed in order; this
    sees temporaries inside operators too, but not the private scratch memory of oneDNN and MKL.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler reports a missing GPU as an error
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        function()
    profiler = recorded.profiler
    assert profiler is not None
    assert profiler.kineto_results is not None
    events: list[Any] = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak

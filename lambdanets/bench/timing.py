"""Time and memory of functions: medians of interleaved repeats, and peak memory."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

TRIED = 4  # cuDNN algorithms to try per convolution, best guesses first; some of the ten take a second per trial


@dataclass(frozen=True)
class Timing:
    """The seconds of each repeat."""

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
    """Return the seconds of one call, on a GPU between two events, without the work queued before."""
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
    """Time functions round-robin, so that temporary disturbances affect all of them.

    It stops after `repeats` rounds, or after `seconds` once every function has run three times. A function that takes
    more than `seconds` runs once.
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
    """Time repeats on a GPU with Triton's do_bench, which clears the L2 cache between calls."""
    from triton.testing import do_bench

    times = do_bench(captured(function), warmup=50, rep=20 * repeats, return_mode="all")
    assert isinstance(times, list)
    return tuple(t * 1e-3 for t in times)


def captured(function: Callable[[], object], *, required: bool = False) -> Callable[[], object]:
    """Capture a function as a CUDA graph, to avoid launch overhead.

    If it cannot be captured, return the function itself, or raise the error if `required`.
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
        # A capture that fails at its end leaves its stream as the current one; the outer context restores the old one.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            try:
                function()
            except RuntimeError as error:  # the end of a failed capture raises another error, which would hide it
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
    """Let cuDNN try its algorithms for each new shape inside the context."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = True, TRIED
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Return the peak memory of a call, without the memory that was allocated before it.

    On CUDA it is `max_memory_allocated`. On a CPU it is the running sum of all allocations and releases of torch's CPU
    allocator, which includes temporaries inside operators, but not the private scratch memory of oneDNN and MKL.
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

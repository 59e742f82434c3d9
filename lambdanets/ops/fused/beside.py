"""Kernels of one operation that do not need each other, side by side on streams of their own.

A kernel leaves more and more of the chip idle while its last programs run, and one that follows on its stream waits for
the very last. On another stream its programs begin where there is room.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

LEAST_WORK = 5e10  # operations of a product (28x28x128, batch 256: 7e10); with fewer, Python is what takes time
NEVER = math.inf
_least_work = LEAST_WORK


@contextlib.contextmanager
def from_work(least: float) -> Iterator[None]:
    """Inside, products with at least so many operations run beside others: 0 all, NEVER none."""
    global _least_work
    before, _least_work = _least_work, least
    try:
        yield
    finally:
        _least_work = before


@functools.cache
def side_streams(device: torch.device, handle: int) -> list[torch.cuda.Stream]:
    """Two usual streams and two urgent ones, to run beside the one with this handle: always the same."""
    usual, urgent = ([torch.cuda.Stream(device, priority=one) for _ in range(3)] for one in (0, -1))
    # torch has 32 of a kind and goes round
    return [one for kind in (usual, urgent) for one in [one for one in kind if one.cuda_stream != handle][:2]]


@dataclass(frozen=True)
class Sides:
    """Contexts to launch kernels in: two sides, and what comes after either, whose programs go before all others."""

    first: contextlib.AbstractContextManager[object]
    second: contextlib.AbstractContextManager[object]
    after_first: contextlib.AbstractContextManager[object]
    after_second: contextlib.AbstractContextManager[object]


@contextlib.contextmanager
def after(stream: torch.cuda.Stream, follower: torch.cuda.Stream) -> Iterator[None]:
    follower.wait_stream(stream)
    with torch.cuda.stream(follower):
        yield


@contextlib.contextmanager
def beside(device: torch.device, work: float) -> Iterator[Sides]:
    """What is launched on the two sides and on neither of them runs side by side, until the end of the block.

    All wait for what was launched before. Where there is no room for all, programs begin in the order of the launches.
    Memory that the sides use must be there before the beginning, and be kept until the end: it belongs to the current
    stream, which may give it to others in between. `work`: operations of one of the products.
    """
    # Where kernels are captured for a CUDA graph, Python's time does not count.
    fork = device.type == "cuda" and (
        work >= _least_work or (_least_work < NEVER and torch.cuda.is_current_stream_capturing())
    )
    if not fork:
        nothing = contextlib.nullcontext()
        yield Sides(nothing, nothing, nothing, nothing)
        return
    here = torch.cuda.current_stream(device)
    begin = here.record_event()
    first, second, after_first, after_second = side_streams(device, here.cuda_stream)
    first.wait_event(begin)
    second.wait_event(begin)
    try:
        yield Sides(
            torch.cuda.stream(first), torch.cuda.stream(second), after(first, after_first), after(second, after_second)
        )
    finally:
        for stream, follower in ((first, after_first), (second, after_second)):
            follower.wait_stream(stream)
            here.wait_stream(follower)

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

LEAST_WORK = 1e10  # operations of a product from which on it lasts longer than Python takes to fork
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
def side_streams(device: torch.device, handle: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream, torch.cuda.Stream]:
    """Two usual streams and an urgent one, to run beside the one with this handle: always the same."""
    usual = [torch.cuda.Stream(device) for _ in range(3)]  # torch has 32 in all and goes round
    first, second = [stream for stream in usual if stream.cuda_stream != handle][:2]
    return first, second, torch.cuda.Stream(device, priority=-1)


@dataclass(frozen=True)
class Sides:
    """Contexts to launch kernels in. Programs of kernels in `after_first` go before all others that wait."""

    first: contextlib.AbstractContextManager[object]
    second: contextlib.AbstractContextManager[object]
    after_first: contextlib.AbstractContextManager[object]


@contextlib.contextmanager
def beside(device: torch.device, work: float) -> Iterator[Sides]:
    """What is launched in `first`, in `second` and in neither of them runs side by side, until the end of the block.

    All wait for what was launched before. `work`: operations of one of the products.
    Memory that the sides use must be there before the beginning, and be kept until the end: it belongs to the current
    stream, which may give it to others in between.
    """
    # Where kernels are captured for a CUDA graph, Python's time does not count.
    fork = device.type == "cuda" and (
        work >= _least_work or (_least_work < NEVER and torch.cuda.is_current_stream_capturing())
    )
    if not fork:
        nothing = contextlib.nullcontext()
        yield Sides(nothing, nothing, nothing)
        return
    here = torch.cuda.current_stream(device)
    begin = here.record_event()
    first, second, urgent = side_streams(device, here.cuda_stream)
    first.wait_event(begin)
    second.wait_event(begin)

    @contextlib.contextmanager
    def after_first() -> Iterator[None]:
        urgent.wait_stream(first)
        with torch.cuda.stream(urgent):
            yield

    try:
        yield Sides(torch.cuda.stream(first), torch.cuda.stream(second), after_first())
    finally:
        urgent.wait_stream(first)
        for side in (second, urgent):
            here.wait_stream(side)

"""Run kernels of one backward pass that do not depend on each other on several streams.

While the last thread blocks of a kernel run, much of the GPU is idle, and the next kernel of the stream waits for the
very last one. Kernels of another stream start in the free space.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

LEAST_WORK = 5e10  # operations of a product (28x28x128, batch 256: 1.1e11); with fewer, Python is what takes time
NEVER = math.inf
_least_work = LEAST_WORK


@contextlib.contextmanager
def from_work(least: float) -> Iterator[None]:
    """Inside, kernels overlap from so many operations of a product on: 0 always, NEVER never."""
    global _least_work
    before, _least_work = _least_work, least
    try:
        yield
    finally:
        _least_work = before


@functools.cache
def side_streams(device: torch.device, handle: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Two streams of high priority besides the one with this handle: always the same.

    torch has 32 of a kind and goes round, so others may have the same ones: then they wait for each other.
    """
    streams = [torch.cuda.Stream(device, priority=-1) for _ in range(3)]
    first, second, *_ = [one for one in streams if one.cuda_stream != handle]
    return first, second


@dataclass(frozen=True)
class Sides:
    """Streams by name: `here`, the current one, and two others. No streams: all kernels run here, one by one."""

    streams: dict[str, torch.cuda.Stream] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)

    def __call__(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Where to launch kernels."""
        return torch.cuda.stream(self.streams[name]) if self.streams else contextlib.nullcontext()

    def wait(self, name: str, other: str) -> None:
        """What is launched on this side from now on comes after all that is on the other one by now."""
        if self.streams:
            self.streams[name].wait_stream(self.streams[other])

    def keep(self, *owners: object) -> None:
        """Of memory that the sides use: until they are waited for."""
        if self.streams:
            self.kept.extend(owners)


ONE_BY_ONE = Sides()


@contextlib.contextmanager
def forked(device: torch.device, work: float) -> Iterator[Sides]:
    """Sides `values` and `table`, which wait for what was launched before, and are waited for at the end of the block.

    Where there is no room for all, programs of the sides go before those of the current stream. Memory that the sides
    use must be asked for on the current stream, to which it then belongs, before the side waits for that stream, and be
    kept until the end of the block: the stream may give it to others before. `work`: operations of a product.
    """
    if device.type != "cuda":
        fork = False
    else:
        with torch.cuda.device(device):  # where kernels are captured for a CUDA graph, Python's time does not count
            captured = torch.cuda.is_current_stream_capturing()
        fork = work >= _least_work or (captured and _least_work < NEVER)
    if not fork:
        yield ONE_BY_ONE
        return
    here = torch.cuda.current_stream(device)
    values, table = side_streams(device, here.cuda_stream)
    values.wait_stream(here)
    table.wait_stream(here)
    try:
        yield Sides({"here": here, "values": values, "table": table})
    finally:
        here.wait_stream(values)
        here.wait_stream(table)

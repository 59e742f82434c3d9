"""Run independent kernels of a backward pass on several streams.

While the last thread blocks of a kernel run, much of the GPU is idle, because the next kernel of the stream waits for
all of them. Kernels of another stream can use the idle multiprocessors.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

LEAST_WORK = 5e10  # operations of a product (28x28x128, batch 256: 1.1e11); with fewer, Python overhead dominates
NEVER = math.inf
_least_work = LEAST_WORK


@contextlib.contextmanager
def from_work(least: float) -> Iterator[None]:
    """Let kernels overlap inside the context if a product has at least `least` operations (0: always, or NEVER)."""
    global _least_work
    before, _least_work = _least_work, least
    try:
        yield
    finally:
        _least_work = before


@functools.cache
def side_streams(device: torch.device, handle: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return two high-priority streams other than the one with this handle, always the same.

    torch reuses 32 streams per priority, so other code may have the same streams; then they wait for each other.
    """
    streams = [torch.cuda.Stream(device, priority=-1) for _ in range(3)]
    first, second, *_ = [one for one in streams if one.cuda_stream != handle]
    return first, second


@dataclass(frozen=True)
class Sides:
    """Streams by name: `here`, the current one, and two side streams. If empty, all kernels run on the current one."""

    streams: dict[str, torch.cuda.Stream] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)

    def __call__(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Return a context manager that launches kernels on the named stream."""
        return torch.cuda.stream(self.streams[name]) if self.streams else contextlib.nullcontext()

    def wait(self, name: str, other: str) -> None:
        """Make later kernels of one stream wait for everything launched so far on another."""
        if self.streams:
            self.streams[name].wait_stream(self.streams[other])

    def keep(self, *owners: object) -> None:
        """Keep the owners of memory that the side streams use alive until these streams have been waited for."""
        if self.streams:
            self.kept.extend(owners)


ONE_BY_ONE = Sides()


@contextlib.contextmanager
def forked(device: torch.device, work: float) -> Iterator[Sides]:
    """Open side streams `values` and `table`, which wait for earlier kernels and are joined at the end of the block.

    The side streams have priority over the current stream. Memory that they use must be allocated on the current
    stream, before the side stream waits for it, and be kept until the end of the block, because the allocator may reuse
    it earlier.

    Args:
        device: the device of the kernels.
        work: operations of a product; with too few no streams are opened.
    """
    if device.type != "cuda":
        fork = False
    else:
        with torch.cuda.device(device):  # a captured CUDA graph has no Python overhead
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

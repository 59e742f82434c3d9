"""The processes of a run, as torchrun describes them in the environment; without torchrun, a single process."""

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from lambdanets.options import chosen_device

T = TypeVar("T")
CPU = torch.device("cpu")
GROUPS = itertools.count()  # process groups that this process has joined


@dataclass(frozen=True)
class World:
    """The processes of a run as this process sees them: its rank, their number, and collective operations.

    Collectives on tensors use the backend of the device (NCCL or gloo), those on Python objects use gloo.

    Attributes:
        rank: rank of this process.
        size: number of processes.
        device: device of this process.
        restarts: how often an elastic torchrun has restarted these processes.

    Example:
        >>> from lambdanets.train.distributed import World
        >>> world = World()  # one process on a CPU
        >>> world.main, world.size
        (True, 1)
    """

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    restarts: int = 0

    @property
    def launch(self) -> str | None:
        """Id of the elastic launch, which stays the same over restarts and changes of machines; None without one."""
        name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        return None if name == "none" else name

    @property
    def main(self) -> bool:
        return self.rank == 0

    def mean_(self, tensor: Tensor) -> Tensor:
        """Average a tensor in place over all processes."""
        return self.sum_(tensor).div_(self.size) if self.size > 1 else tensor

    def sum_(self, tensor: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Combine flags over all processes: each is true if it is true on any process. Does not synchronise with the
        device."""
        if self.size == 1:
            return flags
        found = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return tuple(bool(f) for f in found.tolist())

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes on the main process; on other processes only their own value."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found if self.main else [value]

    def share(self, value: Any) -> Any:
        """Return the value of the main process on all processes, with its tensors on the CPU. Uses pickle, so pass only
        objects that these processes created."""
        if self.size == 1:
            return value
        box = [value if self.main else None]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def on_main(self, act: Callable[[], T]) -> T:
        """Call a function on the main process and return its result on all processes. ValueError and OSError are raised
        on all processes."""
        found: Any = None
        error: ValueError | OSError | None = None
        if self.main:
            try:
                found = act()
            except (ValueError, OSError) as refused:
                error = refused
        kind = OSError if isinstance(error, OSError) else ValueError
        found, failure = self.share((found, None if error is None else (kind, str(error))))
        if error is not None:
            raise error
        if failure is not None:
            raise failure[0](failure[1])
        return found

    def wait(self) -> None:
        """Wait until all processes reach this point."""
        self.any(False)


@contextmanager
def join(device: str | None = None, timeout_minutes: float = 10.0) -> Iterator[World]:
    """Join the processes that torchrun's environment describes, or yield a world with this process alone.

    Waiting for another process for longer than `timeout_minutes` raises an error, see `loss_of_process`.
    """
    chosen = chosen_device(device)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if chosen.type == "cuda":
        if chosen.index is None:
            chosen = torch.device("cuda", local_rank)
        if chosen.index >= torch.cuda.device_count():
            raise ValueError(
                f"process {local_rank} has no GPU: start at most {torch.cuda.device_count()} processes on this machine"
            )
        torch.cuda.set_device(chosen)
    if size == 1:
        yield World(device=chosen)
        return
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    start_group(chosen, restarts, timedelta(minutes=timeout_minutes))
    try:
        yield World(dist.get_rank(), dist.get_world_size(), chosen, restarts)
    finally:
        gc.collect()  # networks that refer to the group would destroy it at exit, when its threads cannot be joined
        dist.destroy_process_group()


def start_group(device: torch.device, restarts: int, timeout: timedelta) -> None:
    """Connect to the other processes.

    After a restart, torchrun's store still contains the addresses of dead processes (torch issue 135712), so each
    attempt uses its own prefix. This works on one machine only, because several machines count restarts separately;
    there, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which gives each attempt a new store.
    """
    store, rank, size = next(rendezvous("env://"))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        store = PrefixStore(f"try-{restarts}", store)
    number = next(GROUPS)
    if number:  # a second training in this process must not find the addresses of the previous group
        store = PrefixStore(f"group-{number}", store)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)

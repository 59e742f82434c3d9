"""The processes of a run. torchrun starts them and says who is who in the environment; alone, nothing is needed."""

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
GROUPS = itertools.count()  # that this process has been in


@dataclass(frozen=True)
class World:
    """Who this process is among all of them.

    Collectives on tensors go over the device's own network (NCCL, gloo), what the hosts agree on over gloo.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    restarts: int = 0  # how often an elastic torchrun has started these processes again

    @property
    def launch(self) -> str | None:
        """What all processes of an elastic launch have in common, over restarts and machines that come and go."""
        name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        return None if name == "none" else name

    @property
    def main(self) -> bool:
        return self.rank == 0

    def mean_(self, tensor: Tensor) -> Tensor:
        """In place, over all processes."""
        return self.sum_(tensor).div_(self.size) if self.size > 1 else tensor

    def sum_(self, tensor: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Each flag, true on all processes if it is on one. The device does not wait."""
        if self.size == 1:
            return flags
        found = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return tuple(bool(f) for f in found.tolist())

    def gather(self, value: Any) -> list[Any]:
        """On the main process the values of all, elsewhere its own."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found if self.main else [value]

    def share(self, value: Any) -> Any:
        """The main process's value, tensors in it included, on the CPU; only what these processes made themselves."""
        if self.size == 1:
            return value
        box = [value if self.main else None]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def on_main(self, act: Callable[[], T]) -> T:
        """The result of a call on the main process, on all processes. Its ValueError or OSError is raised on all."""
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
        """Until all processes are here."""
        self.any(False)


@contextmanager
def join(device: str | None = None, timeout_minutes: float = 10.0) -> Iterator[World]:
    """The world that torchrun's environment describes, or this process alone.

    A process that waits for another one for longer than `timeout_minutes` gets an error, see `loss_of_process`.
    """
    chosen = chosen_device(device)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if chosen.type == "cuda":
        if chosen.index is None:
            chosen = torch.device("cuda", local_rank)
        if chosen.index >= torch.cuda.device_count():
            raise ValueError(f"process {local_rank} has no GPU: start at most {torch.cuda.device_count()} on a machine")
        torch.cuda.set_device(chosen)
    if size == 1:
        yield World(device=chosen)
        return
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    start_group(chosen, restarts, timedelta(minutes=timeout_minutes))
    try:
        yield World(dist.get_rank(), dist.get_world_size(), chosen, restarts)
    finally:
        gc.collect()  # networks that still refer to the group would end it at exit, when its threads cannot be joined
        dist.destroy_process_group()


def start_group(device: torch.device, restarts: int, timeout: timedelta) -> None:
    """Connect to the other processes.

    After a restart, torchrun's store still holds the addresses of the processes that died (torch issue 135712), so each
    try has a name of its own. Only on one machine: several count their restarts each for itself. There the variable
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each try a new store.
    """
    store, rank, size = next(rendezvous("env://"))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        store = PrefixStore(f"try-{restarts}", store)
    number = next(GROUPS)
    if number:  # a process that trains again must not find the addresses of its last group
        store = PrefixStore(f"group-{number}", store)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)

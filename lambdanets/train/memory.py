"""Search for a micro-batch size that fits into memory, before the first step."""

from dataclasses import replace

import torch

from lambdanets.data.order import Remainder
from lambdanets.train.distributed import World
from lambdanets.train.engine import Engine
from lambdanets.train.prefetch import on_device
from lambdanets.train.task import Share

PROBED = ("cuda",)  # devices that raise OutOfMemoryError; on a CPU the system kills the process


def make_share(world: World, batch_size: int, micro_batch: int | None, remainder: Remainder = "drop") -> Share:
    """Divide a step among processes and micro-batches. Raises ValueError if the sizes do not divide."""
    if batch_size % world.size:
        raise ValueError(f"batch_size {batch_size} is not divisible by {world.size} processes")
    whole = batch_size // world.size
    micro = min(micro_batch or whole, whole)
    if whole % micro:
        raise ValueError(
            f"{whole} images per process are not divisible into micro-batches of {micro}: "
            f"use micro_batch {largest_divisor(whole, micro)}"
        )
    return Share(world.rank, world.size, micro, whole // micro, remainder)


def fitting_share(engine: Engine, batch_size: int, remainder: Remainder = "drop") -> Share:
    """Return the share with the largest micro-batch whose forward and backward pass fits into the memory of all
    processes.

    The trial passes do not communicate, so that a process that runs out of memory does not block the others. They leave
    no trace: gradients are dropped, running statistics restored, and the random numbers of steps do not depend on them.
    """
    world = engine.world
    share = make_share(world, batch_size, None, remainder)
    if world.device.type not in PROBED:
        return share
    while True:
        failed = not survives(engine, share)
        if not world.any(failed)[0]:
            return share
        if share.micro_batch == 1:
            raise ValueError("not even one image of this size fits into memory: use a smaller network or image_size")
        smaller = largest_divisor(share.micro_batch * share.parts, share.micro_batch // 2)
        share = make_share(world, batch_size, smaller, remainder)


def survives(engine: Engine, share: Share) -> bool:
    engine.model.train()
    engine.statistics.begin()
    batches = engine.task.batches(engine.task.largest_epoch, 0, share)
    try:
        whole = replace(share, parts=share.parts + 1)  # never the last part, so gradients are not synchronised
        for batch in on_device(batches, engine.world.device):
            engine.backward(0, batch, 0, whole)
            break
        if engine.world.device.type == "cuda":
            torch.cuda.synchronize()
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        engine.optimizer.zero_grad(set_to_none=True)
        engine.statistics.put_back()
        if engine.world.device.type == "cuda":
            torch.cuda.empty_cache()


def largest_divisor(number: int, limit: int) -> int:
    return next(d for d in range(min(limit, number), 0, -1) if number % d == 0)

"""Prefetching of batches to the device: copies run on their own stream during computation."""

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def moved(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a batch to the device: any nesting of tuples, lists, dicts and dataclasses."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(moved(value, device) for value in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{f.name: moved(getattr(batch, f.name), device) for f in fields(batch) if f.init})
    return batch


def on_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yield the batches on the device, in order."""
    if device.type != "cuda":
        for batch in batches:
            yield moved(batch, device)
        return
    side = torch.cuda.Stream(device)
    ahead = None
    for batch in batches:
        # The memory of a batch is reused on this stream after the stream that used it has finished with it.
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            coming = moved(batch, device)
            copied = side.record_event()
        if ahead is not None:
            yield ready(*ahead, device)
        ahead = coming, copied
    if ahead is not None:
        yield ready(*ahead, device)


def ready(batch: Any, copied: Any, device: torch.device) -> Any:
    torch.cuda.current_stream(device).wait_event(copied)
    return batch

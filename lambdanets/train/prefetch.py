"""Batches on the device, one ahead: copies run on their own stream while the device computes."""

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device: any nest of tuples, lists, dicts and dataclasses."""
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


def used_on(batch: Any, stream: torch.cuda.Stream) -> None:
    """Memory of the batch is not given to others before this stream is done with it."""
    if isinstance(batch, Tensor):
        if batch.is_cuda:
            batch.record_stream(stream)
    elif isinstance(batch, dict):
        used_on(list(batch.values()), stream)
    elif isinstance(batch, list | tuple):
        for value in batch:
            used_on(value, stream)
    elif is_dataclass(batch) and not isinstance(batch, type):
        used_on([getattr(batch, f.name) for f in fields(batch)], stream)


def on_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """The batches on the device, in their order."""
    if device.type != "cuda":
        for batch in batches:
            yield moved(batch, device)
        return
    side = torch.cuda.Stream(device)
    ahead = None
    for batch in batches:
        with torch.cuda.stream(side):
            coming = moved(batch, device)
            copied = side.record_event()
        if ahead is not None:
            yield ready(*ahead, device)
        ahead = coming, copied
    if ahead is not None:
        yield ready(*ahead, device)


def ready(batch: Any, copied: Any, device: torch.device) -> Any:
    stream = torch.cuda.current_stream(device)
    stream.wait_event(copied)
    used_on(batch, stream)
    return batch

"""Where a training step of a network spends its time: in kernels, or in starting them.

    python benchmarks/step_profile.py resnet50 resnet50,placement=CCLL --output benchmarks/results/steps-cuda.json

For each network, as it is, compiled, and compiled with CUDA graphs: the time of a step, how long the program takes to
start all of its kernels, how long the GPU is busy, and the kernels that take longest.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch.profiler import ProfilerActivity, profile

from lambdanets.bench.networks import Entry
from lambdanets.machine import describe
from lambdanets.options import optional

Way = Literal["eager", "compiled", "CUDA graphs"]
WARM_UP, STEPS, LONGEST = 4, 10, 25


@dataclass(frozen=True)
class Profile:
    """See above."""

    networks: Annotated[tuple[str, ...], tyro.conf.Positional]
    """As `lambdanets bench network` takes them."""
    ways: tuple[Way, ...] = ("eager", "compiled", "CUDA graphs")
    batch: int = 256
    output: Annotated[Path | None, optional("FILE")] = None

    def run(self) -> int:
        if not torch.cuda.is_available():
            raise ValueError("a profile of a GPU needs one, and torch finds none")
        device = torch.device("cuda")
        found: dict[str, Any] = {"name": "steps", **describe(device), "batch": self.batch, "rows": []}
        for text in self.networks:
            for way in self.ways:
                row = {"network": text, "way": way, **measured(Entry.parse(text), way, self.batch, device)}
                found["rows"].append(row)
                print(
                    f"{text}, {way}: step {row['step_ms']:.1f} ms, started in {row['start_ms']:.1f}, "
                    f"GPU busy for {row['busy_ms']:.1f}, {row['peak_gib']:.2f} GiB",
                    flush=True,
                )
                if self.output is not None:
                    self.output.write_text(json.dumps(found, indent=1) + "\n")
        return 0


def measured(entry: Entry, way: Way, batch: int, device: torch.device) -> dict[str, Any]:
    torch.compiler.reset()
    size = entry.image_size()
    network = entry.build(size).to(device).to(memory_format=torch.channels_last).train()
    if way != "eager":
        network.compile(dynamic=False, mode="reduce-overhead" if way == "CUDA graphs" else None)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9)
    images = torch.randn(batch, 3, *size, device=device).to(memory_format=torch.channels_last)
    classes = torch.zeros(batch, dtype=torch.int64, device=device)

    def step() -> None:
        if way == "CUDA graphs":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device.type, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(network(images).float(), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARM_UP):
        step()
    torch.cuda.reset_peak_memory_stats()
    whole = timed(step, STEPS)
    start = sum(timed(step, 1, wait=False) for _ in range(STEPS)) / STEPS
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        step()
        torch.cuda.synchronize()
    kernels = sorted(record.key_averages(), key=lambda one: -one.self_device_time_total)
    return {
        "step_ms": 1e3 * whole,
        "start_ms": 1e3 * start,
        "busy_ms": sum(one.self_device_time_total for one in kernels) / 1e3,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "longest": [
            {"kernel": one.key, "ms": one.self_device_time_total / 1e3, "calls": one.count} for one in kernels[:LONGEST]
        ],
    }


def timed(step: Callable[[], None], times: int, *, wait: bool = True) -> float:
    """Seconds of a step, to its end or only until all is started."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        step()
    if wait:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


if __name__ == "__main__":
    sys.exit(tyro.cli(Profile, description=__doc__).run())

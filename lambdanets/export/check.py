"""Comparison of exported networks with the original: outputs and latency."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

TOLERANCE = 1e-4  # largest difference in float32, relative to the largest score of the original
ROUNDINGS = 4  # or this multiple of the original's difference between float32 and float64, if larger
SIZES = 4  # number of random image sizes on which a dynamic export is compared
SEED = 0


@dataclass(frozen=True)
class Latency:
    """Median latency of one image in milliseconds.

    Attributes:
        wall: wall-clock time; other load on the machine affects it strongly.
        cpu: CPU time of all threads of the process.
    """

    wall: float
    cpu: float


def shapes_to_compare(shape: tuple[int, int, int, int], dynamic: bool, smallest: int) -> list[tuple[int, ...]]:
    """Return shapes with batches of 1, 2 and 3; with `dynamic` also random, rectangular and odd sizes."""
    _, channels, height, width = shape
    shapes: list[tuple[int, ...]] = [(batch, channels, height, width) for batch in (1, 2, 3)]
    if dynamic:
        generator = torch.Generator().manual_seed(SEED)
        most = max(smallest + 1, max(height, width) * 5 // 4)
        sides = torch.randint(smallest, most + 1, (SIZES, 2), generator=generator)
        shapes += [(1 + i % 2, channels, int(down), int(across)) for i, (down, across) in enumerate(sides)]
        shapes.append((1, channels, smallest, smallest))
    return shapes


@torch.no_grad()
def compare(
    original: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], shapes: Sequence[tuple[int, ...]]
) -> float:
    """Return the largest difference on random images of these shapes, relative to the original's largest score."""
    generator = torch.Generator().manual_seed(SEED)
    worst = 0.0
    for shape in shapes:
        images = torch.randn(shape, generator=generator)
        expected = original(images).double()
        found = other(images).double()
        if found.shape != expected.shape:
            raise ValueError(f"images {list(shape)} gave scores {list(found.shape)}, expected {list(expected.shape)}")
        difference = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))
        worst = max(worst, difference) if difference == difference else float("nan")
        if worst != worst:
            return worst
    return worst


@torch.no_grad()
def latencies(
    runners: Mapping[str, Callable[[Tensor], Tensor]], shape: tuple[int, ...], rounds: int
) -> dict[str, Latency]:
    """Measure in turn, so that other load affects all runners alike; the first round is a warmup."""
    images = torch.randn(shape, generator=torch.Generator().manual_seed(SEED))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    for turn in range(rounds + 1):
        for name, runner in runners.items():
            wall, cpu = time.perf_counter(), time.process_time()
            runner(images)
            spent = (time.perf_counter() - wall, time.process_time() - cpu)
            if turn:
                found[name].append(spent)
    return {
        name: Latency(*(median(times) * 1e3 for times in zip(*spent, strict=True))) for name, spent in found.items()
    }

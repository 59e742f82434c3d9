"""Whether an exported network is the original, and how long each takes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

TOLERANCE = 1e-4  # float32: the largest difference, relative to the largest score of the original
ROUNDINGS = 4  # or so many times the difference that float32 makes to the original itself
SIZES = 4  # random image sizes that a dynamic export is compared on
SEED = 0


@dataclass(frozen=True)
class Latency:
    """Milliseconds for one image, medians. On a machine with other work wall time says more about that work."""

    wall: float
    cpu: float  # process time of all threads


def shapes_to_compare(shape: tuple[int, int, int, int], dynamic: bool, smallest: int) -> list[tuple[int, ...]]:
    """Batches of 1, 2 and 3 at the size; for open sizes also random ones, rectangles and odd sides among them."""
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
    """The largest difference on noise of these shapes, relative to the largest score of the original."""
    generator = torch.Generator().manual_seed(SEED)
    worst = 0.0
    for shape in shapes:
        images = torch.randn(shape, generator=generator)
        expected = original(images).double()
        found = other(images).double()
        if found.shape != expected.shape:
            raise ValueError(f"images {list(shape)} gave {list(found.shape)} and not {list(expected.shape)}")
        difference = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))
        worst = max(worst, difference) if difference == difference else float("nan")
        if worst != worst:
            return worst
    return worst


@torch.no_grad()
def latencies(
    runners: Mapping[str, Callable[[Tensor], Tensor]], shape: tuple[int, ...], rounds: int
) -> dict[str, Latency]:
    """Round-robin, so that what disturbs the machine disturbs all of them; the first round does not count."""
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

"""Learning-rate range test (Smith, 1506.01186): increase the learning rate in every step of a throw-away training."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from lambdanets.files import whole_path, write_json
from lambdanets.train.config import RunConfig
from lambdanets.train.distributed import join
from lambdanets.train.engine import Engine
from lambdanets.train.memory import fitting_share, make_share
from lambdanets.train.prefetch import on_device
from lambdanets.train.task import Share, Task

STEPS, LOWEST, HIGHEST = 100, 1e-6, 10.0
MEMORY = 0.9  # decay of the moving average of the loss
DIVERGED = 3.0  # stop when the loss exceeds the lowest loss by this factor
MARGIN = 10.0  # the suggestion is the rate with the lowest loss divided by this
SHOWN = 12  # rows of the table
JSON, FIGURE = "find_rate.json", "find_rate.svg"


@dataclass(frozen=True)
class FoundRate:
    """Result of the range test. Losses are smoothed."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    suggested: float  # peak learning rate
    schedule_rate: float  # value of schedule.rate that gives this peak at this batch size
    diverged: bool


def find_rate(
    task: Task, config: RunConfig, *, steps: int | None = None, lowest: float = LOWEST, highest: float = HIGHEST
) -> FoundRate:
    """Train new weights for at most `steps` steps with exponentially increasing rates, until the loss diverges."""
    steps = steps or STEPS
    try:
        with join(config.device, config.timeout_minutes) as world:
            engine = Engine(task, config, world, steps)
            if config.micro_batch:
                share = make_share(world, config.batch_size, config.micro_batch)
            else:
                share = fitting_share(engine, config.batch_size)
            batches = on_device(endless(task, share), world.device)
            rates, losses, mean, best = [], [], 0.0, math.inf
            console = Console(stderr=True, quiet=not world.main)
            for step in track(range(steps), "trying learning rates", console=console, transient=True):
                rate = lowest * (highest / lowest) ** (step / max(steps - 1, 1))
                engine.step(step, batches, share, rate)
                loss = engine.metrics.means()["loss"]  # before the update of this step
                mean = MEMORY * mean + (1 - MEMORY) * loss
                smoothed = mean / (1 - MEMORY ** (step + 1))
                if not math.isfinite(loss) or smoothed > DIVERGED * best:
                    break
                rates.append(rate)
                losses.append(smoothed)
                best = min(best, smoothed)
    finally:
        task.close()
    if not rates:
        raise ValueError("the loss of the first step is not finite: check the data")
    suggested = rates[losses.index(best)] / MARGIN
    scale = config.batch_size / config.schedule.per_batch if config.schedule.per_batch else 1.0
    return FoundRate(tuple(rates), tuple(losses), suggested, suggested / scale, len(rates) < steps)


def endless(task: Task, share: Share) -> Iterator[Any]:
    for epoch in itertools.count():
        yield from task.batches(epoch, 0, share)


def write(found: FoundRate, folder: Path) -> None:
    """Write the result as JSON, and as a figure if matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / JSON, asdict(found), indent=2)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(found.rates, found.losses)
    axes.axvline(found.suggested, linestyle=":", color="black")
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss (moving average)")
    with whole_path(folder / FIGURE) as part:
        figure.savefig(part, format="svg")


def show(found: FoundRate, console: Console) -> None:
    table = Table("learning rate", "loss", "")
    low, high = min(found.losses), max(found.losses)
    every = max(1, -(-len(found.rates) // SHOWN))
    for rate, loss in list(zip(found.rates, found.losses, strict=True))[::every]:
        bar = "█" * (1 + round(20 * (loss - low) / ((high - low) or 1)))
        table.add_row(f"{rate:.2g}", f"{loss:.4g}", bar)
    console.print(table)
    if not found.diverged:
        console.print("The loss did not diverge: larger learning rates may work as well.")
    console.print(
        f"Suggested peak learning rate: {found.suggested:.2g}, a tenth of the rate with the lowest loss. Train with "
        f"--schedule.rate {found.schedule_rate:.2g}",
        soft_wrap=True,
    )

"""`lambdanets bench engine`: what the training loop costs beside a bare one with the same network and images."""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import torch
from rich.console import Console

from lambdanets.files import whole_path
from lambdanets.measure.machine import describe
from lambdanets.options import BENCHES, check_positive, chosen_device, optional
from lambdanets.recipes.small import imagenette
from lambdanets.train.config import TrainConfig
from lambdanets.train.loop import fit
from lambdanets.train.precision import autocast
from lambdanets.train.prefetch import moved
from lambdanets.train.signals import SIGNAL_STATUS, Interrupted, Interrupts
from lambdanets.train.task import Share

if TYPE_CHECKING:
    from lambdanets.train.classify import Classify

WINDOW = 20  # steps that are timed together: at the end of each window the host waits for the device


@dataclass(frozen=True)
class BenchEngine:
    """The training loop against a bare one: the same network, images and augmentation, in turns, in one run.

    The bare loop moves a batch to the device, computes the loss, and takes a step of SGD. Ours also averages the
    weights, undoes steps that are not finite, sums up what the log says, and can resume to the last bit.
    """

    data: str
    """Images, as `lambdanets train --data.path` takes them."""
    placement: str = "CCLL"
    """Of the ResNet-50 of the `imagenette` recipe: CCCC for convolutions alone."""
    steps: int = 200
    """Timed in each of the turns, after as many as one window to warm up."""
    turns: int = 4
    """How often both loops run, one after the other; every other time ours comes first."""
    batch: Annotated[int | None, optional("N")] = None
    """Images of a step; by default the recipe's."""
    image_size: Annotated[int | None, optional("PIXELS")] = None
    """Of the images; by default the recipe's. Larger ones leave the device more to do in each step."""
    compile: bool = False
    """torch.compile, for both."""
    workers: Annotated[int | None, optional("N")] = None
    """Processes that read images."""
    device: Annotated[str | None, optional("DEVICE")] = None
    """cpu or cuda; by default a GPU if there is one."""
    output: Path = BENCHES / "engine.json"
    """The JSON file."""

    def run(self) -> int:
        check_positive(image_size=self.image_size)
        base = imagenette()
        size = base.model.image_size if self.image_size is None else self.image_size
        base = replace(
            base,
            model=replace(base.model, placement=self.placement, image_size=size),
            data=replace(base.data, path=self.data, cache="memory", workers=self.workers),
            batch_size=base.batch_size if self.batch is None else self.batch,
            compile=self.compile,
            device=self.device,
        )
        try:
            with Interrupts() as stop:
                result = compare_loops(base, self.steps, self.turns, stop.check)
        except Interrupted as signal:
            (name,) = signal.args
            print(f"lambdanets: {name} ended the measurement: nothing is written to {self.output}", file=sys.stderr)
            return SIGNAL_STATUS[name]
        with whole_path(self.output) as part:
            part.write_text(json.dumps(result, indent=1) + "\n")
        Console(highlight=False).print(
            f"bare loop {result['bare']:,.0f} images/s, ours {result['ours']:,.0f}: "
            f"{100 * result['overhead']:.1f}% overhead, by turns {100 * median(result['overhead_of_turns']):.1f}% "
            f"({100 * min(result['overhead_of_turns']):.1f} to {100 * max(result['overhead_of_turns']):.1f}). "
            f"Written to {self.output}",
            soft_wrap=True,
        )
        return 0


class Clock:
    """Images per second of every window but the first, which warms up. Both loops are timed by this."""

    def __init__(self, images: int, device: torch.device, check: Callable[[], None] = lambda: None) -> None:
        self.images, self.device, self.check = images, device, check
        self.steps, self.began = 0, 0.0
        self.rates: list[float] = []

    def tick(self) -> None:
        """After a step; `check` may end it all."""
        self.check()
        self.steps += 1
        if self.steps % WINDOW:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self.steps > WINDOW:
            self.rates.append(WINDOW * self.images / (now - self.began))
        self.began = now


def compare_loops(
    base: TrainConfig, steps: int, turns: int, check: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Images per second of both loops, medians of windows over all turns, and what ours takes longer."""
    if steps < WINDOW or turns < 1:
        raise ValueError(f"{steps} steps in {turns} turns: at least {WINDOW} steps in one turn can be timed")
    device = chosen_device(base.device)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # as ours does: the bare loop of the first turn has it too
    base = replace(base, log_every=WINDOW, evaluate_every=10**6, micro_batch=base.batch_size, checkpoint_minutes=1e6)
    loops: dict[str, Callable[[TrainConfig, int, Clock], None]] = {"bare": run_bare, "ours": run_ours}
    found: dict[str, list[float]] = {"bare": [], "ours": []}
    overhead_of_turns = []
    for turn in range(turns):
        rates = {}
        for name in ("bare", "ours") if turn % 2 == 0 else ("ours", "bare"):  # what drifts with time cancels
            clock = Clock(base.batch_size, device, check)
            loops[name](base, (1 + steps // WINDOW) * WINDOW, clock)
            rates[name] = clock.rates
            found[name] += clock.rates
        overhead_of_turns.append(median(rates["bare"]) / median(rates["ours"]) - 1)
    bare, ours = median(found["bare"]), median(found["ours"])
    settings = {"placement": base.model.placement, "batch": base.batch_size, "precision": base.precision}
    settings |= {"image_size": base.model.size, "compile": base.compile, "steps": steps, "turns": turns}
    return {
        "name": "engine",
        **describe(device),
        "settings": settings,
        "bare": bare,
        "ours": ours,
        "overhead": bare / ours - 1,
        "overhead_of_turns": overhead_of_turns,
        "windows": found,
    }


def run_bare(config: TrainConfig, steps: int, clock: Clock) -> None:
    """A loop that does the least that training needs."""
    from lambdanets.train.classify import Classify

    torch.manual_seed(config.seed)
    task, device = Classify(config), clock.device
    network = task.model().to(device)
    network = network.to(memory_format=torch.channels_last) if config.channels_last else network  # pyright: ignore
    if config.compile:
        network.compile()
    chosen = config.optimizer
    optimizer = torch.optim.SGD(
        network.parameters(), lr=1e-3, momentum=chosen.momentum, weight_decay=chosen.weight_decay, fused=True
    )
    batches = endless(task, config)
    try:
        for _ in range(steps):
            batch = moved(next(batches), device)
            with autocast(config.precision, device):
                outcome = task.loss(network, batch)
            outcome.loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            clock.tick()
    finally:
        batches.close()
        task.close()


def endless(task: "Classify", config: TrainConfig) -> Any:
    """The batches of one epoch after the other."""

    def batches() -> Iterator[Any]:
        epoch = 0
        while True:
            yield from task.batches(epoch, 0, Share(0, 1, config.batch_size, 1))
            epoch += 1

    return batches()


def run_ours(config: TrainConfig, steps: int, clock: Clock) -> None:
    """The loop that trains."""
    from lambdanets.train.classify import Classify

    def watch(record: dict[str, Any]) -> None:
        if record["event"] == "tick":
            clock.tick()

    with tempfile.TemporaryDirectory() as folder:
        task = Classify(config)
        epochs = steps / (task.examples // config.batch_size)
        # A run that a signal ends has nothing to save here.
        fit(task, replace(config, epochs=epochs, out=Path(folder)), watch=watch, listen=False)

"""`lambdanets bench engine`: what the training loop costs beside a bare one with the same network and images."""

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import torch
from rich.console import Console

from lambdanets.measure.machine import describe
from lambdanets.options import chosen_device, optional
from lambdanets.recipes.small import imagenette
from lambdanets.report.log import read_log
from lambdanets.train.config import TrainConfig
from lambdanets.train.log import LOG
from lambdanets.train.loop import fit
from lambdanets.train.precision import autocast
from lambdanets.train.prefetch import moved
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
    """How often both loops run, one after the other."""
    batch: Annotated[int | None, optional("N")] = None
    """Images of a step; by default the recipe's."""
    compile: bool = False
    """torch.compile, for both."""
    workers: Annotated[int | None, optional("N")] = None
    """Processes that read images."""
    device: Annotated[str | None, optional("DEVICE")] = None
    """cpu or cuda; by default a GPU if there is one."""
    output: Path = Path("benchmarks/results/engine.json")
    """The JSON file."""

    def run(self) -> int:
        if self.steps < WINDOW or self.turns < 1:
            raise ValueError(f"--steps {self.steps} --turns {self.turns}: at least {WINDOW} steps and one turn")
        base = imagenette()
        base = replace(
            base,
            model=replace(base.model, placement=self.placement),
            data=replace(base.data, path=self.data, cache="memory", workers=self.workers),
            batch_size=base.batch_size if self.batch is None else self.batch,
            compile=self.compile,
            device=self.device,
        )
        result = compare_loops(base, self.steps, self.turns)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(result, indent=1) + "\n")
        Console(highlight=False).print(
            f"bare loop {result['bare']:,.0f} images/s, ours {result['ours']:,.0f}: "
            f"{100 * result['overhead']:.1f}% overhead. Written to {self.output}",
            soft_wrap=True,
        )
        return 0


def compare_loops(base: TrainConfig, steps: int, turns: int) -> dict[str, Any]:
    """Images per second of both loops, medians of windows over all turns, and what ours takes longer."""
    device = chosen_device(base.device)
    base = replace(base, log_every=WINDOW, evaluate_every=10**6, micro_batch=base.batch_size, checkpoint_minutes=1e6)
    found: dict[str, list[float]] = {"bare": [], "ours": []}
    for _ in range(turns):
        found["bare"] += bare_windows(base, device, steps)
        found["ours"] += our_windows(base, steps)
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
        "windows": found,
    }


def bare_windows(config: TrainConfig, device: torch.device, steps: int) -> list[float]:
    """Images per second of every window of a loop that does the least that training needs."""
    from lambdanets.train.classify import Classify

    torch.manual_seed(config.seed)
    task = Classify(config)
    network = task.model().to(device)
    network = network.to(memory_format=torch.channels_last) if config.channels_last else network  # pyright: ignore
    if config.compile:
        network.compile()
    chosen = config.optimizer
    optimizer = torch.optim.SGD(
        network.parameters(), lr=1e-3, momentum=chosen.momentum, weight_decay=chosen.weight_decay, fused=True
    )
    batches, rates = endless(task, config), []
    try:
        for window in range(1 + steps // WINDOW):
            began = time.perf_counter()
            for _ in range(WINDOW):
                batch = moved(next(batches), device)
                with autocast(config.precision, device):
                    outcome = task.loss(network, batch)
                outcome.loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if window:  # the first one warms up
                rates.append(WINDOW * config.batch_size / (time.perf_counter() - began))
    finally:
        batches.close()
        task.close()
    return rates


def endless(task: "Classify", config: TrainConfig) -> Any:
    """The batches of one epoch after the other."""

    def batches() -> Iterator[Any]:
        epoch = 0
        while True:
            yield from task.batches(epoch, 0, Share(0, 1, config.batch_size, 1))
            epoch += 1

    return batches()


def our_windows(config: TrainConfig, steps: int) -> list[float]:
    """Images per second of every window, as the log says."""
    from lambdanets.train.classify import Classify

    with tempfile.TemporaryDirectory() as folder:
        task = Classify(config)
        epochs = (steps + WINDOW) / (task.examples // config.batch_size)
        fit(task, replace(config, epochs=epochs, out=Path(folder)))
        rates = [record["examples_per_second"] for record in read_log(Path(folder) / LOG).steps]
    return rates[1 : 1 + steps // WINDOW]

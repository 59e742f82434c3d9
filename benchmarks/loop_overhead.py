"""Measure the overhead of the training loop compared with a minimal loop with the same network and images.

python benchmarks/loop_overhead.py --data imagenette2-160 --output benchmarks/results/engine.json
"""

import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import tyro
from rich.console import Console

from lambdanets.files import write_json
from lambdanets.machine import describe
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

Report = Callable[[dict[str, Any]], None]
TIMED_STEPS = 20  # steps per turn, timed together


@dataclass(frozen=True)
class BenchEngine:
    """Compare the training loop with a minimal one: same network, images and augmentation, in turns, in one run.

    The minimal loop moves a batch to the device, computes the loss, and takes a step of SGD. Our loop also averages the
    weights, skips non-finite steps, accumulates the metrics of the log, and can resume bit-identically. Both run in one
    process and alternate every 20 steps, so that other load on the machine affects both. Each has its own processes
    that read images, also while the other loop runs, so that the loops are compared and not the speed of reading.
    """

    data: str
    """Images, as for `lambdanets train --data.path`."""
    placement: str = "CCLL"
    """Placement of the ResNet-50 of the `imagenette` recipe; CCCC uses convolutions only."""
    turns: int = 20
    """Turns of each loop, of 20 steps each, after one warmup turn."""
    batch: Annotated[int | None, optional("N")] = None
    """Batch size; default: that of the recipe."""
    image_size: Annotated[int | None, optional("PIXELS")] = None
    """Image size in pixels; default: that of the recipe. Larger images give the device more work per step."""
    compile: bool = False
    """Use torch.compile in both loops."""
    workers: Annotated[int | None, optional("N")] = None
    """Worker processes of each loop that read images."""
    cache: Literal["auto", "none", "memory", "device"] = "memory"
    """Where both loops keep decoded images, as --data.cache of `lambdanets train`."""
    alone: bool = False
    """Let the minimal loop train on one batch of random pixels on the device. The result is the overhead compared with
    the network alone."""
    device: Annotated[str | None, optional("DEVICE")] = None
    """cpu or cuda; default: a GPU if there is one."""
    output: Path = BENCHES / "engine.json"
    """The JSON file."""

    def run(self) -> int:
        check_positive(image_size=self.image_size)
        base = imagenette()
        size = base.model.image_size if self.image_size is None else self.image_size
        base = replace(
            base,
            model=replace(base.model, placement=self.placement, image_size=size),
            data=replace(base.data, path=self.data, cache=self.cache, workers=self.workers),
            batch_size=base.batch_size if self.batch is None else self.batch,
            compile=self.compile,
            device=self.device,
        )
        done = 0

        def write(result: dict[str, Any]) -> None:
            """Write the result after every turn, so that a stopped run loses nothing."""
            nonlocal done
            done = result["settings"]["turns"]
            write_json(self.output, result)
            print(f"turn {done} of {self.turns}: {100 * result['overhead']:.1f}% so far", file=sys.stderr, flush=True)

        try:
            with Interrupts() as stop:
                result = compare_loops(base, self.turns, stop.check, write, self.alone)
        except Interrupted as signal:
            (name,) = signal.args
            rest = f"{self.output} has {done} of {self.turns} turns" if done else f"nothing is written to {self.output}"
            print(f"lambdanets: {name} ended the measurement: {rest}", file=sys.stderr)
            return SIGNAL_STATUS[name]
        low, high = result["overhead_quartiles"]
        Console(highlight=False).print(
            f"minimal loop {result['bare']:,.0f} images/s, ours {result['ours']:,.0f}: {100 * result['overhead']:.1f}% "
            f"overhead (quartiles {100 * low:.1f}% to {100 * high:.1f}%). Written to {self.output}",
            soft_wrap=True,
        )
        return 0


class Turns:
    """Run a turn of the minimal loop after every turn of ours and measure images per second; the first pair is warmup.

    `check` is called after every step, `report` with the rates so far from the second pair on.
    """

    def __init__(
        self, images: int, device: torch.device, bare: Iterator[None], check: Callable[[], None], report: Report
    ) -> None:
        self.images, self.device, self.bare, self.check, self.report = images, device, bare, check, report
        self.steps, self.began = 0, time.perf_counter()
        self.rates: dict[str, list[float]] = {"bare": [], "ours": []}

    def watch(self, record: dict[str, Any]) -> None:
        """Count a step of our loop; `check` may end the measurement."""
        if record["event"] != "tick":
            return
        self.check()
        self.steps += 1
        if self.steps % TIMED_STEPS == 0:
            self.over("ours")
            for _ in range(TIMED_STEPS):
                next(self.bare)
                self.check()
            self.over("bare")
            if len(self.rates["bare"]) > 1:
                self.report(self.rates)
                self.began = time.perf_counter()

    def over(self, name: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self.steps > TIMED_STEPS:
            self.rates[name].append(TIMED_STEPS * self.images / (now - self.began))
        self.began = now


def compare_loops(
    base: TrainConfig,
    turns: int,
    check: Callable[[], None] = lambda: None,
    report: Report = lambda result: None,
    alone: bool = False,
) -> dict[str, Any]:
    """Return images per second of both loops, medians over turns, and the extra time of ours relative to the next turn.

    `check` is called after every step; `report` with the result so far, after every turn from the second on. `alone`:
    the minimal loop reads no images.
    """
    from lambdanets.train.classify import Classify

    if turns < 2:
        raise ValueError(f"{turns} turns: at least 2 are needed")
    device = chosen_device(base.device)
    base = replace(
        base,
        remainder="drop",
        log_every=TIMED_STEPS,
        evaluate_every=10**6,
        micro_batch=base.batch_size,
        checkpoint_minutes=1e6,
    )
    steps = (1 + turns) * TIMED_STEPS
    bare = bare_steps(base, device, alone)
    about = describe(device)
    taken = Turns(base.batch_size, device, bare, check, lambda rates: report(summary(base, about, rates, alone)))
    try:
        with tempfile.TemporaryDirectory() as folder:
            task = Classify(base)
            epochs = steps / (task.examples // base.batch_size)
            # There is nothing to save when a signal ends the run.
            fit(task, replace(base, epochs=epochs, out=Path(folder)), watch=taken.watch, listen=False)
    finally:
        bare.close()
    return summary(base, about, taken.rates, alone)


def summary(
    base: TrainConfig, about: dict[str, Any], found: dict[str, list[float]], alone: bool = False
) -> dict[str, Any]:
    """Return the result from the images per second of neighbouring turns."""
    overheads = [theirs / ours - 1 for theirs, ours in zip(found["bare"], found["ours"], strict=True)]
    low, middle, high = quantiles(overheads, n=4, method="inclusive")
    settings = {"placement": base.model.placement, "batch": base.batch_size, "precision": base.precision}
    settings |= {"image_size": base.model.size, "compile": base.compile, "steps": TIMED_STEPS, "turns": len(overheads)}
    settings |= {"cache": base.data.cache, "alone": alone}
    return {
        "name": "engine",
        **about,
        "settings": settings,
        "bare": median(found["bare"]),
        "ours": median(found["ours"]),
        "overhead": middle,
        "overhead_quartiles": [low, high],
        "windows": found,
    }


def bare_steps(config: TrainConfig, device: torch.device, alone: bool = False) -> Generator[None]:
    """Run a minimal training loop; with `alone`, always on the same pixels."""
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
    batches = same_pixels(config, device) if alone else endless(task, config)
    try:
        while True:
            batch = moved(next(batches), device)
            with autocast(config.precision, device):
                outcome = task.loss(network, batch)
            outcome.loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield
    finally:
        batches.close()
        task.close()


def endless(task: "Classify", config: TrainConfig) -> Any:
    """Yield the batches of all epochs."""

    def batches() -> Iterator[Any]:
        epoch = 0
        while True:
            yield from task.batches(epoch, 0, Share(0, 1, config.batch_size, 1))
            epoch += 1

    return batches()


def same_pixels(config: TrainConfig, device: torch.device) -> Generator[Any]:
    """Yield the same batch of random pixels endlessly."""
    side, count = config.model.size, config.batch_size
    pixels = torch.randint(0, 256, (count, side, side, config.data.channels), dtype=torch.uint8, device=device)
    while True:
        yield pixels.permute(0, 3, 1, 2), torch.zeros(count, dtype=torch.int64, device=device)


def main(words: Sequence[str] | None = None) -> int:
    return tyro.cli(BenchEngine, args=words).run()


if __name__ == "__main__":
    sys.exit(main())

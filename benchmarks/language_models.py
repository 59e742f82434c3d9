"""Compare language models of lambda layers and of softmax attention of equal size, in turns, in one run.

    python benchmarks/language_models.py --output benchmarks/results/language-cpu.json

It measures bits per byte after equal steps and after equal time, and the training throughput. For generation it
measures, for each length of the text, the time per byte, the memory of the state and the growth of the process.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from rich.console import Console
from torch import Tensor

from lambdanets.bench.timing import interleaved
from lambdanets.experiments.language.corpus import Corpus, read_corpus
from lambdanets.experiments.language.network import ByteModel, Kind, State, state_bytes
from lambdanets.experiments.language.task import (
    LARGEST_LENGTH,
    About,
    Language,
    LanguageConfig,
    bigram_bits,
    evaluate,
    load_language,
    regions,
    save_language,
)
from lambdanets.files import write_json
from lambdanets.machine import describe, threads
from lambdanets.options import BENCHES, check_numbers, optional
from lambdanets.train.distributed import World
from lambdanets.train.engine import Engine
from lambdanets.train.memory import make_share
from lambdanets.train.schedule import learning_rate
from lambdanets.typed import to_json

KINDS: tuple[Kind, ...] = ("lambda", "attention")
STEPS_TIMED = 16  # of generation, in one repeat
REPEATS = 51
WARM_UP = 32  # bytes generated before the growth of the process is measured
AGREED = 1e-4  # largest allowed difference between step-by-step and parallel form, in nats
GROW = "grow"  # first argument of the process that measures memory


@dataclass(frozen=True, kw_only=True)
class CompareLanguage:
    """Train both kinds of language model in turns, measure them, and write JSON.

    Both have the settings of `language train`, but a constant learning rate: then no moment of the run is better than
    another, and any can be compared, by steps or by time. Everything runs on the CPU.
    """

    minutes: float = 6.0
    """Minutes of training for each model."""
    turn: int = 10
    """Steps per turn; the next turn goes to the model with less training time."""
    evaluations: int = 10
    """Evaluations of each model, evenly over its training time."""
    context: tuple[int, ...] = (64, 256, 1024, 4096)
    """Context lengths of the final evaluation, in bytes."""
    lengths: tuple[int, ...] = (256, 1024, 4096, 16384)
    """Text lengths at which generation is measured, in bytes."""
    text: str = "python"
    """The text, as for `lambdanets experiments language train --text`."""
    threads: Annotated[int | None, optional("N")] = None
    """CPU threads; default: torch's number."""
    output: Path = BENCHES / "language-cpu.json"
    """The JSON file."""

    def run(self) -> int:
        console = Console(highlight=False)
        with threads(self.threads):
            result = compare(self, read_corpus(self.text), LanguageConfig(text=self.text), console)
        write_json(self.output, result)
        console.print(f"written to {self.output}", soft_wrap=True)
        return 0


def compare(options: CompareLanguage, corpus: Corpus, base: LanguageConfig, console: Console) -> dict[str, Any]:
    """Return all measurements for the JSON file."""
    for name in ("minutes", "turn", "evaluations", "context", "lengths"):
        given = getattr(options, name)
        for value in given if isinstance(given, tuple) else (given,):
            if value is not None and value <= 0:
                raise ValueError(f"--{name} {value:g}: must be above 0")
    check_numbers(options, "--", turn=(1, 10**6), evaluations=(1, 10**6), threads=(1, 4096))
    check_numbers(options, "--", context=(1, LARGEST_LENGTH), lengths=(1, LARGEST_LENGTH))
    if not options.context or not options.lengths:
        raise ValueError("--context and --lengths need at least one value each")
    base = replace(base, schedule=replace(base.schedule, kind="constant"), ema=replace(base.ema, horizon=0.0))
    contestants: dict[Kind, Contestant] = {kind: Contestant(kind, base, corpus) for kind in KINDS}
    train_in_turns(list(contestants.values()), options, console)
    models: dict[Kind, ByteModel] = {kind: one.trained() for kind, one in contestants.items()}
    task = contestants["lambda"].task
    longest = regions(corpus.validation, max(options.context), base.evaluated)
    for kind, model in models.items():
        check_steps(kind, model, task.regions)
    result: dict[str, Any] = {
        "name": "language",
        **describe(torch.device("cpu")),
        "settings": {**to_json(base), "minutes": options.minutes, "turn": options.turn},
        "text": corpus.describe(),
        "evaluated_bytes": task.regions[:, 1:].numel(),
        "bigram_bits_per_byte": bigram_bits(corpus, task.regions),
        "training": {kind: one.summary() for kind, one in contestants.items()},
        "equal_steps": equal_steps({kind: one.curve for kind, one in contestants.items()}),
        "context": [
            {"length": length}
            | {kind: evaluate(model, longest, length, World())["bits_per_byte"] for kind, model in models.items()}
            for length in options.context
        ],
    }
    with tempfile.TemporaryDirectory() as folder:
        for kind, model in models.items():
            about = About(model=model.config, text=corpus.describe())
            save_language(model, Path(folder) / f"{kind}.safetensors", about)
        result["generation"] = generation(models, corpus, options.lengths, Path(folder))
    for row in result["generation"]:
        console.print(f"generation after {row['length']:,} bytes: {row}", soft_wrap=True)
    return result


# Training -------------------------------------------------------------------------------------------------------------


class Contestant:
    """A model in training: its training engine and its time so far."""

    def __init__(self, kind: Kind, base: LanguageConfig, corpus: Corpus) -> None:
        self.kind, self.world = kind, World()
        self.config = replace(base, model=replace(base.model, kind=kind), device="cpu")
        self.task = Language(self.config, corpus)
        self.epoch_steps = self.task.examples // self.config.batch_size
        if not self.epoch_steps:
            raise ValueError(f"{self.task.examples} sequences do not fill a batch of {self.config.batch_size}")
        self.engine = Engine(self.task, self.config, self.world, self.epoch_steps)
        self.share = make_share(self.world, self.config.batch_size, None)
        self.batches = self.endless()
        self.done, self.seconds = 0, 0.0
        self.rates: list[float] = []  # bytes per second of each turn
        self.curve: list[dict[str, float]] = []

    def endless(self) -> Iterator[Tensor]:
        epoch = 0
        while True:
            yield from self.task.batches(epoch, 0, self.share)
            epoch += 1

    def advance(self, steps: int) -> None:
        began = time.perf_counter()
        config = self.config
        for step in range(self.done, self.done + steps):
            rate = learning_rate(
                config.schedule, config.batch_size, step, steps=self.epoch_steps, steps_per_epoch=self.epoch_steps
            )
            self.engine.step(step, self.batches, self.share, rate)
        took = time.perf_counter() - began
        self.done += steps
        self.seconds += took
        self.rates.append(steps * config.batch_size * config.length / took)

    def trained(self) -> ByteModel:
        assert self.engine.average is not None
        model = self.engine.average.network()
        assert isinstance(model, ByteModel)
        return model.ready()

    def evaluate(self) -> float:
        bits = self.task.evaluate(self.trained(), self.world, False)["validation"]["bits_per_byte"]
        self.curve.append({"step": self.done, "seconds": self.seconds, "bits_per_byte": bits})
        return bits

    def summary(self) -> dict[str, Any]:
        return {
            "parameters": sum(p.numel() for p in self.engine.model.parameters()),
            "steps": self.done,
            "bits_per_byte": self.curve[-1]["bits_per_byte"],
            "seconds": self.seconds,
            "bytes_per_second": median(self.rates[1:] or self.rates),  # the first turn is warmup
            "curve": self.curve,
        }


def train_in_turns(contestants: list[Contestant], options: CompareLanguage, console: Console) -> None:
    """Train in turns, so that other load on the machine affects both. Evaluations do not count as training time."""
    each = 60 * options.minutes / options.evaluations
    while waiting := [one for one in contestants if len(one.curve) < options.evaluations]:
        one = min(waiting, key=lambda one: one.seconds)
        one.advance(options.turn)
        if one.seconds >= each * (len(one.curve) + 1):
            bits, rate = one.evaluate(), median(one.rates)
            console.print(
                f"{one.seconds:.0f} s, step {one.done}, {one.kind}: {bits:.3f} bits per byte, {rate:,.0f} bytes/s"
            )


def equal_steps(curves: dict[Kind, list[dict[str, float]]]) -> dict[str, float]:
    """Return the bits per byte at the last step that all models have reached, interpolated between evaluations."""
    last = min(curve[-1]["step"] for curve in curves.values())
    found = {"step": last}
    for kind, curve in curves.items():
        steps, bits = [point["step"] for point in curve], [point["bits_per_byte"] for point in curve]
        found[kind] = float(np.interp(last, steps, bits))
    return found


# Generation -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_steps(kind: str, model: ByteModel, regions_RN: Tensor, length: int = 96) -> None:
    """Check that step-by-step generation equals the parallel form."""
    text_BN = regions_RN[:1, :length].long()
    expected = model(text_BN).log_softmax(2)[0]
    scores, state = model.prefill(text_BN[:, : length // 2])
    for n in range(length // 2, length):
        worst = (scores.log_softmax(1)[0] - expected[n - 1]).abs().max().item()
        if not worst <= AGREED:
            raise RuntimeError(f"{kind}: byte {n} differs by {worst:.1e} nats step by step, allowed {AGREED}")
        scores, state = model.step(text_BN[:, n], state)


def generation(
    models: dict[Kind, ByteModel], corpus: Corpus, lengths: Sequence[int], folder: Path
) -> list[dict[str, Any]]:
    """Measure the next bytes after texts of several lengths: milliseconds per byte and size of the state.

    All models and lengths are timed in turns, so that other load on the machine affects them equally.
    """
    if len(corpus.training) < max(lengths) + STEPS_TIMED:
        raise ValueError(f"the text has {len(corpus.training)} bytes, too few to generate after {max(lengths)}")
    text = torch.from_numpy(corpus.training[: max(lengths) + STEPS_TIMED]).long()
    states: dict[tuple[Kind, int], State] = {
        (kind, n): model.prefill(text[None, :n])[1] for kind, model in models.items() for n in lengths
    }

    def steps(kind: Kind, length: int) -> None:
        state = states[kind, length]
        for byte in text[length : length + STEPS_TIMED]:
            _, state = models[kind].step(byte[None], state)

    functions = {f"{kind} {n}": partial(steps, kind, n) for kind, n in states}
    for function in functions.values():
        function()
    timed = interleaved(functions, torch.device("cpu"), REPEATS, 120.0)
    rows: list[dict[str, Any]] = []
    for length in lengths:
        rows.append({"length": length})
        for kind in models:
            rows[-1][kind] = {
                "milliseconds": 1e3 * timed[f"{kind} {length}"].median / STEPS_TIMED,
                "state_bytes": state_bytes(states[kind, length]),
                "process_growth_bytes": process_growth(folder / f"{kind}.safetensors", length),
            }
    return rows


def process_growth(weights: Path, length: int) -> int | None:
    """Return the growth of a separate process during generation, in bytes; None where the system does not report it."""
    if not sys.platform.startswith("linux"):
        return None
    done = subprocess.run([sys.executable, __file__, GROW, str(weights), str(length)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the process that measures memory failed: {done.stderr.strip()[-400:]}")
    return int(done.stdout)


def grow(weights: str, length: int) -> None:
    """Generate `length` bytes one by one, and print the growth of peak resident memory after a warmup."""
    process = Path("/proc/self")
    model, _ = load_language(weights)
    before = 0
    for number, _ in enumerate(model.generate(b"\0", length)):
        if number == WARM_UP:
            (process / "clear_refs").write_text("5")  # resets the peak, which was higher while loading
            before = peak_resident(process)
    print(peak_resident(process) - before)


def peak_resident(process: Path) -> int:
    line = next(line for line in (process / "status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def main(words: Sequence[str]) -> int:
    if words[:1] == [GROW]:
        grow(words[1], int(words[2]))
        return 0
    return tyro.cli(CompareLanguage, args=words).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

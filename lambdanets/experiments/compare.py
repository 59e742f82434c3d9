"""`lambdanets experiments compare`: networks trained alike, each with the same budget for tuning, over several seeds.

Tuning sees a held-out part of the training images only. The validation images are looked at once by each final run.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.table import Table

from lambdanets.files import locked, read_object, write_json
from lambdanets.machine import describe
from lambdanets.options import chosen_device, optional
from lambdanets.recipes.small import imagenette
from lambdanets.report.log import read_log
from lambdanets.report.positions import movements
from lambdanets.runs import LOG
from lambdanets.train.config import TrainConfig
from lambdanets.train.loop import Result, fit

HELD_OUT = 0.1  # of the training images, for tuning
BASELINE = "convolution"
WARMUP = 1 / 8  # of a run, at most: short ones are more than their warmup


@dataclass(frozen=True)
class Trial:
    """What tuning changes."""

    rate: float
    weight_decay: float
    embedding_std: float | None = None


# Six trials each: an equal budget. Where there are position embeddings, their size takes the place of weight decay.
RATES = (0.05, 0.1, 0.2)
PLAIN = tuple(Trial(rate, decay) for rate in RATES for decay in (5e-4, 1e-3))
WITH_EMBEDDINGS = tuple(Trial(rate, 5e-4, std) for rate in RATES for std in (1.0, 0.02))


@dataclass(frozen=True)
class Contestant:
    """One kind of network: what it changes in the recipe's."""

    placement: str
    layer: str | None = None
    options: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = WITH_EMBEDDINGS

    def config(self, base: TrainConfig, trial: Trial, seed: int, out: Path) -> TrainConfig:
        std = trial.embedding_std
        model = replace(base.model, placement=self.placement, layer=self.layer, embedding_std=std)
        model = replace(model, options=(*model.options, *self.options))
        optimizer = replace(base.optimizer, weight_decay=trial.weight_decay)
        schedule = replace(base.schedule, rate=trial.rate)
        return replace(base, model=model, optimizer=optimizer, schedule=schedule, seed=seed, out=out)


CONTESTANTS = {
    BASELINE: Contestant("CCCC", trials=PLAIN),
    "se": Contestant("CCCC", options=("se=True",), trials=PLAIN),
    "CCLL": Contestant("CCLL"),
    "LLLL": Contestant("LLLL"),
    "axial": Contestant("LLLL", "axial_attention", trials=PLAIN),
}
Name = Literal["convolution", "se", "CCLL", "LLLL", "axial"]


@dataclass(frozen=True)
class Compare:
    """Which network learns best? Trains several with one recipe, tunes each alike, and repeats with other seeds.

    First six trials of each network on 90% of the training images, judged by the other 10%; then the best trial on all
    of them, once for each seed, judged by the validation images. What is done is never done again: the same command
    goes on where it was stopped.
    """

    data: str
    """Images with a training and a validation part, as `lambdanets train --data.path` takes them."""
    out: Path = Path("runs/compare")
    """The folder for the runs and compare.json."""
    networks: tuple[Name, ...] = ("convolution", "CCLL")
    """ResNet-50 with: convolutions, those and squeeze-and-excitation (se), lambda layers, axial attention."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Of the final runs. A network needs at least two for a spread."""
    epochs: Annotated[float | None, optional("N")] = None
    """Of the final runs; by default the recipe's."""
    tuning_epochs: Annotated[float | None, optional("N")] = None
    """Of the trials; by default half as many. 0: no tuning, the first trial of each network is taken."""
    batch_size: Annotated[int | None, optional("N")] = None
    """Images of a step; by default the recipe's. Rates stay rates for 256 images."""
    minutes: Annotated[float | None, optional("MINUTES")] = None
    """Start no further run after this long."""
    device: Annotated[str | None, optional("DEVICE")] = None
    """cpu or cuda; by default a GPU if there is one."""
    workers: Annotated[int | None, optional("N")] = None
    """Processes that read images."""
    compile: bool = False
    """torch.compile."""

    def run(self) -> int:
        from lambdanets.data.source import splits_of

        if not self.networks:
            raise ValueError(f"--networks: at least one of {', '.join(CONTESTANTS)}")
        if "validation" not in splits_of(self.data):  # or the first final run would fail, after all the trials
            raise ValueError(f"{self.data} has no validation images, which the final runs are judged by")
        base = imagenette()
        data = replace(base.data, path=self.data, workers=self.workers, cache="memory")
        base = replace(
            base, data=data, remainder="drop", device=self.device, compile=self.compile, checkpoint_minutes=1e6
        )
        base = replace(base, epochs=base.epochs if self.epochs is None else self.epochs)
        base = replace(base, batch_size=base.batch_size if self.batch_size is None else self.batch_size)
        tuning = base.epochs / 2 if self.tuning_epochs is None else self.tuning_epochs
        with locked(self.out):
            contest = Contest.open(self.out, base, {name: CONTESTANTS[name] for name in self.networks})
            contest.check(tuning)
            contest.go(self.seeds, tuning, self.minutes)
        contest.show(Console(highlight=False))
        return 0


@dataclass
class Contest:
    """Runs that are done, as rows of compare.json, and those still to do."""

    folder: Path
    base: TrainConfig
    contestants: dict[str, Contestant]
    rows: list[dict[str, Any]]

    @classmethod
    def open(cls, folder: Path, base: TrainConfig, contestants: dict[str, Contestant]) -> "Contest":
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "compare.json"
        rows = read_object(path, constants=True)["rows"] if path.exists() else []
        return cls(folder, base, contestants, rows)

    def check(self, tuning_epochs: float) -> None:
        """Rows of runs of another length or batch would be compared with, or chosen among, those of this one."""
        for phase, epochs in (("final", self.base.epochs), ("tuning", tuning_epochs)):
            wanted = {"epochs": epochs, "batch_size": self.base.batch_size}
            for row in self.rows if epochs else ():
                wrong = [n for n in wanted if row["phase"] == phase and row.get(n, wanted[n]) != wanted[n]]
                if wrong:
                    found, asked = (" and ".join(f"{n} {rows[n]:g}" for n in wrong) for rows in (row, wanted))
                    raise ValueError(
                        f"{self.folder} has {phase} runs with {found}, asked for is {asked}: "
                        f"give those, or another --out"
                    )

    def go(self, seeds: Iterable[int], tuning_epochs: float, minutes: float | None = None) -> None:
        """The trials, then seed by seed every network, so that an early end leaves a fair comparison."""
        deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes
        if tuning_epochs:
            for name, contestant in self.contestants.items():
                for trial in contestant.trials:
                    if self.tuned(name, trial) is None and time.monotonic() <= deadline:
                        self.train("tuning", name, trial, 0, tuning_epochs)
        for seed in seeds:
            for name, contestant in self.contestants.items():
                trial = self.best_trial(name) if tuning_epochs else contestant.trials[0]
                if trial is not None and seed not in self.final(name) and time.monotonic() <= deadline:
                    self.train("final", name, trial, seed)

    def tuned(self, name: str, trial: Trial) -> float | None:
        """The held-out accuracy of a trial that is done."""
        for row in self.rows:
            if (row["phase"], row["network"]) == ("tuning", name) and row["settings"] == vars(trial):
                return row["top1"]
        return None

    def best_trial(self, name: str) -> Trial | None:
        """The one with the best held-out accuracy, once all of them are done."""
        scores = {trial: self.tuned(name, trial) for trial in self.contestants[name].trials}
        if None in scores.values():
            return None
        return max(scores, key=lambda trial: scores[trial] or 0.0)

    def train(self, phase: str, name: str, trial: Trial, seed: int, tuning_epochs: float | None = None) -> None:
        from lambdanets.train.classify import Classify

        settings = "-".join(f"{value:g}" for value in vars(trial).values() if value is not None)
        out = self.folder / f"{name}-{phase}-{settings if phase == 'tuning' else seed}"
        config = self.contestants[name].config(self.base, trial, seed, out)
        if tuning_epochs is not None:
            config = replace(config, epochs=tuning_epochs, data=replace(config.data, held_out=HELD_OUT))
        warmup = min(config.schedule.warmup_epochs, WARMUP * config.epochs)
        config = replace(config, schedule=replace(config.schedule, warmup_epochs=warmup))
        print(f"{phase}: {name}, {trial}, seed {seed}", flush=True)
        task = Classify(config)
        result = fit(task, config, resume=True)
        if not result.finished:
            raise KeyboardInterrupt
        self.rows.append(self.row(phase, name, trial, seed, config, result))
        self.write()

    def row(
        self, phase: str, name: str, trial: Trial, seed: int, config: TrainConfig, result: Result
    ) -> dict[str, Any]:
        weights = next(iter(result.scores.values()))  # the averaged ones, where there are any
        scores = weights["held_out"] if phase == "tuning" else weights["validation"]
        moved = movements(config.out / "start.safetensors", config.out / "weights_raw.safetensors")
        log = read_log(config.out / LOG)
        rates = [record["examples_per_second"] for record in log.steps]
        return {
            "phase": phase,
            "network": name,
            "settings": vars(trial),
            "seed": seed,
            "epochs": config.epochs,
            "batch_size": config.batch_size,
            **{key: scores[key] for key in ("top1", "top5", "loss") if key in scores},
            "parameters": log.start["parameters"],
            "examples_per_second": sorted(rates)[len(rates) // 2],
            "seconds": result.seconds,
            "embedding_cosine": fmean(one.cosine for one in moved) if moved else None,
        }

    def write(self) -> None:
        device = chosen_device(self.base.device)
        about = {"data": Path(self.base.data.path).name, "image_size": self.base.model.size}
        result = {"name": "compare", **describe(device), **about, "rows": self.rows}
        write_json(self.folder / "compare.json", result)

    def show(self, console: Console) -> None:
        table = Table(title="Validation top-1 of the final runs")
        for title in ("network", "runs", "mean", "spread", "beside convolution", "parameters", "images/s", "settings"):
            table.add_column(title, justify="left" if title == "network" else "right")
        for name in self.contestants:
            found = self.final(name)
            if found:
                table.add_row(name, *self.cells(name, found))
        console.print(table)

    def final(self, name: str) -> dict[int, dict[str, Any]]:
        return {row["seed"]: row for row in self.rows if row["phase"] == "final" and row["network"] == name}

    def cells(self, name: str, found: dict[int, dict[str, Any]]) -> list[str]:
        scores = [100 * row["top1"] for row in found.values()]
        last = next(iter(found.values()))
        settings = ", ".join(f"{key} {value}" for key, value in last["settings"].items() if value is not None)
        return [
            str(len(scores)),
            f"{fmean(scores):.2f}",
            f"{stdev(scores):.2f}" if len(scores) > 1 else "-",
            "" if name == BASELINE else paired(found, self.final(BASELINE)),
            f"{last['parameters']:,}",
            f"{fmean(row['examples_per_second'] for row in found.values()):,.0f}",
            settings,
        ]


def paired(found: dict[int, dict[str, Any]], baseline: dict[int, dict[str, Any]]) -> str:
    """The difference as tables have it."""
    numbers = difference(found, baseline)
    return "-" if numbers is None else "{:+.2f} ({:+.2f} to {:+.2f})".format(*numbers)


def difference(
    found: dict[int, dict[str, Any]], baseline: dict[int, dict[str, Any]]
) -> tuple[float, float, float] | None:
    """Points of top-1: the mean over the seeds that both have, and the ends of its 95% interval."""
    from scipy.stats import ttest_rel

    seeds = sorted(found.keys() & baseline.keys())
    if len(seeds) < 2:
        return None
    ours, theirs = ([100 * rows[seed]["top1"] for seed in seeds] for rows in (found, baseline))
    interval: Any = ttest_rel(ours, theirs).confidence_interval(0.95)  # pyright: ignore[reportAttributeAccessIssue]
    return fmean(ours) - fmean(theirs), float(interval.low), float(interval.high)

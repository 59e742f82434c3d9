"""`lambdanets experiments compare`: compare networks with the same tuning budget and several seeds.

Hyperparameters are chosen on a held-out part of the training images. Each final run is evaluated once on the
validation images.
"""

import itertools
import json
import multiprocessing
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.table import Table

from lambdanets.files import locked, read_object, write_json
from lambdanets.machine import describe
from lambdanets.options import chosen_device, optional
from lambdanets.report.log import read_log
from lambdanets.report.positions import movements
from lambdanets.runs import LOG
from lambdanets.train.command import RECIPES
from lambdanets.train.config import TrainConfig, parse_option
from lambdanets.train.loop import fit
from lambdanets.typed import from_json, to_json

HELD_OUT = 0.1  # fraction of the training images that tuning is evaluated on
BASELINE = "convolution"
WARMUP = 1 / 8  # maximum fraction of a run: short runs would otherwise consist of warmup
OPTIONS = "model.options"
Settings = Mapping[str, Any]  # values by dotted name: {"schedule.rate": 0.1}

NETWORKS: dict[str, Settings] = {
    BASELINE: {"model.placement": "CCCC"},
    "se": {"model.placement": "CCCC", "model.options.se": True},
    "CCLL": {"model.placement": "CCLL"},
    "CLLL": {"model.placement": "CLLL"},
    "LLLL": {"model.placement": "LLLL"},
    "axial": {"model.placement": "LLLL", "model.layer": "axial_attention", "model.embedding_std": None},
}
Name = Literal["convolution", "se", "CCLL", "CLLL", "LLLL", "axial"]


@dataclass(frozen=True)
class Compare:
    """Compare networks with the same recipe, hyperparameter trials and seeds.

    The trials of each network train on 90% of the training images and are evaluated on the other 10%. The best settings
    are then trained on all training images, once per seed, and evaluated on the validation images. The table has the
    difference to the convolution with its 95% confidence interval. Run the same command again to resume.
    """

    data: str
    """Dataset with a training and a validation split, as for `lambdanets train --data.path`."""
    out: Path = Path("runs/compare")
    """Folder for the runs and compare.json."""
    recipe: str = "imagenette"
    """Recipe of all runs."""
    settings: tuple[str, ...] = ()
    """Changes to the recipe as name=value: epochs=20 optimizer.kind=adamw model.options.activation=mish"""
    networks: tuple[Name, ...] = ("convolution", "CCLL")
    """Variants of the recipe's network to compare: convolutions, convolutions with squeeze-and-excitation (se), lambda
    layers in some or all stages, axial attention."""
    grid: tuple[str, ...] = ("schedule.rate=0.025,0.05,0.1,0.2,0.4", "optimizer.weight_decay=1e-4,5e-4,2e-3")
    """Hyperparameter grid as name=value,value,...; the same for all networks."""
    trials: int = 6
    """Number of trials per network, drawn at random from the grid, at most the whole grid. 0 disables tuning."""
    tuning_epochs: Annotated[float | None, optional("N")] = None
    """Epochs of each trial; by default half of those of the final runs."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Random seeds of the final runs. At least two are needed for a standard deviation."""
    at_once: int = 1
    """Number of runs at the same time, each in its own process on the same device. On a GPU start CUDA MPS first."""
    minutes: Annotated[float | None, optional("MINUTES")] = None
    """Time budget in minutes; no new run starts after it."""
    device: Annotated[str | None, optional("DEVICE")] = None
    """Device: cpu or cuda; by default a GPU if there is one."""
    workers: Annotated[int | None, optional("N")] = None
    """Worker processes of each run that read images; by default its share of the cores."""

    def run(self) -> int:
        from lambdanets.data.source import splits_of

        if not self.networks:
            raise ValueError(f"--networks is empty: name at least one of {', '.join(NETWORKS)}")
        base = RECIPES[self.recipe].make() if self.recipe in RECIPES else None
        if type(base) is not TrainConfig:
            raise ValueError(f"--recipe must be one of `lambdanets train`, without co-training, got {self.recipe!r}")
        if self.trials < 0 or self.at_once < 1:
            raise ValueError(f"--trials must be at least 0 and --at-once at least 1, got {self.trials}, {self.at_once}")
        if "validation" not in splits_of(self.data):  # otherwise the first final run would fail, after all trials
            raise ValueError(f"{self.data} has no validation images, which the final runs are evaluated on")
        data = replace(base.data, path=self.data, workers=self.workers)
        base = replace(base, data=data, device=self.device, checkpoint_minutes=1e6)
        base = changed(base, dict(map(parse_option, self.settings)))
        grid = {name: several(values) for name, values in map(parse_option, self.grid)}
        for name, values in grid.items():
            for value in values:
                changed(base, {name: value})  # otherwise it would fail after other trials
        tuning = base.epochs / 2 if self.tuning_epochs is None else self.tuning_epochs
        with locked(self.out):
            contest = Contest.open(self.out, base, self.networks, grid, self.trials, tuning)
            contest.go(self.seeds, self.minutes, self.at_once)
        contest.show(Console(highlight=False))
        return 0


def several(values: Any) -> tuple[Any, ...]:
    """Return the values of one hyperparameter as a tuple."""
    if isinstance(values, tuple | list):
        return tuple(values)
    return tuple(values.split(",")) if isinstance(values, str) else (values,)


def changed(config: TrainConfig, settings: Settings) -> TrainConfig:
    """Return the configuration with other values; model.options.NAME is an argument of the network."""
    data = to_json(config)
    for name, value in settings.items():
        if name.startswith(f"{OPTIONS}."):
            option = name.removeprefix(f"{OPTIONS}.")
            others = [word for word in data["model"]["options"] if word.partition("=")[0] != option]
            data["model"]["options"] = [*others, f"{option}={value}"]
            continue
        *path, last = name.split(".")
        place = data
        for key in path:
            place = place.get(key)
            if not isinstance(place, dict):
                raise ValueError(f"{name} is not a setting of a training run: there is no {key}")
        place[last] = to_json(value)
    return from_json(type(config), data)


def draw(grid: Mapping[str, Sequence[Any]], count: int) -> list[dict[str, Any]]:
    """Return `count` different points of a grid, drawn with a fixed seed, or the whole grid if it is smaller."""
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    if len(points) <= count:
        return points
    return random.Random(0).sample(points, count)


@dataclass(frozen=True)
class Job:
    """A run that is not done yet."""

    phase: Literal["tuning", "final"]
    network: str
    settings: Settings
    seed: int
    config: TrainConfig


@dataclass
class Contest:
    """State of a comparison: finished runs (the rows of compare.json) and runs that are still to be trained."""

    folder: Path
    base: TrainConfig
    networks: Sequence[str]
    grid: Mapping[str, Sequence[Any]]
    trials: list[dict[str, Any]]
    tuning_epochs: float
    rows: list[dict[str, Any]]

    @classmethod
    def open(
        cls,
        folder: Path,
        base: TrainConfig,
        networks: Sequence[str],
        grid: Mapping[str, Sequence[Any]],
        trials: int,
        tuning_epochs: float,
    ) -> "Contest":
        folder.mkdir(parents=True, exist_ok=True)
        chosen = draw(grid, trials) if trials else []
        contest = cls(folder, base, networks, grid, to_json(chosen), tuning_epochs, [])
        path = folder / "compare.json"
        if path.exists():
            before = read_object(path, constants=True)
            wanted = contest.about()
            if other := [name for name in ("base", "tuning_epochs") if before.get(name) != wanted[name]]:
                raise ValueError(f"{path} has runs with another {' and '.join(other)}: use another --out")
            contest.rows = before["rows"]
        return contest

    def about(self) -> dict[str, Any]:
        """Return the settings that all runs of the folder share."""
        base = to_json(self.base)
        for name in ("out", "device", "seed"):
            base.pop(name)
        for name in ("path", "workers"):
            base["data"].pop(name)
        return {"base": base, "tuning_epochs": self.tuning_epochs}

    def go(self, seeds: Iterable[int], minutes: float | None = None, at_once: int = 1) -> None:
        """Run the trials, then the final runs, alternating between networks: an early end leaves a fair comparison."""
        deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes
        self.do(self.tuning_jobs(), deadline, at_once)
        self.do(self.final_jobs(seeds), deadline, at_once)

    def tuning_jobs(self) -> Iterator[Job]:
        for trial in self.trials:
            for network in self.networks:
                if self.tuned(network, trial) is None:
                    config = changed(self.base, {**NETWORKS[network], **trial, "epochs": self.tuning_epochs})
                    config = replace(config, data=replace(config.data, held_out=HELD_OUT))
                    yield self.job("tuning", network, trial, 0, config)

    def final_jobs(self, seeds: Iterable[int]) -> Iterator[Job]:
        for seed in seeds:
            for network in self.networks:
                trial = self.best_trial(network)
                if trial is not None and seed not in self.final(network):
                    config = changed(self.base, {**NETWORKS[network], **trial})
                    yield self.job("final", network, trial, seed, config)

    def job(
        self, phase: Literal["tuning", "final"], network: str, trial: Settings, seed: int, config: TrainConfig
    ) -> Job:
        name = sha256(json.dumps(dict(trial)).encode()).hexdigest()[:8] if phase == "tuning" else str(seed)
        warmup = min(config.schedule.warmup_epochs, WARMUP * config.epochs)
        schedule = replace(config.schedule, warmup_epochs=warmup)
        config = replace(config, schedule=schedule, seed=seed, out=self.folder / f"{network}-{phase}-{name}")
        return Job(phase, network, trial, seed, config)

    def do(self, jobs: Iterator[Job], deadline: float, at_once: int) -> None:
        """Run the jobs and store the result of each when it ends."""
        if at_once == 1:
            for job in jobs:
                if time.monotonic() > deadline:
                    return
                self.add(train(job))
            return
        context = multiprocessing.get_context("spawn")  # CUDA cannot be used after a fork
        with ProcessPoolExecutor(at_once, context) as pool:
            running = {pool.submit(train, job) for job in itertools.islice(jobs, at_once)}
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for one in done:
                    self.add(one.result())
                if time.monotonic() <= deadline:
                    running |= {pool.submit(train, job) for job in itertools.islice(jobs, len(done))}

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(f"{row['phase']}: {row['network']}, seed {row['seed']}, {row['settings']}: {row['top1']:.2%}", flush=True)
        self.write()

    def tuned(self, network: str, trial: Settings) -> float | None:
        """Return the held-out accuracy of a trial, or None if it is not done."""
        for row in self.rows:
            if (row["phase"], row["network"], row["settings"]) == ("tuning", network, trial):
                return row["top1"]
        return None

    def best_trial(self, network: str) -> dict[str, Any] | None:
        """Return the trial with the best held-out accuracy, {} without tuning, or None until all trials are done."""
        scores = [self.tuned(network, trial) for trial in self.trials]
        if None in scores:
            return None
        best = max(range(len(scores)), key=lambda i: scores[i] or 0.0, default=None)
        return {} if best is None else self.trials[best]

    def edges(self, network: str) -> list[str]:
        """Return the settings whose best value is the smallest or largest of the grid."""
        best = self.best_trial(network) or {}
        found = []
        for name, value in best.items():
            values = self.grid[name]
            numbers = len(values) > 1 and all(isinstance(v, int | float) for v in values)
            if numbers and value in (min(values), max(values)):
                found.append(f"{name}={value:g}")
        return found

    def write(self) -> None:
        device = chosen_device(self.base.device)
        about = {"data": Path(self.base.data.path).name, "image_size": self.base.model.size, **self.about()}
        grid = {"grid": to_json(self.grid), "edges": {name: self.edges(name) for name in self.networks}}
        result = {"name": "compare", **describe(device), **about, **grid, "rows": self.rows}
        write_json(self.folder / "compare.json", result)

    def show(self, console: Console) -> None:
        table = Table(title="Validation top-1 of the final runs")
        for title in TITLES:
            table.add_column(title, justify="left" if title == "network" else "right")
        for name in self.networks:
            if self.final(name):
                table.add_row(name, *cells(name, self.rows))
        console.print(table)
        for name in self.networks:
            if edges := self.edges(name):
                console.print(
                    f"{name}: the best trial is at the edge of the grid ({', '.join(edges)}). Use a wider grid"
                )

    def final(self, network: str) -> dict[int, dict[str, Any]]:
        return final_runs(network, self.rows)


def train(job: Job) -> dict[str, Any]:
    """Run a job and return its row."""
    config = job.config
    result = fit(config.make_task(), config, resume=True)
    if not result.finished:
        raise KeyboardInterrupt
    weights = next(iter(result.scores.values()))  # the averaged weights if there are any
    scores = weights["held_out"] if job.phase == "tuning" else weights["validation"]
    moved = movements(config.out / "start.safetensors", config.out / "weights_raw.safetensors")
    log = read_log(config.out / LOG)
    rates = [record["examples_per_second"] for record in log.steps]
    return {
        "phase": job.phase,
        "network": job.network,
        "settings": to_json(dict(job.settings)),
        "seed": job.seed,
        "epochs": config.epochs,
        "batch_size": config.batch_size,
        **{key: scores[key] for key in ("top1", "top5", "loss") if key in scores},
        "parameters": log.start["parameters"],
        "examples_per_second": sorted(rates)[len(rates) // 2],
        "seconds": result.seconds,
        "embedding_cosine": fmean(one.cosine for one in moved) if moved else None,
    }


TITLES = ("network", "runs", "mean", "spread", "difference to convolution", "parameters", "images/s", "settings")


def final_runs(network: str, rows: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the final runs of a network by seed."""
    return {row["seed"]: row for row in rows if row["phase"] == "final" and row["network"] == network}


def cells(network: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the cells of a network in the columns `TITLES`, without its name."""
    found = final_runs(network, rows)
    scores = [100 * row["top1"] for row in found.values()]
    last = next(iter(found.values()))
    return [
        str(len(scores)),
        f"{fmean(scores):.2f}",
        f"{stdev(scores):.2f}" if len(scores) > 1 else "-",
        "" if network == BASELINE else paired(found, final_runs(BASELINE, rows)),
        f"{last['parameters']:,}",
        f"{fmean(row['examples_per_second'] for row in found.values()):,.0f}",
        ", ".join(f"{name}={value}" for name, value in last["settings"].items()),
    ]


def paired(found: dict[int, dict[str, Any]], baseline: dict[int, dict[str, Any]]) -> str:
    """Return the difference to the baseline with its confidence interval, as text."""
    numbers = difference(found, baseline)
    return "-" if numbers is None else "{:+.2f} ({:+.2f} to {:+.2f})".format(*numbers)


def difference(
    found: dict[int, dict[str, Any]], baseline: dict[int, dict[str, Any]]
) -> tuple[float, float, float] | None:
    """Return the mean paired difference in points of top-1 and its 95% confidence interval, or None for < 2 seeds."""
    from scipy.stats import ttest_rel

    seeds = sorted(found.keys() & baseline.keys())
    if len(seeds) < 2:
        return None
    ours, theirs = ([100 * rows[seed]["top1"] for seed in seeds] for rows in (found, baseline))
    interval: Any = ttest_rel(ours, theirs).confidence_interval(0.95)  # pyright: ignore[reportAttributeAccessIssue]
    return fmean(ours) - fmean(theirs), float(interval.low), float(interval.high)

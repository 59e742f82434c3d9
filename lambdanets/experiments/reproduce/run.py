"""Running experiments: measure missing numbers, then write and return all results."""

import time
from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Literal

from lambdanets.experiments.reproduce.experiments import EXPERIMENTS
from lambdanets.experiments.reproduce.jobs import GrowthJob, Job, NetworkJob, Settings, Store
from lambdanets.experiments.reproduce.numbers import (
    Accuracy,
    Number,
    as_json,
    counted_cells,
    found_headlines,
    from_json,
    numbers,
)
from lambdanets.experiments.reproduce.page import write
from lambdanets.experiments.reproduce.pareto import OTHERS, OURS, published

QUICK_SECONDS = 80  # for counting and measuring; the last job and writing the pages take longer
FIRST = ("layers", "attention", "hybrids", "c4", "extra-data")  # the most important tables


def jobs_of(names: Sequence[str], *, in_turns: bool) -> Iterable[Job]:
    """Return every job once, the most important first in case the time budget does not suffice for all.

    The order is: training for the speed-accuracy figure, the complexity tables, which take seconds, the main tables,
    inference for the figure, and the others in the order of the paper. With `in_turns`, for very short budgets: the
    complexity tables, then the first job of each experiment, then the second, and so on.
    """
    jobs: dict[str, list[Job]] = {
        name: [cell.job for cell, _ in counted_cells(name) if cell.job is not None] for name in names
    }
    if "pareto" in jobs:
        jobs["pareto"] = pareto_jobs()
    if in_turns:
        turns = zip_longest(*map(dict.fromkeys, jobs.values()))
        ordered = [job for turn in turns for job in turn if job is not None]
        return sorted(dict.fromkeys(ordered), key=lambda job: not isinstance(job, GrowthJob))
    figure = jobs.get("pareto", [])
    return dict.fromkeys(
        [
            *(job for job in figure if isinstance(job, NetworkJob) and job.mode == "training"),
            *(job for job in chain(*jobs.values()) if isinstance(job, GrowthJob)),
            *chain(*(jobs.get(name, ()) for name in FIRST)),
            *figure,
            *chain(*jobs.values()),
        ]
    )


def pareto_jobs() -> list[Job]:
    """Return the jobs of the figure: training first, alternating between families, from small to large networks."""
    families = [[one for one in published() if one.family == family] for family in (OURS, *OTHERS)]
    ordered = [one for turn in zip_longest(*families) for one in turn if one is not None]
    modes: tuple[Literal["training", "inference"], ...] = ("training", "inference")
    return [NetworkJob(one.network, one.image_size, mode, half=True) for mode in modes for one in ordered]


def reproduce(
    names: Sequence[str],
    folder: Path,
    settings: Settings,
    *,
    accuracy: dict[str, Accuracy] | None = None,
    minutes: float | None = None,
    measure: bool = True,
    retry: bool = False,
) -> tuple[dict[str, list[Number]], list[str]]:
    """Run experiments, write reproduce.json, .md and .html into `folder`, and return the numbers and the headlines.

    The pages contain all experiments in the folder, including those of earlier calls.

    Args:
        names: names of experiments, keys of `EXPERIMENTS`.
        folder: folder for results; results in it are not measured again.
        settings: settings of the measurements.
        accuracy: accuracies of networks trained here, by their name in `lambdanets experiments compare`.
        minutes: time budget; no new measurement starts after it, and the last one times fewer steps.
        measure: whether to measure; False only shows the results in the folder, with its own settings, and counts.
        retry: repeat measurements that ended with an error.
    """
    start = time.monotonic()
    store = Store.open(folder)
    if not measure and store.settings is not None:
        settings = Settings.from_json(store.settings)
    jobs = jobs_of(names, in_turns=settings.quick)  # this also computes and caches all counts
    if measure:
        if settings.quick and minutes is None:
            minutes = max(0.0, QUICK_SECONDS - (time.monotonic() - start)) / 60
        for name in names:  # if this process is killed, --no-measure rebuilds them from the measurements
            store.shown.pop(name, None)
        if "pareto" in names:
            store.headlines = []
        store.fill(jobs, settings, minutes=minutes, retry=retry)
    found = {}
    for name in names:
        if measure or accuracy or name not in store.shown:
            store.shown[name] = as_json(numbers(name, store, settings, accuracy or {}))
        found[name] = from_json(store.shown[name])
    if "pareto" in names and (measure or not store.headlines):
        store.headlines = [one.text() for one in found_headlines(store, settings)]
    store.write()
    everything = {name: from_json(store.shown[name]) for name in EXPERIMENTS if name in store.shown}
    write(folder, everything, store.headlines)
    return found, store.headlines if "pareto" in names else []


def listing() -> list[tuple[str, str, str]]:
    """Return the name, title and LaTeX label of every experiment."""
    return [(one.name, one.title, one.label) for one in EXPERIMENTS.values()]

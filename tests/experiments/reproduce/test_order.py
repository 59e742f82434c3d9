"""What is measured first, until when, and what is left of it after a kill."""

import json

import pytest
import torch

from lambdanets.cli import main
from lambdanets.experiments.reproduce.experiments import EXPERIMENTS
from lambdanets.experiments.reproduce.jobs import GrowthJob, NetworkJob, Settings, Store
from lambdanets.experiments.reproduce.pareto import published
from lambdanets.experiments.reproduce.run import jobs_of, reproduce


def test_time_is_shared_between_experiments():
    names = ["hybrids", "complexity", "c4"]
    found = list(jobs_of(names, in_turns=True))
    small = [isinstance(job, GrowthJob) for job in found]
    assert small == sorted(small, reverse=True)
    networks = [job.network for job in found if isinstance(job, NetworkJob)]
    assert networks[:4] == ["resnet50", "resnet_rs101,se=False", "resnet50,placement=LCCC", "resnet_rs101"]
    assert set(found) == set(jobs_of(names, in_turns=False))


def test_half_of_the_figure_is_a_headline():
    found = list(jobs_of(["pareto"], in_turns=False))
    assert set(found) == {cell.job for cell in EXPERIMENTS["pareto"].cells() if cell.job is not None}
    first = found[: len(found) // 2]
    assert all(isinstance(job, NetworkJob) and job.mode == "training" for job in first)
    assert [job.network for job in first[:3] if isinstance(job, NetworkJob)] == [
        "lambda_resnet50",
        "timm:efficientnet_b0",
        "resnet_rs50",
    ]


def test_what_says_most_comes_first():
    found = list(jobs_of(list(EXPERIMENTS), in_turns=False))
    assert len(found) == len(set(found))
    assert set(found) == {cell.job for one in EXPERIMENTS.values() for cell in one.cells() if cell.job is not None}
    figure = len(published())
    assert found[:figure] == list(jobs_of(["pareto"], in_turns=False))[:figure]
    growths = [isinstance(job, GrowthJob) for job in found]
    assert growths == [False] * figure + [True] * sum(growths) + [False] * (len(found) - figure - sum(growths))
    rest = found[figure + sum(growths) :]
    first = set(jobs_of(["layers", "attention", "hybrids", "c4", "extra-data"], in_turns=False)) & set(rest)
    assert set(rest[: len(first)]) == first


def test_the_last_measurement_has_only_the_time_that_is_left_and_is_repeated(tmp_path, monkeypatch):
    clock, given = [0.0], []

    def run(job, settings):
        given.append(settings.seconds)
        clock[0] += 25
        return {"error": "none"}

    monkeypatch.setattr(NetworkJob, "run", run)
    monkeypatch.setattr("lambdanets.experiments.reproduce.jobs.time.monotonic", lambda: clock[0])
    store = Store(tmp_path / "reproduce.json")
    asked = [NetworkJob("resnet50", size, "training") for size in (32, 64, 96, 128)]
    settings = Settings(torch.device("cpu"), seconds=20.0)
    store.fill(asked, settings, minutes=1.0)
    assert given == [20, 20, 10]
    store.fill(asked, settings)
    assert given == [20, 20, 10, 20, 20], "the one that was cut short, and the last"
    store.fill(asked, settings)
    assert len(given) == 5


def test_a_killed_run_of_another_machine_is_shown(tmp_path, measured):
    """Measurements with the settings of a GPU, and no tables: they are made from these, where there is no GPU."""
    gpu = Settings(torch.device("cuda"))
    store = Store(tmp_path / "reproduce.json", hardware="Some GPU", settings=gpu.as_json())
    for job in jobs_of(["pareto"], in_turns=False):
        store.found[job.key(gpu)] = {**job.run(gpu), "hardware": "Some GPU"}
    store.write()
    assert main(["reproduce", "pareto", "--out", str(tmp_path), "--device", "cpu", "--no-measure"]) == 0
    shown = json.loads((tmp_path / "reproduce.json").read_text())
    assert {line["hardware"] for line in shown["experiments"]["pareto"] if line["kind"] == "measured"} == {"Some GPU"}
    assert any("over EfficientNet, training, eager: 3.00" in text for text in shown["headlines"])


def test_a_killed_run_leaves_no_headline_of_the_one_before(tmp_path, monkeypatch):
    Store(tmp_path / "reproduce.json", headlines=["of before"]).write()
    jobs = iter([{"error": "none"}])

    def run(job, settings):
        try:
            return next(jobs)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(NetworkJob, "run", run)
    with pytest.raises(KeyboardInterrupt):
        reproduce(["pareto"], tmp_path, Settings(torch.device("cpu")))
    assert json.loads((tmp_path / "reproduce.json").read_text())["headlines"] == []

"""The benchmark of the training loop runs both loops and compares like with like. Nothing here times anything."""

import json
import signal
from dataclasses import replace
from statistics import median

import pytest
import torch

from lambdanets.recipes import debug
from lambdanets.train.classify import Classify
from lambdanets.train.engine import Engine
from lambdanets.train.signals import SIGNAL_STATUS
from tests.support.scripts import script

loop_overhead = script("benchmarks/loop_overhead.py")


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setattr(loop_overhead, "TIMED_STEPS", 2)
    config = debug()
    options = ("widths=(4,4,8,8)", "depths=(1,1,1,1)", "scope=3")
    config = replace(config, model=replace(config.model, options=options, drop_path_rate=0.0), batch_size=16)
    return replace(config, device="cpu", data=replace(config.data, workers=0))


def test_both_loops_run_and_are_compared(config):
    result = loop_overhead.compare_loops(config, turns=3)
    windows = result["windows"]
    assert {name: len(rates) for name, rates in windows.items()} == {"bare": 3, "ours": 3}  # the first pair warms up
    neighbours = sorted(theirs / ours - 1 for theirs, ours in zip(windows["bare"], windows["ours"], strict=True))
    assert result["overhead"] == neighbours[1]
    assert neighbours[0] <= result["overhead_quartiles"][0] <= neighbours[1] <= result["overhead_quartiles"][1]
    assert result["bare"] == median(windows["bare"])


def test_loops_take_turns_of_as_many_steps(config, monkeypatch):
    calls = []

    def bare(config, device, alone):
        while True:
            calls.append("bare")
            yield

    step = Engine.step
    monkeypatch.setattr(loop_overhead, "bare_steps", bare)
    monkeypatch.setattr(Engine, "step", lambda *arguments: (calls.append("ours"), step(*arguments))[1])
    loop_overhead.compare_loops(config, turns=2)
    assert calls == (["ours"] * 2 + ["bare"] * 2) * 3


def test_the_bare_loop_learns_the_same_network_from_the_same_images(config, monkeypatch):
    seen = []
    loss = Classify.loss
    monkeypatch.setattr(Classify, "loss", lambda self, *given: (seen.append((self, *given)), loss(self, *given))[1])
    steps = loop_overhead.bare_steps(config, torch.device("cpu"))
    next(steps)
    before = [p.detach().clone() for p in seen[0][1].parameters()]
    next(steps)
    steps.close()
    (first, network, batch), (second, again, other) = seen
    assert (first, network) == (second, again)
    assert not torch.equal(batch[0], other[0])
    assert sum(not torch.equal(p, q) for p, q in zip(network.parameters(), before, strict=True)) > len(before) / 2


def test_the_network_alone_is_compared_with_images_on_the_device(config, monkeypatch):
    config = replace(config, data=replace(config.data, cache="device"))
    batches = []
    loss = Classify.loss
    monkeypatch.setattr(
        Classify, "loss", lambda self, model, batch: (batches.append(batch), loss(self, model, batch))[1]
    )
    result = loop_overhead.compare_loops(config, turns=2, alone=True)
    assert (result["settings"]["cache"], result["settings"]["alone"]) == ("device", True)
    alone, ours = ([batch for batch in batches if len(batch) == length] for length in (2, 4))
    assert len(alone) == len(ours) == 6
    assert all(torch.equal(batch[0], alone[0][0]) for batch in alone)
    assert alone[0][0].shape == (16, 1, 28, 28)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(
    "moment", ["bare loop", "backward pass", "start of ours", "ours", "evaluation at the end of ours"]
)
def test_a_signal_ends_it_there_with_a_sentence(moment, name, config, tmp_path, monkeypatch, capsys):
    steps = []

    def signal_after(function, due=lambda: True):
        def run(*arguments, **options):
            result = function(*arguments, **options)
            if due():
                signal.raise_signal(signal.Signals[name])
            return result

        return run

    monkeypatch.setattr(loop_overhead, "imagenette", lambda: config)
    monkeypatch.setattr(Engine, "step", lambda *a, step=Engine.step: (steps.append("ours"), step(*a))[1])
    if moment == "bare loop":
        monkeypatch.setattr(
            loop_overhead, "moved", signal_after(loop_overhead.moved)
        )  # its first step, after two of ours
    elif moment == "backward pass":  # it ends before anything is raised: torch would crash at exit
        loss = Classify.loss

        def with_hook(*arguments):
            outcome = loss(*arguments)
            outcome.loss.register_hook(lambda _: signal.raise_signal(signal.Signals[name]))
            return outcome

        monkeypatch.setattr(Classify, "loss", with_hook)
    elif moment == "start of ours":
        monkeypatch.setattr(Engine, "__init__", signal_after(Engine.__init__))
    elif moment == "ours":
        monkeypatch.setattr(Engine, "update", signal_after(Engine.update, lambda: len(steps) == 3))
    elif moment == "evaluation at the end of ours":
        monkeypatch.setattr(Classify, "evaluate", signal_after(Classify.evaluate))
    before, output = signal.getsignal(signal.SIGTERM), tmp_path / "results" / "engine.json"
    words = ["--data", "mnist", "--placement", "CCCL", "--turns", "2", "--workers", "0", "--device", "cpu"]
    assert loop_overhead.main([*words, "--output", str(output)]) == SIGNAL_STATUS[name]
    said = capsys.readouterr().err
    if moment == "evaluation at the end of ours":  # all turns are over
        assert f"lambdanets: {name} ended the measurement: {output} has 2 of 2 turns" in said
        assert len(json.loads(output.read_text())["windows"]["ours"]) == 2
    else:
        assert f"lambdanets: {name} ended the measurement: nothing is written" in said
        assert not output.parent.exists()
    assert len(steps) == {"bare loop": 2, "backward pass": 1, "start of ours": 0, "ours": 3}.get(moment, 6)
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_size_of_the_images_can_be_chosen_and_is_written(config, tmp_path, monkeypatch):
    monkeypatch.setattr(loop_overhead, "imagenette", lambda: config)
    output = tmp_path / "engine.json"
    words = ["--data", "mnist", "--placement", "CCCL", "--turns", "2", "--workers", "0"]
    for size in (None, 12):
        chosen = [] if size is None else ["--image-size", str(size)]
        assert loop_overhead.main([*words, "--device", "cpu", "--output", str(output), *chosen]) == 0
        assert json.loads(output.read_text())["settings"]["image_size"] == (size or config.model.image_size)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--turns", "1"], "1 turns: at least 2 are needed"),
        (["--batch", "0"], "batch_size must be at least 1, got 0"),
        (["--image-size", "0"], "--image-size must be more than 0, got 0"),
    ],
)
def test_nothing_to_measure_is_refused_with_a_sentence(words, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        loop_overhead.main(["--data", "mnist", "--output", str(tmp_path / "engine.json"), *words])

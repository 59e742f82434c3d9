"""The benchmark of the training loop runs both loops and compares like with like. Nothing here times anything."""

import json
import signal
from dataclasses import replace
from statistics import median

import pytest

from lambdanets.cli import main
from lambdanets.recipes import debug, overhead
from lambdanets.train.classify import Classify
from lambdanets.train.engine import Engine
from lambdanets.train.signals import SIGNAL_STATUS


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setattr(overhead, "WINDOW", 2)
    config = debug()
    options = ("widths=(4,4,8,8)", "depths=(1,1,1,1)", "scope=3")
    config = replace(config, model=replace(config.model, options=options, drop_path_rate=0.0), batch_size=16)
    return replace(config, device="cpu", data=replace(config.data, workers=0))


def test_both_loops_run_and_are_compared(config):
    result = overhead.compare_loops(config, steps=5, turns=2)  # half a window is left out of both
    assert {name: len(rates) for name, rates in result["windows"].items()} == {"bare": 4, "ours": 4}
    assert result["overhead"] == result["bare"] / result["ours"] - 1
    windows = result["windows"]
    turns = [median(windows["bare"][i : i + 2]) / median(windows["ours"][i : i + 2]) - 1 for i in (0, 2)]
    assert result["overhead_of_turns"] == turns


def test_turns_alternate_and_both_take_as_many_steps(config, monkeypatch):
    calls = []

    def loop(name):
        def run(config, steps, clock):
            calls.append((name, steps))
            for _ in range(steps):
                clock.tick()

        return run

    monkeypatch.setattr(overhead, "run_bare", loop("bare"))
    monkeypatch.setattr(overhead, "run_ours", loop("ours"))
    overhead.compare_loops(config, steps=5, turns=3)
    assert calls == [(name, 6) for name in ("bare", "ours", "ours", "bare", "bare", "ours")]


def then_signal(function, name, when=lambda *a: True):
    def run(*arguments, **options):
        result = function(*arguments, **options)
        if when(*arguments):
            signal.raise_signal(getattr(signal, name))
        return result

    return run


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(
    "moment", ["bare loop", "backward pass", "start of ours", "ours", "evaluation at the end of ours", "between"]
)
def test_a_signal_ends_it_there_with_a_sentence(moment, name, config, tmp_path, monkeypatch, capsys):
    calls = []  # of what must not run after the signal
    usual = overhead.run_ours, overhead.Clock.tick
    monkeypatch.setattr(overhead, "imagenette", lambda: config)
    monkeypatch.setattr(overhead, "run_ours", lambda *a: calls.append("ours") or usual[0](*a))
    monkeypatch.setattr(overhead.Clock, "tick", lambda clock: calls.append("step") or usual[1](clock))
    if moment == "between":
        monkeypatch.setattr(overhead, "run_bare", then_signal(overhead.run_bare, name))
    elif moment == "backward pass":  # it ends before anything is raised: torch would crash at exit
        loss = Classify.loss

        def with_hook(*arguments):
            outcome = loss(*arguments)
            outcome.loss.register_hook(lambda _: signal.raise_signal(getattr(signal, name)))
            return outcome

        monkeypatch.setattr(Classify, "loss", with_hook)
    elif moment == "start of ours":
        monkeypatch.setattr(Engine, "__init__", then_signal(Engine.__init__, name))
    elif moment == "evaluation at the end of ours":
        monkeypatch.setattr(Classify, "evaluate", then_signal(Classify.evaluate, name))
    else:
        now = 3 if moment == "bare loop" else 9
        monkeypatch.setattr(overhead.Clock, "tick", then_signal(overhead.Clock.tick, name, lambda _: len(calls) == now))
    before, output = signal.getsignal(signal.SIGTERM), tmp_path / "results" / "engine.json"
    words = ["--data", "mnist", "--placement", "CCCL", "--steps", "4", "--turns", "2", "--workers", "0"]
    assert main(["bench", "engine", *words, "--device", "cpu", "--output", str(output)]) == SIGNAL_STATUS[name]
    assert f"lambdanets: {name} ended the measurement: nothing is written" in capsys.readouterr().err
    assert not output.parent.exists()
    steps = {"bare loop": 3, "backward pass": 1, "start of ours": 6, "ours": 8, "between": 6}.get(
        moment, 12
    )  # 9 calls: one is of ours
    assert calls.count("step") == steps
    assert calls.count("ours") == (moment not in ("bare loop", "backward pass", "between"))
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_size_of_the_images_can_be_chosen_and_is_written(config, tmp_path, monkeypatch):
    monkeypatch.setattr(overhead, "imagenette", lambda: config)
    output = tmp_path / "engine.json"
    words = ["bench", "engine", "--data", "mnist", "--placement", "CCCL", "--steps", "2", "--turns", "1"]
    for size in (None, 12):
        chosen = [] if size is None else ["--image-size", str(size)]
        assert main([*words, "--workers", "0", "--device", "cpu", "--output", str(output), *chosen]) == 0
        assert json.loads(output.read_text())["settings"]["image_size"] == (size or config.model.image_size)


@pytest.mark.parametrize(("steps", "turns"), [(1, 1), (4, 0)])
def test_too_little_to_time_is_refused(config, steps, turns):
    with pytest.raises(ValueError, match=f"{steps} steps in {turns} turns: at least 2 steps in one turn"):
        overhead.compare_loops(config, steps, turns)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0"], "at least 20 steps in one turn"),
        (["--turns", "0"], "at least 20 steps in one turn"),
        (["--image-size", "0"], "--image-size must be more than 0, got 0"),
        (["--batch", "0"], "batch_size is at least 1, not 0"),
    ],
)
def test_nothing_to_measure_is_refused_with_a_sentence(words, said, tmp_path, capsys):
    assert main(["bench", "engine", "--data", "mnist", "--output", str(tmp_path / "engine.json"), *words]) == 2
    assert said in capsys.readouterr().err

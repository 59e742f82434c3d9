"""The benchmark of the training loop runs both loops and compares like with like. Nothing here times anything."""

import signal
from dataclasses import replace
from statistics import median

import pytest

from lambdanets.cli import main
from lambdanets.recipes import debug, overhead


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


def test_a_run_that_is_stopped_is_no_result(config, monkeypatch):
    tick = overhead.Clock.tick

    def stop(clock):
        tick(clock)
        if clock.steps == 3 and signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:  # the loop that listens
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(overhead.Clock, "tick", stop)
    with pytest.raises(ValueError, match="SIGTERM stopped a run at step 3 of 6"):
        overhead.compare_loops(config, steps=4, turns=1)


@pytest.mark.parametrize(("steps", "turns"), [(1, 1), (4, 0)])
def test_too_little_to_time_is_refused(config, steps, turns):
    with pytest.raises(ValueError, match=f"{steps} steps in {turns} turns: at least 2 steps in one turn"):
        overhead.compare_loops(config, steps, turns)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0"], "at least 20 steps in one turn"),
        (["--turns", "0"], "at least 20 steps in one turn"),
        (["--batch", "0"], "batch_size is at least 1, not 0"),
    ],
)
def test_nothing_to_measure_is_refused_with_a_sentence(words, said, tmp_path, capsys):
    assert main(["bench", "engine", "--data", "mnist", "--output", str(tmp_path / "engine.json"), *words]) == 2
    assert said in capsys.readouterr().err

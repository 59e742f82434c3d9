"""The benchmark of the training loop runs both loops and compares like with like. Nothing here times anything."""

from dataclasses import replace

import pytest

from lambdanets.cli import main
from lambdanets.recipes import debug, overhead


def test_both_loops_run_and_are_compared(monkeypatch):
    monkeypatch.setattr(overhead, "WINDOW", 2)
    config = debug()
    options = ("widths=(4,4,8,8)", "depths=(1,1,1,1)", "scope=3")
    config = replace(config, model=replace(config.model, options=options, drop_path_rate=0.0), batch_size=16)
    config = replace(config, device="cpu", data=replace(config.data, workers=0))
    result = overhead.compare_loops(config, steps=4, turns=2)
    assert {name: len(rates) for name, rates in result["windows"].items()} == {"bare": 4, "ours": 4}
    assert result["overhead"] == result["bare"] / result["ours"] - 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0"], "at least 20 steps and one turn"),
        (["--turns", "0"], "at least 20 steps and one turn"),
        (["--batch", "0"], "batch_size is at least 1, not 0"),
    ],
)
def test_nothing_to_measure_is_refused_with_a_sentence(words, said, tmp_path, capsys):
    assert main(["bench", "engine", "--data", "mnist", "--output", str(tmp_path / "engine.json"), *words]) == 2
    assert said in capsys.readouterr().err

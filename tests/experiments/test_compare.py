"""Networks trained alike: equal budgets, tuning that never sees the validation images, nothing done twice."""

import json
from dataclasses import replace

import pytest

from lambdanets.cli import main
from lambdanets.experiments import compare
from lambdanets.experiments.compare import CONTESTANTS, Contest, Contestant, Trial, paired
from lambdanets.recipes import debug

TRIALS = (Trial(0.05, 1e-4), Trial(0.2, 1e-4))
FEW_STEPS = 2 / 62  # epochs
SMALL = {"convolution": Contestant("CCCC", trials=TRIALS), "CCLL": Contestant("CCLL", trials=TRIALS)}


@pytest.fixture
def base():
    config = debug()
    options = ("widths=(4,4,8,8)", "depths=(1,1,1,1)", "scope=3")
    model = replace(config.model, options=options, drop_path_rate=0.0)
    return replace(
        config, model=model, epochs=FEW_STEPS, micro_batch=None, device="cpu", data=replace(config.data, workers=0)
    )


def test_budgets_are_equal():
    assert len({len(one.trials) for one in CONTESTANTS.values()}) == 1
    for one in CONTESTANTS.values():
        assert len(set(one.trials)) == len(one.trials)


def test_a_contest_tunes_then_repeats_and_goes_on_where_it_was(base, tmp_path, monkeypatch):
    seen = []
    fit = compare.fit

    def watched(task, config, **options):
        seen.append((config.out.name, config.data.held_out, config.seed, config.schedule.rate))
        return fit(task, config, **options)

    monkeypatch.setattr(compare, "fit", watched)
    Contest.open(tmp_path, base, SMALL).go([0], FEW_STEPS)
    contest = Contest.open(tmp_path, base, SMALL)
    contest.go([0, 7], FEW_STEPS)
    tuning, final = seen[:4], seen[4:]
    assert [held for _, held, *_ in tuning] == [compare.HELD_OUT] * 4
    assert [(name, seed) for name, _, seed, _ in final] == [
        ("convolution-final-0", 0), ("CCLL-final-0", 0), ("convolution-final-7", 7), ("CCLL-final-7", 7),
    ]  # fmt: skip
    for name, _, _, rate in final:
        best = contest.best_trial(name.split("-")[0])
        assert best is not None
        assert rate == best.rate
    written = json.loads((tmp_path / "compare.json").read_text())
    assert written["data"] == base.data.path
    rows = written["rows"]
    assert len(rows) == 8
    assert {row["network"] for row in rows if row["embedding_cosine"] is None} == {"convolution"}


def test_another_grid_tries_what_is_new_and_chooses_from_itself(base, tmp_path):
    old, both, new = Trial(0.3, 2e-4), Trial(0.05, 2e-4), Trial(0.01, 5e-4, 0.1)
    Contest.open(tmp_path, base, {"CCLL": Contestant("CCLL", trials=(old, both))}).go([], FEW_STEPS)
    contest = Contest.open(tmp_path, base, {"CCLL": Contestant("CCLL", trials=(both, new))})
    contest.go([0], FEW_STEPS)
    tried = [row["settings"] for row in contest.rows if row["phase"] == "tuning"]
    assert tried == [vars(old), vars(both), vars(new)]
    assert contest.final("CCLL")[0]["settings"] in (vars(both), vars(new))


def test_runs_of_another_length_are_not_compared(base, tmp_path):
    Contest.open(tmp_path, base, SMALL).go([0], FEW_STEPS)
    again = Contest.open(tmp_path, base, SMALL)
    again.check(FEW_STEPS)
    again.check(0)  # no trials: none to choose among
    with pytest.raises(ValueError, match=r"tuning runs with epochs 0.*, asked for is epochs 3"):
        again.check(3.0)
    with pytest.raises(ValueError, match=r"final runs with epochs 0.*, asked for is epochs 7"):
        Contest.open(tmp_path, replace(base, epochs=7.0), SMALL).check(FEW_STEPS)
    other = replace(base, batch_size=base.batch_size * 2)
    with pytest.raises(ValueError, match=rf"runs with batch_size {base.batch_size}, asked for .* {other.batch_size}"):
        Contest.open(tmp_path, other, SMALL).check(FEW_STEPS)


def test_images_to_judge_by_are_there_before_anything_is_trained(tmp_path, capsys):
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
    assert main(["experiments", "compare", "--data", str(tmp_path / "pets"), "--out", str(tmp_path / "out")]) == 2
    assert "pets has no validation images" in capsys.readouterr().err
    assert main(["experiments", "compare", "--data", "mnist", "--networks", "--out", str(tmp_path / "out")]) == 2
    assert "at least one of convolution" in capsys.readouterr().err


def test_a_length_of_nothing_is_not_the_recipes(tmp_path, capsys):
    assert main(["experiments", "compare", "--data", "mnist", "--epochs", "0", "--out", str(tmp_path)]) == 2
    assert "epochs is more than 0" in capsys.readouterr().err


def test_a_network_whose_trials_were_not_reached_has_no_final_run(base, tmp_path):
    contest = Contest.open(tmp_path, base, SMALL)
    contest.go([0], FEW_STEPS, minutes=0)
    assert contest.rows == []


def test_differences_are_paired_by_seed():
    ours = {seed: {"top1": 0.5 + seed / 100} for seed in range(4)}
    theirs = {seed: {"top1": 0.48 + seed / 100 + (seed == 2) * 0.004} for seed in range(1, 9)}
    assert paired(ours, theirs).startswith("+1.87 (")
    assert paired({0: ours[0]}, theirs) == "-"

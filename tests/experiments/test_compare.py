"""Networks trained alike: equal budgets, tuning that never sees the validation images, nothing done twice."""

import json
from dataclasses import replace

import pytest

from lambdanets.cli import main
from lambdanets.experiments import compare
from lambdanets.experiments.compare import NETWORKS, Contest, changed, draw, paired, several
from lambdanets.recipes import debug, imagenette

FEW_STEPS = 2 / 62  # epochs
GRID = {"schedule.rate": (0.05, 0.2), "model.options.heads": (2, 4)}
BOTH = ("convolution", "CCLL")


@pytest.fixture
def base():
    config = debug()
    options = ("widths=(4,4,8,8)", "depths=(1,1,1,1)", "scope=3")
    model = replace(config.model, options=options, drop_path_rate=0.0)
    return replace(
        config, model=model, epochs=FEW_STEPS, micro_batch=None, device="cpu", data=replace(config.data, workers=0)
    )


def contest(folder, base, networks=BOTH, grid=GRID, trials=2):
    return Contest.open(folder, base, networks, grid, trials, FEW_STEPS)


def test_settings_change_the_configuration_by_name():
    config = changed(imagenette(), {"schedule.rate": 0.3, "epochs": 20, "model.options.widths": (8, 16, 32, 64)})
    assert (config.schedule.rate, config.epochs) == (0.3, 20.0)
    assert config.model.row().widths == (8, 16, 32, 64)
    config = changed(config, {"model.options.widths": (4, 4, 8, 8), "augment.crop_scale": (0.35, 1.0)})
    assert config.model.options == ("widths=(4, 4, 8, 8)",)
    assert config.augment.crop_scale == (0.35, 1.0)
    with pytest.raises(ValueError, match=r"unknown key schedule\.rat .*did you mean schedule\.rate"):
        changed(config, {"schedule.rat": 0.1})
    with pytest.raises(ValueError, match=r"schedul\.rate is not a setting of a training run"):
        changed(config, {"schedul.rate": 0.1})
    with pytest.raises(ValueError, match=r"model\.options"):
        changed(config, {"model.options.num_classes": 3})


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_those_they_are_called(name):
    row = changed(imagenette(), NETWORKS[name]).model.row()
    placement = {"convolution": "CCCC", "se": "CCCC", "axial": "LLLL"}.get(name, name)
    assert (row.placement, row.se, row.layer) == (
        placement, name == "se", "axial_attention" if name == "axial" else "lambda",
    )  # fmt: skip


def test_a_small_grid_is_tried_whole_and_a_large_one_by_equal_draws():
    assert draw({"a": (1, 2), "b": ("x",)}, 5) == [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}]
    grid = {"a": range(10), "b": range(10)}
    found = draw(grid, 20)
    assert len({(one["a"], one["b"]) for one in found}) == 20
    assert found == draw(grid, 20)
    assert [several(value) for value in ((1, 2), "sgd,adamw", 3)] == [(1, 2), ("sgd", "adamw"), (3,)]


def test_a_contest_tunes_then_repeats_and_goes_on_where_it_was(base, tmp_path, monkeypatch):
    seen = []
    fit = compare.fit

    def watched(task, config, **options):
        seen.append((config.out.name, config.data.held_out, config.seed, config.schedule.rate))
        return fit(task, config, **options)

    monkeypatch.setattr(compare, "fit", watched)
    contest(tmp_path, base).go([0])
    again = contest(tmp_path, base)
    again.go([0, 7])
    tuning, final = seen[:4], seen[4:]
    assert [held for _, held, *_ in tuning] == [compare.HELD_OUT] * 4
    assert [name.partition("-tuning-")[0] for name, *_ in tuning] == [*BOTH, *BOTH]
    assert len({name for name, *_ in tuning}) == 4
    assert [(name, seed) for name, _, seed, _ in final] == [
        ("convolution-final-0", 0), ("CCLL-final-0", 0), ("convolution-final-7", 7), ("CCLL-final-7", 7),
    ]  # fmt: skip
    for name, _, _, rate in final:
        best = again.best_trial(name.split("-")[0])
        assert best is not None
        assert rate == best["schedule.rate"]
    written = json.loads((tmp_path / "compare.json").read_text())
    assert written["data"] == base.data.path
    assert all(edge.startswith("schedule.rate=") for edge in written["edges"]["CCLL"][:1])
    rows = written["rows"]
    assert len(rows) == 8
    assert {row["network"] for row in rows if row["embedding_cosine"] is None} == {"convolution"}


def test_another_grid_tries_what_is_new_and_chooses_from_itself(base, tmp_path):
    old, new = {"schedule.rate": (0.3, 0.05)}, {"schedule.rate": (0.05, 0.01)}
    contest(tmp_path, base, ["CCLL"], old).go([])
    second = contest(tmp_path, base, ["CCLL"], new)
    second.go([0])
    tried = [row["settings"]["schedule.rate"] for row in second.rows if row["phase"] == "tuning"]
    assert tried == [0.3, 0.05, 0.01]
    assert second.final("CCLL")[0]["settings"]["schedule.rate"] in (0.05, 0.01)
    assert second.edges("CCLL") == [f"schedule.rate={second.best_trial('CCLL')['schedule.rate']:g}"]


def test_several_runs_at_once_give_the_same_rows(base, tmp_path):
    contest(tmp_path / "one", base, trials=1).go([])
    contest(tmp_path / "two", base, trials=1).go([], at_once=2)
    first, second = (
        {(row["phase"], row["network"], row["seed"]): row for row in contest(tmp_path / name, base).rows}
        for name in ("one", "two")
    )
    assert len(first) == 2
    assert first.keys() == second.keys()
    for run, row in first.items():  # processes of their own may use more threads, and sum up in another order
        assert second[run]["top1"] == row["top1"]
        assert second[run]["loss"] == pytest.approx(row["loss"], rel=1e-5)


def test_runs_of_another_recipe_are_not_compared(base, tmp_path):
    contest(tmp_path, base, ["convolution"]).go([])
    contest(tmp_path, replace(base, out=tmp_path / "elsewhere", seed=3))
    with pytest.raises(ValueError, match="has runs with another base: use another --out"):
        contest(tmp_path, replace(base, epochs=7.0))
    with pytest.raises(ValueError, match="has runs with another tuning_epochs"):
        Contest.open(tmp_path, base, BOTH, GRID, 2, 3.0)


def test_without_tuning_the_recipe_is_used(base, tmp_path):
    one = contest(tmp_path, base, ["convolution"], trials=0)
    one.go([1])
    assert [(row["phase"], row["settings"]) for row in one.rows] == [("final", {})]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "PETS"], "pets has no validation images"),
        (["--data", "mnist", "--networks"], "at least one of convolution"),
        (["--data", "mnist", "--recipe", "cotrain"], ", without co-training, got 'cotrain'"),
        (["--data", "mnist", "--settings", "epochs=0"], "epochs must be finite and above 0"),
        (["--data", "mnist", "--grid", "schedule.rate=0.1,-1"], "schedule.rate must be finite and above 0, got -1"),
        (["--data", "mnist", "--at-once", "0"], "--at-once at least 1"),
    ],
)
def test_errors_come_before_anything_is_trained(words, message, tmp_path, capsys):
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
    words = [str(tmp_path / "pets") if word == "PETS" else word for word in words]
    assert main(["experiments", "compare", *words, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*-*"))


def test_a_network_whose_trials_were_not_reached_has_no_final_run(base, tmp_path):
    one = contest(tmp_path, base)
    one.go([0], minutes=-1)
    assert one.rows == []


def test_differences_are_paired_by_seed():
    ours = {seed: {"top1": 0.5 + seed / 100} for seed in range(4)}
    theirs = {seed: {"top1": 0.48 + seed / 100 + (seed == 2) * 0.004} for seed in range(1, 9)}
    assert paired(ours, theirs).startswith("+1.87 (")
    assert paired({0: ours[0]}, theirs) == "-"

"""A run says what it is, in config.json; runs from before it did are recognised."""

import json
from pathlib import Path

import pytest

from lambdanets import cli
from lambdanets.detect.config import DetectConfig
from lambdanets.experiments.language.task import LanguageConfig
from lambdanets.pseudo.config import CoTrainConfig, DistillConfig, OnlineTeacher, PseudoData
from lambdanets.report.page import write_report
from lambdanets.runs import OLD_TASKS, TASKS, config_of, read_config, read_stored, write_config
from lambdanets.train.classify import Classify
from lambdanets.train.config import RunConfig, TrainConfig
from lambdanets.train.loop import fit
from lambdanets.typed import to_json
from tests.support.image_runs import folder_of_images, image_config, weights
from tests.train.tasks import Numbers, StopAt, config, final, records, same

CONFIGS = {
    "classification": TrainConfig(label_smoothing=0.25),
    "co-training": CoTrainConfig(pseudo=PseudoData(ratio=3.0)),
    "distillation": DistillConfig(teacher=OnlineTeacher(size=192)),
    "detection": DetectConfig(size=64),
    "language": LanguageConfig(length=32),
}
COMMANDS = {
    "classification": "train",
    "co-training": "train",
    "distillation": "train",
    "detection": "detect train",
    "language": "experiments language train",
}
# Distillation is younger than the key "task".
TASKS_AND_AGES = [(task, old) for task in CONFIGS for old in (False, True) if not (old and task == "distillation")]


def stored(folder: Path, config: RunConfig, old: bool) -> Path:
    """A folder with the configuration of a run, in the format from before it named its task if `old`."""
    folder.mkdir(exist_ok=True)
    write_config(config_in(folder, config))
    if old:
        make_old(folder)
    return folder


def config_in(folder: Path, config: RunConfig) -> RunConfig:
    return type(config)(**{**vars(config), "out": folder})


def make_old(folder: Path) -> None:
    path = folder / "config.json"
    data = json.loads(path.read_text())
    del data["task"]
    path.write_text(json.dumps(data))


def test_all_tasks_are_known():
    assert {task: config_of(task) for task in TASKS} == {name: type(one) for name, one in CONFIGS.items()}
    assert all(task == one.TASK for task, one in CONFIGS.items())
    assert set(OLD_TASKS.values()) < set(TASKS)


def test_a_task_that_was_removed_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TASKS, "language", "lambdanets.experiments.removed:Config")
    assert cli.main(["train", "resume", str(stored(tmp_path, CONFIGS["language"], old=False))]) == 2
    assert "is a run of language: this version resumes" in capsys.readouterr().err


@pytest.mark.parametrize(("task", "old"), TASKS_AND_AGES)
def test_the_task_and_the_configuration_are_read(tmp_path, task, old):
    folder = stored(tmp_path / "run", CONFIGS[task], old)
    assert ("task" in json.loads((folder / "config.json").read_text())) is not old
    found = read_stored(folder)
    assert (found.task, found.command) == (task, COMMANDS[task])
    assert found.settings == to_json(config_in(folder, CONFIGS[task]))
    moved = folder.rename(tmp_path / "moved")
    again = read_config(moved, COMMANDS[task])
    assert type(again) is type(CONFIGS[task])
    assert again == config_in(moved, CONFIGS[task])


@pytest.mark.parametrize(("task", "old"), TASKS_AND_AGES)
def test_other_commands_name_the_right_one(tmp_path, task, old, capsys):
    folder = stored(tmp_path, CONFIGS[task], old)
    for command in set(COMMANDS.values()) - {COMMANDS[task]}:
        assert cli.main([*command.split(), "resume", str(folder)]) == 2
        said = capsys.readouterr().err
        assert f"is a run of {task}: use `lambdanets {COMMANDS[task]} resume {folder}`" in said


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("juggling", "is a run of juggling: this version resumes runs of classification, co-training"),
        (3, "must be text, got 3"),
    ],
)
def test_tasks_that_nobody_knows_are_refused(tmp_path, task, words, capsys):
    folder = stored(tmp_path, TrainConfig(), old=False)
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | {"task": task}))
    assert cli.main(["train", "resume", str(folder)]) == 2
    assert words in capsys.readouterr().err


def test_an_old_run_resumes_to_the_last_bit_and_is_reported(tmp_path):
    images = folder_of_images(tmp_path / "images")
    whole, parts = image_config(images, tmp_path / "whole"), image_config(images, tmp_path / "parts")
    fit(Classify(whole), whole)
    fit(Classify(parts), parts, watch=StopAt(6))
    make_old(parts.out)
    assert cli.main(["train", "resume", str(parts.out)]) == 0
    assert records(parts.out, "resumed")[0]["step"] == 6
    assert same(weights(whole.out), weights(parts.out))
    assert write_report(parts.out).is_file()


def test_an_old_run_of_a_task_of_ones_own_resumes(tmp_path):
    fit(Numbers(), config(tmp_path / "whole"))
    fit(Numbers(), config(tmp_path / "parts"), watch=StopAt(10))
    assert read_stored(tmp_path / "parts").task == "custom"
    make_old(tmp_path / "parts")
    fit(Numbers(), config(tmp_path / "parts"), resume=True)
    assert same(final(tmp_path / "whole"), final(tmp_path / "parts"))


def test_a_run_does_not_resume_as_another_task(tmp_path):
    images = folder_of_images(tmp_path / "images")
    begun = image_config(images, tmp_path / "run")
    fit(Classify(begun), begun, watch=StopAt(6))

    class Other(TrainConfig):
        TASK = "other"

    other = Other(**vars(begun))
    with pytest.raises(ValueError, match="task was 'classification' and is 'other'"):
        fit(Classify(other), other, resume=True)


def test_each_task_says_which_settings_may_change():
    """The names are those of settings that there are: a slip would make them unchangeable."""
    for one in CONFIGS.values():
        settings = set(flat_names(to_json(one)))
        assert settings > one.RESUMABLE | one.PER_MACHINE
        assert RunConfig.RESUMABLE <= one.RESUMABLE
        assert RunConfig.PER_MACHINE <= one.PER_MACHINE


def flat_names(data, before=""):
    for key, value in data.items():
        yield from flat_names(value, f"{before}{key}.") if isinstance(value, dict) else [f"{before}{key}"]

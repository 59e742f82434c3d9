"""Resuming: the same run, the same data, checkpoints and folders that are not as they were left."""

import errno
import json
import shutil
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from lambdanets.files import FolderInUseError, locked
from lambdanets.train import checkpoint
from lambdanets.train.checkpoint import complete
from lambdanets.train.config import DataConfig, Ema, TrainConfig
from lambdanets.train.distributed import World
from lambdanets.train.identity import check_processes
from lambdanets.train.log import FolderLostError
from lambdanets.train.loop import fit
from lambdanets.train.resume import check_config
from lambdanets.typed import to_json
from tests.train.tasks import EXAMPLES, Numbers, StopAt, config, final, records, same

# Two runs in one folder, and a run on other data


def checkpoint_of(folder):
    return complete(folder / "checkpoints")[-1]


def test_a_checkpoint_of_another_run_is_left_out_and_named(tmp_path):
    """As after two processes wrote into one folder."""
    whole, parts, other = tmp_path / "whole", tmp_path / "parts", tmp_path / "other"
    fit(Numbers(), config(whole))
    fit(Numbers(), config(parts), watch=StopAt(10))
    fit(Numbers(), config(other), watch=StopAt(15))
    foreign = checkpoint_of(other)
    shutil.copy2(foreign, parts / "checkpoints")
    fit(Numbers(), config(parts), resume=True)
    resumed = records(parts, "resumed")[0]
    assert resumed["step"] == 10
    assert f"{foreign.name} belongs to another run: its id is" in resumed["note"]
    assert (parts / "checkpoints" / f"{foreign.name}.foreign").read_bytes() == foreign.read_bytes()
    assert same(final(whole), final(parts))


def test_only_checkpoints_of_another_run_are_refused(tmp_path):
    parts, other = tmp_path / "parts", tmp_path / "other"
    for folder in (parts, other):
        fit(Numbers(), config(folder), watch=StopAt(10))
    mine = checkpoint_of(parts)
    mine.unlink()
    shutil.copy2(checkpoint_of(other), parts / "checkpoints")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is usable: .*belongs to another run"):
        fit(Numbers(), config(parts), resume=True)
    (parts / "log.jsonl").unlink()
    with pytest.raises(ValueError, match="already holds a run"):
        fit(Numbers(), config(parts))


def test_a_run_in_use_is_refused_and_left_as_it_is(tmp_path):
    fit(Numbers(), config(tmp_path), watch=StopAt(10))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    with locked(tmp_path):
        before[tmp_path / ".lock"] = (tmp_path / ".lock").stat().st_mtime_ns
        for resume in (False, True):
            with pytest.raises(FolderInUseError, match="is in use by another process"):
                fit(Numbers(), config(tmp_path), resume=resume)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}


def test_a_copied_run_and_a_run_from_before_ids_resume(tmp_path):
    whole, parts, copied, old = (tmp_path / name for name in ("whole", "parts", "copied", "old"))
    fit(Numbers(), config(whole))
    fit(Numbers(), config(parts), watch=StopAt(10))
    shutil.copytree(parts, copied)
    shutil.copytree(parts, old)
    (old / "run.json").unlink()
    state = torch.load(checkpoint_of(old), weights_only=True)
    del state["run"]
    checkpoint.save(state, old / "checkpoints", 10, keep=1)
    for folder in (copied, old):
        fit(Numbers(), config(folder), resume=True)
        assert records(folder, "resumed")[0]["step"] == 10
        assert same(final(whole), final(folder))


class Named(Numbers):
    """Says what its data are."""

    def __init__(self, **data):
        super().__init__()
        self.data = {"classes": ("cat", "dog", "fox"), "images": EXAMPLES, "labels": "0a", "names": "0b"} | data

    def identity(self):
        return self.data

    def describe(self):
        return {"evaluated": {"validation": 32}}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (dict(classes=("cat", "wolf", "fox")), r"the 3 classes are now 3; removed: dog; added: wolf"),
        (dict(classes=("dog", "cat", "fox")), "order of the classes changed: class 0 was 'cat' and is 'dog'"),
        (dict(classes=("cat", "dog")), r"the 3 classes are now 2; removed: fox; added: "),
        (dict(images=95), "there were 96 training images, now there are 95"),
        (dict(labels="0c"), "the labels of the training images changed"),
        (dict(names="0c"), "the names of the training images changed"),
    ],
)
def test_a_run_does_not_resume_on_other_data(tmp_path, data, words):
    fit(Named(), config(tmp_path), watch=StopAt(10))
    with pytest.raises(ValueError, match=f"cannot be resumed, because .*{words}"):
        fit(Named(**data), config(tmp_path), resume=True)
    (tmp_path / "run.json").unlink()  # as in old runs
    state = torch.load(checkpoint_of(tmp_path), weights_only=True) | {"run": None}
    checkpoint.save(state, tmp_path / "checkpoints", 10, keep=1)
    assert fit(Named(**data), config(tmp_path), resume=True).finished


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("run.json", "{", "run.json is not usable JSON.*remove it to resume without"),
        ("run.json", "[1]", "run.json must contain a JSON object.*remove it"),
        ("run.json", "{}", "run.json does not contain the id and data of a run"),
        ("config.json", "{", "config.json is not usable JSON"),
        ("config.json", "[" * 10000, "config.json is not usable JSON: it is nested too deeply"),
        ("config.json", '{"epochs": [1]}', "epochs was .1. and is 4.0"),
        ("config.json", None, "has checkpoints but no config.json"),
    ],
)
def test_damaged_files_of_a_run_are_sentences(tmp_path, name, text, words):
    fit(Numbers(), config(tmp_path), watch=StopAt(10))
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words):
        fit(Numbers(), config(tmp_path), resume=True)


@pytest.mark.parametrize(
    "text", ["", "\0" * 100, "[" * 10000 + "\n", '{"event": "start", "launch": 1' + "0" * 400 + "}\n"]
)
def test_a_damaged_log_does_not_stop_a_resume(tmp_path, monkeypatch, text):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "some-launch")
    fit(Numbers(), config(tmp_path), watch=StopAt(10))
    (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(ValueError, match="already holds a run"):
        fit(Numbers(), config(tmp_path))
    assert fit(Numbers(), config(tmp_path), resume=True).finished


def test_a_setting_that_is_newer_than_the_run_does_not_change_when_it_resumes(tmp_path):
    """config.json of the run does not have it."""
    fit(Numbers(), config(tmp_path), watch=StopAt(10))
    stored = json.loads((tmp_path / "config.json").read_text())
    del stored["clip_norm"], stored["schedule"]["flat"], stored["ema"]["recalibrate"], stored["keep_best"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"cannot be resumed, because clip_norm was 0.0 and is 1.0"):
        fit(Numbers(), config(tmp_path, clip_norm=1.0), resume=True)
    with pytest.raises(ValueError, match=r"cannot be resumed, because ema.recalibrate was 0 and is 2"):
        fit(Numbers(), config(tmp_path, ema=Ema(decay=0.9, recalibrate=2)), resume=True)
    assert fit(Numbers(), config(tmp_path, keep_best=True), resume=True).finished


def test_what_the_absence_of_a_setting_means_is_compared(tmp_path):
    before = TrainConfig(out=tmp_path)
    stored = to_json(before)
    del stored["data"]["exif_orientation"], stored["data"]["first_size"], stored["augment"]["mixup"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    old = replace(before, data=replace(before.data, exif_orientation=False))
    check_config(old)
    with pytest.raises(ValueError, match=r"data.exif_orientation was False and is True"):
        check_config(before)
    with pytest.raises(ValueError, match=r"data.first_size was None and is 64"):
        check_config(replace(old, data=replace(old.data, first_size=64)))
    with pytest.raises(ValueError, match=r"augment.mixup was 0.0 and is 0.2"):
        check_config(replace(old, augment=replace(old.augment, mixup=0.2)))


def changed(state, path, value):
    """The state with another value at a path of keys; without the key if the value is None."""
    *before, last = path
    for key in before:
        state = state[key]
    if value is None:
        del state[last]
    else:
        state[last] = value


FOREIGN = {
    "a tensor": ((), torch.ones(3)),
    "a list": ((), [1, 2]),
    "another format": (("format",), 2),
    "no step": (("step",), None),
    "a step of text": (("step",), "10"),
    "a step beyond the end": (("step",), 1000),
    "negative seconds": (("seconds",), -1.0),
    "a micro-batch of nothing": (("micro_batch",), 0),
    "an unknown remainder": (("remainder",), ["drop"]),
    "best of text": (("best",), "0.5"),
    "best without weights": (("best",), {"score": 0.5, "step": 3}),
    "no weights": (("engine",), None),
    "weights of text": (("engine", "model"), "weights"),
    "one tensor less": (("engine", "model", "0.weight"), None),
    "one tensor more": (("engine", "model", "9.weight"), torch.ones(3)),
    "another shape": (("engine", "model", "0.weight"), torch.ones(6, 16)),
    "integers": (("engine", "model", "0.weight"), torch.ones(16, 6, dtype=torch.int64)),
    "a sparse tensor": (("engine", "model", "0.weight"), torch.ones(16, 6).to_sparse()),
    "another average": (("engine", "ema", "0.bias"), torch.ones(3)),
    "an average of numbers": (("engine", "ema"), 3),
    "no optimizer": (("engine", "optimizer"), None),
    "another optimizer": (("engine", "optimizer"), {"state": {}, "param_groups": []}),
    "an optimizer of text": (("engine", "optimizer"), "sgd"),
    "no momentum": (("engine", "optimizer", "state", 0), {}),
    "a list of momenta": (("engine", "optimizer", "state", 0), [1.0]),
    "momentum of another shape": (("engine", "optimizer", "state", 0, "momentum_buffer"), torch.ones(2, 2)),
    "another weight decay": (("engine", "optimizer", "param_groups", 0, "weight_decay"), "much"),
    "another scale": (("engine", "scale", "scale"), torch.ones(2)),
    "other sums": (("engine", "sums"), torch.ones(99)),
    "sums without names": (("engine", "names"), [1, 2, 3, 4]),
    "no skipped steps": (("engine", "skipped"), {}),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped") / "run"
    fit(Numbers(), config(folder), watch=StopAt(8))
    fit(Numbers(), config(folder), resume=True, watch=StopAt(10))
    return folder


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_checkpoint_with_foreign_content_is_a_sentence(tmp_path, stopped, kind):
    """Its name has the right digest, and torch can read it."""
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    path, value = FOREIGN[kind]
    state = torch.load(checkpoint_of(folder), weights_only=True)
    if path:
        changed(state, path, value)
    checkpoint.save(state if path else value, folder / "checkpoints", 10, keep=1)
    words = "is usable|does not belong to this run"
    with pytest.raises(ValueError, match=rf"(?s)step-000000010.*({words})|({words}).*step-000000010"):
        fit(Numbers(), config(folder), resume=True)


def test_a_renamed_folder_stops_the_run_and_resumes_there(tmp_path):
    whole, run, moved = tmp_path / "whole", tmp_path / "run", tmp_path / "moved"
    fit(Numbers(), config(whole))

    def rename(record):
        if record["event"] == "step" and record["step"] == 15:
            run.rename(moved)

    with pytest.raises(FolderLostError, match=r"run/log\.jsonl was deleted, renamed or replaced"):
        fit(Numbers(), config(run, checkpoint_minutes=0.0), watch=rename)
    assert not run.exists()
    fit(Numbers(), config(moved), resume=True)
    assert records(moved, "resumed")[0]["step"] >= 14
    assert same(final(whole), final(moved))


def test_a_deleted_folder_stops_the_run(tmp_path):
    run = tmp_path / "run"

    def delete(record):
        if record["event"] == "step" and record["step"] == 10:
            shutil.rmtree(run)

    with pytest.raises(FolderLostError, match="was deleted"):
        fit(Numbers(), config(run), watch=delete)
    assert not run.exists()


class NoRoom(Numbers):
    """Its files do not fit onto the disk for the first `times`."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def save(self, folder, moment, models, scores):
        if moment == "end" and self.times:
            self.times -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        super().save(folder, moment, models, scores)


def test_older_checkpoints_make_room_for_the_weights(tmp_path):
    assert fit(NoRoom(1), config(tmp_path, checkpoint_minutes=0.0)).finished
    assert [path.name[:14] for path in complete(tmp_path / "checkpoints")] == ["step-000000024"]


def test_weights_that_do_not_fit_are_written_when_the_run_resumes(tmp_path):
    whole, full = tmp_path / "whole", tmp_path / "full"
    fit(Numbers(), config(whole))
    with pytest.raises(OSError, match=r"cannot write the weights: .*No space left.*step-000000024-.*is kept"):
        fit(NoRoom(2), config(full))
    assert "cannot write the weights" in records(full, "end")[0]["reason"]
    assert fit(Numbers(), config(full), resume=True).finished
    assert records(full, "resumed")[0]["step"] == 24
    assert same(final(whole), final(full))


# Several processes, as one of them sees it


class Other(World):
    """The main process of two; the other one has `theirs` in place of what this one would gather."""

    theirs: ClassVar[dict] = {}

    def gather(self, value):
        return [value, {key: v for key, v in (value | self.theirs).items() if v is not None}]

    def share(self, value):
        return value


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"schedule.rate": 0.1}, "rank 1 has schedule.rate 0.1 and rank 0 has 0.2: start all of them with the same"),
        ({"seed": 3}, "rank 1 has seed 3 and rank 0 has 0"),
        ({"precision": None}, "rank 1 has precision None and rank 0 has 'float64'"),
        ({"label_smoothing": 0.1}, "rank 1 has label_smoothing 0.1 and rank 0 has None"),
        ({"data: examples": 95}, "rank 1 has 95 training examples and rank 0 has 96: give all machines the same"),
        ({"data: images": 95}, "rank 1 has 95 training images and rank 0 has 96"),
        (
            {"data: teacher": "other"},
            "rank 1 and rank 0 have teachers with different weights: give .* the same teacher",
        ),
        ({"data: classes": "other"}, "rank 1 and rank 0 have different training images .their classes differ"),
        (
            {"data: validation images": 40},
            "rank 1 has 40 validation images and rank 0 has 32: give all machines the same",
        ),
        ({}, None),
    ],
)
def test_processes_with_other_settings_are_refused(tmp_path, theirs, words):
    world = Other(rank=0, size=2)
    Other.theirs = theirs
    if words is None:
        check_processes(world, Named(), config(tmp_path))
    else:
        with pytest.raises(ValueError, match=words):
            check_processes(world, Named(), config(tmp_path))


def test_places_of_a_machine_may_differ_between_processes(tmp_path):
    one, other = (
        TrainConfig(out=tmp_path),
        TrainConfig(out=tmp_path / "other", data=DataConfig(path="elsewhere", workers=3)),
    )
    seen = []

    class Seen(Other):
        def gather(self, value):
            seen.append(value)
            return [value]

    for settings in (one, other):
        check_processes(Seen(rank=0, size=2), Numbers(), settings)
    assert seen[0] == seen[1]
    assert seen[0]["data.held_out"] == 0.0

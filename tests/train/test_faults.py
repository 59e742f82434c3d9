"""Runs that are killed, and data that is broken, through the command's own task. Nothing is lost and nothing stops."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lambdanets.cli import main
from lambdanets.data.broken import TooManyBrokenError
from lambdanets.data.workers import loss_of_worker
from lambdanets.files import FolderInUseError
from lambdanets.models.pretrained import read_card
from lambdanets.train.checkpoint import complete, load_newest
from lambdanets.train.classify import Classify
from lambdanets.train.config import DataConfig, Ema, Optimizer
from lambdanets.train.loop import fit
from lambdanets.train.lost import LostProcessError
from tests.support.file_size import limit, unlimited_afterwards
from tests.support.image_runs import folder_of_images, image_config, weights
from tests.support.programs import ROOT, environment
from tests.train.tasks import Numbers, StopAt, config, final, records, same

KILLS = 20


def program(out, **settings):
    command = [sys.executable, "-m", "tests.train.program", str(out), json.dumps(settings)]
    return subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE)


def wait_for(process, out, lines):
    """Until the log has so many lines, or the process has ended: whether it still runs."""
    log = Path(out) / "log.jsonl"
    while process.poll() is None:
        if log.exists() and log.read_bytes().count(b"\n") >= lines:
            return True
        time.sleep(0.002)
    return False


@pytest.mark.slow
def test_twenty_kills_change_nothing(tmp_path):
    """SIGKILL at random moments, also while a checkpoint is written; the last run ends with the very same weights."""
    settings = dict(epochs=60.0, checkpoint_minutes=0.0, log_every=3)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert program(whole, **settings).wait(300) == 0
    total = (whole / "log.jsonl").read_bytes().count(b"\n")
    generator = random.Random(20)
    kills, newest = 0, 0
    while kills < KILLS:
        process = program(killed, resume=True, **settings)
        log = killed / "log.jsonl"
        before = log.read_bytes().count(b"\n") if log.exists() else 0
        if not wait_for(process, killed, before + generator.randint(1, total // KILLS)):
            break
        time.sleep(generator.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        found = load_newest(killed / "checkpoints")
        if found is not None:  # whole, and never older than before
            assert not found.damaged
            assert found.state["step"] >= newest
            newest = found.state["step"]
    assert kills == KILLS
    assert program(killed, resume=True, **settings).wait(300) == 0
    assert records_of(killed, "resumed")
    assert same(final(whole), final(killed))


def records_of(folder, event):
    """Of a log with torn lines."""
    found = []
    for line in (folder / "log.jsonl").read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [record for record in found if record["event"] == event]


@pytest.mark.slow
def test_sigterm_writes_a_checkpoint_first(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = dict(epochs=40.0, log_every=2)
    assert program(whole, **settings).wait(300) == 0
    process = program(parts, **settings)
    assert wait_for(process, parts, 4)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    newest = complete(parts / "checkpoints")[-1]
    assert f"step-{records(parts, 'end')[0]['step']:09d}" in newest.name
    assert program(parts, resume=True, **settings).wait(300) == 0
    assert same(final(whole), final(parts))


@pytest.mark.slow
def test_a_second_run_in_a_folder_is_refused_until_the_first_one_ends(tmp_path):
    """Whether it would start or resume; at once after SIGKILL."""
    settings = dict(epochs=5000.0, log_every=2)
    process = program(tmp_path, **settings)
    try:
        assert wait_for(process, tmp_path, 3)
        for resume in (False, True):
            with pytest.raises(FolderInUseError, match=rf"in use by another process \(process {process.pid} on .*\)"):
                fit(Numbers(), config(tmp_path, **settings), resume=resume)
    finally:
        process.kill()
        process.communicate()

    def stop(record):
        if record["event"] == "step":
            signal.raise_signal(signal.SIGTERM)

    assert fit(Numbers(), config(tmp_path, **settings), resume=True, watch=stop).stopped_by == "SIGTERM"


# Images


@pytest.mark.parametrize("workers", [0, 2])
def test_images_stop_and_resume_to_the_last_bit(tmp_path, workers):
    """Augmentation, dropout, stochastic depth, batch norm, EMA; with worker processes and without."""
    images = folder_of_images(tmp_path / "images")
    data = DataConfig(path=str(images), workers=workers)
    fit(Classify(c := image_config(images, tmp_path / "whole")), c)
    first = image_config(images, tmp_path / "parts", data=data)

    def stop(record):
        if record["event"] == "step" and record["step"] == 8:
            signal.raise_signal(signal.SIGTERM)

    assert fit(Classify(first), first, watch=stop).step == 8
    assert fit(Classify(first), first, resume=True).finished
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_fine_tuning_with_frozen_stages_stops_and_resumes_to_the_last_bit(tmp_path):
    images, start = folder_of_images(tmp_path / "images"), tmp_path / "start"
    config = image_config(images, start, epochs=1.0)
    fit(Classify(config), config)

    def tuned(out):
        config = image_config(images, out, optimizer=Optimizer(layer_decay=0.7))
        model = replace(config.model, pretrained=str(start / "weights.safetensors"), freeze="layer1")
        return replace(config, model=model)

    whole, parts = tuned(tmp_path / "whole"), tuned(tmp_path / "parts")
    fit(Classify(whole), whole)
    fit(Classify(parts), parts, watch=StopAt(8))
    fit(Classify(parts), parts, resume=True)
    found, before = weights(whole.out), weights(start)
    assert same(found, weights(parts.out))
    frozen = [name for name in before if name.startswith(("conv1.", "bn1.", "layer1."))]
    assert len(frozen) > 10
    assert all(torch.equal(found[name], before[name]) for name in frozen)
    assert not torch.equal(found["layer2.0.conv1.weight"], before["layer2.0.conv1.weight"])


def command(*arguments):
    return [sys.executable, "-m", "lambdanets", "train", *map(str, arguments)]


@pytest.mark.slow
def test_two_commands_with_one_folder_and_a_resume_at_once_after_sigkill(tmp_path):
    """The processes that read images outlive SIGKILL of their parent for a moment, and do not keep its lock."""
    images, out = folder_of_images(tmp_path / "images"), tmp_path / "run"
    options = ("digits", "--data.path", images, "--data.workers", 2, "--out", out, "--epochs", 40, "--log-every", 1)
    options += ("--batch-size", 8, "--device", "cpu")
    first = subprocess.Popen(command(*options), cwd=ROOT, env=environment(), stdout=subprocess.PIPE)
    try:
        assert wait_for(first, out, 5)
        second = subprocess.run(
            command(*options, "--resume"), cwd=ROOT, env=environment(), capture_output=True, text=True
        )
        assert second.returncode == 2
        assert f"lambdanets: {out} is in use by another process (process {first.pid} on" in second.stderr
        assert "Traceback" not in second.stderr
    finally:
        first.kill()
        first.communicate()
    third = subprocess.run(command(*options, "--resume"), cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert third.returncode == 0, third.stderr
    assert records_of(out, "end")[0]["reason"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["step", "evaluation"])
def test_a_killed_worker_is_a_sentence_and_the_run_resumes(tmp_path, moment):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    images = folder_of_images(tmp_path / "images")
    fit(Classify(c := image_config(images, whole)), c)
    settings = image_config(images, parts, data=DataConfig(path=str(images), workers=1), checkpoint_minutes=0.0)

    def kill(record):
        if record["event"] == moment and record["step"] >= 6:
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

    with pytest.raises(LostProcessError, match=r"reads images was killed.*resumes from its last checkpoint"):
        fit(Classify(settings), settings, watch=kill)
    assert "reads images was killed" in records(parts, "end")[0]["reason"]
    assert fit(Classify(settings), settings, resume=True).finished
    assert same(weights(whole), weights(parts))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that"), True),
        (RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"), True),
        (RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback"), False),
        (ValueError("DataLoader worker (pid 7) is killed by signal: Killed."), False),
    ],
)
def test_which_errors_mean_that_a_worker_was_killed(error, said):
    sentence = loss_of_worker(error)
    assert (sentence is not None) == said
    assert sentence is None or str(error)[:30] in sentence


def test_weights_that_the_disk_has_no_room_for(tmp_path):
    """Safetensors fails with an exception of its own; once there is room, a resume writes the weights."""
    whole, full = tmp_path / "whole", tmp_path / "full"
    images = folder_of_images(tmp_path / "images")
    fit(Classify(c := image_config(images, whole)), c)
    settings = image_config(images, full)

    def fill(record):
        if record["event"] == "evaluation" and record["step"] == 18:
            limit((full / "log.jsonl").stat().st_size + 5000)

    with unlimited_afterwards(), pytest.raises(OSError, match=r"cannot write the weights: .*File too large.*is kept"):
        fit(Classify(settings), settings, watch=fill)
    assert [path.name for path in full.glob("*weights*")] == ["weights.safetensors"]  # of an earlier evaluation
    assert fit(Classify(settings), settings, resume=True).finished
    assert records(full, "resumed")[0]["step"] == 18
    assert same(weights(whole), weights(full))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"class1": "klass1"}, "the 3 classes are now 3; removed: class1; added: klass1"),
        ({"class0": "class2", "class2": "class0"}, "the names of the training images changed"),
    ],
)
def test_renamed_and_exchanged_classes_are_refused(tmp_path, names, words):
    images, moved, run = folder_of_images(tmp_path / "images"), tmp_path / "moved", tmp_path / "run"
    settings = image_config(images, run)

    def stop(record):
        if record["event"] == "step" and record["step"] == 8:
            signal.raise_signal(signal.SIGTERM)

    fit(Classify(settings), settings, watch=stop)
    for split in ("train", "val"):
        for name in names:
            (images / split / name).rename(images / split / f"was-{name}")
        for name, new in names.items():
            (images / split / f"was-{name}").rename(images / split / new)
    with pytest.raises(ValueError, match=f"cannot be resumed, because {words}"):
        fit(Classify(settings), settings, resume=True)
    shutil.rmtree(images)
    folder_of_images(moved)
    elsewhere = image_config(moved, run)
    assert fit(Classify(elsewhere), elsewhere, resume=True).finished


def test_a_run_of_images_leaves_what_others_read(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file

    from lambdanets.models.pretrained import from_pretrained, read_card

    images = folder_of_images(tmp_path / "images")
    config = image_config(images, tmp_path / "run")
    result = fit(Classify(config), config)
    assert set(result.scores) == {"ema", "raw"}
    card = read_card(tmp_path / "run" / "weights.safetensors")
    assert card.class_names == ("class0", "class1", "class2")
    assert card.preprocessing.size == 16
    assert card.metrics["validation_top1"] == result.scores["ema"]["validation"]["top1"]
    assert card.recipe["batch_size"] == 8
    predictions = load_file(str(tmp_path / "run" / "predictions.safetensors"))
    assert predictions["logits"].shape == (12, 3)
    assert predictions["logits"].dtype == torch.float16
    right = (predictions["logits"].argmax(1) == predictions["labels"]).double().mean()
    assert float(right) == result.scores["ema"]["validation"]["top1"]
    with safe_open(str(tmp_path / "run" / "predictions.safetensors"), "pt") as file:
        assert file.metadata()["split"] == "validation"
    start = load_file(str(tmp_path / "run" / "start.safetensors"))
    network = from_pretrained(tmp_path / "run" / "weights.safetensors")
    assert start.keys() == {name for name, _ in network.named_parameters() if name.endswith("positions.table")}
    assert all(not torch.equal(start[name], dict(network.named_parameters())[name]) for name in start)


def test_one_broken_image_in_a_hundred_is_replaced_and_named(tmp_path):
    images = folder_of_images(tmp_path / "images", 120, broken=(10, 21))
    config = image_config(images, tmp_path / "run")
    result = fit(Classify(config), config)
    assert result.finished
    broken = records(tmp_path / "run", "broken_image")
    assert {Path(r["name"]).name for r in broken} == {"010.png", "021.png"}
    assert all(r["reason"] for r in broken)


def test_too_many_broken_images_stop_the_run_with_their_names(tmp_path):
    images = folder_of_images(tmp_path / "images", 60, broken=range(0, 60, 2))
    config = image_config(images, tmp_path / "run")
    with pytest.raises(TooManyBrokenError, match=r"--data\.max-broken.*\.png"):
        fit(Classify(config), config)
    assert "--data.max-broken" in records(tmp_path / "run", "end")[0]["reason"]


def test_one_broken_image_of_a_small_validation_set_stops_nothing(tmp_path):
    images = folder_of_images(tmp_path / "images", 60, broken=(4,))  # one of 12, and of 60
    config = image_config(images, tmp_path / "run", epochs=1.0)
    result = fit(Classify(config), config)
    assert result.scores["ema"]["validation"]["examples"] == 11
    assert [Path(r["name"]).name for r in records(tmp_path / "run", "broken_image")] == ["004.png"]


def test_images_without_labels_are_counted(tmp_path, capsys):
    images = folder_of_images(tmp_path / "images", 60)
    rows = sorted(path.relative_to(tmp_path).as_posix() for path in images.rglob("*.png"))
    labels = ["" if i % 7 == 3 else Path(row).parent.name for i, row in enumerate(rows)]
    lines = [f"{row},{label},{Path(row).parts[1]}" for row, label in zip(rows, labels, strict=True)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,split", *lines]))
    missing = [
        next(s for s in ("train", "val") if s in row) for row, label in zip(rows, labels, strict=True) if not label
    ]
    config = image_config(tmp_path / "list.csv", tmp_path / "run", epochs=1.0)
    result = fit(Classify(config), config)
    note = records(tmp_path / "run", "start")[0]["note"]
    assert (
        f"{missing.count('train')} of 48 training images have no label and are not used, the first is images/" in note
    )
    assert f"{missing.count('val')} of 12 validation images have no label" in note
    assert result.scores["ema"]["validation"]["examples"] == 12 - missing.count("val")
    assert main(["evaluate", str(tmp_path / "run"), str(tmp_path / "list.csv"), "--json", "--device", "cpu"]) == 0
    assert f"{missing.count('val')} of 12 images have no label" in json.loads(capsys.readouterr().out)["note"]


def test_a_validation_set_that_cannot_be_read_stops_the_run_and_mended_it_goes_on(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    images = folder_of_images(tmp_path / "images")
    fit(Classify(c := image_config(images, whole)), c)
    folder_of_images(images, broken=range(4, 60, 5))
    config = image_config(images, parts, data=DataConfig(path=str(images), workers=0, max_broken=0.9))
    with pytest.raises(TooManyBrokenError, match="12 of 12 images"):
        fit(Classify(config), config)
    assert [path.name[:14] for path in complete(parts / "checkpoints")] == ["step-000000006"]
    assert records(parts, "end")[0]["step"] == 6
    assert len(records(parts, "broken_image")) == 12
    folder_of_images(images)
    config = image_config(images, parts)  # max_broken may change
    assert fit(Classify(config), config, resume=True).finished
    assert same(weights(whole), weights(parts))


def test_a_folder_without_validation_images_holds_some_out(tmp_path):
    images = folder_of_images(tmp_path / "images") / "train"
    config = image_config(images, tmp_path / "run", epochs=1.0)
    result = fit(Classify(config), config)
    assert result.scores["ema"]["held_out"]["examples"] == 6
    assert records(tmp_path / "run", "start")[0]["examples"] == 42


def test_small_classes_hold_one_out_each(tmp_path):
    """2% of 16 images is none when it is rounded, and early stopping would choose on the validation images."""
    images = folder_of_images(tmp_path / "images")
    data = DataConfig(path=str(images), workers=0, held_out=0.02)
    task = Classify(image_config(images, tmp_path / "run", data=data))
    assert task.describe()["evaluated"] == {"held_out": 3, "validation": 12}
    assert task.examples == 45


def test_a_fraction_that_holds_everything_out_is_refused(tmp_path):
    images = folder_of_images(tmp_path / "images")
    data = DataConfig(path=str(images), workers=0, held_out=0.999)
    with pytest.raises(ValueError, match=r"data.held_out 0.999 leaves no training images"):
        Classify(image_config(images, tmp_path / "run", data=data))


def test_an_empty_path_of_validation_images_is_refused(tmp_path):
    images = folder_of_images(tmp_path / "images")
    data = DataConfig(path=str(images), validation="", workers=0)
    with pytest.raises(ValueError, match="the path of the dataset is empty"):
        Classify(image_config(images, tmp_path / "run", data=data))


def test_classes_of_one_image_hold_nothing_out(tmp_path):
    images = folder_of_images(tmp_path / "images", 3) / "train"
    with pytest.raises(ValueError, match="no class has two images"):
        Classify(image_config(images, tmp_path / "run"))


@pytest.mark.parametrize(
    ("classes", "renamed", "words"),
    [
        (4, None, "only .*other/val has class3$"),
        (2, None, "only .*images has class2$"),
        (3, "dog", "only .*other/val has dog; only .*images has class0$"),
    ],
)
def test_classes_of_the_validation_images_that_differ_are_named(tmp_path, classes, renamed, words):
    images = folder_of_images(tmp_path / "images")
    other = folder_of_images(tmp_path / "other", classes=classes) / "val"
    if renamed:
        (other / "class0").rename(other / renamed)
    with pytest.raises(ValueError, match=f"the classes of .*other/val and .*images differ: {words}"):
        Classify(
            image_config(images, tmp_path / "run", data=DataConfig(path=str(images), validation=str(other), workers=0))
        )


def test_one_class_is_refused(tmp_path):
    images = folder_of_images(tmp_path / "images", 12, classes=1)
    with pytest.raises(ValueError, match="at least two"):
        Classify(image_config(images, tmp_path / "run"))


def test_a_run_that_was_interrupted_can_be_used(tmp_path, capsys):
    images, out = folder_of_images(tmp_path / "images"), tmp_path / "run"
    config = image_config(images, out, ema=Ema(decay=0.9, recalibrate=2))
    photo = str(next((images / "val").rglob("*.png")))
    assert fit(Classify(config), config, watch=StopAt(4, event="tick")).step == 4
    assert main(["predict", str(out), photo]) == 2
    assert "has no weights yet: they are written after each evaluation" in capsys.readouterr().err
    fit(Classify(config), config, resume=True, watch=StopAt(12, event="evaluation"))
    state = torch.load(complete(out / "checkpoints")[-1], weights_only=True)
    assert state["step"] == 12
    assert same(load_file(str(out / "weights.safetensors")), state["engine"]["ema"])
    (score,) = (record["top1"] for record in records(out, "evaluation") if record["step"] == 12)
    assert read_card(out / "weights.safetensors").metrics["validation_top1"] == score
    assert main(["evaluate", str(out), "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["top1"] == pytest.approx(score)
    assert main(["predict", str(out), photo, "--device", "cpu"]) == 0
    assert main(["report", str(out)]) == 0
    capsys.readouterr()
    assert main(["predict", str(out), photo, "--weights", "best"]) == 2
    assert "has no best.safetensors: choose --weights ema" in capsys.readouterr().err


class Scored(Classify):
    """Its evaluations have the given scores."""

    def __init__(self, config, scores):
        super().__init__(config)
        self.scores = scores

    def evaluate(self, model, world, final):
        found = super().evaluate(model, world, final)
        return {split: numbers | {"top1": self.scores.pop(0)} for split, numbers in found.items()}


@pytest.mark.parametrize("early_stopping", [0, 9])
def test_the_best_weights_are_kept(tmp_path, early_stopping):
    images, out = folder_of_images(tmp_path / "images"), tmp_path / "run"
    config = image_config(images, out, epochs=4.0, keep_best=True, early_stopping=early_stopping)
    fit(Scored(config, [0.3]), config, watch=StopAt(6, event="evaluation"))
    fit(Scored(config, [0.5]), config, resume=True, watch=StopAt(12, event="evaluation"))
    best = load_file(str(out / "best.safetensors"))
    assert same(best, torch.load(complete(out / "checkpoints")[-1], weights_only=True)["engine"]["ema"])
    fit(Scored(config, [0.4, 0.4, 0.4, 0.4]), config, resume=True)
    assert same(best, load_file(str(out / "best.safetensors")))
    assert same(best, load_file(str(out / "weights.safetensors"))) == bool(early_stopping)
    assert read_card(out / "best.safetensors").metrics["validation_top1"] == 0.5


class Sizes(Classify):
    """Notes the sizes of training and evaluation images."""

    def __init__(self, config):
        super().__init__(config)
        self.seen = []

    def inputs(self, images):
        inputs = super().inputs(images)
        self.seen.append(inputs.shape[2])
        return inputs


@pytest.mark.parametrize("mixup", [0.0, 0.4])
def test_training_images_grow_and_evaluation_has_its_own_size(tmp_path, mixup):
    images = folder_of_images(tmp_path / "images")

    def settings(name):
        config = image_config(images, tmp_path / name, epochs=5.0, batch_size=16)
        model = replace(config.model, image_size=48)
        data = replace(config.data, first_size=16, growing=0.8, test_size=64)
        return replace(config, model=model, data=data, augment=replace(config.augment, mixup=mixup))

    whole, parts = settings("whole"), settings("parts")
    task = Sizes(whole)
    fit(task, whole)
    each = [16, 16, 32, 32, 48]  # 0, 8, 16 and 24 of 32 pixels more, in sixteens
    assert task.seen == [size for one in each for size in (*[one] * 3, 64)] + [64]
    assert [(r["epoch"], r["size"]) for r in records(whole.out, "image_size")] == [(0, 16), (2, 32), (4, 48)]
    assert (
        "Training images grow from 16 to 48 pixels in the first 4 epochs. Evaluation uses 64 pixels"
        in (records(whole.out, "start")[0]["note"])
    )
    assert read_card(whole.out / "weights.safetensors").preprocessing.size == 64
    fit(Sizes(parts), parts, watch=StopAt(8, event="tick"))
    again = Sizes(parts)
    fit(again, parts, resume=True)
    assert again.seen == task.seen[10:]
    assert same(weights(whole.out), weights(parts.out))


@pytest.mark.parametrize(
    ("epochs", "growing", "sizes"),
    [
        (1, 0.75, [48]),
        (2, 0.75, [16, 48]),
        (3, 0.75, [16, 32, 48]),
        (5, 1.0, [16, 16, 32, 32, 48]),
        (2.5, 0.1, [16, 48, 48]),
    ],
)
def test_training_images_have_their_full_size_in_the_last_epoch(tmp_path, epochs, growing, sizes):
    config = image_config(folder_of_images(tmp_path / "images"), tmp_path / "run", epochs=float(epochs))
    data = replace(config.data, first_size=16, growing=growing)
    task = Classify(replace(config, model=replace(config.model, image_size=48), data=data))
    assert [task.size_of_epoch(epoch) for epoch in range(len(sizes))] == sizes


def test_sizes_that_cannot_be(tmp_path):
    images = folder_of_images(tmp_path / "images")
    config = image_config(images, tmp_path / "run")
    with pytest.raises(ValueError, match=r"data\.first_size 32 must not be larger than model.image_size 16"):
        Classify(replace(config, data=replace(config.data, first_size=32)))
    model = replace(config.model, options=("scope=None",))
    task = Classify(replace(config, model=model, data=replace(config.data, test_size=32)))
    with pytest.raises(ValueError, match=r"data\.test_size 32: layers with a global scope support at most"):
        task.model()

"""Rounds and the commands: label, learn, again; interrupted and gone on; several processes."""

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lambdanets.cli import main, parse
from lambdanets.experiments.rounds.rounds import run_rounds
from lambdanets.pseudo.config import CoTrainConfig, PseudoData
from lambdanets.pseudo.files import read_manifest
from lambdanets.pseudo.label import LabelOptions
from lambdanets.pseudo.select import Selection
from lambdanets.recipes import cotrain, cotrain_350, imagenet_350
from lambdanets.train.classify import Classify
from lambdanets.train.inference.command import Using
from lambdanets.train.loop import fit
from tests.pseudo.made import contents, make_files, make_shards, make_teacher
from tests.support.image_runs import folder_of_images, image_config, weights

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
USING = Using(device="cpu", batch_size=8)


def lambdanets(*words, launcher=()):
    return [sys.executable, *launcher, "-m", "lambdanets", *map(str, words)]


def co_config(images, **changes):
    base = image_config(images, images / "unused", **({"batch_size": 8, "epochs": 0.5} | changes))
    return CoTrainConfig(**base.__dict__, pseudo=PseudoData(ratio=1.0, soft=True))


def test_a_student_becomes_the_teacher(tmp_path):
    images = folder_of_images(tmp_path / "images")
    first = image_config(images, tmp_path / "teacher", epochs=0.5)
    fit(Classify(first), first)
    unlabelled = make_files(tmp_path / "unlabelled", 20, first=300)
    leak = images / "val" / "class1" / "004.png"
    (unlabelled / "somewhere" / "leak.png").write_bytes(leak.read_bytes())
    settings = dict(options=LabelOptions(soft=2, batch_size=8, guard_distance=-1), selection=Selection(), using=USING)
    config = co_config(images)
    found = run_rounds(str(tmp_path / "teacher"), str(unlabelled), tmp_path / "out", config, rounds=2, **settings)
    assert [r.result is not None and r.result.finished for r in found] == [True, True]
    teachers = [read_manifest(r.labels).teachers[0]["what"] for r in found]
    assert teachers == [str(tmp_path / "teacher"), str(found[0].student)]
    selected = json.loads((found[0].labels / "selection.json").read_text())
    assert (selected["images"], selected["leaks"]) == (21, 1)  # the validation images are guarded without a word
    assert (found[1].labels / "report.html").is_file()
    # Interrupted in the second round and gone on: the same, and the first round is left alone.
    second = weights(found[1].student)
    before = contents(found[0].student)
    for name in ("weights.safetensors", "weights_raw.safetensors", "log.jsonl", "config.json"):
        (found[1].student / name).unlink()
    (found[1].labels / "labels" / "000000.safetensors").unlink()
    for path in sorted((found[1].student / "checkpoints").iterdir()):
        path.unlink()
    again = run_rounds(str(tmp_path / "teacher"), str(unlabelled), tmp_path / "out", config, rounds=2, **settings)
    assert again[0].result is None
    assert contents(found[0].student) == before
    now = weights(found[1].student)
    assert all(torch.equal(second[name], now[name]) for name in second)


def test_the_commands_of_a_user(tmp_path, capsys):
    """Label, learn, resume by the run's own configuration, evaluate."""
    images = folder_of_images(tmp_path / "images")
    teacher = make_teacher(tmp_path / "teacher.safetensors", names=("class0", "class1", "class2"))
    unlabelled, labels, run = make_files(tmp_path / "files", 20), tmp_path / "labels", tmp_path / "run"
    command = [
        "pseudo",
        "label",
        teacher,
        str(unlabelled),
        str(labels),
        "--soft",
        "--batch-size",
        "8",
        "--device",
        "cpu",
    ]
    assert main([*command, "--threshold", "0"]) == 0
    said = capsys.readouterr().out
    assert "20 images labelled in 1 units" in said
    assert "images/s" in said
    small = "widths=(4,4,8,8) depths=(1,1,1,1) scope=3 heads=2 key_depth=4"
    words = f"train cotrain --data.path {images} --pseudo.path {labels} --out {run} --pseudo.soft --epochs 2 "
    words += "--batch-size 8 --model.name lambda_resnet_tiny --model.image-size 16 --precision float32 --device cpu "
    words += f"--schedule.warmup-epochs 0.5 --model.placement CCLL --model.options {small} --no-report"
    assert main(words.split()) == 0
    config = json.loads((run / "config.json").read_text())
    assert config["pseudo"]["soft"]
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert log[0]["pseudo_labelled"] == 20
    assert main(["train", "resume", str(run), "--no-report"]) == 0
    assert main(["evaluate", str(run), "--device", "cpu", "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out[out.index("{") :])["examples"] == 12


def test_recipes():
    paper, base = cotrain_350(), imagenet_350(152, 288)
    assert replace(base, recipe="cotrain_350_152_288", out=paper.out).__dict__.items() <= paper.__dict__.items()
    with pytest.raises(ValueError, match="no results with pseudo-labels for depth 270 at 256"):
        cotrain_350(270, 256)
    assert cotrain().pseudo.epoch == "longer"
    words = [
        "experiments",
        "rounds",
        "T",
        "I",
        "OUT",
        "--rounds",
        "3",
        "cotrain",
        "--data.path",
        "L",
        "--pseudo.ratio",
        "3",
    ]
    chosen = parse(words)
    assert (chosen.teacher, chosen.images, str(chosen.folder), chosen.rounds) == ("T", "I", "OUT", 3)
    assert (chosen.recipe.data.path, chosen.recipe.pseudo.ratio) == ("L", 3)


@pytest.mark.slow
def test_torchrun_with_two_processes_gives_the_result_of_one(tmp_path):
    teacher = make_teacher(tmp_path / "teacher.safetensors")
    shards = make_shards(tmp_path / "shards", 6)
    words = ["--soft", "--batch-size", 8, "--device", "cpu", "--workers", 1, "--threshold", 0.2, "--most", 9]
    one = lambdanets("pseudo", "label", teacher, shards, tmp_path / "one", *words)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    two = lambdanets("pseudo", "label", teacher, shards, tmp_path / "two", *words, launcher=launcher)
    for command in (one, two):
        subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True, timeout=240)
    found = contents(tmp_path / "two")
    assert "report.html" in found  # the last process has chosen and written the page
    assert found == contents(tmp_path / "one")


@pytest.mark.slow
def test_the_command_killed_at_random_times_is_byte_identical(tmp_path):
    teacher = make_teacher(tmp_path / "teacher.safetensors")
    shards = make_shards(tmp_path / "shards", 12, 150)
    words = ["--soft", "--batch-size", 4, "--device", "cpu", "--workers", 1]
    whole = lambdanets("pseudo", "label", teacher, shards, tmp_path / "whole", *words)
    subprocess.run(whole, cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True, timeout=240)
    command = lambdanets("pseudo", "label", teacher, shards, tmp_path / "out", *words)
    generator, kills = random.Random(7), 0
    for _ in range(8):
        process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=-3, stderr=-3)
        labels = tmp_path / "out" / "labels"
        before = len(list(labels.glob("*.safetensors"))) if labels.is_dir() else 0
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            there = len(list(labels.glob("*.safetensors"))) if labels.is_dir() else 0
            if there > before:  # it works: now, or a little later
                time.sleep(generator.random() * 0.4)
                break
            time.sleep(0.01)
        if process.poll() is None:
            process.kill()
            kills += 1
        process.wait()
        if (tmp_path / "out" / "report.html").exists():
            break
    subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True, timeout=240)
    assert kills >= 2
    found = {name: data for name, data in contents(tmp_path / "out").items() if not name.endswith(".part")}
    assert found == contents(tmp_path / "whole")


@pytest.mark.slow
def test_rounds_with_two_processes(tmp_path):
    images = folder_of_images(tmp_path / "images")
    teacher = make_teacher(tmp_path / "teacher.safetensors", names=("class0", "class1", "class2"))
    unlabelled = make_files(tmp_path / "files", 40, first=300)
    small = "widths=(4,4,8,8) depths=(1,1,1,1) scope=3 heads=2 key_depth=4"
    words = f"experiments rounds {teacher} {unlabelled} {tmp_path / 'out'} --rounds 2 --label.unit 8 "
    words += "--teacher-using.batch-size 8 --teacher-using.device cpu --teacher-using.workers 0 --choose.threshold 0 "
    words += f"cotrain --data.path {images} --epochs 1 --batch-size 8 --model.name lambda_resnet_tiny "
    words += "--model.image-size 16 --precision float32 --device cpu --schedule.warmup-epochs 0.5 --data.workers 0 "
    words += f"--model.placement CCLL --model.options {small}"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        lambdanets(*words.split(), launcher=launcher), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the student of round 2" in done.stdout
    assert (tmp_path / "out" / "round-2" / "student" / "weights.safetensors").is_file()

"""Which weights are shown when nobody says, and the pictures to start with."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lambdanets.detect.command import train as train_detector
from lambdanets.experiments.webdemo.analyse import Classifier, Finder, open_model
from lambdanets.experiments.webdemo.choose import examples, newest_run
from lambdanets.recipes import debug
from lambdanets.recipes.coco import debug as debug_detection
from lambdanets.train.command import train
from tests.train.weights import small_weights


def run(folder: Path, age: int, **options: object) -> Path:
    folder.mkdir(parents=True)
    _, path = small_weights(folder / "weights.safetensors", **options)
    os.utime(path, (1_000_000 - age, 1_000_000 - age))
    return folder


def test_the_newest_run_with_lambda_layers_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no finished run in .*runs with weights\.safetensors: .*`lambdanets demo`"):
        newest_run(tmp_path / "runs")
    plain = run(tmp_path / "runs" / "demo" / "convolution", 0, placement="CCCC")
    assert newest_run(tmp_path / "runs") == plain  # better than none
    run(tmp_path / "runs" / "old", 30)
    best = run(tmp_path / "runs" / "demo" / "lambda", 10)
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "weights.safetensors").write_bytes(b"half a file")
    (tmp_path / "runs" / "unfinished").mkdir()
    assert newest_run(tmp_path / "runs") == best
    with pytest.raises(ValueError, match=r"weights_raw\.safetensors"):
        newest_run(tmp_path / "runs", weights="raw")


def test_pictures_of_a_run(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "debug"
    with (tmp_path / "said").open("w") as said:
        config = replace(debug(), out=out, device="cpu", epochs=2 / 56)
        assert train(config, report=False, console=Console(file=said)) == 0
    assert newest_run(tmp_path / "runs") == out
    model = open_model(str(out), device="cpu")
    assert isinstance(model, Classifier)
    found = examples(str(out), model)
    right = [one.name for one in found if model.answer(one.image).found[0].name == one.name]
    assert right, "the network is right about no example: this shows nothing"
    others = [str(digit) for digit in range(10) if str(digit) != right[0]]
    assert [one.name for one in found] == [right[0], *others]  # the first that it gets right, then from all over
    assert right[0] != "0", "it would be the first anyway"
    assert all(one.image.size == (28, 28) for one in found)
    assert len(examples(str(out), model, most=3)) == 3
    assert examples(str(out / "weights.safetensors"), model) == ()  # weights alone lead nowhere


def test_pictures_of_a_detection_run(tmp_path: Path) -> None:
    config = debug_detection()
    config = replace(config, out=tmp_path / "run", device="cpu", epochs=0.25, data=replace(config.data, workers=0))
    with (tmp_path / "said").open("w") as said:
        assert train_detector(config, report=False, console=Console(file=said)) == 0
    model = open_model(str(tmp_path / "run"), device="cpu")
    assert isinstance(model, Finder)
    found = examples(str(tmp_path / "run"), model, most=4)
    assert len(found) == 4
    answers = model.answer(found[0].image)
    assert {one.name for one in answers.found} <= {"circle", "square", "triangle"}
    assert answers.found
    assert "c4" in model.look(found[0].image).text
    about = model.trained.about
    recipe = about.recipe | {"data": about.recipe["data"] | {"path": str(tmp_path / "gone")}}
    gone = replace(model.trained, about=replace(about, recipe=recipe))
    assert examples(str(tmp_path / "run"), Finder(gone)) == ()


def test_a_run_whose_pictures_are_gone_has_none(tmp_path: Path) -> None:
    config = replace(debug(), out=tmp_path / "run", device="cpu", epochs=1 / 56)
    with (tmp_path / "said").open("w") as said:
        assert train(config, report=False, console=Console(file=said)) == 0
    path = tmp_path / "run" / "config.json"
    path.write_text(path.read_text().replace('"mnist"', '"gone"'))
    assert '"gone"' in path.read_text()
    model = open_model(str(tmp_path / "run"), device="cpu")
    assert examples(str(tmp_path / "run"), model) == ()

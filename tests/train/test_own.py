"""`lambdanets train FOLDER` and `lambdanets.fit`, on made-up images."""

import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import lambdanets
from lambdanets.cli import main
from lambdanets.report.log import Log
from lambdanets.report.run import Predictions, ReportedRun
from lambdanets.train import own, probe
from lambdanets.train.classify import Classify
from lambdanets.train.command import names_images
from tests.support.image_runs import folder_of_images, image_config

TINY = ("widths=(4,4,8,8)", "depths=(1,1,1,1)", "scope=3")
OPTIONS = ["--model.options", *TINY, "--epochs", "2", "--device", "cpu"]
SETTINGS = {"model": {"options": TINY}, "epochs": 2, "device": "cpu"}


@pytest.fixture
def pets(tmp_path, monkeypatch):
    """Here is a folder pets/train with three classes, without validation images."""
    monkeypatch.chdir(tmp_path)
    folder = folder_of_images(tmp_path / "made", count=40)
    (folder / "train").rename(tmp_path / "pets")
    return tmp_path / "pets"


def test_a_folder_trains_with_settings_that_are_chosen(pets, capsys):
    assert main(["train", "pets", *OPTIONS]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "pets: 32 colour images in 3 classes (10 to 11 per class), short side 20 px\ntiming a few training steps\n"
    )
    assert "  validation      6 images held out: 19% of each class" in out
    assert "  epochs          2: set by you\n" in out
    assert re.search(r"^  time            about .*: 2 epochs, as set$", out, re.MULTILINE)
    assert out.index("  time            about ") < out.index("step 1/")  # an estimate before the first step
    assert "not used for training (held_out), standard error" in out
    assert "report:   runs/pets/report.html\nweights:  runs/pets/weights.safetensors\n" in out
    assert "  lambdanets predict runs/pets IMAGES\n" in out
    config = json.loads((pets.parent / "runs/pets/config.json").read_text())
    assert (config["recipe"], config["model"]["image_size"], config["batch_size"]) == ("own images", 20, 4)
    assert (pets.parent / "runs/pets/report.html").is_file()
    assert main(["evaluate", "runs/pets"]) == 0
    assert main(["train", "./pets", *OPTIONS, "--no-report"]) == 0  # the folder of the run is a new one
    assert (pets.parent / "runs/pets-2/weights.safetensors").is_file()
    assert "\nruns/pets exists: this run is written to runs/pets-2\n" in capsys.readouterr().out


def test_fit_returns_the_network_with_its_scores(pets, capsys):
    result = lambdanets.fit(pets, out="there", **SETTINGS)
    assert capsys.readouterr().out.startswith(f"{pets}: 32 colour images")
    assert result.class_names == ("class0", "class1", "class2")
    assert not result.model.training
    assert str(result.folder) == "there"
    assert result.report is not None
    assert result.report.is_file()
    assert result.accuracy == result.scores["ema"]["held_out"]["top1"]
    first, second = (result.predict(what) for what in (pets / "class0", sorted((pets / "class0").iterdir())))
    assert [one.classes for one in first] == [one.classes for one in second]
    assert len(first) == len(list((pets / "class0").iterdir()))
    loaded = lambdanets.create_model("lambda_resnet_tiny", "there/weights.safetensors", num_classes=3, image_size=20,
                                     **dict(widths=(4, 4, 8, 8), depths=(1, 1, 1, 1), scope=3)).eval()  # fmt: skip
    images = torch.randn(2, 3, 20, 20)
    torch.testing.assert_close(result.model(images), loaded(images))


def test_a_stopped_run_goes_on_with_what_was_chosen(pets, monkeypatch, capsys):
    monkeypatch.setattr(probe, "measure", lambda config: 5.0)
    whole = lambdanets.fit(pets, out="whole", quiet=True, report=False, **SETTINGS)

    class Stopping(own.Watcher):
        def tick(self, record):
            if record["step"] == 7:
                import signal

                signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(own, "Watcher", Stopping)
        with pytest.raises(KeyboardInterrupt, match="resume=True"):
            lambdanets.fit(pets, out="part", quiet=True, **SETTINGS)
    (pets / "class2").rename(pets / "renamed")
    with pytest.raises(
        ValueError, match=r"cannot be resumed, because the 3 classes are now 3; removed: class2; added: renamed"
    ):
        lambdanets.fit(pets, out="part", quiet=True, report=False, resume=True)
    (pets / "renamed").rename(pets / "class2")
    moved = pets.rename("moved")
    again = lambdanets.fit(moved, out="part", quiet=True, report=False, resume=True)
    assert again.scores == whole.scores
    other = folder_of_images(pets.parent / "other", count=40)
    with pytest.raises(ValueError, match="cannot be resumed"):  # and does not train on the images of the run instead
        lambdanets.fit(other / "val", out="part", quiet=True, report=False, resume=True)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("empty", "empty has no images"),
        ("one", "1 class; training needs at least two"),
        ("flat", "no image has a label. Sort the images into one folder per class: ./flat/CLASS/"),
        ("broken", "none of 4 sampled images can be read"),
        ("finished", "with `lambdanets predict finished IMAGES`"),
        ("started", "resume it with `lambdanets train resume started`"),
        ("nowhere/", "no such folder"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(what, message, pets, capsys):
    for name in ("empty", "flat", "finished", "started", "one/cat", "broken/cat", "broken/dog"):
        (pets.parent / name).mkdir(parents=True)
    picture = Image.fromarray(np.zeros((8, 8, 3), np.uint8))
    for place in ("one/cat/1.png", "one/cat/2.png", "flat/1.png"):
        picture.save(pets.parent / place)
    for number in range(4):
        (pets.parent / "broken" / ("cat", "dog")[number % 2] / f"{number}.jpg").write_bytes(b"not an image")
    for name in ("finished", "started"):
        (pets.parent / name / "config.json").write_text("{}")
    (pets.parent / "finished" / "weights.safetensors").touch()
    assert main(["train", f"./{what}", "--device", "cpu"]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert "timing" not in said.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pets", "--minutes", "0"], "minutes must be above 0"),
        (["pets", "--out", "pets/../old"], "already holds a run"),
        (["pots"], "pots: no such folder, and no recipe of that name; did you mean pets/?"),
        (["pets", "--data.path", "old"], "got two datasets, pets and data.path old"),
        (["pets", "--model.name", "lambda_resnet51"], "unknown model"),
    ],
)
def test_wrong_options_are_refused(words, message, pets, capsys):
    (pets.parent / "old").mkdir()
    (pets.parent / "old" / "config.json").write_text("{}")
    assert main(["train", *words]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert "timing" not in said.out


def test_several_processes_name_a_recipe(pets, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "pets"]) == 2
    assert "with torchrun, use a recipe" in capsys.readouterr().err


def test_recipes_come_before_folders(pets):
    (pets.parent / "digits").mkdir()
    for word in ("pets", "pets/", "./digits", "nowhere/", "s-{0..9}.tar", "list.csv", "https://a/b.tar", "mnist"):
        assert names_images(word), word
    for word in ("digits", "resume", "imagenette", "nowhere", "--help"):
        assert not names_images(word), word


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["digits"],
            "`lambdanets train ./digits` trains on the folder, `lambdanets train digits --data.path mnist` uses",
        ),
        (
            ["debug", "--epochs", "1"],
            "`debug` is both a recipe and a folder here: `lambdanets train ./debug` trains on",
        ),
        (["distill"], "`distill` is both a recipe and a folder here"),
        (["resume"], "`resume` is both a command and a folder here: `lambdanets train ./resume` trains on the folder"),
    ],
)
def test_a_folder_with_the_name_of_a_recipe(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / words[0]).mkdir()
    assert main(["train", *words]) == 2
    assert message in capsys.readouterr().err
    for option in ("--data.path", "--data.path=nowhere") if words[0] != "resume" else ("nowhere",):
        assert main(["train", words[0], option, *(["nowhere"] if option == "--data.path" else [])]) == 2
        assert "is both" not in capsys.readouterr().err


def test_the_overview_names_folders_and_collapses_series(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    out = capsys.readouterr().out
    assert out.startswith("usage: lambdanets train FOLDER | RECIPE | resume RUN [OPTIONS]\n")
    assert "`lambdanets train FOLDER --help` lists the settings." in out
    assert "  digits  " in out
    assert out.count("imagenet_350_") == out.count("cotrain_350_") == 2  # the series and an example
    assert max(map(len, out.splitlines())) <= 110
    with pytest.raises(SystemExit, match="2"):
        main(["train"])
    assert capsys.readouterr().err == out


def test_the_help_of_a_folder_explains_what_is_chosen(pets, capsys):
    with pytest.raises(SystemExit):
        main(["train", "pets", "--help"])
    out = capsys.readouterr().out
    assert "--minutes MINUTES" in out
    assert "--model.image-size PIXELS" in out
    words = " ".join(re.sub("[│╭╮╰╯─]", " ", out).split())
    for text in (
        "--epochs FLOAT Number of epochs; fractions are allowed.",
        "--ema.decay FLOAT Decay of the average per",
    ):
        assert "(default: chosen from the images)" in words.partition(text)[2][:100], text
    assert "report. (default: runs/NAME_OF_FOLDER)" in words
    assert "--seed INT Random seed of weights, data order, augmentation and dropout. (default: 0)" in words


def test_facts_of_a_folder(pets, tmp_path):
    facts = probe.look_at(str(pets))
    assert (facts.images, facts.short_side, facts.pixels, facts.grey, facts.validation) == (32, 20, 480, False, 0)
    for split in ("train", "val"):
        for name in "ab":
            place = tmp_path / "grey" / split / name
            place.mkdir(parents=True)
            for number in range(3):
                pixels = np.full((30, 40), 51 if name == "a" else 102, np.uint8)
                stored = Image.fromarray(pixels)
                (stored if number else stored.convert("RGB")).save(place / f"{number}.png")
    facts = probe.look_at(str(tmp_path / "grey"))
    assert (facts.grey, facts.validation, facts.mean, facts.std) == (True, 6, 0.3, 0.1)
    assert facts.class_sizes == (("a", 3), ("b", 3))


def test_steps_that_do_not_fit_into_memory_are_timed_in_parts(pets, monkeypatch):
    seen, loss = [], Classify.loss

    def with_little_room(task, model, batch):
        seen.append(len(batch[1]))
        if seen[-1] > 4:
            raise torch.OutOfMemoryError("no room")
        return loss(task, model, batch)

    monkeypatch.setattr(Classify, "loss", with_little_room)
    assert probe.measure(image_config(pets, pets.parent / "run", batch_size=16)) > 0
    assert seen == [16, 8, *[4] * (probe.STEPS + 1)]


def test_a_broken_image_among_those_that_are_timed_is_not_too_many(pets):
    sorted((pets / "class0").iterdir())[1].write_bytes(b"not an image")
    assert probe.measure(image_config(pets, pets.parent / "run", batch_size=4)) > 0


def test_unequal_classes_have_a_mean_of_their_own(tmp_path, monkeypatch):
    logits = torch.tensor([[2.0, 1.0]] * 7 + [[1.0, 2.0]])

    def run(labels):
        found = Predictions(logits, torch.tensor(labels), torch.arange(8), ("a", "b"))
        monkeypatch.setattr(own, "read_run", lambda folder: ReportedRun(folder, Log(), predictions=found))
        return own.mean_over_classes(tmp_path)

    assert run([0, 0, 0, 0, 0, 0, 1, 1]) == pytest.approx((1.0 + 0.5) / 2)
    assert run([0, 0, 0, 0, 1, 1, 1, 1]) is None


def test_a_notebook_shows_lines(pets, monkeypatch):
    """The stream of a kernel says that it is a terminal; rich finds IPython's shell."""
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    lambdanets.fit(pets, report=False, **SETTINGS)
    text = stream.getvalue()
    assert "\nstep 1/" in text
    assert "\naccuracy: " in text
    assert "\x1b" not in text


def test_the_import_is_light_until_fit_is_used():
    code = "import sys, lambdanets; a = 'rich' in sys.modules; lambdanets.fit; print(a, 'rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"
    with pytest.raises(AttributeError, match="no attribute 'fitt'"):
        lambdanets.fitt  # noqa: B018

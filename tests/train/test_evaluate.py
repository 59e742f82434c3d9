"""`lambdanets evaluate`, beside one image after the other."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lambdanets.cli import main
from lambdanets.models import Card, Preprocessing, save_weights
from lambdanets.models.pretrained import save_pretrained
from lambdanets.recipes import debug
from lambdanets.report.log import read_log
from lambdanets.report.page import write_report
from lambdanets.train.classify import Classify
from lambdanets.train.config import DataConfig, ModelConfig, TrainConfig
from lambdanets.train.inference.command import Using
from lambdanets.train.inference.evaluate import Clock, evaluate, find_images, match_classes
from lambdanets.train.inference.trained import open_trained
from lambdanets.train.loop import fit
from tests.train.weights import MEAN, NAMES, OPTIONS, SIZE, STD, image_folder, scores_of, small_network, small_weights


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert main(["evaluate", *map(str, arguments), "--json", "--device", "cpu"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("workers", [0, 1])
def test_scores_are_those_of_single_images(tmp_path: Path, capsys, workers: int):
    network, path = small_weights(tmp_path / "w.safetensors")
    labels = image_folder(tmp_path / "images")
    found = run(capsys, path, tmp_path / "images", "--batch-size", 8, "--workers", workers)
    scores = {image: scores_of(network, image) for image in labels}
    ranks = [int((scores[image] > scores[image][label]).sum()) for image, label in labels.items()]
    assert found["examples"] == len(labels) == 35
    assert found["top1"] == pytest.approx(sum(r < 1 for r in ranks) / 35)
    assert found["top5"] == pytest.approx(sum(r < 5 for r in ranks) / 35)
    losses = [-float(scores[image].log_softmax(0)[label]) for image, label in labels.items()]
    assert found["loss"] == pytest.approx(sum(losses) / 35, rel=1e-5)
    answers = [(label, int(scores[image].argmax())) for image, label in labels.items()]
    assert len({answer for _, answer in answers}) > 1  # or this would test little
    for one in found["per_class"]:
        i = NAMES.index(one["name"])
        assert one["examples"] == 5
        assert one["recall"] == pytest.approx(answers.count((i, i)) / 5)
    assert found["parameters"] == sum(p.numel() for p in network.parameters())
    assert found["images_per_second"] > 0
    assert found["split"] == "all"  # a folder of classes


def test_it_takes_what_people_have(tmp_path: Path, capsys):
    """A run folder (averaged and raw weights), a model folder, a name with weights."""
    image_folder(tmp_path / "images" / "val", each=2)
    image_folder(tmp_path / "images" / "train", each=1)
    network, path = small_weights(tmp_path / "run" / "weights.safetensors")
    with torch.no_grad():
        network.get_classifier().weight.neg_()
    card = Card(Preprocessing(MEAN, STD, SIZE, 1.0), NAMES)
    save_weights(network, tmp_path / "run" / "weights_raw.safetensors", card)
    save_pretrained(network, tmp_path / "model", card)
    data = tmp_path / "images"
    averaged, raw = run(capsys, tmp_path / "run", data), run(capsys, tmp_path / "run", data, "--weights", "raw")
    assert averaged["split"] == "validation"
    assert averaged["examples"] == 14
    assert averaged["loss"] != raw["loss"]
    assert run(capsys, path, data)["loss"] == averaged["loss"]
    assert run(capsys, tmp_path / "model", data)["loss"] == raw["loss"]
    options = [f"{key}={value}" for key, value in OPTIONS.items()]
    named = run(capsys, "resnet26", data, "--pretrained", tmp_path / "model", "--options", *options)
    assert named["loss"] == raw["loss"]
    assert run(capsys, path, data, "--split", "train")["examples"] == 7


def test_other_sizes_and_precisions(tmp_path: Path, capsys):
    _, path = small_weights(tmp_path / "w.safetensors")
    image_folder(tmp_path / "images", each=2)
    usual = run(capsys, path, tmp_path / "images")
    assert run(capsys, path, tmp_path / "images", "--image-size", 20)["image_size"] == 20
    assert run(capsys, path, tmp_path / "images", "--image-size", 20)["loss"] != usual["loss"]
    double = run(capsys, path, tmp_path / "images", "--precision", "float64")["loss"]
    assert double == pytest.approx(usual["loss"], rel=1e-5)
    assert double != usual["loss"]
    half = run(capsys, path, tmp_path / "images", "--precision", "bfloat16")["loss"]
    assert half == pytest.approx(usual["loss"], rel=0.1)
    assert half != usual["loss"]


def test_broken_images_are_named_and_do_not_count(tmp_path: Path, capsys):
    _, path = small_weights(tmp_path / "w.safetensors")
    image_folder(tmp_path / "images", each=3)
    for name in ("ant/0.png", "ant/1.png", "fox/2.png"):
        (tmp_path / "images" / name).write_bytes(b"garbage")
    found = run(capsys, path, tmp_path / "images", "--batch-size", 1)
    assert found["examples"] == 18
    assert sorted(name for name, _ in found["broken"]) == ["ant/0.png", "ant/1.png", "fox/2.png"]
    assert main(["evaluate", str(path), str(tmp_path / "images"), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.count("unreadable: ") == 3


def test_nothing_can_be_read(tmp_path: Path, capsys):
    _, path = small_weights(tmp_path / "w.safetensors")
    for image in image_folder(tmp_path / "images", each=1):
        image.write_bytes(b"garbage")
    assert main(["evaluate", str(path), str(tmp_path / "images"), "--device", "cpu"]) == 2
    assert "none of the 7 images" in capsys.readouterr().err


def test_classes_are_matched_by_name(tmp_path: Path, capsys):
    """The folder has two of the model's classes, in places of their own."""
    network, path = small_weights(tmp_path / "w.safetensors")
    labels = image_folder(tmp_path / "images", ("bee", "fox"), each=6)
    found = run(capsys, path, tmp_path / "images")
    right = [int(scores_of(network, image).argmax()) == NAMES.index(image.parent.name) for image in labels]
    assert found["top1"] == pytest.approx(sum(right) / 12)
    assert {one["name"] for one in found["per_class"]} == {"bee", "fox"}


def test_matching():
    assert match_classes(("b", "a"), ("a", "b", "c")) == ([1, 0], "")
    places, note = match_classes(("x", "y"), ("a", "b"))
    assert places == [0, 1]
    assert "by their order" in note
    numbers = tuple(sorted(map(str, range(12))))  # 0, 1, 10, 11, 2, ...
    places, note = match_classes(numbers, tuple("abcdefghijkl"))
    assert places == [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]
    assert "by number" in note
    assert match_classes(numbers, numbers) == (list(range(12)), "")
    with pytest.raises(ValueError, match=r"the class 'x', which is not one of the 3 classes of the model \(a, b, c"):
        match_classes(("a", "x"), ("a", "b", "c"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "mnist"], ["nowhere is not the folder of a run", "lambdanets models"]),
        (["resnet26", "mnist"], ["resnet26 needs weights", "--pretrained"]),
        (["{tmp}/w.safetensors"], ["no images given", "DATA"]),
        (["{tmp}/w.safetensors", "{tmp}/missing"], ["missing"]),
        (["{tmp}/w.safetensors", "mnist", "--split", "held_out"], ["held_out", "remove DATA"]),
        (["{tmp}/w.safetensors", "mnist", "--batch-size", "0"], ["--batch-size must be at least 1, got 0"]),
        (["{tmp}/w.safetensors", "mnist", "--options", "scope=7"], ["name of a network"]),
        (["{tmp}/w.safetensors", "{tmp}/w.safetensors"], ["w.safetensors"]),
        (["{tmp}/w.safetensors", "mnist"], ["the class '0'", "ant"]),
        (["{tmp}/torn.safetensors", "mnist"], ["not a whole safetensors file"]),
        (["{tmp}/other.pt", "mnist"], ["not a .safetensors file", "lambdanets convert"]),
        (["{tmp}/empty", "mnist"], ["has no weights.safetensors"]),
        (["{tmp}/odd", "mnist"], ["odd/config.json is not usable JSON"]),
        (["{tmp}/odder", "mnist"], ["odder/config.json must contain a JSON object"]),
        (["{tmp}/run"], ["run/config.json is not usable JSON"]),
        (["{tmp}/going", "mnist"], ["has no weights yet", "after each evaluation", "train resume"]),
        (["resnet26", "mnist", "--pretrained", "{tmp}/w.safetensors", "--options", "scop=7"], ["scop", "scope"]),
        (["resnet26", "mnist", "--pretrained", "{tmp}/other.pt"], ["other.pt is not a whole torch file"]),
        (["resnet26", "mnist", "--pretrained", "{tmp}/evil.pt"], ["evil.pt is refused", "could run code"]),
    ],
)
def test_refusals(tmp_path: Path, capsys, arguments: list[str], words: list[str]):
    _, path = small_weights(tmp_path / "w.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(path.read_bytes()[:100])
    (tmp_path / "other.pt").write_bytes(b"\x80\x02")
    torch.save({"weight": Path("an object")}, tmp_path / "evil.pt")
    (tmp_path / "empty").mkdir()
    for name, text in (("odd", '{"lamb'), ("odder", "[]"), ("run", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "run" / "weights.safetensors").write_bytes(path.read_bytes())
    (tmp_path / "run" / "log.jsonl").write_text("")
    (tmp_path / "going").mkdir()
    (tmp_path / "going" / "log.jsonl").write_text("")
    assert main(["evaluate", "--device", "cpu", *(word.format(tmp=tmp_path) for word in arguments)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(word in said for word in words), said


def test_the_table(tmp_path: Path, capsys):
    names = ("[red]a", *NAMES[1:])  # markup of rich
    _, path = small_weights(tmp_path / "w.safetensors", names)
    image_folder(tmp_path / "images", names)
    output = tmp_path / "result.json"
    command = ["evaluate", str(path), str(tmp_path / "images"), "--classes", "7", "--output", str(output)]
    assert main([*command, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    written = json.loads(output.read_text())
    assert f"{100 * written['top1']:.2f}%" in said
    assert "[red]a" in said
    assert ", train)" not in said  # nobody said that these are training images
    assert "images/s" in said
    assert "top-5" in said


def test_the_table_of_few_classes_has_no_top5(tmp_path: Path, capsys):
    _, path = small_weights(tmp_path / "w.safetensors", NAMES[:5])
    image_folder(tmp_path / "images", NAMES[:5])
    command = ["evaluate", str(path), str(tmp_path / "images"), "--output", str(tmp_path / "result.json")]
    assert main([*command, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "top-1" in said
    assert "top-5" not in said
    assert json.loads((tmp_path / "result.json").read_text())["top5"] == 1


def test_throughput_leaves_out_the_first_batch(monkeypatch: pytest.MonkeyPatch):
    now = iter([0.0, 100.0, 101.0, 102.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = Clock()
    for seconds in (90.0, 0.5, 0.5):
        clock.tick(64, seconds)
    assert math.isclose(clock.images_per_second, 64)
    assert math.isclose(clock.network_images_per_second, 128)


def test_from_python(tmp_path: Path):
    _, path = small_weights(tmp_path / "w.safetensors")
    image_folder(tmp_path / "images")
    trained = open_trained(str(path), Using(device="cpu"))
    found = evaluate(trained, find_images(str(path), str(tmp_path / "images")))
    assert 0 <= found.top1 <= found.top5 <= 1
    assert small_network().num_classes == len(trained.class_names)


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few real steps on the embedded digits, made very small."""
    config = debug()
    model = replace(config.model, image_size=8, options=("widths=(4,4,8,8)", "depths=(1,1,1,1)", "scope=3"))
    out = tmp_path_factory.mktemp("runs") / "run"
    config = replace(config, model=model, out=out, device="cpu", epochs=0.2, log_every=4, label_smoothing=0.5)
    assert fit(Classify(config), config).finished
    return out


@pytest.mark.parametrize("weights", ["ema", "raw"])
@pytest.mark.parametrize(("split", "examples"), [("auto", 1000), ("validation", 1000), ("held_out", 400)])
def test_a_run_knows_its_images(trained_run: Path, capsys, weights: str, split: str, examples: int):
    """And what it logged of them is what evaluation finds."""
    found = run(capsys, trained_run, "--weights", weights, "--split", split, "--batch-size", 100)
    name = "validation" if split == "auto" else split
    logged = [one for one in read_log(trained_run / "log.jsonl").evaluated(weights) if one["split"] == name][-1]
    assert found["split"] == name
    assert found["examples"] == logged["examples"] == examples
    assert found["top1"] == pytest.approx(logged["top1"])
    assert found["top5"] == pytest.approx(logged["top5"])
    assert found["loss"] == pytest.approx(logged["loss"], rel=1e-5)


def test_a_run_has_no_other_split(trained_run: Path, capsys):
    assert run(capsys, trained_run, "--split", "train")["examples"] == 4000
    assert main(["evaluate", str(trained_run), "--split", "test", "--device", "cpu"]) == 2
    assert "was evaluated on held_out and validation, not on test" in capsys.readouterr().err


def test_the_loss_with_label_smoothing_is_that_of_training(trained_run: Path):
    """Computed by hand from the stored logits."""
    logged = [one for one in read_log(trained_run / "log.jsonl").evaluated("ema") if one["split"] == "validation"][-1]
    made = load_file(trained_run / "predictions.safetensors")
    logs_NC = made["logits"].double().log_softmax(1)
    own_N = logs_NC.gather(1, made["labels"][:, None])[:, 0]
    plain, smoothed = -own_N.mean(), -(0.5 * own_N + 0.5 * logs_NC.mean(1)).mean()
    assert logged["loss"] == pytest.approx(float(plain), rel=1e-4)  # the logits are stored in half precision
    assert logged["smoothed_loss"] == pytest.approx(float(smoothed), rel=1e-4)
    assert abs(float(smoothed - plain)) > 5e-4 * float(plain)  # so the two cannot be confused


def test_the_report_of_a_real_run(trained_run: Path):
    page = write_report(trained_run, pictures=3).read_text()
    assert page.count('class="tiny"') == 3
    assert "held out, averaged weights" in page
    assert "of 1,000 images are classified correctly" in page
    assert page.count('class="heat"') == 2
    assert "has not ended" not in page
    assert "loss (cross-entropy with label smoothing 0.5)" in page
    assert "without label smoothing" not in page


def test_training_names_the_files_that_are_not_read(tmp_path):
    image_folder(tmp_path / "images")
    (tmp_path / "images" / NAMES[0] / "phone.heic").write_bytes(b"x")
    task = Classify(TrainConfig(model=ModelConfig(image_size=SIZE), data=DataConfig(path=str(tmp_path / "images"))))
    assert task.notes() == [f"1 file was not read in {tmp_path / 'images'}: .heic (1). Convert them to JPEG or PNG"]


def test_evaluation_names_the_files_that_are_not_read(tmp_path, capsys):
    _, path = small_weights(tmp_path / "w.safetensors")
    image_folder(tmp_path / "images")
    (tmp_path / "images" / NAMES[0] / "phone.heic").write_bytes(b"x")
    note = run(capsys, path, tmp_path / "images")["note"]
    assert note == f"1 file was not read in {tmp_path / 'images'}: .heic (1). Convert them to JPEG or PNG"

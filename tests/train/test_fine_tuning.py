"""Training that starts from trained weights: which rules apply, and a run with a small file in the packaged folder."""

import json
from dataclasses import replace
from itertools import product
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import lambdanets
from lambdanets.cli import main
from lambdanets.data.preprocessing import Preprocessing
from lambdanets.models import Card, packaged, save_weights
from lambdanets.train.config import TrainConfig
from lambdanets.train.own import choose
from lambdanets.train.plan import CHOSEN, Facts, Machine, Start, make_plan, names_of
from lambdanets.train.probe import find_start
from tests.train.weights import MEAN, NAMES, OPTIONS, STD, image_folder, small_network

CPU, GPU = Machine("cpu", cores=2), Machine("cuda", "a GPU")
PHOTOS = Facts("pets", tuple((f"class{i}", 100) for i in range(5)), short_side=160, pixels=25_600)
TRAINED = Preprocessing(MEAN, STD, 160, 0.9, "bilinear")
START = Start(
    "packaged", "lambda_resnet50", {"scope": 7, "placement": ("C", "C", (2,), "L")}, TRAINED, about="top-1 60%"
)
SIZE = 48  # of images: larger than those that training takes for drawings of characters


def slow(config) -> float:
    """Images per second: a frozen network is three times as fast."""
    rate = 4.0 * (160 / config.model.size) ** 2
    return 3 * rate if config.model.freeze else rate


def test_rules_on_a_gpu() -> None:
    plan = make_plan(PHOTOS, GPU, lambda config: 1e6, start=START)
    config = plan.config
    assert (config.model.name, config.model.pretrained, config.model.image_size) == ("lambda_resnet50", "packaged", 160)
    row = config.model.row()
    assert (row.scope, row.placement) == (7, ("C", "C", (2,), "L"))
    assert (config.data.mean, config.data.std, config.data.crop) == (MEAN, STD, 0.9)
    assert config.data.interpolation == "bilinear"
    assert (config.model.freeze, config.optimizer.kind, config.optimizer.layer_decay) == (None, "adamw", 0.75)
    scratch = make_plan(PHOTOS, GPU, lambda config: 1e6).config
    assert config.epochs < scratch.epochs
    assert config.schedule.rate == pytest.approx(0.0005 * 2**0.5, rel=0.01)  # for batches of 64
    said = "\n".join(map(str, plan.reasons))
    assert "top-1 60%; --from-scratch starts from random weights" in said
    assert "all layers: learning rate times 0.75 per block, from the classifier down" in said


def test_a_cpu_trains_what_its_time_allows() -> None:
    """400 images in 20 epochs are 8,000: 2,000 s for all layers at 160 px, 670 s for the classifier."""
    config = make_plan(PHOTOS, CPU, slow, minutes=60, start=START).config
    scratch = make_plan(PHOTOS, CPU, slow, minutes=60).config
    assert (config.model.freeze, config.optimizer.layer_decay) == (None, 0.75)
    assert config.schedule.rate == scratch.schedule.rate == 0.004
    plan = make_plan(PHOTOS, CPU, slow, minutes=20, start=START)
    config = plan.config
    assert (config.model.freeze, config.model.size, config.epochs) == ("features", 160, 20)
    assert (config.optimizer.layer_decay, config.schedule.rate) == (1.0, 0.004)
    assert "the classifier alone: all layers would take 3" in "\n".join(map(str, plan.reasons))
    assert make_plan(PHOTOS, CPU, slow, minutes=8, start=START).config.model.size == 96
    fixed = replace(START, resizable=False)
    plan = make_plan(PHOTOS, CPU, slow, minutes=8, start=fixed)
    assert (plan.config.model.size, plan.config.epochs < 20) == (160, True)


def test_few_images_have_the_rate_from_scratch() -> None:
    few = replace(PHOTOS, class_sizes=(("cat", 10), ("dog", 10)))
    config = make_plan(few, CPU, slow, start=START).config
    assert config.batch_size == 4
    assert config.schedule.rate == make_plan(few, CPU, slow).config.schedule.rate == 0.00141
    plan = make_plan(few, CPU, slow, {"optimizer.layer_decay": 1.0}, start=START)
    assert "all layers: at one learning rate" in "\n".join(map(str, plan.reasons))


def test_settings_that_are_given_stay() -> None:
    given = {"model.image_size": 128, "optimizer.kind": "sgd", "schedule.rate": 0.1, "epochs": 3, "data.crop": 1.0}
    config = make_plan(PHOTOS, CPU, slow, given, start=START).config
    assert (config.model.size, config.optimizer.kind, config.schedule.rate, config.epochs) == (128, "sgd", 0.1, 3)
    assert config.data.crop == 1.0
    config = make_plan(PHOTOS, CPU, slow, {"model.freeze": "layer2"}, start=START).config
    assert config.model.freeze == "layer2"
    grey = replace(PHOTOS, grey=True)
    assert make_plan(grey, CPU, slow, start=START).config.data.channels == 3


def test_chosen_settings_are_listed() -> None:
    """The help of `train FOLDER` shows no fixed default for them."""
    small = replace(PHOTOS, short_side=28, pixels=784, grey=True, validation=50)
    default = TrainConfig()
    found = set()
    for facts, machine, start in product((PHOTOS, small, replace(PHOTOS, pixels=2**22)), (CPU, GPU), (None, START)):
        config = make_plan(facts, machine, slow if start else lambda config: 1e3, start=start).config
        found |= {name for name in names_of(config) if attrgetter(name)(config) != attrgetter(name)(default)}
    assert found - CHOSEN == {"recipe", "data.path"}
    assert set(names_of(default)) >= CHOSEN


def test_help_mentions_packaged_weights_where_there_are_some(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def help_of(*words: str) -> str:
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        return " ".join(capsys.readouterr().out.replace("│", " ").split())

    assert "`lambdanets predict photo.jpg`" not in help_of("predict")
    assert "--from-scratch Start from random weights, which is the default" in help_of("train", "./images")
    pack(folder)
    assert "`lambdanets predict photo.jpg` uses resnet26, which comes with lambdanets" in help_of("predict")
    assert "starts from the weights that come with lambdanets" in help_of("train", "./images")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(packaged, "FOLDER", tmp_path / "weights")
    (tmp_path / "weights").mkdir()
    return tmp_path / "weights"


def pack(folder: Path, name: str = "resnet26") -> Path:
    card = Card(Preprocessing(MEAN, STD, SIZE, 1.0), NAMES, {"top1": 0.6}, examples=70)
    return save_weights(small_network(), folder / f"{name}.safetensors", card, bits=8)


def test_which_weights(folder: Path) -> None:
    assert find_start(PHOTOS, {}) is None  # none are packaged
    with pytest.raises(ValueError, match="is 'packaged', and this release of lambdanets comes"):
        find_start(PHOTOS, {"model.pretrained": "packaged"})
    path = pack(folder)
    start = find_start(PHOTOS, {})
    assert start is not None
    assert (start.where, start.name, start.size, start.about) == (
        "packaged",
        "resnet26",
        SIZE,
        "top-1 60.0% of 70 images",
    )
    assert start.resizable
    assert {name: start.arguments[name] for name in ("scope", "stem", "key_depth")} == {
        name: OPTIONS[name] for name in ("scope", "stem", "key_depth")
    }
    assert not {"num_classes", "image_size"} & set(start.arguments)
    assert find_start(PHOTOS, {"model.name": "resnet26"}) == start
    assert find_start(PHOTOS, {"model.name": "resnet50"}) is None
    assert find_start(PHOTOS, {"model.placement": "CCCC"}) is None
    assert find_start(replace(PHOTOS, short_side=28), {}) is None
    assert find_start(replace(PHOTOS, short_side=28), {"model.pretrained": "packaged"}) == start
    with pytest.raises(ValueError, match="resnet50 has no packaged weights: only resnet26"):
        find_start(PHOTOS, {"model.pretrained": "packaged", "model.name": "resnet50"})
    own = find_start(PHOTOS, {"model.pretrained": str(path)})
    assert own == replace(start, where=str(path))
    assert find_start(PHOTOS, {"model.pretrained": str(path), "model.name": "resnet26"}) is None  # settings as given
    small_network(scope=None).save_pretrained(folder / "global")
    found = find_start(PHOTOS, {"model.pretrained": str(folder / "global")})
    assert found is not None
    assert not found.resizable
    torch.save(small_network().state_dict(), folder / "plain.pt")
    with pytest.raises(ValueError, match="For weights without a description, also pass"):
        find_start(PHOTOS, {"model.pretrained": str(folder / "plain.pt")})


def test_a_run_from_packaged_weights(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    pack(folder)
    image_folder(tmp_path / "images", NAMES[:3], each=12, size=SIZE)
    command = ["train", str(tmp_path / "images"), "--device", "cpu", "--data.workers", "0", "--no-report"]
    settings = ["--epochs", "1", "--batch-size", "8", "--model.freeze", "features"]
    assert main([*command, *settings, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "resnet26: the network of the weights" in said
    assert "packaged: top-1 60.0% of 70 images" in said
    assert said.count("Classifier: new, because the weights have 7 classes and the images 3") == 1
    assert not [one for one in recwarn if "classes" in str(one.message)]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    model = config["config"]["model"] if "config" in config else config["model"]
    assert (model["name"], model["pretrained"], model["freeze"]) == ("resnet26", "packaged", "features")
    trained, start = (
        load_file(tmp_path / "run" / "weights.safetensors"),
        lambdanets.create_model("resnet26", "packaged"),
    )
    assert torch.equal(trained["layer1.0.conv1.weight"], start.state_dict()["layer1.0.conv1.weight"])
    assert trained["fc.weight"].shape[0] == 3


def test_from_scratch(folder: Path, tmp_path: Path) -> None:
    pack(folder)
    image_folder(tmp_path / "images", NAMES[:3], each=8, size=SIZE)
    given = {"device": "cpu", "data.workers": 0, "epochs": 1, "out": tmp_path / "run"}
    console = Console(quiet=True)
    scratch = choose(str(tmp_path / "images"), given, None, False, console, from_scratch=True)
    assert (scratch.model.name, scratch.model.pretrained) == ("resnet26_d", None)
    with pytest.raises(ValueError, match="got from_scratch and"):
        choose(str(tmp_path / "images"), {**given, "model.pretrained": "packaged"}, None, False, console, True)

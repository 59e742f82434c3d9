"""Weights that come with the package. Tests put a small file where they would be; the folder itself may be empty."""

import json
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lambdanets.cli import main
from lambdanets.models import Card, Network, Preprocessing, create_model, list_models, save_weights, weights_of
from lambdanets.models import packaged as module
from lambdanets.models.model_card import model_card
from tests.train.weights import MEAN, NAMES, SIZE, STD, small_network

ROOT = Path(__file__).resolve().parent.parent.parent
NAME = "resnet26"
CARD = Card(
    Preprocessing(MEAN, STD, SIZE, 1.0),
    NAMES,
    {"top1": 0.5, "top5": 0.9},
    {"epochs": 3},
    examples=5000,
    evaluated_on="validation images",
    training_data="noise | without *labels*",
    teacher="another network",
    license="made of <noise>",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in the place of the package's; nothing may use the network."""

    def call(*arguments: object, **options: object) -> None:
        raise AssertionError("the hub was contacted")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", call)
    monkeypatch.setattr("socket.socket.connect", call)
    monkeypatch.setattr(module, "FOLDER", tmp_path / "weights")
    return tmp_path / "weights"


def pack(folder: Path, name: str = NAME, card: Card = CARD, **options: object) -> Network:
    folder.mkdir(exist_ok=True)
    network = small_network(**options)
    save_weights(network, folder / f"{name}.safetensors", card, bits=8)
    return network


def image(path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 255, (SIZE, SIZE, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def test_they_are_installed_with_the_package() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["lambdanets"]
    relative = Path(module.FOLDER / "resnet50.safetensors").relative_to(ROOT / "lambdanets")
    assert any(relative.match(pattern) for pattern in patterns)


def test_what_is_in_this_package() -> None:
    """Also true where nothing is."""
    for name in list_models(pretrained="packaged"):
        card = module.packaged_card(name)
        assert len(card.class_names) == 1000
        assert card.examples
        assert card.license
    total = sum(path.stat().st_size for path in module.FOLDER.glob("*")) if module.FOLDER.is_dir() else 0
    assert total <= 20_000_000


def test_networks_with_weights(folder: Path) -> None:
    pack(folder)
    network = create_model(NAME, pretrained=True).eval()
    expected = small_network()
    assert network.card == CARD
    assert network.config == expected.config  # the arguments of the weights, not those of the row
    x = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, full = network(x), expected(x)
    assert (found - full).norm() < 0.05 * full.norm()  # 8 bits
    again = create_model(NAME, "packaged").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in network.state_dict().items())
    maps = create_model(NAME, pretrained=True, features_only=True, out_indices=[2]).eval()(x)
    with torch.no_grad():
        assert (maps[0] - expected.forward_intermediates(x, [2])[1][0]).norm() < 0.05 * maps[0].norm()


def test_timm_finds_them(folder: Path) -> None:
    import timm

    import lambdanets.timm

    pack(folder)
    theirs = timm.create_model(lambdanets.timm.timm_name(NAME), pretrained=True)
    ours = create_model(NAME, pretrained=True).state_dict()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.state_dict().items())
    assert (theirs.pretrained_cfg["mean"], theirs.pretrained_cfg["input_size"]) == (MEAN, (3, SIZE, SIZE))


def test_another_number_of_classes(folder: Path) -> None:
    pack(folder)
    with pytest.warns(UserWarning, match="7 classes instead of 3: fc keeps"):
        network = create_model(NAME, pretrained=True, num_classes=3, drop_rate=0.1)
    assert network.card is not None
    assert (network.num_classes, network.card.class_names, network.card.metrics) == (3, (), {})
    assert network.card.preprocessing == CARD.preprocessing
    assert network.card.teacher == CARD.teacher
    network.save_pretrained(folder.parent / "saved")  # the names of other classes are gone


def test_lists(folder: Path) -> None:
    hub = ["lambda_resnet26rpt_256", "lambda_resnet26t", "lambda_resnet50ts"]
    assert list_models(pretrained=True) == list_models(pretrained="hub") == hub
    assert list_models(pretrained="packaged") == []
    pack(folder)
    pack(folder, "lambda_resnet26t")
    (folder / "unknown.safetensors").write_bytes(b"")
    assert list_models(pretrained="packaged") == ["lambda_resnet26t", NAME]
    assert list_models(pretrained="hub") == [name for name in hub if name != "lambda_resnet26t"]
    assert list_models(pretrained=True) == sorted([*hub, NAME])
    assert list_models("resnet*", pretrained=True) == [NAME]
    assert [weights_of(name) for name in (NAME, hub[0], "resnet50")] == ["packaged", "hub", None]
    with pytest.raises(ValueError, match="pretrained must be True, False, 'packaged' or 'hub', got 'all'"):
        list_models(pretrained="all")  # type: ignore[arg-type]


def test_the_table_of_models(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "*resnet26*", "--format", "json"]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert (found[NAME]["weights"], found["lambda_resnet26t"]["weights"]) == (None, "hub")
    pack(folder)
    assert main(["models", NAME, "--format", "json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["weights"], one["top1"], one["examples"]) == ("packaged", 0.5, 5000)
    assert main(["models", NAME, "--format", "markdown"]) == 0
    assert "packaged: top-1 50.0% (5,000 images)" in capsys.readouterr().out


def test_the_table_of_models_needs_no_safetensors(folder: Path, monkeypatch, capsys) -> None:
    pack(folder)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert main(["models", NAME]) == 0
    assert "packaged" in capsys.readouterr().out


def test_missing_and_wrong_files(folder: Path) -> None:
    with pytest.raises(ValueError, match="'resnet26', nor do any come with lambdanets"):
        create_model(NAME, pretrained=True)
    with pytest.raises(ValueError, match="resnet26 has no packaged weights: this release of lambdanets comes without"):
        create_model(NAME, "packaged")
    pack(folder, "resnet50")
    with pytest.raises(ValueError, match="only resnet50 have weights that come with lambdanets"):
        create_model(NAME, "packaged")
    with pytest.raises(ValueError, match=r"resnet50\.safetensors has the weights of resnet26, not of resnet50"):
        create_model("resnet50", pretrained=True)


def test_the_default_is_the_most_accurate(folder: Path) -> None:
    assert module.default_network() is None
    for name, top1 in (("resnet26", 0.4), ("resnet101", 0.6), ("resnet50", 0.5)):
        pack(folder, name, Card(CARD.preprocessing, NAMES, {"top1": top1}))
    assert module.default_network() == "resnet101"


def test_prediction_without_naming_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photo = image(folder.parent / "photo.png")
    options = ["--json", "--device", "cpu", "--workers", "0"]
    assert main(["predict", str(photo), *options]) == 2
    said = capsys.readouterr().err
    assert "no weights are named, and this release of lambdanets comes without trained weights" in said
    assert said.count("\n") == 1
    pack(folder)
    save_weights(small_network(), folder.parent / "named.safetensors", CARD, bits=8)
    assert main(["predict", str(folder.parent / "named.safetensors"), str(photo), *options]) == 0
    expected = json.loads(capsys.readouterr().out)["classes"]
    assert main(["predict", str(photo), str(photo), *options]) == 0
    out, err = capsys.readouterr()
    for line in out.splitlines():
        for one, other in zip(json.loads(line)["classes"], expected, strict=True):
            assert one["class"] == other["class"]
            assert one["probability"] == pytest.approx(other["probability"], abs=1e-5)
    assert "the network is resnet26, which comes with lambdanets" in err
    (folder.parent / "photos").mkdir()
    image(folder.parent / "photos" / "a.png")
    assert main(["predict", str(folder.parent / "photos"), *options]) == 0
    assert json.loads(capsys.readouterr().out)["classes"] == expected
    assert main(["predict", NAME, str(photo), *options]) == 0  # by name, without --pretrained
    assert json.loads(capsys.readouterr().out)["classes"] == expected

    assert main(["predict", NAME, str(photo), "--pretrained", "packaged", *options]) == 0
    assert json.loads(capsys.readouterr().out)["classes"] == expected
    assert main(["predict", str(folder.parent / "no.jpg"), *options]) == 1
    assert "no.jpg" in json.loads(capsys.readouterr().out)["image"]


def test_folders_without_weights_or_images_are_refused_as_before(folder: Path, capsys) -> None:
    pack(folder)
    (folder.parent / "empty").mkdir()
    assert main(["predict", str(folder.parent / "empty"), str(image(folder.parent / "a.png"))]) == 2
    assert "has no weights.safetensors (a run) or model.safetensors" in capsys.readouterr().err.replace(
        "weights_ema", "weights"
    )


def test_metadata_in_files_and_the_model_card(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network = small_network()
    network.card = CARD
    text = model_card(network, CARD)
    assert "Measured on 5,000 images of validation images." in text
    assert "noise &#124; without &#42;labels&#42;" in text
    assert "| teacher | another network |" in text
    assert "These weights: made of &#60;noise&#62;." in text
    plain = model_card(network, Card(CARD.preprocessing, NAMES))
    assert "## Training" not in plain
    assert "Measured on" not in plain
    assert "authors of these weights choose their licence" in plain
    network.save_pretrained(folder.parent / "with")
    assert Network.from_pretrained(folder.parent / "with").card == CARD
    network.save_pretrained(folder.parent / "without", Card(CARD.preprocessing, NAMES))
    stored = json.loads((folder.parent / "without" / "config.json").read_text())["lambdanets"]
    assert not set(stored) & set(Card.LEFT_OUT_IF_EMPTY)  # older releases read these files


def test_a_card_from_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder.parent / "full.safetensors"
    save_weights(small_network(), source, Card(CARD.preprocessing, NAMES, {}, {"epochs": 3}))
    card = {name: getattr(CARD, name) for name in ("metrics", "examples", "license", "teacher")}
    (folder.parent / "card.json").write_text(json.dumps(card))
    folder.mkdir()
    command = ["convert", str(source), str(folder / f"{NAME}.safetensors"), "--bits", "8", "--card"]
    assert main([*command, str(folder.parent / "card.json")]) == 0
    found = module.packaged_card(NAME)
    assert found == Card(
        CARD.preprocessing, NAMES, CARD.metrics, {"epochs": 3}, 5000, teacher=CARD.teacher, license=CARD.license
    )
    for text, message in (('{"top1": 3}', "unknown key top1"), ('{"examples": -1}', "examples must be from 0")):
        (folder.parent / "card.json").write_text(text)
        capsys.readouterr()
        assert main([*command, str(folder.parent / "card.json")]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert "card.json" in said

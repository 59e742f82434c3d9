"""Weights from elsewhere: what is wrong is a sentence, nothing is fetched, and nothing large is allocated."""

import copy
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lambdanets.cli import main
from lambdanets.convert import load_layer
from lambdanets.detect.weights import DETECTOR_KEY, load_detector
from lambdanets.models import Network, from_pretrained
from lambdanets.models.pretrained import KEY, load_weights
from lambdanets.models.stored import NonFiniteWeightsWarning, read_state, within_size_of
from lambdanets.train.classify import Classify
from lambdanets.train.config import DataConfig, ModelConfig, TrainConfig
from lambdanets.train.inference.trained import open_trained
from tests.train.weights import OPTIONS, SIZE, image_folder, small_network, small_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small_network().save_pretrained(tmp_path / "model")


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of the hub, each of which fails."""
    calls: list[Any] = []

    def call(*arguments: object, **options: object) -> None:
        calls.append((arguments, options))
        raise AssertionError("the hub was contacted")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", call)
    monkeypatch.setattr("socket.socket.connect", call)
    return calls


def change(folder: Path, place: tuple[str, ...], value: object) -> None:
    """Set an entry of our part of config.json."""
    config = json.loads((folder / "config.json").read_text())
    inner = config[KEY]
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    (folder / "config.json").write_text(json.dumps(config))


DESCRIPTIONS: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "pretrained": (("arguments", "pretrained"), "owner/name", "has no argument pretrained"),
    "features_only": (("arguments", "features_only"), True, "has no argument features_only"),
    "out_indices": (("arguments", "out_indices"), 2, "has no argument out_indices"),
    "name of a row": (("arguments", "name"), "resnet50", "has no argument name"),
    "depths": (("arguments", "depths"), [1, 1, 10**9, 1], r"depths\[2\] must be from 1 to 200"),
    "many blocks": (("arguments", "depths"), [200] * 4, r"describes a network of more than .* [\d,]+ tensors"),
    "widths": (("arguments", "widths"), [65536] * 4, r"describes a network of more than [\d,]+ parameters"),
    "classes": (("arguments", "num_classes"), 10**7, r"describes a network of more than [\d,]+ parameters"),
    "heads": (("arguments", "heads"), 1e9, "heads must be a whole number"),
    "scope": (("arguments", "scope"), 16384, r"describes a network of more than [\d,]+ parameters"),
    "global scope": (("arguments", "scope"), None, "positions.table is "),
    "image size": (("arguments", "image_size"), 100_000, "image_size must be from 1 to 8192, got 100000"),
    "placement": (("arguments", "placement"), {"a": 1}, "placement must be text or a list, got {'a': 1}"),
    "nested placement": (
        ("arguments", "placement"),
        [[[[[1]]]], "C", "C", "C"],
        r"placement\[0\]\[0\] must be a",
    ),
    "arguments": (("arguments",), [1], "arguments must be an object"),
    "name": (("name",), 7, "name must be text, got 7"),
    "list as name": (("name",), ["resnet26"], "name must be text"),
    "unknown name": (("name",), "x" * 500, "unknown model"),
    "preprocessing": (("preprocessing",), "none", "preprocessing must be an object"),
    "mean": (("preprocessing", "mean"), 0.5, "preprocessing.mean must be a list, got 0.5"),
    "text in mean": (("preprocessing", "mean"), ["a", 1, 2], r"preprocessing.mean\[0\] must be a number"),
    "long mean": (("preprocessing", "mean"), [0.5] * 4, "mean and std must have one number for each channel"),
    "std": (("preprocessing", "std"), [0, 0, 0], r"preprocessing.std\[0\] must be from 1e-06"),
    "size": (("preprocessing", "size"), 10**6, "preprocessing.size must be from 1 to 8192"),
    "size of text": (("preprocessing", "size"), "large", "preprocessing.size must be a whole number"),
    "crop": (("preprocessing", "crop"), 1e-30, "preprocessing.crop must be from 0.01 to 1"),
    "interpolation": (("preprocessing", "interpolation"), "magic", "preprocessing.interpolation must be one of"),
    "orientation": (("preprocessing", "exif_orientation"), 1, "preprocessing.exif_orientation must be true or false"),
    "unknown key": (("preprocessing", "sizes"), 3, "unknown key preprocessing.sizes.*did you mean preprocessing.size"),
    "class names": (("class_names",), "abcdefg", "class_names must be a list, got 'abcdefg'"),
    "a class name": (("class_names",), ["a", 2, "c", "d", "e", "f", "g"], r"class_names\[1\] must be text, got 2"),
    "few class names": (("class_names",), ["a"], "1 class names for 7 classes"),
    "metrics": (("metrics",), [1], "metrics must be an object"),
    "a metric": (("metrics",), {"top1": "high"}, "metrics.top1 must be a number"),
    "recipe": (("recipe",), 3, "recipe must be an object"),
    "version": (("version",), None, "version must be text"),
    "large integer": (("arguments", "heads"), 10**400, "does not fit into 64 bits"),
}


@pytest.mark.parametrize(("place", "value", "message"), DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_descriptions(
    place: tuple[str, ...], value: object, message: str, folder: Path, no_hub: list[Any], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(torch, "empty", counting(torch.empty, limit=2**28))
    change(folder, place, value)
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)
    assert not no_hub


def counting(create: Callable[..., torch.Tensor], limit: int) -> Callable[..., torch.Tensor]:
    """torch.empty, but a tensor that would take gigabytes fails the test."""

    def checked(*size: Any, **options: Any) -> torch.Tensor:
        made = create(*size, **{**options, "device": "meta"})
        assert made.numel() < limit, f"a tensor of {list(made.shape)}"
        return create(*size, **options)

    return checked


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_commands_contact_nobody(command: str, tmp_path: Path, no_hub: list[Any], capsys) -> None:
    _, path = small_weights(tmp_path / "w.safetensors")
    rewrite_header(path, lambda ours: ours["arguments"].update(pretrained="owner/name"))
    image_folder(tmp_path / "images", each=1)
    assert main([command, str(path), str(tmp_path / "images"), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "has no argument pretrained" in said
    assert said.count("\n") == 1
    assert not no_hub


def rewrite_header(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        ours = json.loads(file.metadata()[KEY])
    edit(ours)
    save_file(load_file(path), path, {"format": "pt", KEY: json.dumps(ours)})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"lambdanets": ' + "[" * 50_000 + "]" * 50_000 + "}", "nested too deeply|must be"),
        ('{"lambdanets": {"name": ' + "9" * 400 + "}}", "does not fit into 64 bits"),
        ("\0\1\2", "not usable JSON"),
        ("[]", "must contain a JSON object"),
        ('{"lambdanets": {"arguments": {}}}', "does not name its network"),
    ],
    ids=["nested", "nested inside", "large integer", "bytes", "list", "nameless"],
)
def test_text_that_is_no_description(text: str, message: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)


def test_infinite_scores_in_a_header_still_load(tmp_path: Path) -> None:
    _, path = small_weights(tmp_path / "w.safetensors")
    rewrite_header(path, lambda ours: ours.update(metrics={"loss": float("nan")}, recipe={"clip": float("inf")}))
    assert str(from_pretrained(path).card) == str(from_pretrained(path).card)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:4],
        lambda data: data[:-10],
        lambda data: data + b"more",
        lambda data: struct.pack("<Q", 2**62) + data[8:],
        lambda data: struct.pack("<Q", 100_000_001) + data[8:],
        lambda data: struct.pack("<Q", 2) + b"[]" + data[8:],
        lambda data: struct.pack("<Q", 200_000) + b"[" * 200_000,
        lambda data: data.replace(b'"F32"', b'"F99"', 1),
        lambda data: data.replace(b'"F32"', b'"I64"', 1),
        lambda data: data.replace(b'"shape":[', b'"shape":[-', 1),
        lambda data: data.replace(b'"shape":[', b'"shape":[99999999999', 1),
        lambda data: data.replace(b'"data_offsets":[', b'"data_offsets":[9', 1),
    ],
)
def test_damaged_safetensors(spoil: Callable[[bytes], bytes], tmp_path: Path) -> None:
    _, path = small_weights(tmp_path / "w.safetensors")
    path.write_bytes(spoil(path.read_bytes()))
    for read in (read_state, from_pretrained):
        with pytest.raises(ValueError, match="is not a whole safetensors file"):
            read(path)


def test_no_more_is_allocated_than_the_file_holds(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"\0" * 100)
    with within_size_of(tmp_path / "w"):
        torch.nn.Linear(8, 8)
        torch.nn.Conv2d(3, 8, 3)
    for make in (
        lambda: torch.nn.Linear(2**30, 2**30),
        lambda: [torch.zeros((2**10, 2**10)) for _ in range(100)],
        lambda: [torch.ones(1) for _ in range(2000)],
    ):
        with (
            within_size_of(tmp_path / "w"),
            pytest.raises(ValueError, match="67,108,964 parameters or 1,002"),
        ):
            make()


def spoilt(network: Network) -> Network:
    network = copy.deepcopy(network)
    with torch.no_grad():
        network.get_submodule("layer1.0.bn1").weight[0] = float("nan")  # type: ignore[index]
    return network


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_weights_that_are_not_finite(command: str, tmp_path: Path, capsys) -> None:
    spoilt(small_network()).save_pretrained(tmp_path / "model")
    message = r"1 of \d+ tensors have values that are not finite .*layer1.0.bn1.weight first"
    with pytest.warns(NonFiniteWeightsWarning, match=message):
        from_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        open_trained(str(tmp_path / "model"))
    image_folder(tmp_path / "images", each=1)
    assert main([command, str(tmp_path / "model"), str(tmp_path / "images"), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "not finite" in said
    assert said.count("\n") == 1


def test_training_does_not_begin_with_weights_that_are_not_finite(tmp_path: Path) -> None:
    network = spoilt(small_network())
    torch.save(network.state_dict(), tmp_path / "w.pt")
    image_folder(tmp_path / "images")
    options = tuple(f"{name}={value}" for name, value in OPTIONS.items() if name not in ("placement", "drop_rate"))
    model = ModelConfig(
        name="resnet26", pretrained=str(tmp_path / "w.pt"), image_size=SIZE, placement="CCLL", options=options
    )
    config = TrainConfig(
        out=tmp_path / "run", model=model, data=DataConfig(path=str(tmp_path / "images"), workers=0), batch_size=8
    )
    with pytest.raises(ValueError, match="values that are not finite"):
        Classify(config).model()


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool])
def test_weights_that_are_no_real_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    """torch would copy them into the parameters, and leave the imaginary parts out."""
    network = small_network()
    name = "layer1.0.bn1.weight"
    state = network.state_dict()
    torch.save(state | {name: state[name].to(dtype)}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=f"{name} is {dtype}, expected torch.float32"):
        load_weights(network, tmp_path / "w.pt")


def test_weights_in_half_precision_are_taken(tmp_path: Path) -> None:
    """All tensors of it, also those that count batches."""
    network = small_network()
    torch.save({name: tensor.half() for name, tensor in network.state_dict().items()}, tmp_path / "w.pt")
    load_weights(network, tmp_path / "w.pt")


def test_torch_files_with_tensors_of_other_kinds(tmp_path: Path) -> None:
    for name, tensor in {
        "expanded": torch.zeros(1).expand(10**9),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
    }.items():
        torch.save({"fc.weight": tensor}, tmp_path / f"{name}.pt")
        with pytest.raises(ValueError, match=r"fc.weight is"):
            read_state(tmp_path / f"{name}.pt")
    torch.save({3: torch.zeros(3)}, tmp_path / "keys.pt")
    with pytest.raises(ValueError, match="not a dictionary of tensors"):
        read_state(tmp_path / "keys.pt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"channels": 8, "device": "cuda"}, "unknown arguments of a layer: device"),
        ({"channels": 2**40}, "describes a network of more than|must be"),
        ({"channels": "8"}, "channels must be a whole number, got '8'"),
        ({}, "needs channels"),
        ([1], "must contain a JSON object"),
        ({"channels": 8}, "does not match its description"),
    ],
)
def test_headers_of_converted_layers(arguments: Any, message: str, tmp_path: Path) -> None:
    header = {"layer": "LambdaLayer2d", "arguments": arguments}
    path = tmp_path / "layer.safetensors"
    save_file({"to_queries.weight": torch.zeros(2, 2)}, path, {KEY: json.dumps(header)})
    with pytest.raises(ValueError, match=message):
        load_layer(path)


def test_a_detector_may_not_name_other_weights(tmp_path: Path, no_hub: list[Any]) -> None:
    about = {
        "model": {"name": "lambda_resnet_tiny", "pretrained": "owner/name"},
        "heads": {},
        "categories": [],
        "masks": False,
        "size": 64,
        "mean": [0.5, 0.5, 0.5],
        "std": [0.2, 0.2, 0.2],
    }
    save_file({"a": torch.zeros(1)}, tmp_path / "d.safetensors", {DETECTOR_KEY: json.dumps(about)})
    with pytest.raises(ValueError, match=r"model.pretrained must be null in a weights file"):
        load_detector(tmp_path / "d.safetensors")
    assert not no_hub

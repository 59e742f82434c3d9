"""Keras' ResNet: torchvision's network with its strides, eps and input changed gives the same outputs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lambdanets.cli import main
from lambdanets.convert import convert_state
from lambdanets.data.class_names import listed_names
from lambdanets.data.transforms import normalize
from lambdanets.models import create_model, from_pretrained
from lambdanets.models.registry import changes
from tests.models.helpers import randomized, settled

NAMES = ("ant", "bee", "cat", "dog", "eel")
BLUE_GREEN_RED = torch.tensor([103.939, 116.779, 123.68]).double().view(3, 1, 1)


def keras_network() -> nn.Module:
    """torchvision's, small, with Keras' strides and eps; for images in the order blue, green, red."""
    from torchvision.models.resnet import Bottleneck, ResNet

    torch.manual_seed(0)
    network = ResNet(Bottleneck, [1, 2, 1, 1], num_classes=len(NAMES))
    for block in network.modules():
        if isinstance(block, Bottleneck):
            block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
        if isinstance(block, nn.BatchNorm2d):
            block.eps = 1e-3
    network = randomized(network.double())
    network.conv1.weight.data /= 100  # for values up to 255
    return settled(network, 255 * torch.rand(2, 3, 64, 64, dtype=torch.float64) - BLUE_GREEN_RED).eval()


def test_outputs_for_the_pixels_of_an_image(tmp_path: Path) -> None:
    theirs = keras_network()
    save_file(theirs.state_dict(), tmp_path / "theirs.safetensors")
    (tmp_path / "names.txt").write_text("".join(f"{i}\t{name}\n" for i, name in enumerate(NAMES)))
    command = ["convert", str(tmp_path / "theirs.safetensors"), str(tmp_path / "ours.safetensors")]
    assert main([*command, "--format", "resnet-keras", "--class-names", str(tmp_path / "names.txt")]) == 0
    ours = from_pretrained(tmp_path / "ours.safetensors").double().eval()
    card = ours.card
    assert card is not None
    assert card.class_names == NAMES
    assert card.recipe["source_format"] == "resnet-keras"
    assert (ours.name, ours.config.stride_in, ours.config.norm_eps) == ("resnet50_keras", "1x1", 1e-3)

    pixels = torch.randint(0, 256, (2, 3, 61, 75), dtype=torch.uint8)  # red, green, blue
    with torch.no_grad():
        expected = theirs(pixels.flip(1).double() - BLUE_GREEN_RED)
        found = ours(normalize(pixels, card.preprocessing).double())
    assert expected.std() > 1e-3
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()  # weights and pixels were in float32


def test_the_format_must_be_named_and_fit() -> None:
    state = keras_network().state_dict()
    usual = convert_state(state)
    assert usual.source_format == "resnet"
    assert usual.module.name != "resnet50_keras"
    with pytest.raises(ValueError, match="this is not Keras' ResNet: missing conv1"):
        convert_state({n: t for n, t in state.items() if n != "conv1.weight"}, "resnet-keras")
    grey = {**state, "conv1.weight": state["conv1.weight"][:, :1]}
    with pytest.raises(ValueError, match="expected 3 channels of images"):
        convert_state(grey, "resnet-keras")


def test_names_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(keras_network().state_dict(), tmp_path / "theirs.safetensors")
    command = ["convert", str(tmp_path / "theirs.safetensors"), str(tmp_path / "ours.safetensors"), "--class-names"]
    assert main([*command, "nothing"]) == 2
    assert "--class-names nothing: give a .txt file" in capsys.readouterr().err
    assert main([*command, "imagenet-words"]) == 2
    assert "1000 class names for 5 classes" in capsys.readouterr().err
    assert not (tmp_path / "ours.safetensors").exists()


def test_names_of_imagenet() -> None:
    ids, words = listed_names("imagenet"), listed_names("imagenet-words")
    assert ids is not None
    assert words is not None
    assert len(set(ids)) == len(set(words)) == 1000
    assert list(ids) == sorted(ids)
    for index, identity, word in ((0, "n01440764", "tench"), (217, "n02102040", "English springer")):
        assert (ids[index], words[index]) == (identity, word)
    assert listed_names("no-such-file.txt") is None


def test_files_of_class_names(tmp_path):
    path = tmp_path / "names.txt"
    path.write_bytes("\ufeff0\tchat\r\n\r\n1\tpère\u2028noël\n".encode())
    assert listed_names(str(path)) == ("chat", "père\u2028noël")
    path.write_bytes("père".encode("latin-1"))
    with pytest.raises(ValueError, match=r"names.txt is not UTF-8 text .*: save it as UTF-8"):
        listed_names(str(path))
    path.write_text("\n")
    with pytest.raises(ValueError, match=r"names.txt is empty"):
        listed_names(str(path))


def test_fields_that_other_networks_do_not_store() -> None:
    """Files of weights and configurations from before these fields stay as they were."""
    assert changes("resnet50", create_model("resnet50", num_classes=2).config) == {"num_classes": 2}
    assert {m.eps for m in create_model("lambda_resnet_tiny").modules() if isinstance(m, nn.BatchNorm2d)} == {1e-5}
    network = create_model("lambda_resnet_tiny", norm_eps=0.01)
    assert {m.eps for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)} == {0.01}
    with pytest.raises(ValueError, match="stride_in must be one of '3x3', '1x1'"):
        create_model("resnet50", stride_in="conv1")

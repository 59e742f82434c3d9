"""Files that are not what they should be: refused in one sentence that says what was expected, and nothing runs."""

import pickle

import pytest
import torch
from safetensors.torch import save_file

from lambdanets.cli import main
from lambdanets.convert.formats import FORMATS
from tests.convert import peers


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def state():
    torch.manual_seed(0)
    return peers.Layer(12, 6, 1, 3, 5).state_dict()


def refusal(source, tmp_path, capsys, *more):
    """What stderr says."""
    assert main(["convert", str(source), str(tmp_path / "ours.safetensors"), *more]) == 2
    assert not (tmp_path / "ours.safetensors").exists()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize("how", ["torch.save", "pickle"])
def test_code_in_a_pickle_does_not_run(how, tmp_path, capsys):
    source, trace = tmp_path / "hostile.pt", tmp_path / "it-ran"
    hostile = {"conv_qkv.weight": Hostile(trace)}
    if how == "torch.save":
        torch.save(hostile, source)
    else:
        source.write_bytes(pickle.dumps(hostile))
    assert "refused" in refusal(source, tmp_path, capsys)
    assert not trace.exists()


@pytest.mark.parametrize("name", ["cut.safetensors", "cut.pt"])
def test_truncated_files(name, state, tmp_path, capsys):
    source = tmp_path / name
    if name.endswith("pt"):
        torch.save(state, source)
    else:
        save_file(state, source)
    source.write_bytes(source.read_bytes()[:-500])
    assert "not a whole" in refusal(source, tmp_path, capsys)


def test_empty_and_missing_files(tmp_path, capsys):
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    for name in ("empty.pt", "empty.safetensors", "nowhere.pt"):
        assert name in refusal(tmp_path / name, tmp_path, capsys)


def test_missing_and_unexpected_names(state, tmp_path, capsys):
    del state["norm_v.bias"]
    state["stray.weight"] = torch.zeros(3)
    torch.save(state, tmp_path / "a.pt")
    said = refusal(tmp_path / "a.pt", tmp_path, capsys)
    assert "missing norm_v.bias; not expected stray.weight" in said


def test_a_name_too_many(state, tmp_path, capsys):
    torch.save({**state, "norm_k.weight": torch.zeros(6)}, tmp_path / "a.pt")
    assert "missing nothing; not expected norm_k.weight" in refusal(tmp_path / "a.pt", tmp_path, capsys)


def test_values_that_are_not_finite(state, tmp_path, capsys):
    name = next(iter(state))
    state[name].view(-1)[0] = float("nan")
    torch.save(state, tmp_path / "nan.pt")
    said = refusal(tmp_path / "nan.pt", tmp_path, capsys)
    assert f"1 of {len(state)} tensors have values that are not finite (NaN or infinite), {name} first" in said


def test_shapes_that_do_not_fit(state, tmp_path, capsys):
    state["norm_q.weight"] = torch.zeros(19)
    torch.save(state, tmp_path / "a.pt")
    assert "key depth 6" in refusal(tmp_path / "a.pt", tmp_path, capsys)


def test_a_network_with_one_wrong_shape_and_one_missing_name(tmp_path, capsys):
    state = peers.LambdaResNet((1, 1, 1, 1), 3, depth=4, scope=3).state_dict()
    torch.save({**state, "layer2.0.conv3.weight": torch.zeros(512, 99, 1, 1)}, tmp_path / "a.pt")
    assert "layer2.0.conv3.weight is [512, 99, 1, 1], expected [512, 128, 1, 1]" in refusal(
        tmp_path / "a.pt", tmp_path, capsys
    )
    del state["layer3.0.conv2.lambda_conv.weight"]
    torch.save(state, tmp_path / "a.pt")
    said = refusal(tmp_path / "a.pt", tmp_path, capsys)
    assert "layer3.0.conv2" in said
    assert "missing lambda_conv.weight" in said


def test_other_networks_say_what_is_known(tmp_path, capsys):
    torch.save({"encoder.weight": torch.zeros(3)}, tmp_path / "a.pt")
    said = refusal(tmp_path / "a.pt", tmp_path, capsys)
    assert "encoder.weight" in said
    assert "conv_qkv.weight" in said


def test_blocks_of_two_convolutions(tmp_path, capsys):
    import torchvision

    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "a.pt")
    assert "two convolutions" in refusal(tmp_path / "a.pt", tmp_path, capsys)


def test_unknown_format_and_a_layer_into_a_folder(state, tmp_path, capsys):
    torch.save(state, tmp_path / "a.pt")
    assert "d-li14-layer" in refusal(tmp_path / "a.pt", tmp_path, capsys, "--format", "magic")
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "folder")]) == 2
    assert ".safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_refuses_other_networks(name, tmp_path, capsys):
    torch.save({"encoder.weight": torch.zeros(3)}, tmp_path / "a.pt")
    assert "missing " in refusal(tmp_path / "a.pt", tmp_path, capsys, "--format", name)


def test_other_things_than_tensors(tmp_path, capsys):
    torch.save({"conv_qkv.weight": "not a tensor"}, tmp_path / "a.pt")
    assert "tensors" in refusal(tmp_path / "a.pt", tmp_path, capsys)


ODD = {
    "scalar": torch.zeros(()),
    "vector": torch.zeros(3),
    "empty": torch.zeros(0),
    "five axes": torch.zeros(1, 1, 1, 1, 1),
    "whole numbers": torch.zeros(6, 12, 1, 1, dtype=torch.int64),
    "complex": torch.zeros(6, 12, 1, 1, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", ["conv_qkv.weight", "norm_q.weight", "norm_v.running_mean", "lambda_conv.weight"])
@pytest.mark.parametrize("kind", ODD)
def test_tensors_of_odd_shapes(kind, name, state, tmp_path, capsys):
    torch.save({**state, name: ODD[kind]}, tmp_path / "a.pt")
    said = refusal(tmp_path / "a.pt", tmp_path, capsys)
    assert "not d-li14's LambdaLayer" in said or "position convolution must be [K, U, 1, r, r]" in said


@pytest.mark.parametrize("kind", ODD)
def test_networks_with_tensors_of_odd_shapes(kind, tmp_path, capsys):
    state = peers.LambdaResNet((1, 1, 1, 1), 3, depth=4, scope=3).state_dict()
    for name in ("conv1.0.weight", "layer1.0.conv1.weight", "layer1.0.conv2.conv_qkv.weight", "fc.weight"):
        torch.save({**state, name: ODD[kind]}, tmp_path / "a.pt")
        assert refusal(tmp_path / "a.pt", tmp_path, capsys)

"""Files of weights in fewer bits: values against a reading with numpy, and files that are not what they should be."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file, save_file

from lambdanets.cli import main
from lambdanets.models import Card, Preprocessing, create_model, from_pretrained, save_weights
from lambdanets.models.compact import LARGE, SCALE
from lambdanets.models.stored import read_state
from tests.models.helpers import randomized

NAMES = ("ant", "bee", "cat")
CARD = Card(Preprocessing(size=32), NAMES, {"top1": 0.5}, {"epochs": 3})


def network(**options: object):
    torch.manual_seed(0)
    found = randomized(create_model("lambda_resnet_tiny", num_classes=len(NAMES), **{"scope": 7, **options}))
    with torch.no_grad():  # channels of very different sizes, one of zeros
        found.layer1[0].conv2.weight.mul_(torch.logspace(-6, 3, 32).view(-1, 1, 1, 1))
        found.layer1[0].conv2.weight[5] = 0
    return found


def written(tmp_path: Path, bits: int, **options: object):
    ours = network(**options)
    save_weights(ours, tmp_path / "full.safetensors", CARD)
    command = ["convert", str(tmp_path / "full.safetensors"), str(tmp_path / "small.safetensors"), "--bits", str(bits)]
    assert main(command) == 0
    return ours, tmp_path / "small.safetensors"


def raw(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file by its header, without safetensors."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    kinds = {"F32": "<f4", "F16": "<f2", "I8": "i1", "I64": "<i8"}
    found = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            found[name] = np.frombuffer(data[start:end], kinds[entry["dtype"]]).reshape(entry["shape"])
    return found


def test_values_in_8_bits(tmp_path: Path) -> None:
    ours, path = written(tmp_path, 8)
    stored, loaded = raw(path), from_pretrained(path).state_dict()
    eight = 0
    for name, tensor in ours.state_dict().items():
        weight = tensor.double().numpy()
        if tensor.ndim > 1 and tensor.numel() >= LARGE:
            eight += 1
            codes, scales = stored[name], stored[name + SCALE]
            assert codes.dtype == np.int8
            np.testing.assert_allclose(scales, np.abs(weight).reshape(len(weight), -1).max(1) / 127, rtol=1e-6)
            scales = scales.reshape(-1, *[1] * (weight.ndim - 1))
            expected = codes.astype(np.float64) * scales
            np.testing.assert_allclose(loaded[name].double().numpy(), expected, rtol=1e-6)
            assert (np.abs(expected - weight) <= 0.501 * scales).all()  # rounded to the nearest
        else:
            assert torch.equal(loaded[name], tensor)  # small ones are as they were
    assert eight > 10
    assert path.stat().st_size < 0.3 * (tmp_path / "full.safetensors").stat().st_size


def test_what_a_file_says_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, path = written(tmp_path, 8)
    assert "largest relative error of a tensor: " in capsys.readouterr().out
    loaded = from_pretrained(path)
    assert loaded.card == CARD
    assert (loaded.name, loaded.config.scope) == ("lambda_resnet_tiny", 7)
    assert create_model("lambda_resnet_tiny", path, num_classes=3, scope=7).num_classes == 3
    assert main(["convert", str(path), str(tmp_path / "folder")]) == 0  # and back to float32
    again = from_pretrained(tmp_path / "folder")
    assert again.card == CARD
    assert all(
        torch.equal(a, b) for a, b in zip(again.state_dict().values(), loaded.state_dict().values(), strict=True)
    )


def test_half_precision(tmp_path: Path) -> None:
    ours = network()
    with torch.no_grad():
        ours.layer1[0].conv1.weight[0, 0] = 1e6  # more than half precision has
    save_weights(ours, tmp_path / "half.safetensors", CARD, bits=16)
    stored, loaded = raw(tmp_path / "half.safetensors"), from_pretrained(tmp_path / "half.safetensors").state_dict()
    for name, tensor in ours.state_dict().items():
        halved = tensor.ndim > 1 and tensor.numel() >= LARGE and name != "layer1.0.conv1.weight"
        expected = tensor.numpy().astype(np.float16).astype(np.float32) if halved else tensor.numpy()
        assert (stored[name].dtype == np.float16) == halved
        np.testing.assert_array_equal(loaded[name].numpy(), expected)


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_shared_tables_are_stored_once(bits: int, tmp_path: Path) -> None:
    ours, path = written(tmp_path, bits, share_positions=True, depths=(1, 1, 3, 2), scope=17)
    tables = [name for name in raw(path) if name.endswith("positions.table")]
    assert len(tables) == 2  # of two stages
    loaded = from_pretrained(path)
    assert loaded.layer3[0].conv2.positions.table is loaded.layer3[2].conv2.positions.table
    found, expected = (net.layer3[2].conv2.positions.table.detach() for net in (loaded, ours))
    error = (found - expected).norm() / expected.norm()
    assert error == 0 if bits == 32 else 0 < error < 0.02


def test_networks_in_half_and_double_precision(tmp_path: Path) -> None:
    for dtype in (torch.float64, torch.float16):
        ours = network().to(dtype)
        with torch.no_grad():
            ours.layer1[0].conv2.weight.fill_(0.5)
        save_weights(ours, tmp_path / "a.safetensors", CARD, bits=8)
        assert {array.dtype.kind + str(array.itemsize) for array in raw(tmp_path / "a.safetensors").values()} == {
            *("i1", "f4", "i8")
        }


Edit = Callable[[dict[str, torch.Tensor]], object]
CONV = "layer1.0.conv2.weight"
HOSTILE: dict[str, tuple[Edit, str]] = {
    "no scales": (lambda s: [s.pop(n) for n in list(s) if n.endswith(SCALE)], "in 8 bits without its scales"),
    "one without scales": (lambda s: s.pop(CONV + SCALE), f"{CONV} is stored in 8 bits without its scales"),
    "scales alone": (lambda s: s.pop(CONV), f"{CONV}{SCALE} belongs to no tensor in 8 bits"),
    "scales of float32": (lambda s: s.update({CONV: s[CONV].float()}), f"{CONV}{SCALE} belongs to no tensor"),
    "scales of half": (lambda s: s.update({CONV + SCALE: s[CONV + SCALE].half()}), "is torch.float16, expected"),
    "whole scales": (lambda s: s.update({CONV + SCALE: s[CONV + SCALE].int()}), "is torch.int32, expected"),
    "axes": (lambda s: s.update({CONV + SCALE: torch.ones(32, 1, 1, 1)}), r"is \[32, 1, 1, 1\] and"),
    "few": (lambda s: s.update({CONV + SCALE: s[CONV + SCALE][:7]}), r"is \[7\] and .* expected one scale per"),
    "many": (lambda s: s.update({CONV + SCALE: torch.ones(33)}), r"is \[33\] and"),
    "no axes": (lambda s: s.update({CONV + SCALE: torch.ones(())}), r"is \[\] and"),
    "one axis": (lambda s: s.update({CONV: s[CONV].flatten()[:32]}), r"and layer1.0.conv2.weight is \[32\]: expected"),
    "empty": (lambda s: s.update({CONV + SCALE: torch.ones(0)}), r"is \[0\] and"),
    "NaN": (lambda s: s[CONV + SCALE][3].fill_(torch.nan), "has a value that is negative or not finite"),
    "infinite": (lambda s: s[CONV + SCALE][3].fill_(torch.inf), "has a value that is negative or not finite"),
    "negative": (lambda s: s[CONV + SCALE][3].fill_(-1), "has a value that is negative or not finite"),
    "other shape": (lambda s: s.update({CONV: s[CONV][:, :7].contiguous()}), f"{CONV} is "),
    "unsigned": (lambda s: s.update({CONV: s[CONV].to(torch.uint8)}), "belongs to no tensor in 8 bits"),
}


@pytest.mark.parametrize(("edit", "message"), HOSTILE.values(), ids=HOSTILE)
def test_files_that_do_not_fit_together(edit: Edit, message: str, tmp_path: Path, capsys) -> None:
    _, path = written(tmp_path, 8)
    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata()
    state = load_file(path)
    edit(state)
    save_file(state, path, metadata)
    with pytest.raises(ValueError, match=message) as refused:
        from_pretrained(path)
    assert str(path) in str(refused.value)
    capsys.readouterr()
    assert main(["convert", str(path), str(tmp_path / "again.safetensors"), "--bits", "8"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_scales_whose_product_overflows(tmp_path: Path) -> None:
    _, path = written(tmp_path, 8)
    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata()
    state = load_file(path)
    state[CONV + SCALE].fill_(3e38)
    save_file(state, path, metadata)
    assert not torch.isfinite(read_state(path)[CONV]).all()
    assert main(["predict", str(path), str(tmp_path), "--device", "cpu"]) == 2


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = network()
    save_weights(ours, tmp_path / "full.safetensors", CARD)
    assert main(["convert", str(tmp_path / "full.safetensors"), str(tmp_path / "folder"), "--bits", "8"]) == 2
    assert "--bits needs one file as the target" in capsys.readouterr().err
    with torch.no_grad():
        ours.layer1[0].conv1.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"bad\.safetensors: 1 of \d+ tensors have values that are not finite"):
        save_weights(ours, tmp_path / "bad.safetensors", CARD, bits=8)
    assert not (tmp_path / "bad.safetensors").exists()


def test_arrays_of_other_readers(tmp_path: Path) -> None:
    """The reading of this file and safetensors' agree."""
    _, path = written(tmp_path, 8)
    theirs = load_arrays(path)
    assert all(np.array_equal(array, theirs[name]) for name, array in raw(path).items())

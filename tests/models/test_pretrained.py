"""Weights in files and folders: the same network comes back, and a wrong file is refused."""

import json
import os
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from lambdanets.cli import main
from lambdanets.detect.weights import DETECTOR_KEY
from lambdanets.experiments.language.task import LANGUAGE_KEY
from lambdanets.layers import LambdaLayer2d
from lambdanets.models import Card, MobileNetV2, Network, Preprocessing, create_model, from_pretrained, read_card
from lambdanets.models.pretrained import may_be_on_hub
from lambdanets.models.registry import changes
from lambdanets.train.inference.trained import open_trained
from tests.models.helpers import SMALL, images, small

CARD = Card(
    Preprocessing(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), size=(31, 21), crop=0.9),
    class_names=tuple(f"<b>{i}</b>" for i in range(7)),
    metrics={"top1": 78.4},
    recipe={"epochs": 90, "optimizer": {"name": "sgd"}},
)


@pytest.mark.parametrize("case", SMALL)
def test_round_trip_of_a_folder(case: str, tmp_path: Path) -> None:
    network, x = small(case).eval(), images(case)
    folder = network.save_pretrained(tmp_path / "weights")
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    again = from_pretrained(folder).eval()
    assert (again.name, again.config) == (network.name, network.config)
    assert again.state_dict().keys() == network.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(again(x), network(x))


@pytest.mark.parametrize("said", [True, False], ids=["as we write it", "as we wrote it once"])
def test_loading_warns_of_nothing_that_the_file_asked_for(said: bool, tmp_path: Path, recwarn) -> None:
    arguments = dict(placement="CCCC", embedding_std=0.02, widths=(4, 4, 8, 8), depths=(1, 1, 1, 1), num_classes=3)
    folder = create_model("resnet26", **arguments).save_pretrained(tmp_path)
    description = json.loads((folder / "config.json").read_text())
    if not said:
        del description["lambdanets"]["arguments"]["placement"]
        (folder / "config.json").write_text(json.dumps(description))
    assert from_pretrained(folder).config.embedding_std == 0.02
    create_model("resnet26", **description["model_args"])  # as timm calls it
    assert not recwarn.list


@pytest.mark.parametrize("case", SMALL)
def test_round_trip_of_a_state_dict(case: str, tmp_path: Path) -> None:
    network, x = small(case).eval(), images(case)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    name, arguments = SMALL[case]
    again = create_model(name, tmp_path / "weights.pth", **arguments).eval()
    with torch.no_grad():
        assert torch.equal(again(x), network(x))


def test_checkpoints_of_timms_script(tmp_path: Path) -> None:
    network = create_model("lambda_patch_tiny", width=16, depth=4)
    wrapped = torch.nn.DataParallel(torch.compile(network))  # type: ignore[arg-type]
    torch.save({"arch": "x", "args": Namespace(lr=0.1), "state_dict": wrapped.state_dict()}, tmp_path / "best.pth.tar")
    again = create_model("lambda_patch_tiny", tmp_path / "best.pth.tar", width=16, depth=4)
    for name, tensor in network.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_metrics_that_are_not_numbers_can_be_read_again(tmp_path: Path) -> None:
    card = Card(metrics={"loss": float("nan"), "worst": float("inf")})
    folder = small("vanilla").save_pretrained(tmp_path, card)
    for path in (folder, folder / "model.safetensors"):
        assert str(read_card(path).metrics) == str(card.metrics)


def test_a_file_alone_is_enough_and_says_what_it_is(tmp_path: Path) -> None:
    network = small("vanilla")
    file = network.save_pretrained(tmp_path, CARD) / "model.safetensors"
    assert read_card(file) == read_card(tmp_path) == CARD
    again = Network.from_pretrained(str(file))
    assert again.card == CARD
    assert again.config == network.config
    again.save_pretrained(tmp_path / "again")  # the card travels with the network
    assert read_card(tmp_path / "again") == CARD
    with pytest.raises(TypeError, match="contains a ResNet, expected a MobileNetV2"):
        MobileNetV2.from_pretrained(file)


def test_shared_positions_are_stored_once_and_stay_shared(tmp_path: Path) -> None:
    network = small("lambda_resnet")
    file = network.save_pretrained(tmp_path) / "model.safetensors"
    with safe_open(str(file), framework="pt") as stored:
        kept = [key for key in stored.keys() if key.endswith("positions.table")]  # noqa: SIM118
    assert len(kept) == 2  # of 1 + 3 layers in two stages
    again = from_pretrained(file)
    last = [m.positions for m in again.layer4.modules() if isinstance(m, LambdaLayer2d)]  # type: ignore[union-attr]
    assert len(last) == 3
    assert all(p is last[0] for p in last)
    assert last[0] is not None
    expected = network.state_dict()["layer4.0.conv2.positions.table"]
    assert torch.equal(last[0].table, expected)


@pytest.mark.parametrize("kind", ["network", "backbone", "inside another module"])
def test_safetensors_own_functions_read_and_write_shared_positions(kind: str, tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(len(made))
        name, arguments = SMALL["lambda_resnet"]
        network = create_model(name, features_only=kind == "backbone", **arguments)
        made.append(nn.Sequential(network) if kind == "inside another module" else network)
        return made[-1]

    made: list[nn.Module] = []
    file = tmp_path / "weights.safetensors"
    save_model(make(), str(file))
    if kind == "inside another module":
        make().load_state_dict(load_file(file))
    else:
        assert load_model(make(), file) == (set(), [])
        state = load_file(file)
        del state[next(name for name in state if name.endswith("to_values.weight"))]
        save_file(state, file)
        with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"\S+to_values.weight\"$"):
            load_model(make(), file)
    for name, tensor in made[0].state_dict().items():
        assert torch.equal(made[1].state_dict()[name], tensor), name


def test_arguments_are_the_changes_and_follow_the_classifier(tmp_path: Path) -> None:
    network = create_model("lambda_resnet_tiny", scope=(3, 3, (5, 7), None), heads=8)
    network.reset_classifier(3)
    assert changes("lambda_resnet_tiny", network.config) == {
        "scope": (3, 3, (5, 7), None),
        "heads": 8,
        "num_classes": 3,
    }
    assert from_pretrained(network.save_pretrained(tmp_path)).num_classes == 3


def test_another_number_of_classes_keeps_the_rest(tmp_path: Path) -> None:
    network = small("vanilla")
    network.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="has 7 classes instead of 5: fc keeps"):
        other = from_pretrained(tmp_path, num_classes=5)
    assert other.get_classifier().weight.shape == (5, 2048)  # type: ignore[union-attr]
    assert torch.equal(other.state_dict()["layer4.1.bn3.weight"], network.state_dict()["layer4.1.bn3.weight"])
    name, arguments = SMALL["vanilla"]
    features = create_model(name, tmp_path, features_only=True, placement=arguments["placement"])
    kept = features.network.state_dict()
    assert all(torch.equal(kept[key], network.state_dict()[key]) for key in kept)


@pytest.mark.parametrize("name", ["resnet26_d", "mobilenet_v2", "lambda_patch_tiny"])
def test_other_channels_fit_the_first_convolution(name: str, tmp_path: Path) -> None:
    network = create_model(name).eval()
    network.save_pretrained(tmp_path)
    x = torch.randn(1, 1, 32, 32)
    with pytest.warns(UserWarning, match="is for images with 3 channels instead of 1: adapted .*weight"):
        grey = create_model(name, tmp_path, in_chans=1).eval()
    with pytest.warns(UserWarning, match="with 3 channels instead of 6"):
        six = from_pretrained(tmp_path, in_chans=6).eval()
    with torch.no_grad():
        expected = network(x.expand(1, 3, 32, 32))
        torch.testing.assert_close(grey(x), expected)
        torch.testing.assert_close(six(x.expand(1, 6, 32, 32)), expected)


def test_tables_that_differ_are_not_taken_for_a_shared_one(tmp_path: Path) -> None:
    alone = create_model("lambda_resnet_tiny")
    with pytest.raises(ValueError, match=r"layer3.0.*layer3.1.* differ in the weights.*share_positions=False"):
        from_pretrained(alone.save_pretrained(tmp_path), share_positions=True)
    sharing = create_model("lambda_resnet_tiny", share_positions=True)
    alone.load_state_dict(sharing.state_dict())  # the other way round nothing is lost
    sharing.layer4[0].conv2.positions.table.data[0, 0, 0] = float("nan")  # type: ignore[index]
    sharing.load_state_dict(sharing.state_dict())


def test_options_of_the_hub_reach_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = create_model("lambda_patch_tiny", width=16, depth=4).save_pretrained(tmp_path)
    asked = []

    def download(repo_id: str, filename: str, **options: object) -> str:
        asked.append((repo_id, filename, options))
        return str(folder / filename)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: None)
    from_pretrained("somebody/something", revision="v1", depth=4)
    assert asked == [("somebody/something", name, {"revision": "v1"}) for name in ("config.json", "model.safetensors")]


@pytest.mark.parametrize("size", [0, 7, 100, 5000])
def test_truncated_files_are_refused(size: int, tmp_path: Path) -> None:
    network = create_model("lambda_patch_tiny", width=16, depth=4)
    file = network.save_pretrained(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        create_model("lambda_patch_tiny", file, width=16, depth=4)


def test_wrong_files_are_refused_with_what_was_expected(tmp_path: Path) -> None:
    create_model("lambda_patch_tiny", width=16, depth=4).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"patch_embed.weight is \[16, 3, 4, 4\], expected \[32, 3, 4, 4\]"):
        create_model("lambda_patch_tiny", tmp_path, width=32, depth=4)
    with pytest.raises(ValueError, match=r"missing blocks.4.*not expected nothing"):
        create_model("lambda_patch_tiny", tmp_path, width=16, depth=5)
    with pytest.raises(FileNotFoundError, match="neither a file or folder"):
        create_model("lambda_patch_tiny", "no/such/file.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no model.safetensors"):
        create_model("lambda_patch_tiny", tmp_path / "empty")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="not a dictionary of tensors"):
        create_model("lambda_patch_tiny", tmp_path / "list.pth")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="does not name its network"):
        from_pretrained(tmp_path / "other.json")


class Payload:
    ran = False

    def __reduce__(self):
        return (setattr, (Payload, "ran", True))


def test_pickles_run_no_code(tmp_path: Path) -> None:
    torch.save({"conv1.weight": Payload()}, tmp_path / "bad.pth")
    with pytest.raises(ValueError, match=r"bad.pth is refused.*could run code") as caught:
        create_model("lambda_patch_tiny", tmp_path / "bad.pth")
    assert "weights_only" not in str(caught.value)  # torch advises to switch the guard off
    assert not Payload.ran


@pytest.mark.parametrize("size", [0, 2, 100, 5000])
@pytest.mark.parametrize("zipped", [True, False])
def test_truncated_torch_files_are_refused(size: int, zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "cut.pt"
    network = create_model("lambda_patch_tiny", width=16, depth=4)
    torch.save(network.state_dict(), path, _use_new_zipfile_serialization=zipped)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"cut.pt is (not a whole torch file|refused)") as caught:
        create_model("lambda_patch_tiny", path, width=16, depth=4)
    assert "weights_only" not in str(caught.value)


def test_what_cannot_be_saved_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="7 class names for 10 classes"):
        create_model("lambda_patch_tiny", width=16, depth=4).save_pretrained(tmp_path, CARD)
    with pytest.raises(ValueError, match="given as a function"):
        create_model("resnet26", placement="CCCL", layer=lambda _: nn.Identity()).save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_configuration_is_what_timm_reads(tmp_path: Path) -> None:
    small("vanilla").save_pretrained(tmp_path, CARD)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architecture"] == "lambdanets_resnet26"
    assert config["model_args"] == {"placement": "CLLL"}
    assert config["num_classes"] == 7
    assert config["pretrained_cfg"]["input_size"] == [3, 31, 21]
    assert config["label_names"] == list(CARD.class_names)


@pytest.mark.parametrize(("key", "kind"), [(DETECTOR_KEY, "detector"), (LANGUAGE_KEY, "language")])
def test_weights_of_other_kinds(tmp_path: Path, key: str, kind: str) -> None:
    save_file({"weight": torch.ones(1)}, tmp_path / "weights.safetensors", {key: "{}"})
    with pytest.raises(ValueError, match=f"not a classifier: it has the weights of another task, {kind}"):
        open_trained(str(tmp_path))


def test_a_slip_in_a_path_is_not_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(url: str, **options: object) -> str:
        raise ConnectionError("no network here")

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("a download repeats requests that fail")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", never)
    monkeypatch.chdir(tmp_path)
    assert not may_be_on_hub("runs/mine")  # also without a folder runs/
    with pytest.raises(FileNotFoundError, match=r"runs/mine: no such run here. The current directory, .*, has no runs"):
        open_trained("runs/mine")
    with pytest.raises(FileNotFoundError, match="runs/mine is neither a file or folder"):
        from_pretrained("runs/mine")
    for number in range(7):
        (tmp_path / "runs" / f"run{number}").mkdir(parents=True)
        (tmp_path / "runs" / f"run{number}" / "config.json").write_text("{}")
        os.utime(tmp_path / "runs" / f"run{number}" / "config.json", (number, number))
    listed = "runs/run6, runs/run5, runs/run4, runs/run3, runs/run2, ..."
    for command in (["predict", "runs/mine", "a.jpg"], ["evaluate", "runs/mine"], ["report", "runs/mine"]):
        assert main(command) == 2
        assert capsys.readouterr().err.endswith(f": {listed}\n")
    with pytest.raises(
        ValueError,
        match="somebody/network is not a file or folder, and loading it from the hub failed: no network here",
    ):
        open_trained("somebody/network")

"""Our networks in timm's registry, and timm's scripts on them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lambdanets
from lambdanets.models import FeatureNetwork, Network, list_models
from lambdanets.models.pretrained import TIMM_HAS
from tests.models.helpers import images, small

timm = pytest.importorskip("timm")
import lambdanets.timm  # noqa: E402


def test_every_name_is_registered_and_none_of_theirs_is_taken() -> None:
    known = set(timm.list_models())
    theirs = {name for name in known if not timm.models.model_entrypoint(name).__module__.startswith("lambdanets")}
    assert set(list_models()) & theirs == TIMM_HAS
    assert set(lambdanets.timm.NAMES) <= known
    assert len(lambdanets.timm.NAMES) == len(list_models())
    assert type(timm.create_model("resnet26")).__module__.startswith("timm")
    assert isinstance(timm.create_model("lambdanets_resnet26"), Network)


def test_arguments_and_data_configuration() -> None:
    model = timm.create_model(
        "lambda_resnet_tiny", num_classes=5, in_chans=1, drop_rate=0.2, img_size=28, bn_momentum=0.01, global_pool="max"
    )
    assert (model.config.num_classes, model.config.in_chans, model.config.image_size) == (5, 1, 28)
    assert (model.bn1.momentum, model.config.global_pool) == (0.01, "max")
    assert (model.num_classes, model.num_features) == (5, 1024)
    data = timm.data.resolve_data_config({}, model=model)
    assert data["input_size"] == (1, 28, 28)
    assert data["crop_pct"] == 0.875
    assert model.pretrained_cfg["classifier"] == "fc"
    with pytest.raises(ValueError, match="no weights are published"):
        timm.create_model("lambda_resnet_tiny", pretrained=True)


def test_features() -> None:
    model = timm.create_model("lambda_resnet_tiny", features_only=True, out_indices=(1, 3))
    assert isinstance(model, FeatureNetwork)
    assert model.feature_info.channels() == [128, 512]
    assert [list(m.shape) for m in model(torch.randn(1, 3, 33, 21))] == [[1, 128, 33, 21], [1, 512, 9, 6]]


def test_a_saved_folder_is_a_model_for_timm(tmp_path: Path) -> None:
    network, x = small("lambda_resnet").eval(), images("lambda_resnet")
    network.save_pretrained(tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(again(x), network(x))
    assert again.pretrained_cfg["input_size"] == [3, 160, 160]


def edited(folder: Path, part: str, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config[part] |= values
    (folder / "config.json").write_text(json.dumps(config))


def test_a_configuration_from_the_hub_cannot_name_other_weights(tmp_path: Path, monkeypatch) -> None:
    saved = small("lambda_resnet")
    folder = saved.save_pretrained(tmp_path)
    edited(folder, "pretrained_cfg", file="other/repository", hf_hub_id="other/repository")
    asked: list[str] = []

    def download(repo_id: str, filename: str, **options: object) -> str:
        asked.append(repo_id)
        return str(folder / filename)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: None)
    monkeypatch.setattr("timm.models._hub.hf_hub_download", download)
    made = timm.create_model("hf-hub:my/repository", pretrained=True)
    assert torch.equal(made.get_classifier().weight, saved.get_classifier().weight)
    assert set(asked) == {"my/repository"}


def test_a_model_folder_cannot_ask_for_more_than_its_weights_hold(tmp_path: Path) -> None:
    folder = small("lambda_resnet").save_pretrained(tmp_path)
    edited(folder, "model_args", widths=[4096] * 4)
    with pytest.raises(ValueError, match=r"describes a network of more than [\d,]+ parameters"):
        timm.create_model(f"local-dir:{folder}", pretrained=True)


def test_what_weights_were_built_with_is_kept() -> None:
    """timm gives it to entrypoints from 1.0.31 on, and reads it when it resizes."""
    given = {"img_size": 64}
    network = lambdanets.timm.entrypoint("resnet_tiny")(pretrained_model_args=given)
    assert network.pretrained_model_args == given
    assert lambdanets.timm.entrypoint("resnet_tiny")().pretrained_model_args == {}


def test_timm_optimizer_spares_what_we_spare() -> None:
    from timm.optim import create_optimizer_v2

    network = small("vanilla")
    groups = create_optimizer_v2(network, opt="sgd", lr=0.1, weight_decay=0.5).param_groups
    spared = {id(p) for g in groups if g["weight_decay"] == 0 for p in g["params"]}
    named = dict(network.named_parameters())
    assert spared == {id(named[name]) for name in network.no_weight_decay()}


def test_scripts_run_with_our_names(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'lambda_patch_tiny'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, timm, beside\n"
        "if __name__ == '__main__':\n"
        "    print(type(timm.create_model(beside.NAME)).__name__, sys.argv[1:])\n"
    )
    command = [sys.executable, "-m", "lambdanets.timm"]
    done = subprocess.run([*command, str(script), "--model", "x"], capture_output=True, text=True)
    assert done.stdout == "PatchNetwork ['--model', 'x']\n", done.stderr
    wrong = subprocess.run([*command, "nothing.py"], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert "nothing.py is not a file" in wrong.stderr

"""timm's lambda networks as rows of ours: the same function, the same weights, and where they are published."""

import pytest
import torch
from safetensors.torch import save_file

from lambdanets.cli import main
from lambdanets.convert import convert_state
from lambdanets.models import Network, create_model
from lambdanets.models.zoo import PUBLISHED, TIMM_NETWORKS
from tests.models.helpers import parameters, randomized, settled

timm = pytest.importorskip("timm")
every_network = pytest.mark.parametrize("name", TIMM_NETWORKS)
SIDE = 64


def theirs(name: str, **arguments: object) -> torch.nn.Module:
    torch.manual_seed(0)
    size = {"img_size": SIDE} if "rpt" in name else {}  # for one size of images
    network = timm.create_model(name, **size, **arguments).double()
    for parameter_name, parameter in network.named_parameters():
        if parameter_name.endswith("conv_lambda.bias"):
            torch.nn.init.normal_(parameter)
    return settled(randomized(network), images()).eval()


def images() -> torch.Tensor:
    return torch.randn(2, 3, SIDE, SIDE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def assert_equal(ours: torch.nn.Module, network: torch.nn.Module) -> None:
    with torch.no_grad():
        expected = network(images())
        assert expected.std() > 1e-3
        assert (ours(images()) - expected).abs().max() <= 1e-10 * expected.abs().max()


@every_network
def test_parameters_and_configuration_are_timms(name: str) -> None:
    assert parameters(name) == sum(p.numel() for p in timm.create_model(name).parameters())
    configuration = timm.get_pretrained_cfg(name)
    found = PUBLISHED[name]
    assert found.hub_id == configuration.hf_hub_id
    preprocessing = found.preprocessing
    assert (3, preprocessing.size, preprocessing.size) == configuration.input_size
    assert (preprocessing.crop, preprocessing.interpolation) == (configuration.crop_pct, configuration.interpolation)
    assert (preprocessing.mean, preprocessing.std) == (configuration.mean, configuration.std)


@every_network
def test_weights_with_timms_names(name: str) -> None:
    network = theirs(name, num_classes=7)
    converted = convert_state(network.state_dict())
    assert isinstance(converted.module, Network)
    assert (converted.source_format, converted.module.name) == ("timm-lambda", name)
    assert_equal(converted.module.eval(), network)


def test_weights_come_from_the_hub(tmp_path, monkeypatch) -> None:
    state = timm.create_model("lambda_resnet26t").state_dict()
    save_file(state, tmp_path / "model.safetensors")
    asked = []

    def download(repo_id: str, filename: str) -> str:
        asked.append((repo_id, filename))
        return str(tmp_path / filename)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: None)
    ours = create_model("lambda_resnet26t", pretrained=True)
    for other in (tmp_path / "model.safetensors", PUBLISHED["lambda_resnet26t"].hub_id):
        for key, tensor in create_model("lambda_resnet26t", other).state_dict().items():
            assert torch.equal(ours.state_dict()[key], tensor), key
    assert torch.equal(ours.state_dict()["layer4.0.conv3.weight"], state["stages.3.0.conv3_1x1.conv.weight"])
    assert asked == [(PUBLISHED["lambda_resnet26t"].hub_id, "model.safetensors")] * 2
    assert ours.card is not None
    assert ours.card.preprocessing == PUBLISHED["lambda_resnet26t"].preprocessing
    with pytest.warns(UserWarning, match="1000 classes instead of 3"):
        assert create_model("lambda_resnet26t", pretrained=True, num_classes=3).num_classes == 3


def test_without_a_connection_the_error_says_what_to_do(monkeypatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("cannot reach\nthe hub")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: None)
    with pytest.raises(
        ValueError, match=r"could not be downloaded: cannot reach the hub .* download model.safetensors"
    ):
        create_model("lambda_resnet26t", pretrained=True)
    with pytest.raises(ValueError, match="no weights are published"):
        create_model("lambda_resnet50", pretrained=True)


def test_networks_of_timm_without_lambda_layers_are_refused(tmp_path) -> None:
    save_file(timm.create_model("botnet26t_256").state_dict(), tmp_path / "theirs.safetensors")
    assert main(["convert", str(tmp_path / "theirs.safetensors"), str(tmp_path / "ours")]) == 2

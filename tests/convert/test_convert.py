"""Converted weights give the outputs of the implementation that they come from, in float64."""

import json
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from lambdanets.cli import main
from lambdanets.convert import convert_state, load_layer
from lambdanets.models import from_pretrained
from tests.convert import peers
from tests.models.helpers import randomized, settled

TOLERANCE = 1e-10


def ready(module: nn.Module, x: torch.Tensor) -> nn.Module:
    """In float64 and eval mode, with norms, biases and weights that are not those of the start."""
    torch.manual_seed(5)
    module = module.double()
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return settled(randomized(module), x).eval()


def assert_equal(ours: nn.Module, theirs: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        for training in (False, True):  # batch statistics too: a bias must not have gone into a running mean wrongly
            found, expected = ours.train(training)(x), theirs.train(training)(x)
            assert expected.std() > 1e-3
            assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


def lucidrains(**options: object) -> nn.Module:
    from lambda_networks import LambdaLayer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls torch.meshgrid without saying how to index
        return LambdaLayer(12, dim_k=6, heads=3, **options)


def timm_layer(**options: object) -> nn.Module:
    from timm.layers.lambda_layer import LambdaLayer

    return LambdaLayer(12, num_heads=3, dim_head=6, **options)


LAYERS = {
    "lucidrains": (lambda: lucidrains(r=5), (7, 8)),
    "lucidrains, u=2": (lambda: lucidrains(r=3, dim_u=2, dim_out=24), (6, 5)),
    "lucidrains, global, u=2": (lambda: lucidrains(n=5, dim_u=2), (5, 5)),
    "timm-layer": (lambda: timm_layer(r=5), (7, 8)),
    "timm-layer, with biases": (lambda: timm_layer(r=3, qkv_bias=True), (7, 8)),
    "timm-layer, global": (lambda: timm_layer(r=None, feat_size=(5, 4)), (5, 4)),
    "d-li14-layer": (lambda: peers.Layer(12, 6, 1, 3, 5), (7, 8)),
    "d-li14-layer, u=2": (lambda: peers.Layer(12, 6, 2, 3, 5), (7, 8)),
}


@pytest.mark.parametrize("case", LAYERS)
def test_layers_give_equal_outputs(case):
    build, grid = LAYERS[case]
    x = torch.randn(2, 12, *grid, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theirs = ready(build(), x)
    converted = convert_state(theirs.state_dict())
    assert converted.source_format == case.partition(",")[0]
    assert (converted.module.position_bias is None) == ("global" in case)
    assert_equal(converted.module, theirs, x)


def test_a_bias_of_zero_needs_no_home():
    theirs = peers.Layer(12, 6, 1, 3, 5)
    nn.init.zeros_(theirs.lambda_conv.bias)
    assert convert_state(theirs.state_dict()).module.position_bias is None


def test_a_layer_on_disk(tmp_path):
    x = torch.randn(2, 12, 7, 8, dtype=torch.float64)
    theirs = ready(peers.Layer(12, 6, 2, 3, 5), x)
    torch.save({"state_dict": theirs.state_dict()}, tmp_path / "theirs.pth")
    assert main(["convert", str(tmp_path / "theirs.pth"), str(tmp_path / "ours.safetensors")]) == 0
    assert_equal(load_layer(tmp_path / "ours.safetensors"), theirs, x)
    with safe_open(tmp_path / "ours.safetensors", "pt") as file:
        header = json.loads(file.metadata()["lambdanets"])
    assert header["recipe"] == {"source_format": "d-li14-layer", "source": "theirs.pth"}
    assert header["arguments"]["intra_depth"] == 2


@pytest.mark.parametrize("prefix", ["", "module."])
def test_lambda_resnet_of_d_li14(prefix, tmp_path):
    x = torch.randn(2, 3, 61, 45, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theirs = ready(peers.LambdaResNet((1, 1, 2, 1), 7, depth=4, heads=4, scope=5, intra=2), x)
    save_file({prefix + name: tensor for name, tensor in theirs.state_dict().items()}, tmp_path / "theirs.safetensors")
    assert main(["convert", str(tmp_path / "theirs.safetensors"), str(tmp_path / "ours.safetensors")]) == 0
    ours = from_pretrained(tmp_path / "ours.safetensors").eval()
    assert (ours.config.placement, ours.config.position_bias, ours.config.scope) == ("LLLL", True, 5)
    assert ours.card.recipe["source_format"] == "d-li14"
    with torch.no_grad():
        found, expected = ours(x.float()), theirs(x)  # from_pretrained builds networks in float32
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert_equal(convert_state(theirs.state_dict()).module, theirs, x)


def test_the_published_size_is_our_resnet50():
    """Their LambdaResNet-50 has the paper's sizes: our resnet50 with LLLL and nothing else changed."""
    with torch.device("meta"):
        state = peers.LambdaResNet((3, 4, 6, 3), 1000).state_dict()
    state = {name: torch.zeros(tensor.shape) for name, tensor in state.items()}
    network = convert_state(state).module
    assert network.name == "resnet50"
    assert network.config.placement == "LLLL"
    assert sum(p.numel() for p in network.parameters()) == 14_995_592  # the bias is zero and has no home


def torchvision_network(name: str) -> nn.Module:
    import torchvision

    return getattr(torchvision.models, name)(num_classes=5)


def timm_network(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=5)


NETWORKS = {
    "torchvision resnet50": (torchvision_network, "resnet50", "resnet50"),
    "timm resnet50": (timm_network, "resnet50", "resnet50"),
    "timm resnet50d": (timm_network, "resnet50d", "resnet50_d"),
    "timm resnetrs50": (timm_network, "resnetrs50", "resnet_rs50"),
    "torchvision mobilenet_v2": (torchvision_network, "mobilenet_v2", "mobilenet_v2"),
}


@pytest.mark.parametrize("case", NETWORKS)
def test_convolutional_networks_give_equal_outputs(case):
    build, theirs_name, ours_name = NETWORKS[case]
    x = torch.randn(2, 3, 64, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theirs = ready(build(theirs_name), x).eval()
    converted = convert_state(theirs.state_dict())
    assert converted.module.name == ours_name
    assert converted.module.config.num_classes == 5
    with torch.no_grad():
        found, expected = converted.module.eval()(x), theirs(x)
    assert expected.std() > 1e-3
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_a_network_in_a_folder(tmp_path):
    torch.save(timm_network("resnet26d").state_dict(), tmp_path / "theirs.pt")
    assert main(["convert", str(tmp_path / "theirs.pt"), str(tmp_path / "folder")]) == 0
    network = from_pretrained(tmp_path / "folder")
    assert (network.name, network.num_classes) == ("resnet26_d", 5)
    assert network.card.recipe == {"source_format": "resnet", "source": "theirs.pt"}

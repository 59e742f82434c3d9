"""What tools built for timm's and torchvision's networks ask of a network: one test for each contract, all families."""

import pytest
import torch
from torch import nn

from lambdanets import LambdaLayer2d, create_model
from lambdanets.layers.arguments import fx_leaf
from lambdanets.models import Network, list_models
from tests.models.helpers import SMALL, fake, images, meta, randomized, settled, small

timm = pytest.importorskip("timm")
import lambdanets.timm  # noqa: E402

every_family = pytest.mark.parametrize("case", SMALL)


def assert_equal_maps(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b)


@every_family
def test_torch_fx_and_feature_extractors(case: str) -> None:
    from torchvision.models.feature_extraction import create_feature_extractor

    network, x = small(case, drop_path_rate=0.2).eval(), images(case)
    traced = torch.fx.symbolic_trace(network)
    other = x[:1, :, :-3, :-5]
    with torch.no_grad():
        for given in (x, other):
            torch.testing.assert_close(traced(given), network(given))
        nodes = {info["module"]: str(i) for i, info in enumerate(network.feature_info)}
        maps = create_feature_extractor(network, nodes)(x)
        assert_equal_maps(list(maps.values()), network.forward_intermediates(x, intermediates_only=True))
    tracing = create_feature_extractor(network.train(), [network.classifier_name])  # another graph in training
    tracing.train()(x)[network.classifier_name].sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_a_layer_with_its_own_forward_is_not_one_node() -> None:
    """A node for it would do what comes after the layer's own forward twice."""

    class Doubled(LambdaLayer2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return 2 * super().forward(x)

    class Leaf(Doubled):
        forward = fx_leaf(Doubled.forward)

    x = torch.randn(1, 8, 5, 5)
    with pytest.raises(TypeError, match="cannot follow this module"):
        torch.fx.symbolic_trace(nn.Sequential(Doubled(8)))
    model = nn.Sequential(Leaf(8)).eval()
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))


@every_family
@pytest.mark.parametrize("kind", ["list", "dict", "hook", "fx", "getter"])
def test_feature_classes_of_timm(case: str, kind: str) -> None:
    name, arguments = SMALL[case]
    network, x = small(case).eval(), images(case)
    name = f"lambdanets_{name}" if name.startswith("resnet26") and not name.endswith("_d") else name
    given = {**arguments, "num_classes": 0}
    chosen = (1, len(network.feature_info) - 1)
    features = timm.create_model(name, features_only=True, feature_cls=kind, out_indices=chosen, **given).eval()
    inner = next(m for m in features.modules() if isinstance(m, Network)) if kind != "fx" else features.graph_module
    inner.load_state_dict({k: v for k, v in network.state_dict().items() if k in inner.state_dict()})
    with torch.no_grad():
        found = features(x)
        expected = network.forward_intermediates(x, chosen, intermediates_only=True)
    assert_equal_maps(list(found.values()) if kind == "dict" else found, expected)
    assert features.feature_info.channels() == [m.shape[1] for m in expected]


def test_feature_classes_are_checked() -> None:
    with pytest.raises(ValueError, match="unknown feature_cls"):
        timm.create_model("resnet_tiny", features_only=True, feature_cls="nothing")
    with pytest.raises(ValueError, match="features_only=True"):
        timm.create_model("resnet_tiny", feature_cls="getter")


@every_family
def test_intermediates_and_pruning(case: str) -> None:
    network, x = small(case).eval(), images(case)
    last = len(network.feature_info) - 1
    with torch.no_grad():
        expected = network.forward_intermediates(
            x, [1, last], norm=False, stop_early=True, output_fmt="NCHW", intermediates_only=True
        )
        with pytest.raises(ValueError, match="NCHW"):
            network.forward_intermediates(x, output_fmt="NHWC")
        whole = sum(p.numel() for p in network.parameters())
        assert network.prune_intermediate_layers([-1], prune_head=False) == [last]
        assert network.num_classes
        assert network.prune_intermediate_layers([1]) == [1]
        assert sum(p.numel() for p in network.parameters()) < 0.8 * whole
        assert_equal_maps(network.forward_intermediates(x, [1], intermediates_only=True), expected[:1])
        torch.testing.assert_close(network(x), expected[0])
        assert (network.num_features, network.num_classes) == (expected[0].shape[1], 0)
        with pytest.raises(ValueError, match="was removed"):
            network.forward_intermediates(x, [last])
        network.reset_classifier(3, "avg")
        assert network(x).shape == (2, 3)


@every_family
def test_global_pooling(case: str) -> None:
    network, x = small(case).eval(), images(case)
    with torch.no_grad():
        features = network.forward_features(x).flatten(2)
        average, largest = features.mean(2), features.amax(2)
        for kind, pooled in (
            ("max", largest),
            ("avgmax", (average + largest) / 2),
            ("catavgmax", torch.cat([average, largest], 1)),
        ):
            network.reset_classifier(3, kind)
            torch.testing.assert_close(network(x), network.get_classifier()(pooled))
            assert network.head_hidden_size == pooled.shape[1]
            assert network.num_features == average.shape[1]
    built = create_model(SMALL[case][0], **{**SMALL[case][1], "global_pool": "catavgmax"})
    assert built.get_classifier().in_features == 2 * network.num_features
    assert network.get_classifier(name_only=True) == network.classifier_name


@every_family
def test_layer_decay_of_timm(case: str) -> None:
    from timm.optim import param_groups_layer_decay

    network = small(case)
    scales = {
        id(p): group["lr_scale"]
        for group in param_groups_layer_decay(network, layer_decay=0.5)
        for p in group["params"]
    }
    named = dict(network.named_parameters())
    assert len(scales) == len(named)
    stem, head = named[f"{network.first_conv}.weight"], network.get_classifier().weight
    blocks = [scales[id(next(block.parameters()))] for _, block in network.residual_blocks()]
    assert scales[id(stem)] == min(scales.values()) < max(scales.values()) == scales[id(head)] == 1
    assert blocks == sorted(blocks)
    assert len(set(blocks)) > 2
    matcher = network.group_matcher(coarse=True)
    assert matcher["blocks"].count("(") == 1  # for each stage of a ResNet


NO_CONTENT = {"content": False, "drop_rate": 0.0, "num_classes": 5}
DILATED = {
    "vanilla": ("resnet26", {"placement": "CLLL", **NO_CONTENT}),
    "rs": ("lambda_resnet50", {"depths": (1, 1, 2, 2), "placement": ("C", "C", (2,), "L"), "se": False, **NO_CONTENT}),
    "timm": ("lambda_resnet26t", {**NO_CONTENT, "scope": 5}),
    "first convolution strides": (
        "resnet50_keras",
        {"depths": (1, 1, 2, 2), "placement": ("C", "C", (2,), "L"), **NO_CONTENT},
    ),
    "mobilenet": ("lambda_mobilenet_v2", {"placement": (7, 10, 14, 16), **NO_CONTENT}),
}


@pytest.mark.parametrize("output_stride", [8, 16])
@pytest.mark.parametrize("case", DILATED)
def test_output_stride_keeps_what_each_position_sees(case: str, output_stride: int) -> None:
    """Without content lambdas the usual network's map is every so manieth position of the dilated one's."""
    name, arguments = DILATED[case]
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    usual = settled(randomized(create_model(name, **arguments)).double(), x).eval()
    dilated = create_model(name, output_stride=output_stride, **arguments).double().eval()
    dilated.load_state_dict(usual.state_dict())
    step = 32 // output_stride
    with torch.no_grad():
        expected, found = usual.forward_features(x), dilated.forward_features(x)
    assert found.shape[2:] == (64 // output_stride, 96 // output_stride)
    assert dilated.feature_info[-1]["reduction"] == output_stride
    assert (found[:, :, ::step, ::step] - expected).abs().max() < 1e-9 * expected.abs().max()
    maps = fake(name, 65, 95, features_only=True, **{**arguments, "output_stride": output_stride, "num_classes": 0})
    assert [m.shape[2] for m in maps] == [-(-65 // info["reduction"]) for info in dilated.feature_info]


def test_output_stride_of_stages_that_cannot_be_dilated() -> None:
    assert create_model("resnet_tiny", output_stride=16).feature_info[-1]["reduction"] == 8  # as without
    for arguments, words in (
        ({"layer": "local_attention"}, "layer='local_attention' cannot be dilated"),
        ({"scope": None}, "a global scope cannot be dilated"),
        ({"share_positions": True}, "share_positions=True needs output_stride=32"),
        ({"blur": "all"}, "blur='all' needs output_stride=32"),
    ):
        with pytest.raises(ValueError, match=words):
            meta("resnet26", placement="CCCL", output_stride=16, **arguments)
    with pytest.raises(ValueError, match="blur='all' needs stride_in='3x3'"):
        meta("resnet50_keras", blur="all")
    with pytest.raises((TypeError, ValueError), match="output_stride"):
        create_model("lambda_patch_tiny", output_stride=8)
    wide = create_model("lambda_resnet50", output_stride=8).eval()  # with content lambdas
    assert wide.forward_features(torch.randn(1, 3, 64, 64)).shape == (1, 2048, 8, 8)


@pytest.mark.parametrize("name", [n for n in list_models() if not any(d in n for d in ("270", "350", "420"))])
def test_configurations_in_timms_registry(name: str) -> None:
    theirs = lambdanets.timm.timm_name(name)
    configuration = timm.get_pretrained_cfg(theirs)
    network = meta(name)
    channels, height, width = configuration.input_size
    assert (channels, height, width) == (3, *network.config.image_grid)
    assert configuration.num_classes == network.num_classes
    assert configuration.first_conv == network.first_conv
    assert configuration.classifier == network.classifier_name
    last = network.feature_info[-1]["reduction"]
    assert configuration.pool_size == (-(-height // last), -(-width // last))
    assert configuration.architecture == theirs


def test_what_timm_says_of_a_model() -> None:
    assert timm.get_pretrained_cfg_value("lambda_resnet_tiny", "pool_size") == (4, 4)
    assert timm.is_model_pretrained("lambdanets_lambda_resnet26t")
    assert timm.list_models("lambdanets_*", pretrained=True) == [
        "lambdanets_lambda_resnet26rpt_256.c1_in1k",
        "lambdanets_lambda_resnet26t.c1_in1k",
        "lambdanets_lambda_resnet50ts.a1h_in1k",
    ]
    model = timm.create_model("lambdanets_lambda_resnet26t.c1_in1k", num_classes=3)
    data = timm.data.resolve_model_data_config(model)
    assert (data["crop_pct"], data["input_size"], data["interpolation"]) == (0.94, (3, 256, 256), "bicubic")
    with pytest.raises(ValueError, match="no weights with the tag 'other'"):
        timm.create_model("lambdanets_lambda_resnet26t.other")

"""What users of timm and torchvision expect of a network."""

import copy

import pytest
import torch
from torch import nn

from lambdanets.models import FeatureNetwork, create_model, list_models
from tests.models.helpers import SMALL, fake, images, meta, randomized, small


@pytest.mark.parametrize("case", SMALL)
def test_features_are_the_maps_of_the_whole_network(case: str) -> None:
    network, x = small(case).eval(), images(case)
    name, arguments = SMALL[case]
    chosen = (-3, 2)
    features = create_model(name, features_only=True, out_indices=chosen, **{**arguments, "num_classes": 0}).eval()
    kept = features.network.state_dict()
    features.network.load_state_dict({k: v for k, v in network.state_dict().items() if k in kept})
    stages = len(network.feature_info)
    assert len(kept) < len(network.state_dict()) - 2  # without the later stages
    with torch.no_grad():
        last, expected = network.forward_intermediates(x)
        assert torch.equal(last, network.forward_features(x))
        assert torch.equal(last, expected[-1])
        assert torch.equal(network.forward_intermediates(x, 1, intermediates_only=True)[0], last)
        assert torch.equal(network.forward_intermediates(x, [1], stop_early=True)[0], expected[1])
        maps = features(x)
    assert len(maps) == 2
    for index, feature_map, channels, reduction in zip(
        chosen, maps, features.feature_info.channels(), features.feature_info.reduction(), strict=True
    ):
        torch.testing.assert_close(feature_map, expected[index % stages])
        size = [-(-s // reduction) for s in x.shape[2:]]
        assert list(feature_map.shape) == [2, channels, *size]
        assert feature_map.abs().sum() > 0


@pytest.mark.parametrize("name", list_models())
def test_feature_info(name: str) -> None:
    if "420" in name or "350" in name:
        name = name.replace("420", "50").replace("350", "50")
    network = create_model(name) if name.endswith("tiny") else meta(name)
    names = dict(network.named_modules())
    assert all(info["module"] in names for info in network.feature_info)
    maps = fake(name, 65, 95, features_only=True)
    assert [m.shape[1] for m in maps] == [info["num_chs"] for info in network.feature_info]
    assert [m.shape[2] for m in maps] == [-(-65 // info["reduction"]) for info in network.feature_info]
    first = names[network.first_conv]
    assert isinstance(first, nn.Conv2d)
    assert first.in_channels == 3
    assert names[network.classifier_name] is network.get_classifier()


@pytest.mark.parametrize("case", SMALL)
def test_head(case: str) -> None:
    network, x = small(case).eval(), images(case)
    with torch.no_grad():
        features = network.forward_features(x)
        pooled = network.forward_head(features, pre_logits=True)
        torch.testing.assert_close(pooled, features.flatten(2).mean(2))
        torch.testing.assert_close(network.get_classifier()(pooled), network(x))
        network.reset_classifier(4, "max")
        assert network.num_classes == 4
        torch.testing.assert_close(network(x), network.get_classifier()(features.flatten(2).max(2).values))
        network.reset_classifier(0, "")
        torch.testing.assert_close(network(x), features)


def test_dropout_is_before_the_classifier() -> None:
    network = small("vanilla", drop_rate=0.5).train()
    pooled = network.forward_head(torch.ones(1, network.num_features, 2, 2), pre_logits=True)
    assert set(pooled.unique().tolist()) == {0.0, 2.0}


def test_other_channels() -> None:
    for name in ("resnet26", "resnet_rs50", "mobilenet_v2", "lambda_patch_tiny", "resnet_tiny"):
        network = create_model(name, in_chans=5, num_classes=2).eval()
        assert network(torch.randn(1, 5, 37, 33)).shape == (1, 2)


@pytest.mark.parametrize("case", SMALL)
def test_checkpointing_changes_no_gradient_and_no_statistics(case: str) -> None:
    plain = small(case, drop_path_rate=0.3).double().train()
    saving = copy.deepcopy(plain)
    saving.set_grad_checkpointing()
    calls = []
    for _, block in saving.residual_blocks():
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    x = images(case, dtype=torch.float64)
    for network in (plain, saving):
        torch.manual_seed(5)  # stochastic depth and dropout
        (network(x) ** 2).sum().backward()
    assert len(calls) == 2 * len(list(saving.residual_blocks()))  # computed again
    for (name, a), (_, b) in zip(plain.named_parameters(), saving.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
    for (name, a), (_, b) in zip(plain.named_buffers(), saving.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    assert saving.state_dict().keys() == plain.state_dict().keys()


def test_checkpointing_of_norms_that_many_processes_share() -> None:
    network = create_model("lambda_resnet_tiny").train()
    network.set_grad_checkpointing()
    shared = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    shared(torch.randn(2, 3, 8, 8)).sum().backward()
    assert shared.layer4[0].bn1.num_batches_tracked == 1  # type: ignore[union-attr]


def test_weight_decay_spares_norms_and_biases_only() -> None:
    network = small("lambda_resnet")
    spared = network.no_weight_decay()
    assert {"bn1.weight", "bn1.bias", "fc.bias", "layer1.0.se.fc1.bias", "layer4.0.conv2.norm_values.weight"} <= spared
    named = dict(network.named_parameters())
    assert not spared & {"fc.weight", "conv1.0.weight", "layer4.0.conv2.positions.table"}
    assert spared == {name for name in named if named[name].ndim == 1}


@pytest.mark.parametrize("case", ["vanilla", "lambda_resnet", "mobilenet", "patch"])
def test_compiled_networks_give_the_same(case: str) -> None:
    network, x = small(case).double(), images(case, dtype=torch.float64)
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    results = []
    for run in (network, compiled):
        fresh = copy.deepcopy(network.state_dict())
        scores = run(x)
        (scores**2).sum().backward()
        results.append([scores, *(p.grad for p in network.parameters())])
        network.zero_grad(set_to_none=True)
        network.load_state_dict(fresh)
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(other, eager)


@pytest.mark.parametrize("case", ["vanilla", "lambda_resnet", "mobilenet", "patch"])
def test_exported_networks_give_the_same(case: str) -> None:
    network, x = small(case).eval(), images(case)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(network, (x,), dynamic_shapes={"x": {0: batch}})
    more = images(case, batch=3)
    with torch.no_grad():
        expected = network(more)
        torch.testing.assert_close(program.module()(more), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_channels_last_and_half_precision() -> None:
    network, x = small("vanilla").eval(), images("vanilla")
    with torch.no_grad():
        expected = network(x)
        last = network.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
        torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        half = network.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    # Random weights make it chaotic: with convolutions alone the error is 0.1 already, with lambdas 0.35.
    assert (half.float() - expected).norm() < 0.5 * expected.norm()


def test_feature_network_is_typed_and_checkpointed() -> None:
    features = create_model("resnet26", features_only=True, out_indices=2)
    assert isinstance(features, FeatureNetwork)
    assert features.out_indices == (3, 4)
    assert features.feature_info.get_dicts()[0] == {"num_chs": 1024, "reduction": 16, "module": "layer3"}
    assert features.feature_info.module_name() == ["layer3", "layer4"]
    assert (len(features.feature_info), features.feature_info.channels(1)) == (5, 256)
    assert features.feature_info[0]["num_chs"] == features.feature_info.get("num_chs", 0) == 64
    features.set_grad_checkpointing()
    assert features.network.grad_checkpointing
    assert sum(p.requires_grad for p in randomized(features).parameters()) == len(list(features.parameters()))

"""How large a new layer's output is: embedding_std="unit" gives its position part a variance of 1."""

import math
from statistics import fmean, stdev

import pytest
import torch
from torch import nn

from lambdanets import LambdaLayer1d, LambdaLayer2d, LambdaLayer3d, RelativePositions, create_model

LAYERS = {1: LambdaLayer1d, 2: LambdaLayer2d, 3: LambdaLayer3d}
SIDES = {1: (48,), 2: (12, 11), 3: (6, 5, 7)}
SCOPES = {1: 15, 2: 5, 3: 3}
LAYERS_DRAWN = 32


def output_variance(dims, mode="train", sides=None, **options):
    """Mean square of the position part and its standard error, over independent layers and inputs.

    Without an input_size only queries count whose whole scope lies inside the map.
    """
    options = {"scope": SCOPES[dims], "heads": 4, "key_depth": 8, "content": False} | options
    sides, found = sides or SIDES[dims], []
    for seed in range(LAYERS_DRAWN):
        torch.manual_seed(seed)
        layer = LAYERS[dims](16, **options).train(mode == "train")
        with torch.no_grad():
            y = layer(torch.randn(3, 16, *sides))
        if layer.positions.input_size is None:
            for axis in range(dims):
                margin = layer.positions.scope[axis] // 2 * layer.positions.dilation[axis]
                margin = -(-margin // layer.stride[axis])
                y = y.narrow(axis + 2, margin, y.shape[axis + 2] - 2 * margin)
        assert y.numel() > 0
        found.append(y.square().mean().item())
    return fmean(found), stdev(found) / LAYERS_DRAWN**0.5


def assert_variance(found, expected):
    """Five standard errors, which must themselves be small enough to tell the rule from its neighbours."""
    mean, error = found
    assert error < 0.12 * expected
    assert abs(mean - expected) < 5 * error


OPTIONS = {
    "plain": {},
    "key_depth_2": {"key_depth": 2, "heads": 8},
    "key_depth_24": {"key_depth": 24},
    "intra_depth": {"intra_depth": 3},
    "multi_head": {"multi_head": True, "intra_depth": 2},
    "causal": {"causal": True},
    "strict": {"causal": "strict"},
    "even_scope_causal": {"scope": 4, "causal": True},
    "out_channels": {"out_channels": 32},
}


@pytest.mark.parametrize(
    ("mode", "batch_norm"), [("train", True), ("eval", True), ("train", False)], ids=["train", "eval", "no_norm"]
)
@pytest.mark.parametrize("dims", [1, 2, 3], ids=["1d", "2d", "3d"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_unit_variance_in_the_interior(dims, options, mode, batch_norm):
    """In eval mode before any training batch norm does nothing yet: 1 / key_depth."""
    expected = 1 / options.get("key_depth", 8) if batch_norm and mode == "eval" else 1
    assert_variance(output_variance(dims, mode, batch_norm=batch_norm, **options), expected)


WHOLE_MAPS = {
    "global": {"scope": None},
    "global_causal": {"scope": None, "causal": True},
    "global_strict": {"scope": None, "causal": "strict"},
    "local": {"scope": 9},
    "local_causal": {"scope": 5, "causal": True},
    "local_even_causal": {"scope": 4, "causal": "strict"},
    "local_dilated": {"scope": 5, "dilation": 2},
}


@pytest.mark.parametrize(("dims", "sides"), [(1, (12,)), (2, (5, 6)), (3, (4, 3, 5))], ids=["1d", "2d", "3d"])
@pytest.mark.parametrize("options", WHOLE_MAPS.values(), ids=WHOLE_MAPS.keys())
def test_unit_variance_on_average_over_a_map_of_the_input_size(dims, sides, options):
    assert_variance(output_variance(dims, sides=sides, input_size=sides, **options), 1)


@pytest.mark.parametrize("options", [{"stride": 2}, {"dilation": 2}, {"scope": (3, 7)}], ids=str)
def test_unit_variance_on_other_grids(options):
    assert_variance(output_variance(2, **options), 1)


@pytest.mark.parametrize("batch_norm", [True, False])
def test_a_softmax_over_queries_is_covered_approximately(batch_norm):
    mean, error = output_variance(2, query_softmax=True, batch_norm=batch_norm)
    assert error < 0.12
    assert 1 / 1.22 - 5 * error < mean < 1 + 5 * error


@pytest.mark.parametrize(
    ("options", "positions"),
    [
        ({}, 25),
        ({"dilation": 3}, 25),
        ({"causal": True}, 13),
        ({"causal": "strict"}, 12),
        ({"scope": (3, 4), "causal": True}, 1 * 4 + 1 + 1),
        ({"input_size": (2, 100)}, 2 * (5 - 6 / 100)),  # 1 + 2 columns are missing on either side
        ({"scope": None, "input_size": (3, 4)}, 12),
        ({"scope": None, "input_size": (3, 4), "causal": True}, 6.5),
        ({"scope": None, "input_size": (3, 4), "causal": "strict"}, 5.5),
        ({"input_size": (3, 1), "dilation": 2}, (2 + 1 + 2) / 3),
    ],
    ids=str,
)
def test_how_many_positions_a_query_reaches(options, positions):
    assert RelativePositions(2, **({"scope": 5} | options)).mean_reach() == pytest.approx(positions, rel=1e-12)


@pytest.mark.parametrize("intra_depth", [1, 2])
@pytest.mark.parametrize("batch_norm", [True, False], ids=["norm", "no_norm"])
@pytest.mark.parametrize("key_norm", ["softmax", "l2", None], ids=str)
def test_the_content_part_is_as_large_as_the_documents_say(key_norm, batch_norm, intra_depth):
    """docs/operation.md: it dominates without a softmax, and `embedding_std` does not cover it."""
    channels, side, key_depth = 16, 14, 8
    context, q = side**2, key_depth if batch_norm else 1
    share = {"softmax": math.e / context + 1 / channels, "l2": 1 + context / channels}
    expected = q * intra_depth * (share[key_norm] if key_norm else context * share["l2"])
    found = []
    for seed in range(LAYERS_DRAWN):
        torch.manual_seed(seed)
        options = {"key_norm": key_norm, "batch_norm": batch_norm, "intra_depth": intra_depth, "key_depth": key_depth}
        layer = LambdaLayer2d(channels, position=False, **options)
        with torch.no_grad():
            found.append(layer(torch.randn(3, channels, side, side)).square().mean().item())
    assert fmean(found) == pytest.approx(expected, rel=0.35)  # the formula is for many channels


def test_the_number_for_the_default_layer():
    assert LambdaLayer2d(8).positions.unit_std() == pytest.approx((16 * 23 * 23) ** -0.5)  # 0.0109
    assert LambdaLayer2d(8, batch_norm=False).positions.unit_std() == pytest.approx(1 / 23)
    assert RelativePositions(2).unit_std() == LambdaLayer2d(8).positions.unit_std()
    assert RelativePositions(1, causal=True).unit_std() == LambdaLayer1d(8, causal=True).positions.unit_std()
    assert RelativePositions(2, 1, causal="strict").unit_std() == 1  # nothing is in reach


@pytest.mark.parametrize("build", [lambda **options: LambdaLayer2d(8, **options).positions, RelativePositions])
def test_embedding_std(build):
    for options, std in (({}, (16 * 23 * 23) ** -0.5), ({"embedding_std": 0.3}, 0.3), ({"embedding_std": 1}, 1.0)):
        positions = build(**options)
        for _ in range(2):  # again after a reset
            assert abs(positions.table.std().item() / std - 1) < 5 / (2 * positions.table.numel()) ** 0.5
            positions.reset_parameters()
    assert build(embedding_std=0).table.count_nonzero() == 0
    for wrong in ("one", -1, float("nan"), float("inf"), None, True):
        with pytest.raises(ValueError, match="embedding_std must be "):
            build(embedding_std=wrong)


def test_shared_positions_keep_their_own():
    shared = RelativePositions(2, 5, embedding_std=0.3)
    before = shared.table.detach().clone()
    layer = LambdaLayer2d(8, positions=shared)
    layer.reset_parameters(positions=False)
    assert torch.equal(shared.table, before)
    layer.reset_parameters()
    assert abs(shared.table.std().item() / 0.3 - 1) < 5 / (2 * before.numel()) ** 0.5


def test_descriptions_name_what_is_not_usual():
    assert "embedding_std" not in repr(LambdaLayer2d(8))
    assert "embedding_std=1.0" in repr(LambdaLayer2d(8, embedding_std=1.0))


def test_the_papers_networks_have_the_papers_embeddings():
    for name, options in (
        ("lambda_resnet_tiny", {}),
        ("mobilenet_v2", {"placement": (10,)}),
        ("lambda_patch_tiny", {}),
    ):
        network = create_model(name, **options)
        assert network.config.embedding_std == 1.0
        tables = torch.cat([module.table.flatten() for module in network.modules() if hasattr(module, "table")])
        assert abs(tables.std().item() - 1) < 5 / (2 * tables.numel()) ** 0.5
    network = create_model("lambda_resnet_tiny", embedding_std="unit", batch_norm=False, scope=5)
    assert [module.unit_std() for module in network.modules() if hasattr(module, "table")] == [1 / 5] * 4


def test_output_is_as_large_as_a_convolutions():
    """The whole layer, content included: with embeddings of size 1 the ratio would be about 100."""
    torch.manual_seed(0)
    x = torch.randn(2, 64, 28, 28)
    ours, convolution = LambdaLayer2d(64)(x).std(), nn.Conv2d(64, 64, 3, padding=1)(x).std()
    assert 0.5 < ours / convolution < 3


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_plain_layers_train_without_a_norm_behind_them(seed):
    """SGD with a rate that suits a stack of convolutions; with embeddings of size 1 it gives NaN in five steps."""
    torch.manual_seed(seed)
    network = nn.Sequential(LambdaLayer2d(32), LambdaLayer2d(32))
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    losses = []
    for _ in range(10):
        x = torch.randn(4, 32, 12, 12)
        loss = (network(x) - x).square().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert max(losses) < 10 * losses[0]
    assert losses[-1] < losses[0]

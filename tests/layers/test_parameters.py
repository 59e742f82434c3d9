"""Parameters of a layer: how many, how they start, how they are shared, copied and stored."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from lambdanets import LambdaLayer1d, LambdaLayer2d, LambdaLayer3d, RelativePositions

DIMS = {1: LambdaLayer1d, 2: LambdaLayer2d, 3: LambdaLayer3d}


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("dims", [1, 2, 3], ids=["1d", "2d", "3d"])
@pytest.mark.parametrize("u", [1, 4])
@pytest.mark.parametrize("multi_head", [False, True], ids=["multi_query", "multi_head"])
def test_count_by_formula(dims, u, multi_head):
    d, out, h, k, scope, context = 24, 32, 4, 16, 5, 20
    layer = DIMS[dims](
        d, out, context_channels=context, heads=h, key_depth=k, intra_depth=u, scope=scope, multi_head=multi_head
    )
    groups = h if multi_head else 1
    queries, keys, values = d * h * k, context * groups * k * u, context * groups * (out // h) * u
    norms = 2 * (h * k + groups * (out // h) * u)
    assert count(layer) == queries + keys + values + norms + scope**dims * groups * k * u


def test_count_of_the_papers_layer():
    # Q d -> hk, K d -> k, V d -> d/h, a table of 23 x 23 x k, batch norm on queries and values.
    d, h, k = 512, 4, 16
    expected = d * h * k + d * k + d * d // h + 23 * 23 * k + 2 * (h * k + d // h)
    assert count(LambdaLayer2d(d)) == expected


def test_what_is_off_has_no_parameters():
    assert {name for name, _ in LambdaLayer2d(8, content=False, scope=3).named_parameters()} == {
        "to_queries.weight",
        "to_values.weight",
        "norm_queries.weight",
        "norm_queries.bias",
        "norm_values.weight",
        "norm_values.bias",
        "positions.table",
    }
    names = {name for name, _ in LambdaLayer2d(8, position=False, batch_norm=False).named_parameters()}
    assert names == {"to_queries.weight", "to_values.weight", "to_keys.weight"}


def test_default_scopes():
    assert LambdaLayer1d(8).positions.scope == (23,)
    assert LambdaLayer2d(8).positions.scope == (23, 23)
    assert LambdaLayer3d(8).positions.scope == (7, 7, 7)


@pytest.mark.parametrize("causal", [False, True, "strict"])
def test_batch_norm_by_default(causal):
    layer = LambdaLayer2d(8, scope=3, causal=causal)
    expected = nn.Identity if causal else nn.BatchNorm2d
    assert type(layer.norm_queries) is type(layer.norm_values) is expected
    forced = LambdaLayer2d(8, scope=3, causal=causal, batch_norm=True)
    assert isinstance(forced.norm_queries, nn.BatchNorm2d)
    assert forced.norm_queries.num_features == 4 * 16
    assert forced.norm_values.num_features == 2


def test_initialisation_is_the_papers():
    torch.manual_seed(1)
    layer = LambdaLayer2d(256, 512, context_channels=384, intra_depth=2, scope=23, embedding_std=1.0)
    expected = {
        "to_queries.weight": (16 * 256) ** -0.5,
        "to_keys.weight": 384**-0.5,
        "to_values.weight": 384**-0.5,
        "positions.table": 1.0,
    }
    for name, std in expected.items():
        weight = layer.get_parameter(name)
        assert weight.numel() > 10_000
        # Five standard errors of an estimate of the standard deviation, and of the mean.
        error = 5 / (2 * weight.numel()) ** 0.5
        assert abs(weight.std().item() / std - 1) < error, name
        assert abs(weight.mean().item()) / std < 5 / weight.numel() ** 0.5, name
        assert weight.abs().max() > 3 * std, f"{name} is not normal: a uniform one has no such tail"
    assert all(module.bias is None for module in layer.modules() if isinstance(module, nn.Linear))
    assert torch.equal(layer.norm_queries.weight, torch.ones(64))


def test_reset_parameters_draws_anew():
    layer = LambdaLayer2d(16, scope=5)
    layer.norm_values.weight.data.fill_(7)
    before = copy.deepcopy(layer.state_dict())
    layer.reset_parameters()
    for name in ("to_queries.weight", "to_keys.weight", "to_values.weight", "positions.table", "norm_values.weight"):
        assert not torch.equal(layer.state_dict()[name], before[name]), name
    kept = layer.positions.table.detach().clone()
    layer.reset_parameters(positions=False)  # shared positions are not the layer's own to draw again
    assert torch.equal(layer.positions.table, kept)


def shared_pair(**options):
    positions = RelativePositions(2, 3, key_depth=4, **options)
    layers = [LambdaLayer2d(8, heads=2, key_depth=4, positions=positions) for _ in range(2)]
    return nn.Sequential(*layers).double()


def test_shared_positions_are_one_parameter():
    pair = shared_pair()
    assert pair[0].positions.table is pair[1].positions.table
    assert len([name for name, _ in pair.named_parameters() if name.endswith("table")]) == 1
    own = nn.Sequential(*(LambdaLayer2d(8, heads=2, key_depth=4, scope=3) for _ in range(2)))
    assert count(own) - count(pair) == 3 * 3 * 4


def test_gradients_of_shared_positions_add_up():
    pair, x = shared_pair().eval(), torch.randn(2, 8, 4, 5, dtype=torch.float64)
    first, second = pair[0](x), pair[1](2 * x)
    table = pair[0].positions.table
    parts = [torch.autograd.grad(out.square().sum(), table, retain_graph=True)[0] for out in (first, second)]
    (first.square().sum() + second.square().sum()).backward()
    torch.testing.assert_close(table.grad, parts[0] + parts[1])
    assert all(part.abs().max() > 0 for part in parts)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_keep_sharing_and_results(how):
    pair = shared_pair().eval()
    other = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert other[0].positions.table is other[1].positions.table
    assert other[0].positions.table is not pair[0].positions.table
    x = torch.randn(2, 8, 4, 5, dtype=torch.float64)
    assert torch.equal(pair(x), other(x))
    other[0].positions.table.data.add_(1)
    assert not torch.equal(pair(x), other(x))


OPTIONS = [{}, {"multi_head": True, "intra_depth": 2, "scope": 4}, {"causal": True}, {"scope": None, "input_size": 6}]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "multi_head_intra_depth", "causal", "global"])
def test_state_dict_round_trip(options):
    options = {"scope": 3} | options
    layer, other = LambdaLayer2d(8, **options).eval(), LambdaLayer2d(8, **options).eval()
    x = torch.randn(2, 8, 4, 5)
    assert not torch.equal(layer(x), other(x))
    stored = io.BytesIO()
    torch.save(layer.state_dict(), stored)
    stored.seek(0)
    other.load_state_dict(torch.load(stored, weights_only=True))
    assert torch.equal(layer(x), other(x))


def test_state_dict_of_shared_positions_round_trip():
    pair, other = shared_pair().eval(), shared_pair().eval()
    other.load_state_dict(pair.state_dict())
    assert other[0].positions.table is other[1].positions.table
    x = torch.randn(2, 8, 4, 5, dtype=torch.float64)
    assert torch.equal(pair(x), other(x))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"stride": 2, "intra_depth": 2}], ids=str)
def test_meta_device(options):
    layer = LambdaLayer2d(8, device="meta", scope=3, **options)
    assert all(p.is_meta for p in layer.parameters())
    found = layer(torch.empty(2, 8, 6, 5, device="meta"))
    assert found.is_meta
    real = LambdaLayer2d(8, scope=3, **options)
    assert found.shape == real(torch.randn(2, 8, 6, 5)).shape
    layer.to_empty(device="cpu").reset_parameters()
    assert layer(torch.randn(2, 8, 6, 5)).isfinite().all()


def test_dtype_argument():
    layer = LambdaLayer2d(8, scope=3, dtype=torch.float64)
    assert {p.dtype for p in layer.parameters()} == {torch.float64}


def test_description_says_what_is_not_usual():
    assert "causal='strict'" in repr(LambdaLayer2d(8, scope=3, causal="strict"))
    usual = repr(LambdaLayer2d(8, 16, scope=3))
    assert "8, 16, heads=4, key_depth=16" in usual
    assert "scope=(3, 3)" in usual
    assert "causal" not in usual

"""The form that is exported is the network, in float64, for every option of a lambda layer."""

import copy

import pytest
import torch
from torch import nn

from lambdanets.export import plain
from lambdanets.export.plain import FixedLambda2d, OpenPool, plain_network
from lambdanets.export.positions import ByFrequency, WrittenOut
from lambdanets.layers import LambdaLayer2d
from tests.models.helpers import SMALL, images, randomized, small

LAYERS = {
    "usual": {},
    "even scope": {"scope": (4, 6)},
    "intra-depth": {"scope": 5, "intra_depth": 3},
    "dilation": {"scope": 3, "dilation": 2},
    "global": {"scope": None, "input_size": (9, 8)},
    "l2": {"scope": 5, "key_norm": "l2"},
    "no norm of keys": {"scope": 5, "key_norm": None},
    "query softmax": {"scope": 5, "query_softmax": True},
    "content alone": {"position": False},
    "positions alone": {"scope": 5, "content": False},
    "no batch norm": {"scope": 5, "batch_norm": False},
    "bias": {"scope": 5, "position_bias": True},
    "downsample": {"scope": 5, "downsample": "avg"},
}


def layer_of(options: dict) -> LambdaLayer2d:
    layer = randomized(LambdaLayer2d(8, 12, heads=2, key_depth=3, **options)).double().eval()
    if layer.position_bias is not None:
        nn.init.normal_(layer.position_bias)
    return layer


@pytest.mark.parametrize("most", [0, 2**22], ids=["by frequency", "written out"])
@pytest.mark.parametrize("case", LAYERS)
def test_layers_of_one_size(case: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "MOST_EMBEDDINGS", most)
    layer = layer_of(LAYERS[case])
    fixed = plain_network(nn.Sequential(layer), (1, 8, 9, 7), fixed=True)[0]
    assert isinstance(fixed, FixedLambda2d)
    if layer.positions is not None:
        assert isinstance(fixed.positions, WrittenOut if most else ByFrequency)
    x = torch.randn(3, 8, 9, 7, dtype=torch.float64)
    torch.testing.assert_close(fixed(x), layer(x), rtol=1e-10, atol=1e-10)


def test_tiles_of_large_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "MOST_EMBEDDINGS", 0)
    layer = layer_of({"scope": 5, "intra_depth": 2})
    fixed = plain_network(nn.Sequential(layer), (1, 8, 33, 10), fixed=True)[0]
    assert isinstance(fixed, FixedLambda2d)
    assert isinstance(fixed.positions, ByFrequency)
    assert fixed.positions.tiles == 3
    x = torch.randn(2, 8, 33, 10, dtype=torch.float64)
    torch.testing.assert_close(fixed(x), layer(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{"multi_head": True}, {"causal": True}, {"stride": 2}])
def test_other_layers_stay_as_they_are(options: dict) -> None:
    network = nn.Sequential(layer_of({"scope": 5, **options}))
    copied = plain_network(network, (1, 8, 9, 7), fixed=True)
    assert isinstance(copied[0], LambdaLayer2d)
    x = torch.randn(2, 8, 9, 7, dtype=torch.float64)
    torch.testing.assert_close(copied(x), network(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("case", SMALL)
def test_networks(case: str, fixed: bool) -> None:
    network, x = small(case).eval().double(), images(case, dtype=torch.float64)
    before = copy.deepcopy(network.state_dict())
    copied = plain_network(network, (1, *x.shape[1:]), fixed)
    with torch.no_grad():
        expected = network(x)
        torch.testing.assert_close(copied(x), expected, rtol=1e-8, atol=1e-8 * float(expected.abs().max()))
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    assert not any(p.requires_grad for p in copied.parameters())


@pytest.mark.parametrize("size", [(6, 8), (7, 8), (6, 9), (7, 9), (2, 3)])
def test_pooling_of_any_size(size: tuple[int, int]) -> None:
    pool = nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    torch.testing.assert_close(OpenPool(pool)(x), pool(x))


def test_pooling_that_is_not_ours() -> None:
    with pytest.raises(ValueError, match="every image size"):
        OpenPool(nn.AvgPool2d(3, 2, ceil_mode=True))

"""The interactions are the layer: applied to the values they give its output, each part by itself too."""

import math

import pytest
import torch
from torch import Tensor, nn

from lambdanets.layers import LambdaLayer2d
from lambdanets.ops.reference import lambda_reference
from lambdanets.view import interactions, reaches
from lambdanets.view.capture import capture
from lambdanets.view.look import neighbour_correlation, untrained
from tests.models.helpers import SMALL, images, randomized, small

LAYERS = {
    "usual": {"scope": 5},
    "even scope": {"scope": (4, 6)},
    "wider than the map": {},
    "global": {"scope": None, "input_size": (9, 8)},
    "intra-depth": {"scope": 5, "intra_depth": 3},
    "dilation": {"scope": 3, "dilation": 2},
    "stride": {"scope": 5, "stride": 2},
    "multi-head": {"scope": 5, "multi_head": True},
    "multi-head, intra-depth": {"scope": 3, "multi_head": True, "intra_depth": 2},
    "l2": {"scope": 5, "key_norm": "l2"},
    "no norm of keys": {"scope": 5, "key_norm": None},
    "query softmax": {"scope": 5, "query_softmax": True},
    "content alone": {"position": False},
    "positions alone": {"scope": 5, "content": False},
    "causal": {"scope": 5, "causal": True},
    "strictly causal": {"scope": 5, "causal": "strict"},
    "bias": {"scope": 5, "position_bias": True},
}
SIZE = (9, 7)


def layer_of(case: str) -> LambdaLayer2d:
    layer = randomized(LambdaLayer2d(8, 12, heads=2, key_depth=3, **LAYERS[case])).double()
    if layer.position_bias is not None:
        nn.init.normal_(layer.position_bias)
    return layer


@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize("query", [(0, 0), (4, 3), (8, 6)])
def test_interactions_give_the_output(case: str, query: tuple[int, int]) -> None:
    layer, x = layer_of(case), torch.randn(8, *SIZE, dtype=torch.float64)
    (one,) = interactions(layer, x, query).layers
    with torch.no_grad():
        output = layer.eval()(x[None])[0]
    row, column = (q // s if s > 1 else q for q, s in zip(query, layer.stride, strict=True))
    assert one.query == (row, column)
    expected = output[:, row, column].view(2, 6)
    torch.testing.assert_close(one.output, expected)
    torch.testing.assert_close(one.applied(), expected, rtol=1e-10, atol=1e-10)
    for maps, there in ((one.content, layer.to_keys), (one.position, layer.positions)):
        assert (maps is None) == (there is None)
        assert maps is None or maps.shape == (2, layer.intra_depth, *SIZE)


def test_interactions_are_those_before_pooling() -> None:
    layer, x = (
        randomized(LambdaLayer2d(8, 12, heads=2, scope=5, downsample="avg")).double().eval(),
        torch.randn(8, 9, 7),
    )
    (one,) = interactions(layer, x.double(), (4, 3)).layers
    layer.downsample = None
    with torch.no_grad():
        expected = layer(x.double()[None])[0, :, 4, 3].view(2, 6)
    torch.testing.assert_close(one.output, expected)
    torch.testing.assert_close(one.applied(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", ["usual", "intra-depth", "multi-head", "causal"])
def test_each_part_by_itself(case: str) -> None:
    layer, x = layer_of(case).eval(), torch.randn(1, 8, *SIZE, dtype=torch.float64)
    (one,) = capture(layer, x)
    with torch.no_grad():
        queries, keys, values, *grids = layer.project(x, None)
        placed = layer._place(*grids)
        options = {"multi_head": layer.multi_head, "causal": layer.causal}
        content = lambda_reference(queries, keys, values, None, **options)
        position = lambda_reference(queries, None, values, placed, content=False, **options)
    rows = torch.arange(math.prod(SIZE))
    for maps, expected in ((one.content(rows), content), (one.position(rows), position)):
        assert maps is not None
        torch.testing.assert_close(one.apply(maps), expected[0], rtol=1e-10, atol=1e-10)


class Masked(nn.Module):
    """A layer that is asked about another input, with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = randomized(LambdaLayer2d(8, 12, context_channels=5, heads=2, scope=5)).double()
        self.context = torch.randn(1, 5, *SIZE, dtype=torch.float64)
        self.mask = torch.rand(1, *SIZE) < 0.7

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.context, context_mask=self.mask)


def test_context_and_padding() -> None:
    (one,) = interactions(Masked(), torch.randn(8, *SIZE, dtype=torch.float64), (4, 3)).layers
    torch.testing.assert_close(one.applied(), one.output, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", [case for case in SMALL if case != "attention"])
def test_every_layer_of_a_network(case: str) -> None:
    network, x = small(case).double().train(), images(case, batch=1, dtype=torch.float64)
    statistics = {name: buffer.clone() for name, buffer in network.named_buffers()}
    seen = interactions(network, x, (20, 5))
    named = {name for name, module in network.named_modules() if isinstance(module, LambdaLayer2d)}
    assert {layer.name for layer in seen.layers} == named
    for layer in seen.layers:
        torch.testing.assert_close(layer.applied(), layer.output, rtol=1e-8, atol=1e-8)
    assert all(module.training for module in network.modules())  # left as it was
    assert not any(module._forward_hooks for module in network.modules())
    assert all(torch.equal(statistics[name], buffer) for name, buffer in network.named_buffers())


def test_reach_against_a_loop() -> None:
    layer = layer_of("usual").eval()
    x = torch.randn(8, 6, 5, dtype=torch.float64)
    (found,) = reaches(layer, x)
    content, position, everywhere = [], [], []
    for row in range(6):
        for column in range(5):
            (one,) = interactions(layer, x, (row, column)).layers
            assert one.content is not None
            assert one.position is not None
            far = torch.tensor([[math.hypot(y - row, z - column) for z in range(5)] for y in range(6)]).double()
            everywhere.append(far.mean())
            for maps, means in ((one.content, content), (one.position, position)):
                weights = maps.abs().sum(1)
                means.append(((weights * far).sum((1, 2)) / weights.sum((1, 2))).mean())
    for value, means in ((found.content, content), (found.position, position), (found.everywhere, everywhere)):
        assert value == pytest.approx(float(torch.stack(means).mean()), rel=1e-6)
    assert 0 < found.position_share < 1


def test_distances_are_in_pixels_of_the_image() -> None:
    layer = LambdaLayer2d(4, heads=1, scope=3, content=False, batch_norm=False)
    with torch.no_grad():  # only the right neighbour counts
        assert layer.positions is not None
        layer.positions.table.zero_()
        layer.positions.table[1, 2] = 1
    pooled = nn.Sequential(nn.AvgPool2d(8), layer)
    seen = interactions(pooled, torch.randn(4, 64, 64), (20, 30))
    (one,) = seen.layers
    assert one.query == (2, 3)
    assert one.position is not None
    assert one.position[0, 0].nonzero().tolist() == [[2, 4]]
    # the last column of queries has no right neighbour, and 0 for a distance
    assert seen.reaches[0].position == pytest.approx(8 * 7 / 8)


def test_refusals() -> None:
    layer, x = layer_of("usual"), torch.randn(8, *SIZE, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"query 9 0 .* outside the input of 9 x 7"):
        interactions(layer, x, (9, 0))
    with pytest.raises(ValueError, match="one image"):
        interactions(layer, x.expand(2, -1, -1, -1))
    with pytest.raises(ValueError, match="no LambdaLayer2d"):
        interactions(nn.Conv2d(8, 8, 1), x)
    with pytest.raises(ValueError, match=r"no lambda layer has layer9 in its name; the layers are 0"):
        interactions(nn.Sequential(layer), x, layers=("layer9",))


def smooth(height: int, width: int, channels: int) -> Tensor:
    y, x = torch.meshgrid(torch.linspace(-2, 2, height), torch.linspace(-2, 2, width), indexing="ij")
    return torch.exp(-(y**2) - x**2)[..., None] * torch.randn(channels)


def test_correlation_of_neighbours() -> None:
    torch.manual_seed(0)
    assert abs(neighbour_correlation(torch.randn(23, 23, 16), (32, 32))) < 0.05
    assert abs(neighbour_correlation(torch.randn(23, 23, 16) + 5, (32, 32))) < 0.05  # a constant is no structure
    assert neighbour_correlation(torch.zeros(5, 5, 4), (8, 8)) == 0
    assert neighbour_correlation(smooth(23, 23, 16), (32, 32)) > 0.9
    stripes = (torch.arange(9) % 2).float()[:, None, None].expand(9, 9, 4)
    assert neighbour_correlation(stripes, (16, 16)) == pytest.approx(0, abs=0.05)  # -1 down, 1 across
    table = torch.randn(23, 21, 16)
    table[8:15, 7:14] = smooth(7, 7, 16)  # what a map of 4 x 4 uses: three rows and columns to each side of the middle
    assert neighbour_correlation(table, (4, 4)) > 0.6
    assert neighbour_correlation(table, (32, 32)) < 0.1
    values = torch.randn(3, 4, 2, dtype=torch.float64)
    centred = values - values.mean((0, 1))
    pairs = [(centred[i, j], centred[i + 1, j]) for i in range(2) for j in range(4)]
    pairs += [(centred[i, j], centred[i, j + 1]) for i in range(3) for j in range(3)]
    products = sum(float(a @ b) for a, b in pairs)
    squares = sum(float(a @ a + b @ b) / 2 for a, b in pairs)
    assert neighbour_correlation(values, (8, 8)) == pytest.approx(products / squares)


def test_tables_that_are_not_trained_are_named() -> None:
    torch.manual_seed(0)
    new, trained = torch.randn(7, 7, 16), smooth(7, 7, 16)
    assert untrained([("a", trained, (8, 8))]) == ""
    assert untrained([]) == ""
    assert untrained([("a", new, (8, 8)), ("b", new, (8, 8))]).startswith("The position tables (a, b) are still close")
    some = untrained([("a", trained, (8, 8)), ("b", new, (8, 8))])
    assert some.startswith("1 of 2 position tables (b) is still close to the random initialisation")
    assert "--model.embedding-std" in some


def test_some_layers() -> None:
    network, x = small("vanilla"), images("vanilla", batch=1)
    chosen = interactions(network, x, layers=("layer4", "layer2.0")).layers
    assert [layer.name for layer in chosen] == ["layer2.0.conv2", "layer4.0.conv2", "layer4.1.conv2"]
    assert [layer.stage for layer in chosen] == ["c3", "c5", "c5"]


def test_numbers_that_are_not_finite() -> None:
    layer = layer_of("usual")
    nn.init.constant_(layer.to_values.weight, torch.inf)
    with pytest.raises(ValueError, match="the output of layer is not finite"):
        interactions(layer, torch.randn(8, *SIZE, dtype=torch.float64))

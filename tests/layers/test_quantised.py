"""torchao's int8 weights in our layers and networks: near the float ones, the projections included."""

import copy

import pytest
import torch
from torch import nn

from lambdanets import LambdaLayer2d
from lambdanets.layers import LinearAttention
from tests.models.helpers import images, small

quantization = pytest.importorskip("torchao.quantization", reason="needs torchao: pip install torchao")
KINDS = {
    "weights": quantization.Int8WeightOnlyConfig,
    "weights and activations": quantization.Int8DynamicActivationInt8WeightConfig,
}


def quantised(model: nn.Module, kind: str) -> nn.Module:
    model = copy.deepcopy(model)
    quantization.quantize_(model, KINDS[kind]())
    return model


def dequantised(model: nn.Module) -> nn.Module:
    """A float model whose weights are the rounded ones."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module.weight) is not nn.Parameter:
            module.weight = nn.Parameter(module.weight.dequantize(), requires_grad=False)
    return model


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("case", ["vanilla", "lambda_resnet", "mobilenet", "patch"])
def test_networks(case: str) -> None:
    network, x = small(case).eval(), images(case)
    expected = network(x)
    model = quantised(network, "weights")
    wrapped = [m for m in model.modules() if isinstance(m, nn.Linear) and type(m.weight) is not nn.Parameter]
    assert len(wrapped) > 3
    same = dequantised(model)
    assert relative(model(x), same(x)) < 1e-3 < relative(model(x), expected)
    both = quantised(network, "weights and activations")(x)
    assert relative(both, expected) < 3 * relative(model(x), expected) + 0.02


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"intra_depth": 2}, {"stride": 2}, {"batch_norm": False}])
def test_layers(kind: str, options: dict) -> None:
    torch.manual_seed(0)
    layer = LambdaLayer2d(32, heads=4, key_depth=8, scope=5, **options).eval()
    x = torch.randn(2, 32, 9, 8)
    model = quantised(layer, kind)
    found = model(x)
    assert 1e-4 < relative(found, layer(x)) < 0.05
    if kind == "weights":
        torch.testing.assert_close(found, dequantised(model)(x), rtol=1e-4, atol=1e-4)
    assert model.fuse().fused_projection is None
    torch.testing.assert_close(model(x), found)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), found)


@torch.no_grad()
def test_a_fused_layer_forgets_its_float_weights() -> None:
    torch.manual_seed(0)
    layer = LambdaLayer2d(32, heads=4, key_depth=8, scope=5).eval()
    x = torch.randn(2, 32, 9, 8)
    expected = quantised(layer, "weights")(x)
    layer.fuse()
    quantization.quantize_(layer, KINDS["weights"]())
    torch.testing.assert_close(layer(x), expected)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_linear_attention(kind: str) -> None:
    torch.manual_seed(0)
    layer, x = LinearAttention(32).eval(), torch.randn(2, 32, 9, 8)
    assert 0 < relative(quantised(layer, kind)(x), layer(x)) < 0.05

"""Half precision at the paper's initialisation and scope 23: finite, and as exact as plain PyTorch."""

import copy

import pytest
import torch
from torch import nn

from lambdanets import LambdaLayer2d
from lambdanets.ops import lambda_reference

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
TRAINING = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
OPTIONS = {
    "plain": {},
    "intra_depth": {"intra_depth": 4},
    "multi_head": {"multi_head": True},
    "causal": {"causal": True},
    "no_batch_norm": {"batch_norm": False},
    "l2": {"key_norm": "l2"},
}


class PlainLayer(LambdaLayer2d):
    """The same projections, then the paper's einsums in whatever dtype autocast gives them."""

    def interact(self, queries, keys, values, query_grid, context_grid, mask=None, context_mask=None):
        positions = self.positions(query_grid, context_grid, self.stride)
        positions = positions.with_table(positions.table.to(queries.dtype))
        options = {"key_norm": self.key_norm, "multi_head": self.multi_head, "causal": self.causal}
        return lambda_reference(queries, keys, values, positions, **options)


def results(layer, x, gradient, dtype=None):
    """The output and the gradients of the input and of every parameter, in float64."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        output = layer(x)
    inputs = {"input": x} | dict(layer.named_parameters())
    grads = torch.autograd.grad(output, list(inputs.values()), gradient.to(output.dtype))
    return {"output": output.detach().double()} | {
        name: grad.double() for name, grad in zip(inputs, grads, strict=True)
    }


@HALF
@TRAINING
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_autocast_is_finite(options, training, dtype):
    layer = LambdaLayer2d(64, scope=23, **options).train(training)
    x = torch.randn(2, 64, 14, 14)
    found = results(layer, x, torch.randn(2, 64, 14, 14), dtype)
    for name, result in found.items():
        assert result.isfinite().all(), name
        assert result.abs().max() > 0, name


@HALF
@TRAINING
def test_half_precision_layer_is_finite(training, dtype):
    """Weights and inputs themselves in half precision, as in inference servers."""
    layer = LambdaLayer2d(64, scope=23).to(dtype).train(training)
    found = results(layer, torch.randn(2, 64, 14, 14, dtype=dtype), torch.randn(2, 64, 14, 14))
    assert all(result.isfinite().all() for result in found.values())


@HALF
@TRAINING
@pytest.mark.parametrize("options", [{}, {"intra_depth": 2, "scope": 7}], ids=["scope_23", "intra_depth"])
def test_error_is_that_of_plain_torch(options, training, dtype):
    """At most twice the error of the einsums in the same dtype, against float64."""
    options = {"scope": 23} | options
    layer = LambdaLayer2d(32, **options).train(training)
    plain = PlainLayer(32, **options).train(training)
    plain.load_state_dict(layer.state_dict())
    exact = copy.deepcopy(plain).double()
    x, gradient = torch.randn(4, 32, 12, 12), torch.randn(4, 32, 12, 12)
    expected = results(exact, x.double(), gradient.double())
    found, usual = results(layer, x, gradient, dtype), results(plain, x, gradient, dtype)
    for name, wanted in expected.items():
        error, allowed = ((result[name] - wanted).norm() / wanted.norm() for result in (found, usual))
        # A floor of one rounding of the result, for gradients that plain torch happens to hit.
        assert error <= max(2 * allowed, torch.finfo(dtype).eps), f"{name}: {error:.2e}, plain torch {allowed:.2e}"


@TRAINING
def test_float32_is_close_to_float64(training):
    layer = LambdaLayer2d(32, scope=23).train(training)
    nn.init.uniform_(layer.norm_values.running_var, 0.5, 2)
    x, gradient = torch.randn(2, 32, 14, 14), torch.randn(2, 32, 14, 14)
    expected = results(copy.deepcopy(layer).double(), x.double(), gradient.double())
    for name, found in results(layer, x, gradient).items():
        assert (found - expected[name]).norm() <= 1e-4 * expected[name].norm(), name

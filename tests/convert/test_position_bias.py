"""`position_bias`: a constant in every position lambda, the home of a bias that other implementations have."""

import pytest
import torch

from lambdanets import LambdaLayer1d, LambdaLayer2d


def layer_with_bias(kind=LambdaLayer2d, **options):
    torch.manual_seed(0)
    layer = kind(8, heads=2, key_depth=3, scope=3, position_bias=True, **options).double().eval()
    torch.nn.init.normal_(layer.position_bias)
    return layer


@pytest.mark.parametrize("options", [{}, {"multi_head": True}, {"query_softmax": True}, {"stride": 2}])
def test_is_added_to_the_lambda_of_every_query(options):
    layer = layer_with_bias(**options)
    x = torch.randn(2, 8, 5, 4, dtype=torch.float64, requires_grad=True)
    queries = layer.project(x, None)[0]
    queries = queries.softmax(-1) if layer.query_softmax else queries
    # a lambda with the bias in every one of its V columns
    bias_HKV = layer.position_bias.expand(2, 3)[..., None].expand(2, 3, 4)
    extra = torch.einsum("bnhk,hkv->bnhv", queries, bias_HKV)
    found = layer(x)
    bias, layer.position_bias = layer.position_bias, None
    expected = layer(x) + extra.flatten(2).transpose(1, 2).unflatten(2, found.shape[2:])
    assert (found - expected).abs().max() < 1e-12
    assert extra.abs().max() > 0.1
    mine = torch.autograd.grad(found.square().sum(), [x, bias])
    right = torch.autograd.grad(expected.square().sum(), [x, bias])
    assert all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(mine, right, strict=True))


def test_is_off_by_default_and_needs_positions():
    assert not any("bias" in name for name, _ in LambdaLayer2d(8, batch_norm=False).named_parameters())
    assert LambdaLayer2d(8, position_bias=True).position_bias.count_nonzero() == 0
    with pytest.raises(ValueError, match="position_bias"):
        LambdaLayer2d(8, position=False, position_bias=True)


@pytest.mark.parametrize("query_softmax", [False, True])
def test_steps_of_a_causal_layer_have_it_too(query_softmax):
    layer = layer_with_bias(LambdaLayer1d, causal=True, query_softmax=query_softmax)
    x = torch.randn(2, 8, 6, dtype=torch.float64)
    state, steps = layer.init_state(2), []
    for i in range(6):
        y, state = layer.step(x[:, :, i], state)
        steps.append(y)
    assert (torch.stack(steps, -1) - layer(x)).abs().max() < 1e-12

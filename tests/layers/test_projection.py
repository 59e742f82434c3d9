"""The projections as one product, with batch norm folded in: what may be merged, and what must not go stale."""

import copy

import pytest
import torch
from torch import nn

from lambdanets import LambdaLayer1d, LambdaLayer2d, RelativePositions
from lambdanets.layers import SqueezeExcitation2d
from lambdanets.ops import Relation, lambda_op

X = torch.randn(3, 8, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def layer() -> LambdaLayer2d:
    layer = LambdaLayer2d(8, heads=2, key_depth=4, scope=3).double()
    for _ in range(3):
        layer(torch.randn(4, 8, 5, 6, dtype=torch.float64))
    return layer.eval()


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_folded_batch_norm_is_batch_norm(layer):
    """Hooks make the layer call its modules one by one, with batch norm as a module of its own."""
    folded = layer(X)
    layer.norm_queries.register_forward_hook(lambda *args: None)
    close(folded, layer(X))


def test_hooks_on_projections_are_called(layer):
    seen = []
    for name in ("to_queries", "to_keys", "to_values", "norm_values"):
        getattr(layer, name).register_forward_hook(lambda module, *rest, name=name: seen.append(name))
    layer(X)
    layer.train()(X)
    assert sorted(seen) == sorted(["to_queries", "to_keys", "to_values", "norm_values"] * 2)


@pytest.mark.parametrize("kind", [LambdaLayer2d, SqueezeExcitation2d])
def test_a_parametrized_weight_is_computed_once(kind):
    """Checks of the input must not read it: spectral norm in training changes its estimate with each reading."""
    calls = []

    class Counting(nn.Module):
        def forward(self, weight):
            calls.append(1)
            return weight

    layer = kind(8).double()
    projection = layer.to_queries if kind is LambdaLayer2d else layer.fc1
    nn.utils.parametrize.register_parametrization(projection, "weight", Counting())
    calls.clear()
    layer(X)
    assert len(calls) == 1


def test_an_adapter_in_place_of_a_projection_is_trained(layer):
    class Adapter(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.linear, self.weight, self.out_features = linear, linear.weight, linear.out_features
            self.extra = nn.Parameter(torch.zeros_like(linear.weight))

        def forward(self, x):
            return self.linear(x) + x @ self.extra.T

    expected = layer(X)
    layer.to_values = Adapter(layer.to_values)
    found = layer(X)
    close(found, expected)
    found.square().sum().backward()
    assert layer.to_values.extra.grad.abs().max() > 0


def test_fused_equals_eval_and_is_undone(layer):
    expected = layer(X)
    with torch.inference_mode():
        layer.fuse()
    kept = layer.fused_projection.weight
    with torch.no_grad():
        close(layer(X), expected)
        close(copy.deepcopy(layer)(X), expected)
    assert layer.float().fused_projection.weight.dtype == torch.float32
    assert kept.dtype == torch.float64
    assert layer.unfuse().fused_projection is None


def test_fused_is_used(layer):
    layer.fuse()
    layer.fused_projection.weight.zero_()
    layer.fused_projection.bias.zero_()
    with torch.no_grad():
        assert layer(X).abs().max() == 0


@pytest.mark.parametrize("change", ["train", "load_state_dict", "reset_parameters"])
def test_fused_does_not_outlive_its_weights(layer, change):
    layer.fuse()
    if change == "train":
        layer.train()
    elif change == "load_state_dict":
        layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()})
    else:
        layer.reset_parameters()
    assert layer.fused_projection is None


def test_gradients_reach_the_weights_of_a_fused_layer(layer):
    layer.fuse()
    layer(X).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in (layer.to_queries.weight, layer.to_keys.weight))


@pytest.mark.parametrize("trains", ["to_values.weight", "norm_queries.bias"])
def test_gradients_reach_the_only_weight_that_trains(layer, trains):
    layer.fuse().requires_grad_(False)
    weight = layer.get_parameter(trains).requires_grad_()
    layer(X).square().sum().backward()
    assert weight.grad.abs().max() > 0


def test_fused_layer_with_a_context_of_other_channels():
    layer = LambdaLayer2d(8, context_channels=6, heads=2, key_depth=4, scope=3).double().eval()
    context = X[:, :6]
    with torch.no_grad():
        expected = layer(X, context)
        close(layer.fuse()(X, context), expected)


def test_fused_layer_with_other_positions(layer):
    layer.fuse()
    with torch.no_grad():
        before = layer(X)
        layer.positions = RelativePositions(2, 3, 4).double()
        found = layer(X)
        close(found, copy.deepcopy(layer).unfuse()(X))
    assert (found - before).abs().max() > 0.1


def test_synchronised_batch_norm_is_batch_norm():
    layer = nn.SyncBatchNorm.convert_sync_batchnorm(LambdaLayer1d(8, heads=2, causal=True, batch_norm=True))
    nn.init.constant_(layer.norm_queries.weight, 7.0)
    layer.reset_parameters()
    assert (layer.norm_queries.weight == 1).all()
    with pytest.raises(ValueError, match="eval"):
        layer.init_state(1)


def test_words_for_a_scope_are_refused():
    with pytest.raises(ValueError, match=r"scope must be a whole number .* got 'global'"):
        LambdaLayer2d(8, scope="global")


def test_integers_are_refused():
    with pytest.raises(TypeError, match=r"queries must be floating-point, got torch.int64; use queries.float"):
        lambda_op(torch.ones(1, 4, 1, 2).long(), torch.zeros(1, 4, 2), torch.zeros(1, 4, 3))


def test_relations_may_be_small_integers():
    index = torch.randint(0, 3, (4, 4), dtype=torch.uint8)
    inputs = torch.randn(1, 4, 1, 2), torch.randn(1, 4, 2), torch.randn(1, 4, 3)
    table = torch.randn(3, 2)
    close(lambda_op(*inputs, Relation(table, index)), lambda_op(*inputs, Relation(table, index.long())))


def test_causal_order_needs_one_grid():
    layer = LambdaLayer2d(8, heads=2, position=False, causal=True)
    with pytest.raises(ValueError, match=r"equal grids .*got \(4, 6\) and \(6, 4\)"):
        layer(torch.randn(1, 8, 4, 6), torch.randn(1, 8, 6, 4))


def test_steps_have_the_dtype_of_the_parallel_form():
    layer = LambdaLayer1d(8, heads=2, causal=True).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = layer.step(torch.randn(2, 8), layer.init_state(2))
        assert y.dtype == layer(torch.randn(2, 8, 4)).dtype == torch.bfloat16


def test_what_the_backward_pass_keeps_is_no_part_of_something_larger():
    """Keys as a slice of the projection would keep all of it: more memory than the layer's own input."""
    queries, keys, values, _, _ = LambdaLayer2d(64, scope=7).project(torch.randn(2, 64, 6, 6), None)
    for part in (queries, keys, values):
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


@pytest.mark.parametrize("backend", ["gemm", "dft"])
def test_fused_layer_keeps_what_depends_on_the_table_alone(backend, monkeypatch):
    layer = LambdaLayer2d(8, heads=2, key_depth=4, scope=3, backend=backend).double().eval()
    x = X
    with torch.no_grad():
        expected = layer(x)
        layer.fuse()
        torch.testing.assert_close(layer(x), expected)
        made = dict(layer.kept.made)
        assert len(made) == 1
        torch.testing.assert_close(layer(x), expected)
        assert list(layer.kept.made.values())[0] is list(made.values())[0]  # noqa: RUF015
        small = X[:, :, :4]
        torch.testing.assert_close(layer(small), copy.deepcopy(layer).unfuse()(small))  # another size
        assert len(layer.kept.made) == 2
        layer.positions.table.mul_(2)  # a change of the table is noticed
        torch.testing.assert_close(layer(x), copy.deepcopy(layer).unfuse()(x))
        for side in range(1, 3 * layer.kept.most):
            layer(X.repeat(1, 1, side, 1))
        assert len(layer.kept.made) <= layer.kept.most
        torch.testing.assert_close(layer.float()(x.float()), copy.deepcopy(layer).unfuse()(x.float()))
    layer(x.float().requires_grad_()).sum().backward()  # gradients of the table: nothing is kept
    assert layer.positions.table.grad is not None


def test_heads_with_tables_of_their_own_share_nothing_that_is_kept():
    layer = LambdaLayer2d(8, heads=2, key_depth=4, scope=3, multi_head=True, backend="gemm").double().eval()
    with torch.no_grad():
        expected = layer(X)
        layer.fuse()
        for _ in range(2):
            torch.testing.assert_close(layer(X), expected)


def test_batch_norm_gets_what_torch_has_fast_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of the merged projection has gaps between its rows: torch then takes kernels that are 50 times slower."""
    seen = []
    batch_norm = torch.nn.functional.batch_norm

    def watched(images, *args, **kwargs):
        seen.append(images)
        return batch_norm(images, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "batch_norm", watched)
    LambdaLayer2d(8, heads=2, key_depth=4, scope=3).train()(torch.randn(2, 8, 5, 5))
    assert len(seen) == 2, "queries and values"
    assert all(images.is_contiguous() and images.stride(1) == 1 for images in seen)

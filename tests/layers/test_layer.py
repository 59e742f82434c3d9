"""What a lambda layer computes: projections, batch norm and the reference, written out beside it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lambdanets import LambdaLayer1d, LambdaLayer2d, LambdaLayer3d
from lambdanets.ops import Relative, lambda_reference

LAYERS = {1: LambdaLayer1d, 2: LambdaLayer2d, 3: LambdaLayer3d}
SIZES = {1: (9,), 2: (5, 6), 3: (3, 4, 2)}


def build(dims=2, channels=8, **options):
    """A float64 layer whose batch norm is not the identity."""
    layer = LAYERS[dims](channels, **({"heads": 2, "key_depth": 3, "scope": 3} | options)).double()
    for norm in (layer.norm_queries, layer.norm_values):
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 2)
            nn.init.normal_(norm.bias)
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    return layer


def image(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def close(found, expected, tolerance=1e-10):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def by_hand(layer, x, context=None, mask=None, context_mask=None):
    """The layer from its weights alone: 1x1 convolutions, batch norm, the reference."""
    asked = x if context is None else context
    x = x[(..., *(slice(None, None, s) for s in layer.stride))]

    def project(weight, inputs):
        return torch.einsum("oc,bcn->bon", weight, inputs.flatten(2))

    def normed(module, projected):
        if not isinstance(module, nn.BatchNorm2d):
            return projected
        if not layer.training:
            return F.batch_norm(projected, module.running_mean, module.running_var, module.weight, module.bias)
        return F.batch_norm(projected, None, None, module.weight, module.bias, training=True)

    def split(projected, depth):
        shape = [layer.heads] if layer.multi_head else []
        shape += [depth] if layer.intra_depth == 1 else [depth, layer.intra_depth]
        return projected.unflatten(1, shape).movedim(-1, 1)

    queries = normed(layer.norm_queries, project(layer.to_queries.weight, x))
    queries = queries.unflatten(1, (layer.heads, layer.key_depth)).movedim(-1, 1)
    values = split(normed(layer.norm_values, project(layer.to_values.weight, asked)), layer.value_depth)
    keys = None if layer.to_keys is None else split(project(layer.to_keys.weight, asked), layer.key_depth)
    positions = None
    if layer.positions is not None:
        table, dilation = layer.positions.table, layer.positions.dilation
        positions = Relative(table, x.shape[2:], asked.shape[2:], dilation, layer.stride)
    output = lambda_reference(
        queries,
        keys,
        values,
        positions,
        content=keys is not None,
        key_norm=layer.key_norm,
        query_softmax=layer.query_softmax,
        multi_head=layer.multi_head,
        mask=mask,
        context_mask=None if context_mask is None else context_mask.flatten(1),
        causal=layer.causal,
    )
    return output.flatten(2).transpose(1, 2).unflatten(2, x.shape[2:])


OPTIONS = {
    "plain": {},
    "multi_head": {"multi_head": True},
    "intra_depth": {"intra_depth": 3},
    "multi_head_intra_depth": {"multi_head": True, "intra_depth": 2},
    "content_only": {"position": False},
    "position_only": {"content": False},
    "l2": {"key_norm": "l2"},
    "no_key_norm": {"key_norm": None},
    "query_softmax": {"query_softmax": True},
    "no_batch_norm": {"batch_norm": False},
    "causal": {"causal": True},
    "strict_batch_norm": {"causal": "strict", "batch_norm": True},
    "even_scope": {"scope": 4},
    "dilation": {"dilation": 2},
    "stride": {"stride": 2},
    "out_channels": {"out_channels": 14},
    "reference": {"backend": "reference"},
    "fft": {"backend": "fft"},
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dims", [1, 2, 3], ids=["1d", "2d", "3d"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_equals_its_parts(dims, options, training):
    layer = build(dims, **options).train(training)
    x = image(2, 8, *SIZES[dims]).requires_grad_()
    inputs = [x, *layer.parameters()]
    found, expected = layer(x), by_hand(layer, x)
    assert found.shape == (2, layer.out_channels, *(-(-s // layer.stride[0]) for s in SIZES[dims]))
    close(found, expected)
    gradient = torch.randn_like(found)
    grads = torch.autograd.grad(found, inputs, gradient)
    for found_grad, expected_grad in zip(grads, torch.autograd.grad(expected, inputs, gradient), strict=True):
        close(found_grad, expected_grad, 1e-9)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("size", [(5, 6), (3, 9), (1, 1)], ids=str)
@pytest.mark.parametrize("channels", [8, 5], ids=["same_channels", "context_channels"])
def test_cross_context(size, channels, training):
    layer = build(context_channels=channels, scope=(3, 4)).train(training)
    x, context = image(2, 8, 5, 6), image(2, channels, *size)
    close(layer(x, context), by_hand(layer, x, context))


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_masks(cross):
    layer = build().eval()
    x, context = image(2, 8, 5, 6), image(2, 8, 4, 3) if cross else None
    space = (4, 3) if cross else (5, 6)
    mask = torch.rand(30, space[0] * space[1]) > 0.4
    context_mask = torch.rand(2, *space) > 0.3
    found = layer(x, context, mask=mask, context_mask=context_mask)
    close(found, by_hand(layer, x, context, mask, context_mask))
    assert not torch.allclose(found, layer(x, context))


def test_padding_never_changes_an_image():
    layer = build(scope=5).eval()
    small = image(2, 8, 4, 5)
    alone = layer(small)
    mask = torch.zeros(2, 6, 8, dtype=torch.bool)
    mask[:, :4, :5] = True
    for padding in (float("nan"), -1e4):
        padded = torch.full((2, 8, 6, 8), padding, dtype=torch.float64)
        padded[:, :, :4, :5] = small
        close(layer(padded, context_mask=mask)[:, :, :4, :5], alone)
    assert not torch.allclose(layer(padded)[:, :, :4, :5], alone)  # without the mask it does


@pytest.mark.parametrize("dims", [1, 2, 3], ids=["1d", "2d", "3d"])
@pytest.mark.parametrize("stride", [2, 3])
def test_stride_is_a_subsampled_dense_result(dims, stride):
    strided = build(dims, stride=stride, scope=4).eval()
    dense = build(dims, scope=4).eval()
    dense.load_state_dict(strided.state_dict())
    x = image(2, 8, *SIZES[dims])
    close(strided(x), dense(x)[(..., *[slice(None, None, stride)] * dims)])


@pytest.mark.parametrize("size", [(4, 5), (6, 7), (1, 3)], ids=str)
def test_smaller_inputs_use_the_middle_of_a_global_table(size):
    layer = build(scope=None, input_size=(6, 7)).eval()
    assert layer.positions.scope == (11, 13)
    local = build(scope=(2 * size[0] - 1, 2 * size[1] - 1)).eval()
    table = layer.positions.table.detach()
    top, left = 6 - size[0], 7 - size[1]
    state = layer.state_dict() | {"positions.table": table[top : 11 - top, left : 13 - left].clone()}
    local.load_state_dict(state)
    x = image(2, 8, *size)
    close(layer(x), local(x))


@pytest.mark.parametrize("causal", [True, "strict"])
def test_causal_layer_does_not_see_the_future(causal):
    layer = build(causal=causal, scope=5, dims=2)
    x = image(1, 8, 4, 5)
    changed = x.clone()
    changed.flatten(2)[:, :, 11:] += 1
    before, after = layer(x).flatten(2), layer(changed).flatten(2)
    close(before[:, :, :11], after[:, :, :11])
    # The changed element asks differently, and all after it also see it.
    assert ((before - after).abs().amax(dim=1) > 1e-6)[0, 11:].all()


def test_running_statistics_are_those_of_batch_norm():
    layer = build(intra_depth=2)
    plain = nn.BatchNorm2d(layer.norm_values.num_features, dtype=torch.float64)
    plain.load_state_dict(layer.norm_values.state_dict())
    x = image(3, 8, 4, 5)
    layer(x)
    plain(torch.einsum("oc,bcyx->boyx", layer.to_values.weight, x))
    close(layer.norm_values.running_mean, plain.running_mean)
    close(layer.norm_values.running_var, plain.running_var)


def test_frozen_batch_norm_in_a_training_layer():
    """Detection fine-tunes with batch norm in eval mode: the running statistics are used and kept."""
    layer = build()
    for norm in (layer.norm_queries, layer.norm_values):
        norm.eval()
    before = layer.norm_values.running_mean.clone()
    x = image(2, 8, 4, 5)
    found = layer(x)
    assert torch.equal(layer.norm_values.running_mean, before)
    close(found, layer.eval()(x))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_memory_format_is_kept(training):
    for dims, form in ((2, torch.channels_last), (3, torch.channels_last_3d)):
        layer = build(dims).train(training)
        x = image(2, 8, *SIZES[dims])
        plain, last = layer(x), layer(x.to(memory_format=form))
        assert plain.is_contiguous()
        assert not plain.is_contiguous(memory_format=form)
        assert last.is_contiguous(memory_format=form)
        close(plain, last)


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (13, 2)], ids=str)
@pytest.mark.parametrize("scope", [1, 23], ids=["scope_1", "scope_23"])
def test_small_maps(size, scope):
    layer = build(scope=scope).eval()
    x = image(1, 8, *size)
    close(layer(x), by_hand(layer, x))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("causal", [False, True])
def test_empty_batch(training, causal):
    layer = build(causal=causal).train(training)
    x = image(0, 8, 4, 5).requires_grad_()
    output = layer(x)
    assert output.shape == (0, 8, 4, 5)
    output.sum().backward()
    assert x.grad.shape == x.shape
    assert layer.to_values.weight.grad.abs().max() == 0


def test_batch_of_one_pixel_in_training_raises_as_batch_norm_does():
    x = image(1, 8, 1, 1)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        nn.BatchNorm2d(8).double()(x)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        build()(x)
    assert build().eval()(x).shape == (1, 8, 1, 1)
    assert build(batch_norm=False)(x).shape == (1, 8, 1, 1)


def test_explain_says_what_could_run():
    found = build().explain(image(2, 8, 5, 6))
    assert found.keys() >= {"gemm", "conv", "depthwise", "dft", "fft"}
    assert not isinstance(next(iter(found.values())), str)  # the chosen one first
    assert isinstance(build(dims=1).explain(image(2, 8, 9))["dft"], str)


@pytest.mark.parametrize("options", [{}, {"multi_head": True}, {"query_softmax": True}], ids=str)
def test_position_bias_is_one_more_lambda(options):
    """b_k for every value: what lambdas plus a constant add to the output of a query is (q . b)."""
    layer = build(position_bias=True, **options).eval()
    x = image(2, 8, 5, 6)
    assert layer.position_bias.abs().max() == 0  # it starts as the paper's layer
    without = layer(x)
    nn.init.normal_(layer.position_bias)
    queries, *_ = layer.project(x, None)
    queries = queries.softmax(-1) if layer.query_softmax else queries
    extra = torch.einsum("bnhk,hk->bnh", queries, layer.position_bias.expand(layer.heads, -1))
    expected = extra[..., None].expand(-1, -1, -1, layer.value_depth).flatten(2).transpose(1, 2).unflatten(2, (5, 6))
    close(layer(x) - without, expected)

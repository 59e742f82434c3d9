"""The public layers, their position bias zeroed and their weights in ours: the same function, to 1e-10."""

import pytest
import torch
from torch import nn

from lambdanets import LambdaLayer2d

timm_lambda = pytest.importorskip("timm.layers.lambda_layer")
lucidrains = pytest.importorskip("lambda_networks")

CHANNELS, OUT, HEADS, DEPTH = 12, 12, 3, 5
TRAINING = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def randomise(peer):
    """Nothing may be at a value that hides a mistake: batch norm gets weights, biases and statistics."""
    for module in peer.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return peer.double()


def copy_norm(ours, theirs, order=slice(None)):
    for name in ("weight", "bias", "running_mean", "running_var"):
        getattr(ours, name).data.copy_(getattr(theirs, name).data[order])


def copy_bias(ours, convolution):
    """Their convolution adds a bias that the paper does not have: ours has it only where it is asked for."""
    if ours.position_bias is None:
        convolution.bias.data.zero_()
    else:
        nn.init.normal_(convolution.bias)
        ours.position_bias.data.copy_(convolution.bias.data)


def assert_same_function(ours, theirs, size, training):
    ours.train(training)
    theirs.train(training)
    x = torch.randn(3, CHANNELS, *size, dtype=torch.float64, requires_grad=True)
    found, expected = ours(x), theirs(x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    gradient = torch.randn_like(found)
    (found_grad,) = torch.autograd.grad(found, x, gradient)
    (expected_grad,) = torch.autograd.grad(expected, x, gradient)
    torch.testing.assert_close(found_grad, expected_grad, rtol=1e-10, atol=1e-10)
    for norm, other in ((ours.norm_queries, theirs.norm_q), (ours.norm_values, theirs.norm_v)):
        # Statistics move alike (lucidrains' value channels come in another order: sorted they are equal).
        torch.testing.assert_close(norm.running_mean.sort()[0], other.running_mean.sort()[0], rtol=1e-10, atol=1e-10)


def timm_pair(bias=False, **options):
    theirs = randomise(timm_lambda.LambdaLayer(CHANNELS, num_heads=HEADS, dim_head=DEPTH, **options))
    scope = {"scope": options["r"]} if options.get("r") else {"scope": None, "input_size": options["feat_size"]}
    ours = LambdaLayer2d(CHANNELS, heads=HEADS, key_depth=DEPTH, position_bias=bias, **scope).double()
    queries, keys, values = theirs.qkv.weight.data.flatten(1).split([HEADS * DEPTH, DEPTH, CHANNELS // HEADS])
    ours.to_queries.weight.data.copy_(queries)
    ours.to_keys.weight.data.copy_(keys)
    ours.to_values.weight.data.copy_(values)
    copy_norm(ours.norm_queries, theirs.norm_q)
    copy_norm(ours.norm_values, theirs.norm_v)
    if theirs.conv_lambda is None:
        nn.init.normal_(theirs.pos_emb)
        ours.positions.table.data.copy_(theirs.pos_emb.data)
    else:
        copy_bias(ours, theirs.conv_lambda)
        ours.positions.table.data.copy_(theirs.conv_lambda.weight.data[:, 0, :, :, 0].permute(1, 2, 0))
    return ours, theirs


@TRAINING
@pytest.mark.parametrize("size", [(6, 7), (3, 3)], ids=["6x7", "3x3"])
@pytest.mark.parametrize("r", [3, 9])
def test_timm_local(r, size, training):
    assert_same_function(*timm_pair(r=r), size, training)


@TRAINING
@pytest.mark.parametrize("size", [(5, 5), (4, 6)], ids=["5x5", "4x6"])
def test_timm_global(size, training):
    assert_same_function(*timm_pair(r=None, feat_size=size), size, training)


def lucidrains_pair(dim_u, bias=False, **options):
    theirs = randomise(lucidrains.LambdaLayer(CHANNELS, dim_k=DEPTH, heads=HEADS, dim_u=dim_u, **options))
    scope = {"scope": options["r"]} if "r" in options else {"scope": None, "input_size": options["n"]}
    ours = LambdaLayer2d(
        CHANNELS, heads=HEADS, key_depth=DEPTH, intra_depth=dim_u, position_bias=bias, **scope
    ).double()

    def order(depth):
        """Their channels go (u, depth), ours (depth, u)."""
        return torch.arange(dim_u * depth).view(dim_u, depth).T.flatten()

    ours.to_queries.weight.data.copy_(theirs.to_q.weight.data.flatten(1))
    ours.to_keys.weight.data.copy_(theirs.to_k.weight.data.flatten(1)[order(DEPTH)])
    ours.to_values.weight.data.copy_(theirs.to_v.weight.data.flatten(1)[order(OUT // HEADS)])
    copy_norm(ours.norm_queries, theirs.norm_q)
    copy_norm(ours.norm_values, theirs.norm_v, order(OUT // HEADS))
    if theirs.local_contexts:
        copy_bias(ours, theirs.pos_conv)
        table = theirs.pos_conv.weight.data[:, :, 0].permute(2, 3, 0, 1)  # [r, r, k, u]
    else:
        table = theirs.rel_pos_emb.data
    ours.positions.table.data.copy_(table if dim_u > 1 else table[..., 0])
    return ours, theirs


@TRAINING
@pytest.mark.parametrize("dim_u", [1, 2])
@pytest.mark.parametrize("size", [(6, 7), (3, 3)], ids=["6x7", "3x3"])
def test_lucidrains_local(dim_u, size, training):
    assert_same_function(*lucidrains_pair(dim_u, r=5), size, training)


@TRAINING
@pytest.mark.parametrize(
    "pair", [lambda: timm_pair(bias=True, r=3), lambda: lucidrains_pair(2, bias=True, r=3)], ids=["timm", "lucidrains"]
)
def test_with_their_position_bias(pair, training):
    assert_same_function(*pair(), (6, 7), training)


@TRAINING
@pytest.mark.parametrize("dim_u", [1, 2])
def test_lucidrains_global(dim_u, training):
    assert_same_function(*lucidrains_pair(dim_u, n=5), (5, 5), training)

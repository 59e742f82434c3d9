"""A layer refuses what it cannot do: the message has the offending value, and what to do."""

import pytest
import torch

from lambdanets import LambdaLayer1d, LambdaLayer2d, LambdaLayer3d, RelativePositions

BUILDING = {
    "heads": (
        {"out_channels": 30},
        "out_channels=30 is not divisible by heads=4.*28 or 32, or another number of heads",
    ),
    "fewer_channels_than_heads": ({"out_channels": 2}, "out_channels=2 .*use out_channels 4, or another"),
    "key_norm": ({"key_norm": "batch"}, "unknown key_norm 'batch'; choose one of 'softmax', 'l2', None"),
    "causal": ({"causal": "yes"}, r"unknown causal 'yes'; choose one of False, True \(m <= n\), 'strict'"),
    "nothing_left": ({"content": False, "position": False}, "no interaction at all: keep one of the two"),
    "global_without_size": ({"scope": None}, r"scope=None \(global\) needs input_size"),
    "global_dilation": ({"scope": None, "input_size": 8, "dilation": 2}, r"no dilation, got \(2, 2\); give a scope"),
    "scope_axes": ({"scope": (3, 3, 3)}, r"scope needs one size or 2 \(one per axis\), got \(3, 3, 3\)"),
    "scope_0": ({"scope": 0}, r"scope must be positive, got \(0, 0\)"),
    "dilation_0": ({"dilation": (1, 0)}, r"dilation must be positive, got \(1, 0\)"),
    "stride_axes": ({"stride": (2,)}, r"stride needs one size or 2.*got \(2,\)"),
    "input_size_axes": ({"scope": None, "input_size": (4, 4, 4)}, r"input_size needs one size or 2"),
    "positions_dims": ({"positions": RelativePositions(1, 3)}, "positions do not fit.*dims=1 instead of 2"),
    "positions_depth": ({"positions": RelativePositions(2, 3, 8)}, "key_depth=8 instead of 16"),
    "positions_intra_depth": (
        {"positions": RelativePositions(2, 3, intra_depth=2), "intra_depth": 4},
        "intra_depth=2 instead of 4",
    ),
    "positions_scope": ({"positions": RelativePositions(2, 3), "scope": 5}, r"scope=\(3, 3\) instead of \(5, 5\)"),
    "positions_global": ({"positions": RelativePositions(2, 3), "scope": None}, "is_global=False instead of True"),
    "positions_dilation": ({"positions": RelativePositions(2, 3), "dilation": 2}, r"dilation=\(1, 1\) instead of"),
    "positions_input_size": ({"positions": RelativePositions(2, 3), "input_size": 8}, "input_size=None instead of"),
    "positions_without_position": (
        {"positions": RelativePositions(2, 3), "position": False},
        "position=False: leave one of the two out",
    ),
    "bias_without_position": ({"position_bias": True, "position": False}, "position_bias .*position=False: leave one"),
    "heads_0": ({"heads": 0}, "heads must be at least 1, got 0"),
    "key_depth_0": ({"key_depth": 0}, "key_depth must be at least 1, got 0"),
    "positions_heads": ({"positions": RelativePositions(2, 3), "multi_head": True}, "heads=None instead of 4"),
}


@pytest.mark.parametrize(("options", "message"), BUILDING.values(), ids=BUILDING.keys())
def test_building(options, message):
    with pytest.raises(ValueError, match=message):
        LambdaLayer2d(32, **options)


def boolean(*shape):
    return torch.ones(*shape, dtype=torch.bool)


X = torch.zeros(2, 8, 4, 5)
CALLS = {
    "axes": ({}, (X[0],), {}, ValueError, r"x must be \[batch, channels, height, width\], got \[8, 4, 5\]"),
    "channels": ({}, (X[:, :7],), {}, ValueError, "x has 7 channels, this layer was built for 8"),
    "context_axes": ({}, (X, X[0]), {}, ValueError, r"context must be \[batch, channels, height, width\]"),
    "context_channels": ({}, (X, X[:, :3]), {}, ValueError, "context has 3 channels, this layer was built for 8"),
    "context_missing": ({"context_channels": 5}, (X,), {}, ValueError, r"needs a context with 5 channels: layer\(x, "),
    "context_batch": ({}, (X, X[:1]), {}, ValueError, "x has a batch of 2, its context one of 1"),
    "mask_shape": ({}, (X,), {"mask": boolean(4, 5)}, ValueError, r"mask must be \[20, 20\].*got \[4, 5\]"),
    "mask_dtype": ({}, (X,), {"mask": torch.ones(20, 20)}, TypeError, "mask must be boolean.*float32; use mask.bool"),
    "context_mask_shape": (
        {},
        (X,),
        {"context_mask": boolean(2, 20)},
        ValueError,
        r"context_mask must be \[2, 4, 5\], \[B, \*context space\], got \[2, 20\]",
    ),
    "context_mask_of_x": (
        {},
        (X, X[:, :, :2]),
        {"context_mask": boolean(2, 4, 5)},
        ValueError,
        r"context_mask must be \[2, 2, 5\].*got \[2, 4, 5\]",
    ),
    "context_mask_dtype": (
        {},
        (X,),
        {"context_mask": torch.ones(2, 4, 5)},
        TypeError,
        "context_mask must be boolean.*float32; use context_mask.bool",
    ),
    "beyond_input_size": (
        {"scope": None, "input_size": (4, 4)},
        (X,),
        {},
        ValueError,
        r"\(4, 5\).* larger than the input_size \(4, 4\).*larger input_size or with a local scope",
    ),
    "context_beyond_input_size": (
        {"scope": None, "input_size": (4, 5)},
        (X, torch.zeros(2, 8, 6, 5)),
        {},
        ValueError,
        r"the context is \(6, 5\).* larger than the input_size \(4, 5\)",
    ),
    "causal_without_positions": (
        {"causal": True, "position": False},
        (X, X[:, :, :2]),
        {},
        ValueError,
        "causal layer without positions needs equal grids",
    ),
    "unknown_backend": ({"backend": "magic"}, (X,), {}, ValueError, "unknown backend 'magic'; choose one of 'auto'"),
    "impossible_backend": (
        {"backend": "conv"},
        (X,),
        {"mask": boolean(20, 20)},
        ValueError,
        "backend 'conv' cannot run here: a mask differs.*gemm: can run",
    ),
}


@pytest.mark.parametrize(("options", "arguments", "masks", "error", "message"), CALLS.values(), ids=CALLS.keys())
def test_calling(options, arguments, masks, error, message):
    with pytest.raises(error, match=message):  # where it enters may be the building already
        LambdaLayer2d(8, **({"heads": 2, "key_depth": 3, "scope": 3} | options))(*arguments, **masks)


@pytest.mark.parametrize(
    ("layer", "x", "axes"),
    [(LambdaLayer1d, X, "length"), (LambdaLayer3d, X, "depth, height, width")],
    ids=["1d", "3d"],
)
def test_axes_are_named(layer, x, axes):
    with pytest.raises(ValueError, match=rf"x must be \[batch, channels, {axes}\], got \[2, 8, 4, 5\]"):
        layer(8, scope=3)(x)


def test_a_stride_counts_against_the_input_size():
    layer = LambdaLayer2d(8, scope=None, input_size=(4, 5), stride=2)
    assert layer(X).shape == (2, 8, 2, 3)
    with pytest.raises(ValueError, match="larger than the input_size"):
        layer(torch.zeros(2, 8, 4, 7))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # it is deprecated; TensorBoard's graphs still use it
def test_tracing_says_what_to_use_instead():
    with pytest.raises(RuntimeError, match=r"use torch\.compile, torch\.export"):
        torch.jit.trace(LambdaLayer2d(8), torch.randn(1, 8, 5, 5))

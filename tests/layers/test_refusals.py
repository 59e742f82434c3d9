"""A layer refuses what it cannot do: the message has the offending value, and what to do."""

import inspect
import io

import numpy as np
import pytest
import torch

from lambdanets import LambdaLayer1d, LambdaLayer2d, LambdaLayer3d, RelativePositions
from lambdanets.layers import (
    AugmentedConvolution2d,
    AxialAttention2d,
    ConvolutionLinearAttention2d,
    GlobalAttention2d,
    LinearAttention,
    LocalAttention2d,
    PairwiseAttention2d,
    PatchwiseAttention2d,
    SqueezeExcitation2d,
)
from lambdanets.ops import Dense, Relation, Relative, lambda_op

BUILDING = {
    "heads": (
        {"out_channels": 30},
        "out_channels=30 is not divisible by heads=4.*28 or 32, or another number of heads",
    ),
    "fewer_channels_than_heads": ({"out_channels": 2}, "out_channels=2 .*use out_channels 4, or another"),
    "key_norm": ({"key_norm": "batch"}, "unknown key_norm 'batch'; choose one of 'softmax', 'l2', None"),
    "causal": ({"causal": "yes"}, r"unknown causal 'yes'; choose one of False, True \(m <= n\), 'strict'"),
    "nothing_left": ({"content": False, "position": False}, "content and position are both False: keep at least one"),
    "global_without_size": ({"scope": None}, r"scope=None \(global\) needs input_size"),
    "global_dilation": ({"scope": None, "input_size": 8, "dilation": 2}, r"no dilation, got \(2, 2\): set scope"),
    "scope_axes": ({"scope": (3, 3, 3)}, r"scope must be one size or 2 sizes \(one per axis\), got \(3, 3, 3\)"),
    "scope_0": ({"scope": 0}, "scope must be at least 1, got 0"),
    "dilation_0": ({"dilation": (1, 0)}, r"dilation\[1\] must be at least 1, got 0"),
    "stride_axes": ({"stride": (2,)}, r"stride must be one size or 2.*got \(2,\)"),
    "input_size_axes": ({"scope": None, "input_size": (4, 4, 4)}, r"input_size must be one size or 2"),
    "positions_dims": ({"positions": RelativePositions(1, 3)}, "positions do not match.*dims=1 instead of 2"),
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
        "position=False: remove one of the two",
    ),
    "bias_without_position": (
        {"position_bias": True, "position": False},
        "position_bias=True .*position=False",
    ),
    "heads_0": ({"heads": 0}, "heads must be at least 1, got 0"),
    "key_depth_0": ({"key_depth": 0}, "key_depth must be at least 1, got 0"),
    "heads_bool": ({"heads": True}, "heads must be a whole number, got True"),
    "heads_float": ({"heads": 4.0}, "heads must be a whole number, got 4.0"),
    "scope_float": ({"scope": 7.0}, "scope must be a whole number .*, got 7.0"),
    "scope_of_floats": ({"scope": (7, 7.5)}, r"scope\[1\] must be a whole number, got 7.5"),
    "stride_0": ({"stride": (1, 0)}, r"stride\[1\] must be at least 1, got 0"),
    "position": ({"position": "x"}, "position must be true or false, got 'x'"),
    "batch_norm": ({"batch_norm": 3}, "batch_norm must be true or false or none, got 3"),
    "query_softmax": ({"query_softmax": 1}, "query_softmax must be true or false, got 1"),
    "embedding_std": ({"embedding_std": float("nan")}, "embedding_std must be .*, got nan"),
    "positions": ({"positions": 3}, "positions must be a RelativePositions or none, got 3"),
    "dtype": ({"dtype": torch.int64}, "dtype must be a floating-point dtype such as torch.float32, got torch.int64"),
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
    "channels": ({}, (X[:, :7],), {}, ValueError, "x has 7 channels, but this layer was built for 8"),
    "context_axes": ({}, (X, X[0]), {}, ValueError, r"context must be \[batch, channels, height, width\]"),
    "context_channels": ({}, (X, X[:, :3]), {}, ValueError, "context has 3 channels, but this layer was built for 8"),
    "context_missing": ({"context_channels": 5}, (X,), {}, ValueError, "context_channels=5: pass a context"),
    "context_batch": ({}, (X, X[:1]), {}, ValueError, "same batch size, got 2 and 1"),
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
        "position=False needs equal grids",
    ),
    "unknown_backend": ({"backend": "magic"}, (X,), {}, ValueError, "unknown backend 'magic'; choose one of 'auto'"),
    "impossible_backend": (
        {"backend": "conv"},
        (X,),
        {"mask": boolean(20, 20)},
        ValueError,
        "backend 'conv' cannot run here: a convolution cannot apply a mask.*gemm: can run",
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


LAYERS = {
    "1d": (LambdaLayer1d, {}, 3),
    "2d": (LambdaLayer2d, {}, 4),
    "3d": (LambdaLayer3d, {"scope": 3}, 5),
    "global": (GlobalAttention2d, {"input_size": 5}, 4),
    "axial": (AxialAttention2d, {"input_size": 5}, 4),
    "local": (LocalAttention2d, {"heads": 2}, 4),
    "augmented": (AugmentedConvolution2d, {"input_size": 5, "heads": 2}, 4),
    "pairwise": (PairwiseAttention2d, {"scope": 3}, 4),
    "patchwise": (PatchwiseAttention2d, {"scope": 3}, 4),
    "convolved": (ConvolutionLinearAttention2d, {}, 4),
    "linear": (LinearAttention, {}, 4),
    "se": (SqueezeExcitation2d, {}, 4),
}
every_layer = pytest.mark.parametrize(("kind", "options", "axes"), LAYERS.values(), ids=LAYERS)


@every_layer
def test_inputs_that_are_no_tensors_of_this_type(kind, options, axes):
    layer, x = kind(8, **options), torch.zeros(1, 8, *[5] * (axes - 2))
    for wrong, message in (
        (x.double(), r"x is torch.float64, but the weights of this layer are torch.float32: use x.to\(torch.float32\)"),
        (x.long(), r"x must be floating-point, got torch.int64: use x.float\(\)"),
        (x.byte(), r"x must be floating-point, got torch.uint8: use x.float\(\) / 255"),
        (x.numpy(), r"x must be a torch.Tensor, got ndarray: use torch.as_tensor\(x\)"),
        (None, "x must be a torch.Tensor, got NoneType"),
    ):
        with pytest.raises(TypeError, match=message):
            layer(wrong)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x.bfloat16())  # autocast allows other types


def test_a_context_of_another_type():
    with pytest.raises(TypeError, match=r"context is torch.float64, but the weights"):
        LambdaLayer2d(8)(X, X.double())


def test_a_context_mask_that_is_no_tensor():
    with pytest.raises(TypeError, match=r"context_mask must be a torch.Tensor, got ndarray: use torch.as_tensor\(cont"):
        LambdaLayer2d(8)(X, context_mask=np.ones((2, 4, 5), bool))
    with pytest.raises(TypeError, match=r"context_mask must be a torch.Tensor, got list"):
        LambdaLayer2d(8)(X, context_mask=[True])


def test_inputs_of_single_steps():
    layer = LambdaLayer1d(8, scope=3, causal=True).eval()
    x, state = torch.zeros(2, 8), layer.init_state(2)
    for wrong, message in (
        (x.double(), r"x is torch.float64, but the weights of this layer are torch.float32"),
        (x.byte(), r"x must be floating-point, got torch.uint8: use x.float\(\) / 255"),
        (x.cfloat(), r"x must be floating-point, got torch.complex64: use x.real or x.abs\(\)"),
        (x.numpy(), r"x must be a torch.Tensor, got ndarray: use torch.as_tensor\(x\)"),
    ):
        with pytest.raises(TypeError, match=message):
            layer.step(wrong, state)
        with pytest.raises(TypeError, match=message):
            layer.prefill(wrong[:, :, None])
    with pytest.raises(TypeError, match=r"state must be a StreamState from init_state, .* got NoneType"):
        layer.step(x, None)
    for batch, message in ((2.0, "batch must be a whole number, got 2.0"), (-1, "batch must be at least 0, got -1")):
        with pytest.raises(ValueError, match=message):
            layer.init_state(batch)


@every_layer
def test_arguments_that_people_carry_over(kind, options, axes):
    name = kind.__name__
    with pytest.raises(TypeError, match=f"{name} has no argument dim; use channels"):
        kind(dim=8, **options)
    with pytest.raises(ValueError, match="channels must be a whole number, got None"):
        kind(None, **options)
    with pytest.raises(TypeError, match=f"{name} needs channels"):
        kind(**options)
    with pytest.raises(TypeError, match=f"{name} takes only channels.* by position, got 4 values"):
        kind(8, 8, 3, 1, **options)
    with pytest.raises(TypeError, match=f"{name} has no argument padding; padding is automatic"):
        kind(8, padding=1, **options)
    if "heads" in inspect.signature(kind).parameters:
        with pytest.raises(TypeError, match=f"{name} has no argument num_heads; use heads$"):
            kind(8, num_heads=4, **options)
        with pytest.raises(TypeError, match=f"{name} has no argument key_dept; did you mean key_depth"):
            kind(8, key_dept=4, **options)
        with pytest.raises(ValueError, match="heads must be at least 1, got 0"):
            kind(8, **{**options, "heads": 0})


def test_window_arguments():
    for name in ("kernel_size", "window_size", "r"):
        with pytest.raises(TypeError, match=rf"has no argument {name}; use scope \(the window"):
            LambdaLayer2d(8, **{name: 3})
    with pytest.raises(ValueError, match="dims must be from 1 to 3, got 4"):
        RelativePositions(4)
    with pytest.raises(TypeError, match="RelativePositions has no argument num_heads; use heads"):
        RelativePositions(2, num_heads=4)
    with pytest.raises(ValueError, match="kernel_size must be odd, got 4: use 5"):
        AugmentedConvolution2d(8, input_size=5, heads=2, kernel_size=4)
    assert LambdaLayer2d(np.int64(8), heads=np.int32(2), scope=[3, 5]).positions.scope == (3, 5)


def test_the_function():
    queries, keys, values = torch.zeros(1, 4, 2, 3), torch.zeros(1, 4, 3), torch.zeros(1, 4, 5)
    with pytest.raises(TypeError, match=r"queries must be a torch.Tensor, got ndarray: use torch.as_tensor"):
        lambda_op(queries.numpy(), keys, values)
    with pytest.raises(TypeError, match=r"mask must be a torch.Tensor, got ndarray"):
        lambda_op(queries, keys, values, mask=np.ones((4, 4), bool))
    with pytest.raises(TypeError, match="positions must be Dense, Relative or Relation embeddings, got Tensor"):
        lambda_op(queries, keys, values, keys)
    table = np.zeros((4, 4, 3))
    for positions in (Dense(table), Relative(table[0], 4), Relation(table[0], torch.zeros(4, 4, dtype=torch.int64))):
        name = type(positions).__name__
        with pytest.raises(TypeError, match=f"embeddings of {name} must be a torch.Tensor, got ndarray: use torch.as"):
            lambda_op(queries, keys, values, positions)
    with pytest.raises(TypeError, match=r"lambda_op has no argument heads; the heads are an axis of the queries"):
        lambda_op(queries, keys, values, heads=2)
    with pytest.raises(TypeError, match=r"lambda_op has no argument key_nrm; did you mean key_norm\?"):
        lambda_op(queries, keys, values, key_nrm="l2")


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # it is deprecated; TensorBoard's graphs still use it
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracing_says_what_to_use_instead():
    layer, x = LambdaLayer2d(8).eval(), torch.randn(1, 8, 5, 5)
    instead = r"use torch\.compile, torch\.export, .*lambdanets export"
    with pytest.raises(RuntimeError, match=instead):
        torch.jit.trace(layer, x)
    with pytest.raises(RuntimeError, match=f"dynamo=False.* cannot follow LambdaLayer2d: {instead}"):
        torch.onnx.export(layer, (x,), io.BytesIO(), dynamo=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@every_layer
def test_scripting_and_symbolic_tracing_say_what_to_use_instead(kind, options, axes):
    layer = kind(8, **options)
    with pytest.raises(RuntimeError, match=rf"torch\.jit\.script cannot compile {kind.__name__}: use torch\.compile"):
        torch.jit.script(layer)
    with pytest.raises(TypeError, match=r"symbolic_trace cannot follow this module: use torch.export"):
        torch.fx.symbolic_trace(layer)


def test_a_tracer_may_keep_a_layer_whole():
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m, module_qualified_name):
            return isinstance(m, LambdaLayer2d) or super().is_leaf_module(m, module_qualified_name)

    model = torch.nn.Sequential(LambdaLayer2d(8, scope=3), torch.nn.ReLU())
    traced, x = torch.fx.GraphModule(model, Tracer().trace(model)), torch.randn(2, 8, 4, 5)
    torch.testing.assert_close(traced.eval()(x), model.eval()(x))

"""torch.compile without recompiling per size, and torch.export with sizes that stay open."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim

from lambdanets import LambdaLayer1d, LambdaLayer2d
from lambdanets.ops import gemm

LAYERS = {
    "2d": (lambda: LambdaLayer2d(8, scope=5), [(2, 8, 6, 7), (3, 8, 9, 4), (5, 8, 12, 10)]),
    "2d_global": (lambda: LambdaLayer2d(8, scope=None, input_size=12), [(2, 8, 6, 7), (3, 8, 9, 4), (5, 8, 12, 10)]),
    "2d_stride": (lambda: LambdaLayer2d(8, scope=5, stride=2), [(2, 8, 6, 7), (3, 8, 9, 5), (5, 8, 12, 10)]),
    "1d_causal": (lambda: LambdaLayer1d(8, scope=5, causal=True), [(2, 8, 9), (3, 8, 40), (5, 8, 33)]),
}


pytestmark = pytest.mark.usefixtures("forget_compiled_code")


def steps(layer, x):
    """Output, gradient of the input and of every parameter of a training step."""
    x = x.clone().requires_grad_()
    output = layer(x)
    grads = torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])
    return [output.detach(), *grads]


@pytest.mark.parametrize("name", LAYERS)
def test_one_compilation_for_all_sizes(name):
    build, shapes = LAYERS[name]
    layer = build().double()
    compiled_layer = copy.deepcopy(layer)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(compiled_layer, fullgraph=True, dynamic=True, backend=counter)
    compilations = []
    for shape in shapes:
        x = torch.randn(*shape, dtype=torch.float64)
        expected = steps(layer, x)
        inputs = x.clone().requires_grad_()
        output = compiled(inputs)
        grads = torch.autograd.grad(output.square().sum(), [inputs, *compiled_layer.parameters()])
        for found, wanted in zip([output.detach(), *grads], expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
        compilations.append(counter.frame_count)
    assert compilations[0] > 0  # it was compiled,
    assert len(set(compilations)) == 1  # and never again
    for found, wanted in zip(compiled_layer.buffers(), layer.buffers(), strict=True):  # batch norm's statistics
        torch.testing.assert_close(found, wanted)


def test_compiled_evaluation():
    layer = LambdaLayer2d(8, scope=5).eval()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    compilations = []
    with torch.no_grad():
        for shape in [(2, 8, 6, 7), (3, 8, 9, 4), (4, 8, 30, 20)]:
            x = torch.randn(*shape)
            torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-4)
            compilations.append(counter.frame_count)
    assert compilations[0] > 0
    assert len(set(compilations)) == 1


def test_compiled_under_autocast():
    layer = LambdaLayer2d(8, scope=5).eval()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(2, 8, 6, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = compiled(x), layer(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


OPEN = Dim("batch", min=1, max=64)
EXPORTED = {
    "2d_local": (
        lambda: LambdaLayer2d(8, scope=5),
        {0: OPEN, 2: Dim("height", min=4, max=64), 3: Dim("width", min=4, max=64)},
        [(2, 8, 6, 7), (5, 8, 9, 20), (3, 8, 4, 4)],
    ),
    "2d_scope_beyond_map": (
        lambda: LambdaLayer2d(8, scope=23),
        {0: OPEN, 2: Dim("height", min=4, max=64), 3: Dim("width", min=4, max=64)},
        [(2, 8, 6, 7), (5, 8, 30, 20), (3, 8, 4, 4)],
    ),
    "2d_multi_head": (
        lambda: LambdaLayer2d(8, scope=4, multi_head=True, intra_depth=2),
        {0: OPEN, 2: Dim("height", min=4, max=64), 3: Dim("width", min=4, max=64)},
        [(2, 8, 6, 7), (5, 8, 9, 20)],
    ),
    "2d_stride": (
        lambda: LambdaLayer2d(8, scope=5, stride=2),
        {0: OPEN, 2: Dim("height", min=4, max=64), 3: Dim("width", min=4, max=64)},
        [(2, 8, 6, 7), (5, 8, 9, 20), (3, 8, 8, 5)],
    ),
    "1d_causal": (
        lambda: LambdaLayer1d(8, scope=5, causal=True),
        {0: OPEN, 2: Dim("length", min=4, max=128)},
        [(2, 8, 40), (3, 8, 70), (1, 8, 5)],
    ),
    "2d_global": (
        lambda: LambdaLayer2d(8, scope=None, input_size=(6, 7)),
        {0: OPEN},
        [(2, 8, 6, 7), (5, 8, 6, 7)],
    ),
    "1d_local": (
        lambda: LambdaLayer1d(8, scope=5),
        {0: OPEN, 2: Dim("length", min=4, max=64)},
        [(2, 8, 9), (3, 8, 30)],
    ),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_export_with_open_sizes(name):
    build, dynamic, shapes = EXPORTED[name]
    layer = build().double().eval()
    program = torch.export.export(layer, (torch.randn(*shapes[0], dtype=torch.float64),), dynamic_shapes=(dynamic,))
    # Plain torch, so that other runtimes can read it.
    assert not any("lambdanets" in str(node.target) for node in program.graph.nodes)
    for shape in shapes:
        x = torch.randn(*shape, dtype=torch.float64)
        torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-9, atol=1e-9)


def test_export_with_a_mask_of_padding():
    layer = LambdaLayer2d(8, scope=5).double().eval()
    x = torch.randn(2, 8, 6, 7, dtype=torch.float64)
    mask = torch.rand(2, 6, 7) > 0.3
    program = torch.export.export(layer, (x,), {"context_mask": mask})
    other = torch.rand(2, 6, 7) > 0.5
    torch.testing.assert_close(program.module()(x, context_mask=other), layer(x, context_mask=other))


def test_export_with_a_mask_and_an_open_batch(monkeypatch):
    """By matrix products, without gradients: in one piece, whatever the batch."""
    monkeypatch.setattr(gemm, "PART", 1)  # in parts it would be a loop of as many turns as the first batch has
    layer = LambdaLayer2d(8, scope=5, heads=1, key_depth=2).double().eval()
    x, mask = torch.randn(2, 8, 4, 5, dtype=torch.float64), torch.rand(20, 20) > 0.3
    with torch.no_grad():
        program = torch.export.export(layer, (x,), {"mask": mask}, dynamic_shapes={"x": {0: OPEN}, "mask": None})
        assert not any("out" in node.kwargs for node in program.graph.nodes)
        for batch in (2, 5):
            x = torch.randn(batch, 8, 4, 5, dtype=torch.float64)
            torch.testing.assert_close(program.module()(x, mask=mask), layer(x, mask=mask), rtol=1e-9, atol=1e-9)

"""A training step of small layers that together launch every kernel: what `make sanitize` runs under compute-sanitizer.

Layers use the fused kernels in half precision and are compared with the same layers in float64 by another backend.
"""

import copy

import pytest
import torch

from lambdanets import LambdaLayer2d
from lambdanets.ops.triton import pool_first, why_not
from tests.ops.kernels import CUDA, DEVICE, relative_error

HALF = torch.bfloat16 if CUDA else torch.float16  # the interpreter has no bfloat16
REASON = why_not(DEVICE, HALF, 16, 16, 4)
pytestmark = [pytest.mark.sanitize, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

LAYERS = {  # map, and what differs from the defaults below
    "several chunks of context": ((10, 13), {}),
    "all pairs of a larger map": ((17, 16), dict(scope=None, input_size=(17, 16))),
    "intra-depth, larger map": ((17, 16), dict(intra_depth=2)),
    "tiles": ((17, 16), {}),
    "tiles of a wide map, several batch elements": ((8, 34), dict(scope=(3, 5))),
    "pooling first": ((5, 6), dict(downsample="avg")),
    "pooling last": ((5, 6), dict(downsample="avg")),
}


def step(layer, x, gradient):
    output = layer(x)
    return [output, *torch.autograd.grad(output, [x, *layer.parameters()], gradient.to(output.dtype))]


@pytest.mark.parametrize("name", LAYERS)
def test_a_training_step(name, monkeypatch):
    if not CUDA and "larger map" in name:
        pytest.skip("too slow for the interpreter; test_fused.py runs these kernels on smaller cases")
    grid, options = LAYERS[name]
    if name.startswith("pooling"):
        reason = None if name == "pooling first" else "not asked for"
        monkeypatch.setattr(pool_first, "why_not", lambda problem, backward: reason if problem.pooled else "no pooling")
    torch.manual_seed(0)
    exact = LambdaLayer2d(32, **dict(heads=2, key_depth=16, scope=3, backend="gemm") | options).double().to(DEVICE)
    layer = copy.deepcopy(exact).to(HALF)
    layer.backend = "fused"
    x = torch.randn(3, 32, *grid, device=DEVICE, dtype=HALF).to(memory_format=torch.channels_last).requires_grad_()
    shape = exact(x.detach().double()).shape
    gradient = torch.randn(shape, device=DEVICE, dtype=HALF).contiguous(memory_format=torch.channels_last)
    found = step(layer, x, gradient)
    right = step(exact, x.detach().double().requires_grad_(), gradient.double())
    names = ["output", "input", *(name for name, _ in layer.named_parameters())]
    for part, one, other in zip(names, found, right, strict=True):
        if part == "norm_values.weight":  # zero but for rounding: batch norm of a sum does not see its scale
            continue
        assert torch.isfinite(one).all(), part
        assert relative_error(one, other) < 0.1, part

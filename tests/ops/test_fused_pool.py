"""The kernels of average pooling against torch in float64: values, gradients, and gradients of those. Runs as
test_fused.py does.
"""

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton is not installed")

from lambdanets.layers.pool import AveragePool
from lambdanets.ops.triton import pooling, pooling_operators, why_not
from tests.ops.kernels import CUDA, DEVICE, DTYPES, Graphs

REASON = why_not(DEVICE, torch.float32, 1, 1, 1)
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.usefixtures("poisoned_memory", "forget_compiled_code"),
]
LAST = torch.channels_last
THREE, TWO = AveragePool(3, 2, padding=1), AveragePool(2, 2, ceil_mode=True, count_include_pad=False)
OPERATORS = ["average_pool", "average_pool_backward"]


def images(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype).to(memory_format=LAST).requires_grad_()


def by_torch(module, x, gradient):
    """Values and gradients in float64, on the CPU: torch's own on a GPU are wrong for padded channels-last images."""
    exact = x.detach().cpu().double().requires_grad_()
    values = nn.AvgPool2d.forward(module, exact)
    return values, *torch.autograd.grad(values, exact, gradient.cpu().double())


def check(found, expected, dtype):
    """One rounding, after sums in float32."""
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        eps = torch.finfo(dtype).eps / 2 + 4 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(one.cpu().double(), other, rtol=eps, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        pytest.param(THREE, (2, 5, 7, 9), id="odd"),
        pytest.param(THREE, (2, 16, 8, 6), id="even"),
        pytest.param(THREE, (1, 300, 5, 12), id="two tiles of channels, odd and even"),
        pytest.param(THREE, (1, 72, 4, 70), id="two tiles of columns"),
        pytest.param(THREE, (3, 1, 1, 1), id="a pixel"),
        pytest.param(THREE, (2, 3, 1, 6), id="a row"),
        pytest.param(THREE, (2, 3, 7, 1), id="a column"),
        pytest.param(THREE, (0, 3, 7, 4), id="no images"),
        pytest.param(TWO, (2, 16, 6, 10), id="two by two"),
        pytest.param(TWO, (1, 67, 2, 66), id="two by two, tiles"),
    ],
)
def test_pooling(module, shape, dtype):
    x = images(*shape, dtype=dtype)
    assert pooling.takes(x)
    assert module.is_halving(x)
    found = module(x)
    assert found.is_contiguous(memory_format=LAST)
    gradient = torch.randn(found.shape, device=DEVICE).to(dtype)  # of the other layout
    (dx,) = torch.autograd.grad(found, x, gradient)
    assert dx.is_contiguous(memory_format=LAST)
    check((found, dx), by_torch(module, x, gradient), dtype)


@pytest.mark.parametrize("kernel", [2, 3])
@pytest.mark.parametrize("rows", [1, 3])
def test_other_tiles(rows, kernel, monkeypatch):
    """An odd edge of windows of 2x2 has no window, and no gradient."""
    monkeypatch.setattr(pooling_operators, "ROWS", rows)
    monkeypatch.setattr(pooling_operators, "COLUMNS", 4)
    module, x = AveragePool(kernel, 2, padding=kernel - 2), images(2, 6, 9, 13)
    found = pooling.average_pool(x, kernel)
    gradient = torch.randn_like(found)
    check((found, *torch.autograd.grad(found, x, gradient)), by_torch(module, x, gradient), torch.float32)


@pytest.mark.parametrize("kernel", [2, 3])
def test_pooling_registered(kernel):
    x = images(2, 3, 6, 4)
    torch.library.opcheck(pooling_operators.average_pool, (x, kernel))
    gradient = torch.randn(pooling_operators.forward(x.detach(), kernel).shape, device=DEVICE, requires_grad=True)
    torch.library.opcheck(pooling_operators.average_pool_backward, (gradient, 6, 4, kernel))  # of the other layout


@pytest.mark.parametrize("module", [THREE, TWO], ids=["3x3", "2x2"])
def test_gradients_of_gradients(module):
    """And of many gradients at once, by autograd's own batches and by torch.vmap."""
    x = images(2, 3, 6, 4)
    values = module(x)
    gradient = torch.randn(values.shape, device=DEVICE, requires_grad=True)
    (dx,) = torch.autograd.grad(values, x, gradient, create_graph=True)
    weights = torch.randn_like(dx)
    (twice,) = torch.autograd.grad(dx, gradient, weights)  # pooling is linear: what it makes of the weights
    torch.testing.assert_close(twice, module(weights))
    many = torch.randn(3, *values.shape, device=DEVICE)
    one_by_one = [torch.autograd.grad(values, x, one, retain_graph=True)[0] for one in many]
    (batched,) = torch.autograd.grad(values, x, many, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(batched, torch.stack(one_by_one))
    mapped = torch.vmap(lambda one: torch.autograd.grad(values, x, one, retain_graph=True)[0])(many)
    torch.testing.assert_close(mapped, batched)


@pytest.mark.parametrize("module", [THREE, TWO], ids=["3x3", "2x2"])
def test_transforms_take_torch(module):
    x, direction = images(3, 4, 6, 8).detach(), images(3, 4, 6, 8).detach()
    right = nn.AvgPool2d.forward(module, x)
    torch.testing.assert_close(torch.vmap(module)(x[:, None])[:, 0], right)
    values, slope = torch.func.jvp(module, (x,), (direction,))
    torch.testing.assert_close(values, right)
    torch.testing.assert_close(slope, nn.AvgPool2d.forward(module, direction))
    weights = torch.randn_like(right)
    dx = torch.func.grad(lambda one: (module(one) * weights).sum())(x)
    check((dx,), by_torch(module, x, weights)[1:], torch.float32)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("module", "operators"), [(THREE, OPERATORS), (TWO, [])], ids=["3x3", "2x2"])
def test_pooling_compiled(module, operators, dynamic):
    """Windows of 2x2 are left to the compiler."""
    graphs = Graphs()
    compiled = torch.compile(module, backend=graphs.backend, fullgraph=True, dynamic=dynamic)
    for shape in ((2, 16, 6, 8), (3, 16, 10, 4))[: 1 + dynamic]:
        x = images(*shape)
        found = compiled(x)
        gradient = torch.randn_like(found)
        check((found, *torch.autograd.grad(found, x, gradient)), by_torch(module, x, gradient), torch.float32)
    names = [str(node.target) for graph in graphs.forward + graphs.backward for node in graph.graph.nodes]
    assert [name.split(".")[1] for name in names if name.startswith("lambdanets.")] == operators  # once for all sizes


@pytest.mark.parametrize("strict", [False, True])
def test_exported_pooling_is_torch_alone(strict):
    program = torch.export.export(THREE, (images(2, 8, 4, 3).detach(),), strict=strict)
    targets = [str(node.target) for node in program.graph.nodes]
    assert [target for target in targets if "avg_pool2d" in target]
    assert not [target for target in targets if "lambdanets" in target]


def test_what_the_kernels_do_not_take():
    assert not pooling.takes(torch.randn(2, 3, 4, 5, device=DEVICE))
    assert not pooling.takes(images(2, 3, 4, 5)[:, :2])
    assert not pooling.takes(images(2, 3, 4, 5, dtype=torch.float64))
    assert not pooling.takes(torch.randn(3, 4, 5, device=DEVICE))
    assert CUDA or not pooling.takes(images(2, 3, 4, 5, dtype=torch.bfloat16))  # of which the interpreter has none


@pytest.mark.parametrize("channels", [1, 3, 16, 24, 64, 96, 144, 256, 320, 512, 2048])
def test_tiles(channels):
    tile = pooling_operators.tile_of(channels, 3)
    unused = -channels % tile["CH"]
    assert unused <= max(channels // 3, 1)
    assert tile["CH"] * tile["COLS"] <= pooling_operators.NUMBERS

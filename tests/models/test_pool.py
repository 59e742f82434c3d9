"""Average pooling with right gradients: by a matrix product, by a copy, and by torch where torch is right."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from lambdanets.models import create_model
from lambdanets.models.pool import AveragePool, Halved, is_plain

SHORTCUT = AveragePool(2, 2, ceil_mode=True, count_include_pad=False)  # of ResNet-D
AFTER_LAYER = AveragePool(3, 2, padding=1)  # where a lambda layer makes the map smaller
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("pool", "grid"),
    [(AFTER_LAYER, (7, 10)), (AFTER_LAYER, (8, 5)), (AFTER_LAYER, (1, 1)), (SHORTCUT, (6, 4))],
)
def test_values_and_gradients(pool: AveragePool, grid: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, *grid, dtype=torch.float64, generator=generator).to(memory_format=torch.channels_last)
    x.requires_grad_()
    assert pool.is_halving(x)
    expected, found = nn.AvgPool2d.forward(pool, x), Halved.apply(x, pool.kernel_size)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert found.is_contiguous(memory_format=torch.channels_last)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    gradients = [torch.autograd.grad((y * weights).sum(), x)[0] for y in (expected, found)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda y: Halved.apply(y, pool.kernel_size), x)


def test_a_half_precision_result_is_rounded_once() -> None:
    x = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x = x.to(memory_format=torch.channels_last)
    exact = nn.functional.avg_pool2d(x.double(), 3, 2, padding=1)
    assert torch.equal(Halved.apply(x, 3), exact.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("pool", "grid"),
    [
        (SHORTCUT, (5, 4)),
        (AveragePool(3, 2, padding=1, count_include_pad=False), (6, 6)),
        (AveragePool(3, 2, padding=1, ceil_mode=True), (6, 6)),
        (AveragePool(3, 1, padding=1), (6, 6)),
        (AveragePool(3, 2), (7, 7)),
        (AveragePool(2, 2, divisor_override=3), (6, 6)),
        (AFTER_LAYER, (65, 64)),
    ],
)
def test_other_pooling_is_not_taken_for_this(pool: AveragePool, grid: tuple[int, int]) -> None:
    assert not pool.is_halving(torch.empty(1, 1, *grid, device="meta"))


LAST = torch.channels_last


@pytest.mark.parametrize(
    ("pool", "x", "way"),
    [
        (AFTER_LAYER, torch.empty(2, 3, 8, 8, dtype=torch.bfloat16).to(memory_format=LAST), "halved"),
        (AFTER_LAYER, torch.empty(2, 3, 8, 8).to(memory_format=LAST), "copied"),
        (AFTER_LAYER, torch.empty(2, 3, 8, 8, dtype=torch.bfloat16), "torch"),
        (AFTER_LAYER, torch.empty(1, 3, 65, 64, dtype=torch.bfloat16).to(memory_format=LAST), "copied"),
        (AFTER_LAYER, torch.empty(3, 8, 8), "torch"),
        (SHORTCUT, torch.empty(2, 3, 8, 8).to(memory_format=LAST), "halved"),
        (SHORTCUT, torch.empty(2, 3, 7, 8).to(memory_format=LAST), "torch"),
        (AveragePool(3, 1, padding=1), torch.empty(2, 3, 8, 8).to(memory_format=LAST), "copied"),
    ],
)
def test_padded_channels_last_images_never_reach_torchs_gradients(pool: AveragePool, x: torch.Tensor, way: str) -> None:
    assert pool.way(x) == way


def test_fake_images_leave_nothing_behind() -> None:
    """Estimators of memory run networks on fake tensors; the next real one has to find a real matrix."""
    with FakeTensorMode():
        Halved.apply(torch.empty(2, 3, 12, 10).to(memory_format=LAST), 3)
    x = torch.ones(2, 3, 12, 10).to(memory_format=LAST)
    torch.testing.assert_close(Halved.apply(x, 3), nn.AvgPool2d.forward(AFTER_LAYER, x))


@pytest.mark.parametrize("channels", [1, 3])
def test_layouts(channels: int) -> None:
    x = torch.empty(2, channels, 4, 5, device="meta")
    assert is_plain(x)
    assert not is_plain(x.to(memory_format=torch.channels_last))
    assert not is_plain(x[:, :, ::2])


@pytest.mark.parametrize(("name", "placement"), [("resnet26_d", "CCCC"), ("resnet26", "LLLL")])
def test_the_networks_have_no_other(name: str, placement: str) -> None:
    pools = [one for one in create_model(name, placement=placement).modules() if isinstance(one, nn.AvgPool2d)]
    assert len(pools) == 3
    assert all(isinstance(one, AveragePool) for one in pools)


@GPU
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("pool", "grid"),
    [(AFTER_LAYER, (28, 28)), (AFTER_LAYER, (70, 65)), (SHORTCUT, (28, 28)), (AveragePool(3, 1, padding=1), (9, 8))],
)
def test_a_gpu_has_the_gradients_of_a_cpu(pool: AveragePool, grid, dtype: torch.dtype, layout) -> None:
    """In float64 on a CPU, because torch's own on a GPU are wrong for padded channels-last images."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 16, *grid, generator=generator).to(dtype)
    exact = x.double().requires_grad_()
    expected = nn.AvgPool2d.forward(pool, exact)
    weights = torch.randn(expected.shape, generator=generator).to(dtype)
    (expected_gradient,) = torch.autograd.grad(expected, exact, weights.double())
    ours = x.cuda().contiguous(memory_format=layout).requires_grad_()
    found = pool(ours)
    (gradient,) = torch.autograd.grad(found, ours, weights.cuda().contiguous(memory_format=layout))
    allowed = 4 * torch.finfo(dtype).eps
    assert (found.cpu().double() - expected).norm() <= allowed * expected.norm()
    assert (gradient.cpu().double() - expected_gradient).norm() <= allowed * expected_gradient.norm()

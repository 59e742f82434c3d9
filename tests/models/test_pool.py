"""Pooling by a matrix product is average pooling, and is used only where it is."""

import pytest
import torch
from torch import nn

from lambdanets.models import create_model
from lambdanets.models.pool import AveragePool, Halved


@pytest.mark.parametrize(("kernel", "grid"), [(3, (7, 10)), (3, (8, 5)), (3, (1, 1)), (2, (6, 4))])
def test_values_and_gradients(kernel: int, grid: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, *grid, dtype=torch.float64, generator=generator).to(memory_format=torch.channels_last)
    x.requires_grad_()
    pool = AveragePool(3, 2, padding=1) if kernel == 3 else AveragePool(2, 2, ceil_mode=True, count_include_pad=False)
    assert pool.is_halving(x)
    expected, found = nn.AvgPool2d.forward(pool, x), Halved.apply(x, kernel)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert found.is_contiguous(memory_format=torch.channels_last)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    gradients = [torch.autograd.grad((y * weights).sum(), x)[0] for y in (expected, found)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda y: Halved.apply(y, kernel), x)


def test_a_half_precision_result_is_rounded_once() -> None:
    x = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x = x.to(memory_format=torch.channels_last)
    exact = nn.functional.avg_pool2d(x.double(), 3, 2, padding=1)
    assert torch.equal(Halved.apply(x, 3), exact.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("pool", "grid"),
    [
        (AveragePool(2, 2, ceil_mode=True, count_include_pad=False), (5, 4)),
        (AveragePool(3, 2, padding=1, count_include_pad=False), (6, 6)),
        (AveragePool(3, 2, padding=1, ceil_mode=True), (6, 6)),
        (AveragePool(3, 1, padding=1), (6, 6)),
        (AveragePool(3, 2), (7, 7)),
        (AveragePool(3, 2, padding=1), (65, 64)),
    ],
)
def test_other_pooling_is_torchs(pool: AveragePool, grid: tuple[int, int]) -> None:
    assert not pool.is_halving(torch.empty(1, 1, *grid, device="meta"))


def test_the_networks_use_it() -> None:
    pools = [one for one in create_model("resnet26_d", placement="CCLL").modules() if isinstance(one, nn.AvgPool2d)]
    assert pools
    assert all(isinstance(one, AveragePool) for one in pools)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kernel", [2, 3])
def test_on_a_gpu_errors_are_those_of_torch(kernel: int) -> None:
    x = torch.randn(4, 64, 28, 28, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    pool = AveragePool(3, 2, padding=1) if kernel == 3 else AveragePool(2, 2)
    assert pool.has_faster_way(x)
    weights = torch.randn(4, 64, 14, 14, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)

    def results(function, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.to(dtype).detach().requires_grad_()
        y = function(leaf)
        return y, torch.autograd.grad(y, leaf, weights.to(dtype))[0]

    exact = results(lambda y: nn.AvgPool2d.forward(pool, y), torch.float64)
    theirs = results(lambda y: nn.AvgPool2d.forward(pool, y), torch.bfloat16)
    for ours, torchs, expected in zip(results(pool, torch.bfloat16), theirs, exact, strict=True):
        allowed = (torchs.double() - expected).norm() + 1e-9
        assert (ours.double() - expected).norm() <= 1.1 * allowed

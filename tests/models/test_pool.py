"""The gradient of average pooling by half is spread as torch spreads it, and only where windows do not overlap."""

import pytest
import torch
from torch import nn

from lambdanets.models import create_model
from lambdanets.models.pool import AveragePool, Halved

SHORTCUT = AveragePool(2, 2, ceil_mode=True, count_include_pad=False)  # of ResNet-D


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_values_and_gradients(layout: torch.memory_format) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 6, 4, dtype=torch.float64, generator=generator).to(memory_format=layout).requires_grad_()
    assert SHORTCUT.is_halving(x)
    expected, found = nn.AvgPool2d.forward(SHORTCUT, x), Halved.apply(x)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    theirs, ours = (torch.autograd.grad((y * weights).sum(), x)[0] for y in (expected, found))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(Halved.apply, x)


@pytest.mark.parametrize(
    ("pool", "grid"),
    [
        (SHORTCUT, (5, 4)),
        (AveragePool(3, 2, padding=1), (6, 6)),
        (AveragePool(2, 1), (6, 6)),
        (AveragePool(2, 2, padding=1), (6, 6)),
        (AveragePool(2, 2, divisor_override=3), (6, 6)),
    ],
)
def test_other_pooling_is_torchs(pool: AveragePool, grid: tuple[int, int]) -> None:
    assert not pool.is_halving(torch.empty(1, 1, *grid, device="meta"))


def test_the_shortcuts_use_it() -> None:
    pools = [one for one in create_model("resnet26_d").modules() if isinstance(one, nn.AvgPool2d)]
    assert len(pools) == 3
    assert all(isinstance(one, AveragePool) for one in pools)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_errors_are_those_of_torch() -> None:
    x = torch.randn(4, 64, 28, 28, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    weights = torch.randn(4, 64, 14, 14, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)

    def results(function, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.to(dtype).detach().requires_grad_()
        y = function(leaf)
        return y, torch.autograd.grad(y, leaf, weights.to(dtype))[0]

    def torchs(y: torch.Tensor) -> torch.Tensor:
        return nn.AvgPool2d.forward(SHORTCUT, y)

    exact, theirs = results(torchs, torch.float64), results(torchs, torch.bfloat16)
    for ours, plain, expected in zip(results(SHORTCUT, torch.bfloat16), theirs, exact, strict=True):
        allowed = (plain.double() - expected).norm() + 1e-9
        assert (ours.double() - expected).norm() <= 1.1 * allowed

"""Average pooling with right gradients: by kernels (tests/ops/test_fused_pool.py), by a copy, and by torch where it is
right.
"""

import pytest
import torch
from torch import nn

from lambdanets import LambdaLayer2d
from lambdanets.layers.pool import AveragePool, is_plain
from lambdanets.models import create_model

SHORTCUT = AveragePool(2, 2, ceil_mode=True, count_include_pad=False)  # of ResNet-D
AFTER_LAYER = AveragePool(3, 2, padding=1)  # where a lambda layer makes the map smaller
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("pool", "grid"),
    [
        (SHORTCUT, (5, 4)),
        (AveragePool(3, 2, padding=1, count_include_pad=False), (6, 6)),
        (AveragePool(3, 2, padding=1, ceil_mode=True), (6, 6)),
        (AveragePool(3, 1, padding=1), (6, 6)),
        (AveragePool(3, 2), (7, 7)),
        (AveragePool(2, 2, divisor_override=3), (6, 6)),
    ],
)
def test_other_pooling_is_not_taken_for_this(pool: AveragePool, grid: tuple[int, int]) -> None:
    assert not pool.is_halving(torch.empty(1, 1, *grid, device="meta"))


LAST = torch.channels_last


@pytest.mark.parametrize(
    ("pool", "x", "safe"),
    [
        (AFTER_LAYER, torch.empty(2, 3, 8, 8).to(memory_format=LAST), False),
        (AFTER_LAYER, torch.empty(2, 3, 8, 8), True),
        (AFTER_LAYER, torch.empty(3, 8, 8), True),
        (SHORTCUT, torch.empty(2, 3, 7, 8).to(memory_format=LAST), True),
        (AveragePool(3, 1, padding=1), torch.empty(2, 3, 8, 8).to(memory_format=LAST), False),
    ],
)
def test_padded_channels_last_images_never_reach_torchs_gradients(
    pool: AveragePool, x: torch.Tensor, safe: bool
) -> None:
    assert pool.is_safe(x) == safe


@pytest.mark.parametrize(("pool", "grid"), [(SHORTCUT, (6, 4)), (AFTER_LAYER, (65, 64)), (AFTER_LAYER, (1, 1))])
def test_pooling_of_the_networks_is_by_half(pool: AveragePool, grid: tuple[int, int]) -> None:
    assert pool.is_halving(torch.empty(1, 1, *grid, device="meta"))


def test_traced_networks_have_torchs_pooling() -> None:
    network = create_model("resnet_rs50", depths=(1, 1, 1, 1)).eval().to(memory_format=LAST)
    images = torch.randn(1, 3, 64, 64).to(memory_format=LAST)
    traced = torch.jit.trace(network, images)
    torch.testing.assert_close(traced(images), network(images))


@pytest.mark.parametrize("channels", [1, 3])
def test_layouts(channels: int) -> None:
    x = torch.empty(2, channels, 4, 5, device="meta")
    assert is_plain(x)
    assert not is_plain(x.to(memory_format=torch.channels_last))
    assert not is_plain(x[:, :, ::2])


def test_the_networks_have_no_other() -> None:
    for name, placement, layer in (("resnet26_d", "CCCC", "lambda"), ("resnet26", "LLLL", "linear_attention")):
        network = create_model(name, placement=placement, layer=layer)
        pools = [one for one in network.modules() if isinstance(one, nn.AvgPool2d)]
        assert len(pools) == 3
        assert all(isinstance(one, AveragePool) for one in pools)


def test_lambda_layers_of_the_networks_pool_themselves() -> None:
    for name, options in (("resnet26", {"placement": "LLLL"}), ("mobilenet_v2", {"placement": (2, 4, 7)})):
        network = create_model(name, **options)
        assert not [one for one in network.modules() if isinstance(one, nn.AvgPool2d)]
        assert [one.downsample for one in network.modules() if isinstance(one, LambdaLayer2d)].count("avg") == 3


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


def test_blocks_take_whatever_stands_for_a_projection() -> None:
    """An adapter, a quantised layer: it may have no weight to look at."""
    network, x = create_model("resnet_tiny", placement="LLLL", depths=(1, 1, 1, 1)).eval(), torch.randn(1, 3, 32, 32)
    right = network(x.to(memory_format=LAST))
    for layer in [module for module in network.modules() if isinstance(module, LambdaLayer2d)]:
        layer.to_queries = nn.Sequential(layer.to_queries)  # type: ignore[assignment]
    torch.testing.assert_close(network(x.to(memory_format=LAST)), right, rtol=1e-4, atol=1e-4)

"""downsample="avg": the layer, and 3x3 average pooling with stride 2 behind it. The fused form: test_fused_maps.py."""

import pytest
import torch

from lambdanets import LambdaLayer1d, LambdaLayer2d, LambdaLayer3d
from lambdanets.models.flops import executed_flops, paper_flops

LAYERS = {1: LambdaLayer1d, 2: LambdaLayer2d, 3: LambdaLayer3d}
SIZES = {1: (9,), 2: (6, 5), 3: (3, 4, 2)}
HALVED = {1: (5,), 2: (3, 3), 3: (2, 2, 1)}
OPTIONS = {"heads": 2, "key_depth": 3, "scope": 3, "dtype": torch.float64}


def pooled(images):
    """The definition: the mean of three neighbours along each axis, zeros outside, at every other position."""
    for axis in range(2, images.ndim):
        zeros = torch.zeros_like(images.narrow(axis, 0, 1))
        padded = torch.cat([zeros, images, zeros], axis)
        sums = sum(padded.narrow(axis, shift, images.shape[axis]) for shift in range(3))
        images = sums.index_select(axis, torch.arange(0, sums.shape[axis], 2)) / 3
    return images


def pair(dims=2, **options):
    """A layer with the option, and one without that has its weights."""
    one, two = (LAYERS[dims](8, downsample=what, **OPTIONS | options) for what in ("avg", None))
    assert list(one.state_dict()) == list(two.state_dict())
    two.load_state_dict(one.state_dict())
    return one, two


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dims", [1, 2, 3], ids=["1d", "2d", "3d"])
@pytest.mark.parametrize("options", [{}, {"position": False}, {"multi_head": True, "out_channels": 4}], ids=str)
def test_is_the_layer_and_pooling(dims, options, training):
    one, two = (layer.train(training) for layer in pair(dims, **options))
    x = torch.randn(2, 8, *SIZES[dims], dtype=torch.float64, requires_grad=True)
    found, right = one(x), pooled(two(x))
    assert found.shape == (2, one.out_channels, *HALVED[dims])
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(found)
    gradients = torch.autograd.grad(found, [x, *one.parameters()], weights)
    expected = torch.autograd.grad(right, [x, *two.parameters()], weights)
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-10)
    for name, buffer in one.named_buffers():
        torch.testing.assert_close(buffer, two.get_buffer(name))


@pytest.mark.parametrize("dims", [2, 3], ids=["2d", "3d"])
def test_memory_format_is_kept(dims):
    form = {2: torch.channels_last, 3: torch.channels_last_3d}[dims]
    one, two = pair(dims)
    x = torch.randn(2, 8, *(size + 3 for size in SIZES[dims]), dtype=torch.float64)
    plain, last = one.eval()(x), one(x.to(memory_format=form))
    assert plain.is_contiguous()
    assert last.is_contiguous(memory_format=form)
    torch.testing.assert_close(plain, last)
    torch.testing.assert_close(plain, pooled(two.eval()(x)))


@pytest.mark.parametrize("size", [(1,), (1, 1), (1, 6), (1, 2, 1)], ids=str)
def test_small_maps_and_empty_batches(size):
    one, two = (layer.eval() for layer in pair(len(size)))
    for batch in (2, 0):
        x = torch.randn(batch, 8, *size, dtype=torch.float64)
        torch.testing.assert_close(one(x), pooled(two(x)))


def test_masks_and_another_context():
    one, two = pair(context_channels=5)
    x = torch.randn(2, 8, 6, 5, dtype=torch.float64)
    context = torch.randn(2, 5, 4, 4, dtype=torch.float64)
    masks = {"mask": torch.rand(30, 16) < 0.7, "context_mask": torch.rand(2, 4, 4) < 0.7}
    right = pooled(two(x, context, **masks))
    torch.testing.assert_close(one(x, context, **masks), right)


@pytest.mark.parametrize("dims", [1, 2], ids=["1d", "2d"])
def test_padding_never_changes_an_image(dims):
    """What a padded position puts out is not in the means of the image's border."""
    layer, _ = pair(dims)
    layer.eval()
    size = (5, 4)[:dims]
    small = torch.randn(2, 8, *size, dtype=torch.float64)
    padded = torch.randn(2, 8, *(8, 8)[:dims], dtype=torch.float64)
    inside = torch.zeros(2, *(8, 8)[:dims], dtype=torch.bool)
    picture = tuple(slice(side) for side in size)
    padded[(..., *picture)], inside[(..., *picture)] = small, True
    alone = layer(small)
    half = tuple(slice(side) for side in alone.shape[2:])
    torch.testing.assert_close(layer(padded, context_mask=inside)[(..., *half)], alone)
    assert not torch.allclose(layer(padded)[(..., *half)], alone)  # without the mask it does


def test_fused_projections():
    one, two = (layer.eval() for layer in pair())
    x = torch.randn(2, 8, 6, 5, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(one.fuse()(x), pooled(two(x)))


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=["plain", "channels_last"])
def test_compiled_and_exported(form):
    one, _ = pair()
    x = torch.randn(2, 8, 6, 5, dtype=torch.float64).to(memory_format=form)
    compiled = torch.compile(one.eval(), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), one(x))
    program = torch.export.export(one, (x,))
    assert not [node for node in program.graph.nodes if "lambdanets" in str(node.target)]
    torch.testing.assert_close(program.module()(x), one(x))


def test_what_pooling_costs_is_not_counted():
    one, two = (layer.eval() for layer in pair(2, dtype=torch.float32))
    shape = (2, 8, 12, 7)
    assert paper_flops(one, shape) == paper_flops(two, shape)
    assert executed_flops(one, shape) == executed_flops(two, shape)


def test_description():
    one, two = pair()
    assert "downsample='avg'" in repr(one)
    assert "downsample" not in repr(two)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"downsample": "max"}, r"unknown downsample 'max'; choose 'avg' \(average pooling after the layer\) or None"),
        ({"downsample": 2}, "downsample must be text or none, got 2"),
        ({"stride": 2}, r"downsample='avg' cannot be combined with stride=\(2, 2\): use one"),
        ({"causal": True}, "downsample='avg' cannot be combined with causal=True: pooling windows reach one position"),
        ({"causal": "strict"}, "downsample='avg' cannot be combined with causal='strict'"),
    ],
    ids=str,
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        LambdaLayer2d(8, **{"downsample": "avg", **options})

"""Queries, values and keys of a narrow layer by kernels that never write their product, against torch in float64:
values, every gradient and running statistics. Runs as test_fused.py does.
"""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lambdanets import LambdaLayer2d
from lambdanets.layers import projection
from lambdanets.ops.triton import narrow, norm_operators, norms, why_not

from .test_fused import CUDA, DEVICE, DTYPES, relative_error
from .test_fused_norms import two_norms

REASON = why_not(DEVICE, torch.float16, 16, 16, 4)
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.usefixtures("poisoned_memory", "narrow_float16"),
]
HALVES = [dtype for dtype in DTYPES if dtype.itemsize == 2]

#        batch positions channels queries, values(, keys)
CASES = {
    "a part of a tile": (3, 7, 8, (8, 4, 4)),
    "no keys": (2, 41, 24, (16, 8)),
    "several shares, last one short": (5, 149, 40, (24, 16, 8)),
    "odd channels": (2, 99, 61, (35, 19, 3)),
    "as wide as it goes": (2, 33, 128, (64, 32, 32)),
    "two rows": (1, 2, 16, (4, 4, 4)),
}
if CUDA:
    CASES["more programs than one turn sums"] = (70, 149, 64, (64, 16, 16))


def plain(inputs, weight, pair, sizes):
    parts = nn.functional.linear(inputs, weight).split(sizes, dim=-1)
    normed = [norm(part.flatten(0, 1)[..., None, None]).view_as(part) for norm, part in zip(pair, parts, strict=False)]
    return [*normed, *(part.clone() for part in parts[2:])]


def fused(inputs, weight, pair, sizes):
    modules = (*pair, None)[: len(sizes)]
    assert narrow.fits(inputs.shape[2], sizes, inputs.dtype, inputs.device)
    assert norms.takes(inputs, inputs.dtype, modules)
    return norms.projected_parts(inputs, weight, modules, sizes)


def random_case(case, dtype, far=0.0):
    batch, count, channels, sizes = CASES[case]
    torch.manual_seed(0)
    inputs = torch.randn(batch, count, channels, device=DEVICE) + far * torch.randn(channels, device=DEVICE)
    weight = torch.randn(sum(sizes), channels, device=DEVICE) * channels**-0.5
    gradients = [torch.randn(batch, count, size, device=DEVICE).to(dtype) for size in sizes]
    return inputs.to(dtype), weight.to(dtype), gradients, sizes


def results(function, inputs, weight, pair, gradients, sizes):
    """Outputs, gradients of inputs and weights and of the norms' parameters, and running statistics."""
    leaves = [inputs.clone().requires_grad_(), weight.clone().requires_grad_()]
    outputs = function(*leaves, pair, sizes)
    wanted = [*leaves, *(p for norm in pair for p in norm.parameters())]
    found = torch.autograd.grad(outputs, wanted, [g.to(outputs[0].dtype) for g in gradients])
    return [*outputs, *found, *(b for norm in pair for b in (norm.running_mean, norm.running_var))]


@pytest.mark.parametrize("far", [0.0, 30.0], ids=["centred", "far from zero"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_against_torch_in_float64(case, dtype, far):
    inputs, weight, gradients, sizes = random_case(case, dtype, far)
    found = results(fused, inputs, weight, two_norms(sizes, torch.float32), gradients, sizes)
    usual = results(plain, inputs, weight, two_norms(sizes, torch.float32), gradients, sizes)
    right = results(plain, inputs.double(), weight.double(), two_norms(sizes, torch.float64), gradients, sizes)
    for i, (mine, theirs, exact) in enumerate(zip(found, usual, right, strict=True)):
        assert mine.dtype == theirs.dtype, i
        floor = {torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}[mine.dtype]
        assert relative_error(mine, exact) <= max(2 * relative_error(theirs, exact), floor), i


@pytest.mark.skipif(not CUDA, reason="needs a GPU: its tensor cores round sums towards zero")
@pytest.mark.parametrize("channels", [64, 128])
def test_sums_that_means_are_taken_off(channels):
    """Inputs and gradients with means: what is left without them is a thousandth of the sums over so many rows."""
    torch.manual_seed(0)
    sizes, dtype = (64, 32, 16), torch.bfloat16
    inputs = (torch.randn(64, 3136, channels, device=DEVICE).relu() + 1).to(dtype)
    weight = (torch.randn(sum(sizes), channels, device=DEVICE) * channels**-0.5).to(dtype)
    gradients = [((torch.randn(64, 3136, size, device=DEVICE) + 1) / 8).to(dtype) for size in sizes]
    found = results(fused, inputs, weight, two_norms(sizes, torch.float32), gradients, sizes)[4:9]
    usual = results(plain, inputs, weight, two_norms(sizes, torch.float32), gradients, sizes)[4:9]
    right = results(plain, inputs.double(), weight.double(), two_norms(sizes, torch.float64), gradients, sizes)[4:9]
    normed = sizes[0] + sizes[1]
    for i, (mine, theirs, exact) in enumerate(zip(found, usual, right, strict=True)):
        if i == 0:  # of the normed parts: that of keys is larger by far
            mine, theirs, exact = mine[:normed], theirs[:normed], exact[:normed]
        factor = 0.1 if i in (1, 3) else 2  # the norms' weights: 0.02 and less; with one sum 0.3 to 0.5 (128 channels)
        assert relative_error(mine, exact) <= factor * relative_error(theirs, exact) + 1e-6, i


def test_parts_are_summed_in_several_turns(monkeypatch):
    monkeypatch.setattr(narrow, "TURN", 2)
    inputs, weight, gradients, sizes = random_case("several shares, last one short", torch.float16)
    found = results(fused, inputs, weight, two_norms(sizes, torch.float32), gradients, sizes)
    right = results(plain, inputs.double(), weight.double(), two_norms(sizes, torch.float64), gradients, sizes)
    for i, (mine, exact) in enumerate(zip(found, right, strict=True)):
        assert relative_error(mine, exact) < 1e-3, i


def test_rows_that_are_all_alike():
    """No deviation: 1 / sqrt(eps) times what rounding left. The weights' gradients are zero then."""
    inputs, weight, gradients, sizes = random_case("several shares, last one short", torch.float16)
    inputs = inputs[:1, :1].expand_as(inputs).contiguous()
    found = results(fused, inputs, weight, two_norms(sizes, torch.float32), gradients, sizes)
    right = results(plain, inputs.double(), weight.double(), two_norms(sizes, torch.float64), gradients, sizes)
    for i, (mine, exact) in enumerate(zip(found, right, strict=True)):
        assert mine.isfinite().all(), i
        torch.testing.assert_close(mine.double(), exact, rtol=5e-2, atol=5e-2 * max(1.0, exact.abs().max().item()))


@pytest.mark.parametrize(
    ("channels", "sizes", "dtype", "taken"),
    [
        (128, (64, 32, 32), torch.bfloat16, True),
        (129, (64, 32, 32), torch.bfloat16, False),
        (128, (65, 32, 32), torch.bfloat16, False),
        (128, (64, 33, 32), torch.bfloat16, False),
        (128, (64, 32, 33), torch.bfloat16, False),
        (128, (64, 32), torch.bfloat16, True),
        (128, (64, 32, 32), torch.float32, False),
    ],
)
def test_what_is_narrow(channels, sizes, dtype, taken):
    assert narrow.fits(channels, sizes, dtype, DEVICE) == taken


def test_float16_has_a_product_in_memory(monkeypatch):
    """Its gradients of weights would lose too much where gradients have a mean."""
    monkeypatch.undo()
    assert not narrow.fits(64, (64, 16, 16), torch.float16, DEVICE)


def test_a_device_without_kernels_is_asked_nothing(monkeypatch):
    """As AMD's GPUs, which do not say how much memory a program may have."""
    monkeypatch.setattr(norms, "why_not", lambda *a: "no kernels here")
    monkeypatch.setattr(narrow, "has_room", lambda device: pytest.fail("asked"))
    layer = LambdaLayer2d(8, heads=2, key_depth=4, scope=3, device=DEVICE, dtype=torch.float16, backend="fused")
    assert layer(torch.randn(2, 8, 3, 3, device=DEVICE).half()).isfinite().all()


def test_float64_is_not_cast():
    layer = LambdaLayer2d(8, heads=2, key_depth=4, scope=3, position=False, device=DEVICE, dtype=torch.float64)
    with torch.autocast(DEVICE.type, torch.float16):
        parts = projection.project(
            torch.randn(2, 9, 8, device=DEVICE, dtype=torch.float64),
            projection.merged([projection.Projection.of(*one) for one in layer._projections()]),
            kernels=True,
        )
    assert [part.dtype for part in parts] == [torch.float64] * 3


def test_the_operator_takes_any_layout():
    inputs, weight, gradients, sizes = random_case("a part of a tile", torch.float16)
    right = results(fused, inputs, weight, two_norms(sizes, torch.float32), gradients, sizes)
    found = results(
        fused, inputs.mT.contiguous().mT, weight.T.contiguous().T, two_norms(sizes, torch.float32), gradients, sizes
    )
    assert all(map(torch.equal, found, right))


def test_derivatives_of_every_kind():
    """One part alone, in batches, and a second time: by torch where no kernel can."""
    dtype, allowed = (torch.bfloat16, 5e-2) if CUDA else (torch.float16, 1e-2)
    inputs, weight, gradients, sizes = random_case("a part of a tile", dtype)
    pair, leaf = two_norms(sizes, torch.float32), inputs.clone().requires_grad_()
    parameters = [getattr(norm, name) for name in ("weight", "bias") for norm in pair]
    right = norm_operators.plain_projected_parts(leaf, weight, *parameters, [norm.eps for norm in pair], sizes)
    found = fused(leaf, weight, pair, sizes)
    for i, (mine, exact) in enumerate(zip(found, right, strict=True)):
        one, other = (torch.autograd.grad((y**3).sum(), leaf, create_graph=True)[0] for y in (mine, exact))
        assert relative_error(one, other) < allowed, i
        one, other = (torch.autograd.grad(g.square().sum(), leaf, retain_graph=True)[0] for g in (one, other))
        assert relative_error(one, other) < allowed, i
    several = torch.stack([gradients[0], 2 * gradients[0]])
    (batched,) = torch.autograd.grad(found[0], leaf, several, is_grads_batched=True, retain_graph=True)
    (single,) = torch.autograd.grad(found[0], leaf, gradients[0])
    torch.testing.assert_close(batched, torch.stack([single, 2 * single]), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_the_layer_trains_by_them(autocast, last, monkeypatch):
    """A step through the layer, against the same layer by plain torch in float64."""
    calls, usual = [], norms.projected_parts
    monkeypatch.setattr(projection.norms, "projected_parts", lambda *a: calls.append(1) or usual(*a))
    torch.manual_seed(0)
    options = dict(heads=2, key_depth=4, scope=3, device=DEVICE)
    layer = LambdaLayer2d(8, **options, dtype=None if autocast else torch.float16, backend="fused")
    exact = LambdaLayer2d(8, **options, dtype=torch.float64, backend="reference")
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(4, 8, 5, 4, device=DEVICE).half()
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    images = [one.requires_grad_() for one in (x.double(), x.float() if autocast else x)][::-1]
    upstream = torch.randn_like(images[1])
    with torch.autocast(DEVICE.type, torch.float16, enabled=autocast):
        output = layer(images[0])
    assert output.dtype == torch.float16
    output.backward(upstream.half())
    exact(images[1]).backward(upstream)
    assert len(calls) == 1
    assert relative_error(images[0].grad, images[1].grad) < 1e-2
    for (name, mine), right in zip(layer.named_parameters(), exact.parameters(), strict=True):
        assert mine.grad.dtype == mine.dtype
        assert relative_error(mine.grad, right.grad) < 1e-2, name
    for (name, mine), right in zip(layer.named_buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(mine.double(), right.double(), rtol=1e-2, atol=1e-2, msg=name)


def wide(layer):
    layer.to_values = nn.Linear(8, 40, bias=False, device=DEVICE, dtype=torch.float16)
    layer.norm_values = nn.BatchNorm2d(40, device=DEVICE, dtype=torch.float16)
    layer.value_depth, layer.out_channels = 40, 80


def frozen(layer):
    layer.norm_values.eval()


def synchronised(layer):
    layer.norm_values = nn.SyncBatchNorm.convert_sync_batchnorm(layer.norm_values)


@pytest.mark.parametrize("change", [wide, frozen, synchronised, lambda layer: layer.float()])
def test_other_layers_have_a_product(change, monkeypatch):
    monkeypatch.setattr(projection.norms, "projected_parts", lambda *a: pytest.fail("not for this layer"))
    layer = LambdaLayer2d(8, heads=2, key_depth=4, scope=3, device=DEVICE, dtype=torch.float16, backend="fused")
    change(layer)
    x = torch.randn(2, 8, 3, 3, device=DEVICE, dtype=layer.to_keys.weight.dtype)
    if change is synchronised:  # it wants a GPU; that it was reached says enough
        layer.norm_values.forward = lambda part: part
    assert layer(x).isfinite().all()


def test_registered_operators():
    inputs, weight, _, sizes = random_case("a part of a tile", torch.float16)
    pair = two_norms(sizes, torch.float32)
    parameters = [getattr(norm, name) for name in ("weight", "bias") for norm in pair]
    names = ("running_mean", "running_var", "num_batches_tracked")
    statistics = [getattr(norm, name) for name in names for norm in pair]
    kept = (inputs.requires_grad_(), weight.requires_grad_(), *parameters)
    arguments = (*kept, *statistics, [1e-5, 1e-3], [0.1, 0.25], list(sizes))
    torch.library.opcheck(norm_operators.projected_parts, arguments)
    *parts, moments = (one.detach() for one in norm_operators.projected_parts(*arguments))
    kept = [one.detach() for one in kept]
    torch.library.opcheck(norm_operators.projected_parts_backward, (*parts, *kept, moments, list(sizes)))


def test_flops_are_those_of_the_product():
    inputs, weight, gradients, sizes = random_case("no keys", torch.float16)
    counts = []
    for function in (fused, plain):
        with FlopCounterMode(display=False) as counter:
            results(function, inputs, weight, two_norms(sizes, torch.float32), gradients, sizes)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 3 * 2 * 2 * 41 * 24 * 24

"""Batch norm of a projection's parts by kernels of their own, against torch's in float64: values, every gradient and
running statistics. Runs as test_fused.py does.
"""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

pytest.importorskip("triton", reason="Triton is not installed")

from lambdanets import LambdaLayer2d
from lambdanets.layers import projection
from lambdanets.ops.triton import norm_operators, norms, why_not
from tests.ops.kernels import CUDA, DEVICE, DTYPES, relative_error, two_norms

REASON = why_not(DEVICE, torch.float32, 16, 16, 4)
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.usefixtures("poisoned_memory")]

#        batch positions queries, values(, keys)
CASES = {
    "one tile": (3, 7, (8, 4, 4)),
    "no keys": (2, 9, (16, 8)),
    "several shares, last one short": (5, 149, (24, 16, 8)),
    "odd channels over several tiles": (2, 33, (35, 61, 3)),
    "two rows": (1, 2, (4, 4, 4)),
}


def results(function, product, pair, gradients):
    """Outputs, gradients of the product, weights and biases, and running statistics."""
    leaf = product.clone().requires_grad_()
    outputs = function(leaf, pair)
    wanted = [leaf, *(p for norm in pair for p in norm.parameters())]
    found = torch.autograd.grad(outputs, wanted, [g.to(outputs[0].dtype) for g in gradients])
    return [*outputs, *found, *(b for norm in pair for b in (norm.running_mean, norm.running_var))]


@pytest.mark.parametrize("far", [0.0, 30.0], ids=["centred", "far from zero"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_against_torch_in_float64(case, dtype, far, monkeypatch):
    monkeypatch.setattr(norm_operators, "ROWS", 16)  # several shares, of several tiles each, for small inputs
    monkeypatch.setattr(norm_operators, "SHARES", 16)
    monkeypatch.setattr(norm_operators, "PROGRAMS", 16)
    monkeypatch.setattr(norm_operators, "WIDE", 16)  # several strips of one part
    batch, count, sizes = CASES[case]
    torch.manual_seed(0)
    product = (torch.randn(batch, count, sum(sizes), device=DEVICE) + far * torch.randn(sum(sizes), device=DEVICE)).to(
        dtype
    )
    gradients = [torch.randn(batch, count, size, device=DEVICE).to(dtype) for size in sizes]
    names = (None,) * (len(sizes) - 2)

    def fused(leaf, pair):
        assert norms.takes(leaf, leaf.dtype, (*pair, *names))
        return norms.normed_parts(leaf, (*pair, *names), sizes)

    def plain(leaf, pair):
        parts = leaf.split(sizes, dim=-1)
        normed = [
            norm(part.flatten(0, 1)[..., None, None]).view_as(part) for norm, part in zip(pair, parts, strict=False)
        ]
        return [*normed, *(part.clone() for part in parts[2:])]

    found = results(fused, product, two_norms(sizes, torch.float32), gradients)
    usual = results(plain, product, two_norms(sizes, torch.float32), gradients)
    right = results(plain, product.double(), two_norms(sizes, torch.float64), gradients)
    for i, (mine, theirs, exact) in enumerate(zip(found, usual, right, strict=True)):
        assert mine.dtype == theirs.dtype, i
        # float32 knows a mean of 30 to 2e-6 of a deviation, whoever adds it up
        floor = {torch.float32: 2e-6 + 2e-7 * far, torch.bfloat16: 4e-3, torch.float16: 5e-4}[mine.dtype]
        assert relative_error(mine, exact) <= max(2 * relative_error(theirs, exact), floor), i


def test_batches_are_counted_and_gradients_need_no_layout():
    pair = two_norms((4, 4), torch.float32)
    product = torch.randn(2, 9, 12, device=DEVICE, requires_grad=True)
    outputs = norms.normed_parts(product, (*pair, None), (4, 4, 4))
    sum(one.sum() * 0.5 for one in outputs).backward()  # gradients without strides
    assert torch.isfinite(product.grad).all()
    torch.testing.assert_close(product.grad[..., 8:], torch.full((2, 9, 4), 0.5, device=DEVICE))
    assert [int(norm.num_batches_tracked) for norm in pair] == [1, 1]


def plain_parts(product, pair):
    parameters = (getattr(norm, name) for name in ("weight", "bias") for norm in pair)
    return norm_operators.plain_parts(product, *parameters, [norm.eps for norm in pair], (4, 4, 4))


def test_a_gradient_of_one_part():
    pair = two_norms((4, 4), torch.float32)
    product = torch.randn(2, 5, 12, device=DEVICE, requires_grad=True)
    right = plain_parts(product, pair)
    for i, parts in enumerate(zip(norms.normed_parts(product, (*pair, None), (4, 4, 4)), right, strict=True)):
        found, exact = (torch.autograd.grad((one**3).sum(), product, retain_graph=True)[0] for one in parts)
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4, msg=str(i))


def test_a_second_derivative():
    pair = two_norms((4, 4), torch.float32)
    product = torch.randn(2, 5, 12, device=DEVICE, requires_grad=True)

    def penalty(function):
        outputs = function(product)
        (gradient,) = torch.autograd.grad(sum((one**3).sum() for one in outputs), product, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), product)[0]

    found = penalty(lambda x: norms.normed_parts(x, (*pair, None), (4, 4, 4)))
    right = penalty(lambda x: plain_parts(x, pair))
    torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-3 * right.abs().max().item())


def test_a_second_derivative_of_one_part():
    pair = two_norms((4, 4), torch.float32)
    product = torch.randn(2, 5, 12, device=DEVICE)
    pair[1].requires_grad_(False)
    outputs = norms.normed_parts(product, (*pair, None), (4, 4, 4))
    (gradient,) = torch.autograd.grad((outputs[0] ** 3).sum(), pair[0].weight, create_graph=True)
    (found,) = torch.autograd.grad(gradient.sum(), pair[0].weight)
    normed = (outputs[0].detach() - pair[0].bias) / pair[0].weight
    torch.testing.assert_close(found, (6 * outputs[0] * normed**2).sum((0, 1)), rtol=1e-4, atol=1e-4)


def test_gradients_in_batches():
    pair = two_norms((4, 4), torch.float32)
    product = torch.randn(2, 5, 12, device=DEVICE, requires_grad=True)
    whole = torch.cat(norms.normed_parts(product, (*pair, None), (4, 4, 4)), -1)
    several = torch.randn(3, *whole.shape, device=DEVICE)
    wanted = [product, pair[0].weight, pair[1].bias]
    right = [torch.autograd.grad(whole, wanted, one, retain_graph=True) for one in several]
    batched = torch.autograd.grad(whole, wanted, several, is_grads_batched=True, retain_graph=True)
    mapped = torch.vmap(lambda one: torch.autograd.grad(whole, wanted, one, retain_graph=True))(several)
    for i, exact in enumerate(zip(*right, strict=True)):
        torch.testing.assert_close(batched[i], torch.stack(exact), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mapped[i], torch.stack(exact), rtol=1e-4, atol=1e-5)


def test_forward_mode_is_torch_s():
    layer = LambdaLayer2d(8, heads=2, key_depth=4, position=False, device=DEVICE, backend="fused")
    x = torch.randn(2, 8, 3, 3, device=DEVICE)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.randn_like(x)))).tangent
    assert found is not None
    assert found.isfinite().all()


@pytest.mark.parametrize("which", ["to_queries", "norm_values"])
def test_every_kind_of_hook_is_called(which):
    x = torch.randn(2, 8, 3, 3, device=DEVICE, requires_grad=True)
    for kind in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
        layer = LambdaLayer2d(8, heads=2, key_depth=4, scope=3, device=DEVICE, backend="fused")
        calls = []
        getattr(layer.get_submodule(which), f"register_{kind}_hook")(lambda *a, calls=calls: calls.append(1))
        layer(x).sum().backward()
        assert calls == [1], kind


@pytest.mark.parametrize("which", ["to_queries", "norm_values"])
def test_a_forward_put_on_a_module_is_called(which):
    """As libraries do that move weights to the device only while they are used."""
    layer = LambdaLayer2d(8, heads=2, key_depth=4, scope=3, device=DEVICE, backend="fused")
    module, calls = layer.get_submodule(which), []
    usual = module.forward
    module.forward = lambda *a: calls.append(1) or usual(*a)
    layer(torch.randn(2, 8, 3, 3, device=DEVICE))
    assert calls == [1]


def test_the_layer_trains_by_them(monkeypatch):
    """A step through the layer, against the same layer by plain torch in float64."""
    calls = []
    plain = norms.normed_parts
    monkeypatch.setattr(projection.norms, "normed_parts", lambda *a: calls.append(1) or plain(*a))
    torch.manual_seed(0)
    layer = LambdaLayer2d(8, heads=2, key_depth=4, scope=3, device=DEVICE, backend="fused")
    exact = LambdaLayer2d(8, heads=2, key_depth=4, scope=3, device=DEVICE, dtype=torch.float64, backend="reference")
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(2, 8, 4, 3, device=DEVICE)
    for one, image in ((layer, x), (exact, x.double())):
        one(image).square().sum().backward()
    assert len(calls) == 1
    for (name, mine), right in zip(layer.named_parameters(), exact.parameters(), strict=True):
        assert relative_error(mine.grad, right.grad) < 1e-4, name
    for (name, mine), right in zip(layer.named_buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(mine.double(), right.double(), msg=name)


@pytest.mark.parametrize("where", ["queries and values of a layer", "two layers"])
def test_a_norm_that_is_used_twice(where, monkeypatch):
    calls = []
    usual = norms.normed_parts
    monkeypatch.setattr(projection.norms, "normed_parts", lambda *a: calls.append(1) or usual(*a))

    def make(dtype, backend):
        options = dict(heads=2, key_depth=2, scope=3, device=DEVICE, dtype=dtype, backend=backend)
        first, second = LambdaLayer2d(8, **options), LambdaLayer2d(8, **options)
        if where == "two layers":
            second.norm_queries = first.norm_queries
        else:
            first.norm_values = first.norm_queries
        return nn.Sequential(first, second)

    torch.manual_seed(0)
    mine, exact = make(torch.float32, "fused"), make(torch.float64, "reference")
    exact.load_state_dict(mine.state_dict())
    x = torch.randn(2, 8, 4, 3, device=DEVICE)
    for one, image in ((mine, x), (exact, x.double())):
        one(image).square().sum().backward()
    assert len(calls) == (2 if where == "two layers" else 1)
    for (name, one), right in zip(mine.named_parameters(), exact.parameters(), strict=True):
        assert relative_error(one.grad, right.grad) < 1e-3, name
    for (name, one), right in zip(mine.named_buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(one.double(), right.double(), rtol=1e-4, atol=1e-5, msg=name)


def frozen(pair):
    pair[0].eval()


def hooked(pair):
    pair[1].register_full_backward_hook(lambda *a: None)


def cumulative(pair):
    pair[0].momentum = None


def uncounted(pair):
    pair[0].num_batches_tracked = None


def strided(pair):  # as functional_call may give them, from a stack of several networks
    pair[0].weight = nn.Parameter(torch.rand(4, 3, device=DEVICE)[:, 1])


def strided_statistics(pair):
    pair[1].running_var = torch.rand(4, 3, device=DEVICE)[:, 1]


def synchronised(pair):
    pair[1] = nn.SyncBatchNorm.convert_sync_batchnorm(pair[1])


def of_another_type(pair):
    pair[1].double()


def one_for_both(pair):
    pair[1] = pair[0]


@pytest.mark.parametrize(
    "change",
    [one_for_both, of_another_type, frozen, hooked, cumulative, uncounted, strided, strided_statistics, synchronised],
)
def test_other_norms_are_called_as_the_modules_they_are(change):
    product, pair = torch.randn(2, 9, 12, device=DEVICE), two_norms((4, 4), torch.float32)
    assert norms.takes(product, product.dtype, (*pair, None))
    change(pair)
    assert not norms.takes(product, product.dtype, (*pair, None))


def test_inputs_that_only_torch_takes():
    modules, rows = (*two_norms((4, 4), torch.float32), None), torch.randn(2, 9, 8, device=DEVICE)
    assert norms.takes(rows, torch.float32, modules)
    assert not norms.takes(rows[:1, :1], torch.float32, modules)  # torch says why one row is too few
    assert not norms.takes(rows, torch.float64, modules)
    assert not norms.takes(nn.Parameter(rows), torch.float32, modules)  # any subclass
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        LambdaLayer2d(8, heads=2, scope=3, device=DEVICE, backend="fused")(torch.randn(1, 8, 1, 1, device=DEVICE))


@pytest.mark.skipif(CUDA, reason="on a GPU the kernels are the usual way")
def test_a_cpu_takes_torch_unless_asked(monkeypatch):
    monkeypatch.setattr(projection.norms, "normed_parts", lambda *a: pytest.fail("not asked for"))
    LambdaLayer2d(8, heads=2, scope=3)(torch.randn(2, 8, 3, 3)).sum().backward()

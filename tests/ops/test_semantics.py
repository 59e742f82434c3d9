"""Properties that tell the paper's operation from the mistakes of public copies, for every implementation."""

import pytest
import torch
import torch.nn.functional as F

from lambdanets.ops import Relative, lambda_op
from tests.cases import Case, Inputs

RELATIVE = ["reference", "gemm", "conv", "depthwise", "dft", "fft"]
ANY = ["reference", "gemm"]


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def close(found, expected, tolerance=1e-11):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", ANY)
@pytest.mark.parametrize("masked", [False, True])
def test_softmax_runs_over_the_context(backend, masked):
    queries, keys, values = normal(2, 6, 3, 4), normal(2, 6, 4, 2), normal(2, 6, 5, 2)
    mask = torch.ones(6, 6, dtype=torch.bool).tril() if masked else None
    found = lambda_op(queries, keys, values, mask=mask, backend=backend)
    # A number added to all context positions of a (k, u) cancels; over any other axis it would not.
    close(lambda_op(queries, keys + 3 * normal(2, 1, 4, 2), values, mask=mask, backend=backend), found)
    assert not torch.allclose(lambda_op(queries, keys + normal(2, 6, 1, 1), values, mask=mask, backend=backend), found)
    # Weights sum to one: a context that says the same everywhere is passed on as it is.
    same = normal(2, 1, 5, 2).expand(2, 6, 5, 2)
    expected = queries.sum(-1)[..., None] * same[:, 0].sum(-1)[:, None, None]
    close(lambda_op(queries, keys, same, mask=mask, backend=backend), expected)


@pytest.mark.parametrize("backend", RELATIVE)
@pytest.mark.parametrize("scope", [(3, 5), (4, 2)], ids=["odd", "even"])
def test_position_lambdas_move_with_the_image(backend, scope):
    table, query = normal(*scope, 4), normal(4)
    queries = query.expand(1, 64, 1, 4)  # equal queries: only the image tells places apart
    image = normal(1, 8, 8, 3)
    moved = image.roll((1, 2), dims=(1, 2))

    def output(image):
        found = lambda_op(queries, None, image.flatten(1, 2), Relative(table, (8, 8)), content=False, backend=backend)
        return found.view(8, 8, 3)

    interior = slice(2, 6)
    shifted = output(image).roll((1, 2), dims=(0, 1))
    close(output(moved)[3:6, 4:6], shifted[3:6, 4:6])
    assert not torch.allclose(output(image)[interior, interior], output(moved)[interior, interior])


@pytest.mark.parametrize("backend", RELATIVE)
@pytest.mark.parametrize("scope", [(3, 3), (4, 2), (1, 5), (6, 5)], ids=str)
@pytest.mark.parametrize("dilation", [1, 2])
def test_single_entry_looks_in_its_direction(backend, scope, dilation):
    side, queries, image = 5, normal(1, 25, 1, 2), normal(1, 5, 5, 3)
    for i, j in [(0, 0), (scope[0] - 1, 0), (scope[0] // 2, scope[1] - 1)]:
        table = torch.zeros(*scope, 2, dtype=torch.float64)
        table[i, j] = normal(2)
        found = lambda_op(
            queries,
            None,
            image.flatten(1, 2),
            Relative(table, (side, side), dilation=dilation),
            content=False,
            backend=backend,
        )
        # m - n = (i - (scope - 1) // 2) * dilation, and nothing beyond the border.
        down, right = (i - (scope[0] - 1) // 2) * dilation, (j - (scope[1] - 1) // 2) * dilation
        expected = torch.zeros(side, side, 3, dtype=torch.float64)
        for y in range(side):
            for x in range(side):
                if 0 <= y + down < side and 0 <= x + right < side:
                    expected[y, x] = (queries[0, y * side + x, 0] @ table[i, j]) * image[0, y + down, x + right]
        close(found.view(side, side, 3), expected)


@pytest.mark.parametrize("backend", RELATIVE)
@pytest.mark.parametrize("scope", [(3, 3), (4, 4), (2, 5), (6, 1)], ids=str)
def test_equals_torch_convolution_with_same_padding(backend, scope):
    table, image = normal(*scope, 1), normal(1, 7, 6, 1)
    queries = normal(1, 42, 1, 1)
    found = lambda_op(queries, None, image.flatten(1, 2), Relative(table, (7, 6)), content=False, backend=backend)
    # padding="same" puts (scope - 1) // 2 zeros in front: an even scope reaches one further forward.
    expected = F.conv2d(image.permute(0, 3, 1, 2), table.permute(2, 0, 1)[None], padding="same")
    close(found.flatten(), expected.flatten() * queries.flatten())


@pytest.mark.parametrize("backend", RELATIVE)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"key_norm": "l2"}], ids=["plain", "causal", "l2"])
def test_intra_depth_is_a_sum_of_lambdas(backend, options):
    queries, keys, values, table = normal(2, 12, 2, 3), normal(2, 12, 3, 2), normal(2, 12, 4, 2), normal(3, 3, 3, 2)
    found = lambda_op(queries, keys, values, Relative(table, (3, 4)), backend=backend, **options)
    parts = [
        lambda_op(queries, keys[..., u], values[..., u], Relative(table[..., u], (3, 4)), backend=backend, **options)
        for u in range(2)
    ]
    close(found, parts[0] + parts[1])


@pytest.mark.parametrize("backend", RELATIVE)
def test_linear_in_queries_and_in_values(backend):
    keys, positions = normal(2, 12, 3), Relative(normal(3, 3, 3), (3, 4))

    def run(queries, values):
        return lambda_op(queries, keys, values, positions, backend=backend)

    queries, others = normal(2, 12, 2, 3), normal(2, 12, 2, 3)
    values, more = normal(2, 12, 4), normal(2, 12, 4)
    close(run(2 * queries - others, values), 2 * run(queries, values) - run(others, values))
    close(run(queries, 3 * values + more), 3 * run(queries, values) + run(queries, more))
    # No stray bias: nothing in, nothing out.
    assert run(queries, torch.zeros_like(values)).abs().max() < 1e-14


@pytest.mark.parametrize("backend", RELATIVE)
@pytest.mark.parametrize("causal", [True, "strict"])
@pytest.mark.parametrize("grid", [(4, 5), (3, 3)], ids=str)
def test_nothing_leaks_from_the_future(backend, causal, grid):
    inputs = Inputs(Case(grid=grid, scope=(5, 4), causal=causal, intra_depth=2))
    output = inputs.forward(backend)
    count = grid[0] * grid[1]
    for n in range(count):
        grads = torch.autograd.grad(
            output[:, n].square().sum(), [inputs.leaves["keys"], inputs.leaves["values"]], retain_graph=True
        )
        first = n + (causal is True)  # the first position that query n must not see
        for grad in grads:
            assert grad[:, first:].abs().max() < 1e-12 if first < count else True
        if first > 0:  # and it does see what is just before
            assert grads[1][:, first - 1].abs().max() > 1e-6
    if causal == "strict":
        assert output[:, 0].abs().max() < 1e-14  # an empty context gives 0 (fft: to rounding)


@pytest.mark.parametrize("backend", RELATIVE)
@pytest.mark.parametrize("causal", [True, "strict"])
@pytest.mark.parametrize("intra_depth", [1, 2])
def test_huge_keys_stay_finite_and_right(backend, causal, intra_depth):
    # float32: exp(200) overflows, and exp(-400) of a maximum over everything underflows to 0/0.
    case = Case(grid=(8, 8), causal=causal, intra_depth=intra_depth)
    exact = Inputs(case)
    with torch.no_grad():
        exact.leaves["keys"].copy_(torch.where(torch.rand_like(exact.leaves["keys"]) > 0.5, 200.0, -200.0))
        exact.leaves["keys"][:, 40:] += normal(2, 24, *exact.leaves["keys"].shape[2:])
    inputs = Inputs(case, dtype=torch.float32)
    inputs.leaves = {name: leaf.detach().float().requires_grad_() for name, leaf in exact.leaves.items()}
    # float32 rounds keys of 200 to 1e-5: give the oracle the same ones.
    exact.leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in inputs.leaves.items()}
    expected, found = exact.results("oracle"), inputs.results(backend)
    for name, wanted in expected.items():
        assert found[name].isfinite().all(), name
        close(found[name].double(), wanted, 1e-3)


@pytest.mark.parametrize("backend", RELATIVE)
@pytest.mark.parametrize("options", [{}, {"key_norm": "l2"}, {"key_norm": None}, {"causal": True}], ids=str)
def test_padded_image_equals_the_image(backend, options):
    queries, keys, values = normal(1, 4, 5, 2, 3), normal(1, 4, 5, 3), normal(1, 4, 5, 4)
    table = normal(5, 4, 3)
    alone = lambda_op(
        queries.flatten(1, 2),
        keys.flatten(1, 2),
        values.flatten(1, 2),
        Relative(table, (4, 5)),
        **options,
        backend=backend,
    ).view(4, 5, 2, 4)

    def padded(tensor, value):
        full = torch.full((1, 6, 8, *tensor.shape[3:]), value, dtype=torch.float64)
        full[:, :4, :5] = tensor
        return full.flatten(1, 2)

    mask = torch.zeros(1, 6, 8, dtype=torch.bool)
    mask[:, :4, :5] = True
    for padding in (float("nan"), 1e6):
        found = lambda_op(
            padded(queries, 1.0),
            padded(keys, padding),
            padded(values, padding),
            Relative(table, (6, 8)),
            **options,
            context_mask=mask.flatten(1),
            backend=backend,
        )
        close(found.view(6, 8, 2, 4)[:4, :5], alone)


@pytest.mark.parametrize("backend", RELATIVE)
def test_fully_padded_example_gives_zero(backend):
    inputs = Inputs(Case(context_mask=True, batch=3))
    output = inputs.forward(backend)
    assert output[1].abs().max() < 1e-14
    assert output[0].abs().max() > 0.1


@pytest.mark.parametrize("causal", [True, "strict"])
@pytest.mark.parametrize("key_norm", ["softmax", "l2", None])
def test_causal_equals_its_mask(causal, key_norm):
    inputs = Inputs(Case(grid=(5, 8), scope=(3, 4), causal=causal, key_norm=key_norm))
    order = torch.ones(40, 40, dtype=torch.bool).tril(0 if causal is True else -1)
    expected = lambda_op(*inputs.arguments(), key_norm=key_norm, mask=order, backend="reference")
    close(inputs.forward("gemm"), expected)


def test_mask_of_ones_changes_nothing():
    inputs = Inputs(Case())
    everything = torch.ones(20, 20, dtype=torch.bool)
    masked = lambda_op(*inputs.arguments(), mask=everything, context_mask=everything[:2], backend="gemm")
    close(masked, inputs.forward("reference"))


@pytest.mark.parametrize("backend", RELATIVE)
def test_multi_head_is_one_operation_for_each_head(backend):
    queries, keys, values, table = normal(2, 12, 2, 3), normal(2, 12, 2, 3), normal(2, 12, 2, 4), normal(3, 3, 2, 3)
    found = lambda_op(queries, keys, values, Relative(table, (3, 4)), multi_head=True, backend=backend)
    for h in range(2):
        alone = lambda_op(
            queries[:, :, h : h + 1], keys[:, :, h], values[:, :, h], Relative(table[:, :, h], (3, 4)), backend=backend
        )
        close(found[:, :, h : h + 1], alone)


@pytest.mark.parametrize("backend", RELATIVE)
def test_stride_takes_every_other_query(backend):
    queries, keys, values = normal(2, 5, 6, 2, 3), normal(2, 30, 3), normal(2, 30, 4)
    table = normal(4, 3, 3)
    dense = lambda_op(queries.flatten(1, 2), keys, values, Relative(table, (5, 6)), backend="reference")
    fewer = queries[:, ::2, ::3]
    found = lambda_op(
        fewer.flatten(1, 2), keys, values, Relative(table, (3, 2), (5, 6), stride=(2, 3)), backend=backend
    )
    close(found.view(2, 3, 2, 2, 4), dense.view(2, 5, 6, 2, 4)[:, ::2, ::3])

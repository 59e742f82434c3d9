"""The fused kernels against float64 einsums: values and every gradient, on odd shapes.

Without a GPU the kernels run under Triton's interpreter, in a run of their own: `make test-kernels` asks for it with
TRITON_INTERPRET=1 before anything imports Triton.
Letters: B batch, N queries, M context, H heads, K key depth, V value depth, U intra-depth.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from lambdanets import LambdaLayer2d
from lambdanets.ops.triton import fused_dense, fused_relative, why_not
from lambdanets.ops.triton.content import content_gradients, content_lambda
from tests.ops.kernels import CUDA, DEVICE, DTYPES, check, dense_of, gradients, oracle, random_inputs, relative_error

REASON = why_not(DEVICE, torch.float32, 16, 16, 4)
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.usefixtures("poisoned_memory", "side_by_side"),
]
SLOW_IN_FLOAT32 = {"depth 32", "scope beyond the map", "wide values", "middle context"}
SLOW_IN_FLOAT32 |= {"depth 32, scope beyond the map", "several blocks of a window", "more than 32 columns"}


#        batch heads depth value intra query_grid context_grid scope     stride
CASES = {
    "square": (3, 4, 16, 16, 1, (5, 5), (5, 5), (5, 5), 1),
    "rectangle, even scope": (1, 2, 16, 24, 1, (3, 6), (3, 6), (4, 2), 1),
    "scope beyond the map": (2, 4, 16, 8, 1, (3, 4), (3, 4), (11, 9), 1),
    "another context grid": (2, 3, 8, 16, 1, (4, 3), (6, 5), (5, 3), 1),
    "intra-depth": (2, 4, 4, 16, 2, (4, 4), (4, 4), (3, 3), 1),
    "depth 32": (1, 4, 32, 40, 1, (3, 3), (3, 3), (5, 5), 1),
    "odd depth, one head": (2, 1, 5, 16, 1, (2, 5), (2, 5), (3, 3), 1),
    "one query": (3, 4, 16, 16, 1, (1, 1), (1, 1), (3, 3), 1),
    "stride": (2, 4, 16, 16, 1, (3, 3), (6, 5), (5, 5), 2),
    "one axis": (2, 4, 16, 16, 1, (11,), (11,), (5,), 1),
    "middle context": (1, 4, 16, 16, 1, (6, 13), (6, 13), (5, 5), 1),
    "long context": (2, 4, 16, 16, 1, (17, 16), (17, 16), (3, 5), 1),
    "long axis": (1, 4, 16, 16, 1, (70,), (70,), (7,), 1),
    "wide values": (1, 2, 16, 136, 1, (3, 3), (3, 3), (3, 3), 1),
    "many columns, wide scope": (1, 2, 4, 16, 1, (2, 20), (2, 20), (3, 39), 1),
    "many columns, wide scope, stride": (1, 1, 4, 16, 1, (1, 18), (2, 37), (3, 71), 2),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_relative(case, dtype):
    if not CUDA and (case == "long context" or (dtype == torch.float32 and case in SLOW_IN_FLOAT32)):
        pytest.skip("too slow for the interpreter; shorter cases run the same kernels")
    batch, heads, depth, value, intra, query_grid, context_grid, scope, stride = CASES[case]
    count, context = torch.Size(query_grid).numel(), torch.Size(context_grid).numel()
    inputs = random_inputs(batch, count, context, heads, depth, value, intra, scope, dtype, content=case != "stride")
    check(
        inputs,
        lambda q, v, c, e: fused_relative(q, v, c, e, query_grid, context_grid, stride),
        lambda q, v, c, e: oracle(q, v, c, dense_of(e, query_grid, context_grid, stride)),
        dtype,
    )


def test_offsets_of_64_bits(monkeypatch):
    """What is folded where the parts have 2^31 elements: here the same parts both ways."""
    from lambdanets.ops.triton import table_kernels, tables
    from lambdanets.ops.triton.problem import Geometry

    usual, geometry = table_kernels.fold, Geometry((2, 20), (3, 21), (5, 39))
    partial = torch.randn(3, 40 * 4, 64, device=DEVICE)
    table = torch.empty(5, 39, 2, 1, device=DEVICE)
    narrow = tables.fold(partial, table, geometry, 4)

    class Wide:
        def __getitem__(self, grid):
            return lambda *a, WIDE, **options: usual[grid](*a, WIDE=True, **options)

    monkeypatch.setattr(table_kernels, "fold", Wide())
    assert tables.fold(partial, table, geometry, 4).equal(narrow)


WINDOW_CASES = {
    "square": (3, 4, 16, 16, (9, 7), (9, 7), (5, 5)),
    "rectangle, even scope, two value groups": (2, 2, 16, 24, (3, 6), (3, 6), (4, 2)),
    "halves of tiles, even scope": (1, 2, 16, 16, (9, 3), (9, 3), (4, 2)),
    "another context grid": (2, 3, 8, 16, (4, 3), (6, 5), (5, 3)),
    "fewer context rows": (1, 4, 16, 16, (7, 6), (3, 5), (3, 3)),
    "depth 32, scope beyond the map": (2, 4, 32, 8, (5, 5), (5, 5), (2, 11)),
    "one axis": (2, 1, 5, 16, (11,), (11,), (5,)),
    "one example at a time": (3, 4, 16, 16, (5, 6), (5, 6), (3, 3)),
    "wide values": (2, 2, 16, 136, (3, 5), (3, 5), (3, 3)),
    "values of two tiles in float32": (2, 1, 16, 40, (2, 3), (2, 3), (1, 3)),
    "sixteen heads": (1, 16, 4, 16, (3, 5), (3, 5), (3, 3)),
    "17 to 32 columns": (1, 2, 16, 16, (2, 20), (2, 20), (3, 3)),
    "more than 32 columns": (1, 4, 16, 16, (2, 34), (2, 34), (3, 3)),
    "several blocks of a window": (1, 1, 16, 16, (12, 11), (12, 11), (11, 11)),
    "many tiles": (3, 4, 16, 32, (20, 21), (20, 21), (7, 9)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", WINDOW_CASES)
def test_windows(case, dtype, monkeypatch):
    """The mode for larger maps, on maps that the interpreter has time for."""
    from lambdanets.ops.triton import tiled

    if not CUDA and (case == "many tiles" or (dtype == torch.float32 and case in SLOW_IN_FLOAT32)):
        pytest.skip("too slow for the interpreter; smaller maps run the same kernels")
    monkeypatch.setattr(tiled, "SMALL_CONTEXT", 0)
    if case == "one example at a time":
        monkeypatch.setattr(tiled, "WORKSPACE", 1)
    batch, heads, depth, value, query_grid, context_grid, scope = WINDOW_CASES[case]
    count, context = torch.Size(query_grid).numel(), torch.Size(context_grid).numel()
    inputs = random_inputs(batch, count, context, heads, depth, value, 1, scope, dtype, content=case != "wide values")
    used = []
    monkeypatch.setattr(tiled, "forward", lambda *all, f=tiled.forward: used.append(1) or f(*all))
    check(
        inputs,
        lambda q, v, c, e: fused_relative(q, v, c, e, query_grid, context_grid),
        lambda q, v, c, e: oracle(q, v, c, dense_of(e, query_grid, context_grid, 1)),
        dtype,
    )
    assert used


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_windows_of_more_examples_than_a_tile(dtype, monkeypatch):
    """g is written for several examples side by side, and here for nine of them at a time."""
    from lambdanets.ops.triton import tiled

    monkeypatch.setattr(tiled, "SMALL_CONTEXT", 0)
    monkeypatch.setattr(tiled, "WORKSPACE", 9 * 6 * 16 * 16 * dtype.itemsize)
    check(
        random_inputs(17, 6, 6, 1, 4, 16, 1, (1, 3), dtype),
        lambda q, v, c, e: fused_relative(q, v, c, e, (2, 3), (2, 3)),
        lambda q, v, c, e: oracle(q, v, c, dense_of(e, (2, 3), (2, 3), 1)),
        dtype,
    )


@pytest.mark.parametrize("larger", [False, True], ids=["small maps", "windows"])
def test_a_table_of_the_inputs_type(larger, monkeypatch):
    """Its gradient is written in that type, as rounding the one in float32 would give it."""
    from lambdanets.ops.triton import tiled

    monkeypatch.setattr(tiled, "SMALL_CONTEXT", 0 if larger else 256)
    inputs = random_inputs(2, 12, 12, 2, 16, 16, 1, (3, 3), torch.float16)
    table = inputs[3].half()
    gradient = torch.randn(2, 12, 2, 16, device=DEVICE)
    call = lambda q, v, c, e: fused_relative(q, v, c, e, (3, 4), (3, 4))  # noqa: E731
    found = gradients(call, [*inputs[:3], table], gradient)[4]
    right = gradients(call, [*inputs[:3], table.float()], gradient)[4]
    assert found.dtype == torch.float16
    assert torch.equal(found, right.half())


def problem_of(side=(1, 2), scope=3, B=2, H=2, K=4, V=16, **geometry):
    from lambdanets.ops.triton.problem import Geometry, Problem

    grid = (side, side) if isinstance(side, int) else side
    where = dict(query_grid=grid, context_grid=grid, scope=(scope, scope)) | geometry
    count = grid[0] * grid[1]
    return Problem(Geometry(**where), B, count, count, H, K, V, torch.float16, DEVICE)


def test_large_tables_have_one_copy(monkeypatch):
    from lambdanets.ops.triton import tiled

    table, problem = torch.randn(3, 3, 4, 1, device=DEVICE), problem_of()
    several = tiled.expand(problem, table, (1, 2), (3, 4))
    assert several.shape == (tiled.COPIES, 16, 32)
    assert all(torch.equal(copy, several[0]) for copy in several)
    monkeypatch.setattr(tiled, "COPIED", several[0].numel() * 2 - 1)
    assert torch.equal(tiled.expand(problem, table, (1, 2), (3, 4)), several[:1])
    assert tiled.expand(problem, table, (3, 4), (4, 4), (2, 2), transposed=True).shape == (1, 192, 16)


@pytest.mark.parametrize(
    ("batch", "value", "grid", "tiles_first"),
    [(512, 16, (56, 56), False), (256, 64, (56, 56), True), (2**17, 64, (56, 56), False), (1, 16, (2**10, 2**9), True)],
)
def test_grids_fit_the_second_dimension(batch, value, grid, tiles_first):
    from lambdanets.ops.triton import tiled

    problem = problem_of(grid, 23, B=batch, H=4, K=16, V=value)
    use, found = tiled.launch_grid(problem, tiled.tile("forward", problem))
    assert use.tiles_first == tiles_first
    assert found[1] < 2**16
    tiles, batch_tiles = use.count(grid), -(-batch // use.BB)
    assert found == ((tiles, batch_tiles) if tiles_first else (batch_tiles, tiles))


def test_the_tiled_mode_takes_larger_maps_only():
    from lambdanets.ops.triton import tiled

    def reason(side, scope=23, **geometry):
        return tiled.why_not(problem_of(side, scope, H=4, K=16, **geometry), False)

    assert reason(28) is None
    assert reason(56) is None
    assert "expanded mode is faster" in reason(14)
    assert "expanded mode is faster" in reason(28, 55)
    for other in (dict(query_grid=None), dict(stride=2), dict(intra_depth=2)):
        assert "stride 1" in reason(28, **other), other
    assert "at most 16 heads, not 17" in tiled.why_not(problem_of(28, 23, H=17, K=16), False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "context", "intra"), [(7, 9, 1), (5, 20, 2), (3, 300, 1)])
def test_dense(count, context, intra, dtype):
    inputs = random_inputs(2, count, context, 4, 16, 16, intra, (count, context), dtype)
    check(inputs, fused_dense, oracle, dtype)


CONTENT_CASES = {"one block": (2, 7, 16, 16), "odd depths, two blocks": (3, 70, 5, 12), "wide": (1, 300, 32, 136)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CONTENT_CASES)
def test_content_lambda(case, dtype):
    """Keys far from zero: without a maximum their exponentials overflow. Keys and values are slices of one buffer."""
    batch, context, depth, value = CONTENT_CASES[case]
    torch.manual_seed(0)
    buffer = (20 * torch.randn(batch, context, depth + value, device=DEVICE) + 60).to(dtype)
    gradient = torch.randn(batch, depth, value, device=DEVICE)

    def results(function, kind):
        leaf = buffer.to(kind).requires_grad_()
        output = function(leaf[..., :depth], leaf[..., depth:])
        (grad,) = torch.autograd.grad(output, leaf, gradient.to(output.dtype))
        return [output, grad[..., :depth], grad[..., depth:] + 1]

    keys, values = buffer[..., :depth], buffer[..., depth:]
    output, norm = content_lambda(keys, values)
    dv = torch.ones(batch, context, value, device=DEVICE, dtype=dtype)  # what is there already is added to
    found = [output, torch.empty(keys.shape, device=DEVICE, dtype=dtype), dv]
    assert content_gradients(gradient, keys, values, output, norm, dv, found[1]) is dv
    gaps = torch.ones(batch, context + 3, value, device=DEVICE, dtype=dtype)[:, :context]  # between examples
    dk = torch.empty_like(found[1])
    apart = content_gradients(gradient, keys, values, output, norm, gaps, dk)
    assert all(map(torch.equal, (dk, apart), found[1:]))
    assert apart.is_contiguous()
    assert (apart is gaps) == (batch == 1)  # one example has none
    plain = results(lambda k, v: k.float().softmax(1).to(dtype).mT @ v, dtype)
    expected = results(lambda k, v: k.softmax(1).mT @ v, torch.float64)
    for mine, theirs, right in zip(found, plain, expected, strict=True):
        floor = 1e-3 if dtype == torch.float32 else 1e-2
        assert relative_error(mine, right) <= max(2 * relative_error(theirs, right), floor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [False, True], ids=["small map", "window"])
def test_content_lambda_of_keys(window, dtype, monkeypatch):
    """Content and positions in one operator: the gradient of the values is the sum of both."""
    from lambdanets.ops.triton import tiled

    monkeypatch.setattr(tiled, "SMALL_CONTEXT", 0 if window else 256)
    queries, values, _, table = random_inputs(2, 20, 20, 4, 16, 16, 1, (3, 5), dtype)
    keys = torch.randn(2, 20, 16, device=DEVICE).to(dtype)
    check(
        [queries, values, keys, table],
        lambda q, v, k, e: fused_relative(q, v, None, e, (4, 5), (4, 5), keys=k),
        lambda q, v, k, e: oracle(q, v, k.softmax(1).mT @ v.squeeze(-1), dense_of(e, (4, 5), (4, 5), 1)),
        dtype,
    )


@pytest.mark.parametrize("options", [{}, dict(intra_depth=2), dict(query_softmax=True), dict(key_norm="l2")], ids=str)
def test_compiled_layers_hold_the_kernels_themselves(options):
    """Not the opaque operator, whose backward would run the forward once more; one graph for all sizes."""
    torch.compiler.reset()
    torch.manual_seed(0)
    layer = LambdaLayer2d(16, heads=2, key_depth=8, scope=3, device=DEVICE, **options)
    graphs = []

    def backend(graph, inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph

    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for height, width in ((3, 4), (5, 3)):
        x = torch.randn(2, 16, height, width, device=DEVICE)
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-3, atol=1e-3)
    (targets,) = graphs
    assert "lambdanets.fused.default" in targets
    assert "lambdanets.lambda_op.default" not in targets


def test_tables_without_intra_depth_and_slices_of_one_projection():
    """queries and values as slices of one buffer (strided), table [*scope, K], values [B, M, V]."""
    torch.manual_seed(0)
    buffer = torch.randn(2, 12, 2 * 16 + 16, device=DEVICE)
    queries, values = buffer[..., :32].view(2, 12, 2, 16), buffer[..., 32:]
    table = torch.randn(3, 3, 16, device=DEVICE)
    found = fused_relative(queries, values, None, table, (3, 4), (3, 4))
    embeddings = dense_of(table[..., None].double(), (3, 4), (3, 4), 1)
    expected = oracle(queries.double(), values[..., None].double(), None, embeddings)
    assert relative_error(found, expected) < 2e-3


@pytest.mark.parametrize("from_keys", [False, True], ids=["content", "keys"])
def test_only_the_gradients_that_are_asked_for(from_keys):
    inputs = random_inputs(2, 9, 9, 2, 16, 16, 1, (3, 3), torch.float32)
    if from_keys:
        inputs[2] = torch.randn(2, 9, 16, device=DEVICE)
    for asked in range(4):
        queries, values, third, table = leaves = [
            one.clone().requires_grad_(i == asked) for i, one in enumerate(inputs)
        ]
        content, keys = (None, third) if from_keys else (third, None)
        fused_relative(queries, values, content, table, (3, 3), (3, 3), keys=keys).sum().backward()
        assert [one.grad is not None for one in leaves] == [i == asked for i in range(4)]
        assert torch.isfinite(leaves[asked].grad).all()


@pytest.mark.parametrize("content", ["keys", "given", "none"])
def test_registered_operator(content, monkeypatch):
    from lambdanets.ops.triton.operators import fused

    monkeypatch.undo()  # opcheck compares outputs with what torch.empty gives
    queries, values, lambdas, table = random_inputs(2, 9, 9, 2, 16, 24, 1, (3, 3), torch.float32)
    keys = torch.randn(2, 9, 16, device=DEVICE) if content == "keys" else None
    arguments = [queries.flatten(2), values.squeeze(-1), keys, lambdas if content == "given" else None, table]
    leaves = [one if one is None else one.requires_grad_() for one in arguments]
    torch.library.opcheck(fused, (*leaves, [3, 3], [3, 3], 1, False))


def test_flops_count_what_is_in_scope():
    from torch.utils.flop_counter import FlopCounterMode

    queries, values, lambdas, table = random_inputs(2, 9, 9, 2, 16, 16, 1, (3, 3), torch.float32)
    with FlopCounterMode(display=False) as counter:
        fused_relative(queries, values, lambdas, table, (3, 3), (3, 3))
    assert counter.get_total_flops() == 2 * 2 * 16 * 16 * (7 * 7 + 9 * 2)
    with FlopCounterMode(display=False) as counter:
        keys = torch.randn(2, 9, 16, device=DEVICE, requires_grad=True)
        fused_relative(queries, values, None, table, (3, 3), (3, 3), keys=keys).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 16 * 16 * (7 * 7 + 9 * 2 + 9 + 9)  # content forward, keys backward


def test_reasons():
    cpu = torch.device("cpu")
    assert "float64" in why_not(DEVICE, torch.float64, 16, 16, 4)
    assert "3-d" in why_not(DEVICE, torch.float32, 16, 16, 4, dims=3)
    assert "dilation" in why_not(DEVICE, torch.float32, 16, 16, 4, dilation=2)
    if CUDA:
        assert "CUDA" in why_not(cpu, torch.float32, 16, 16, 4)


@pytest.mark.parametrize("content", ["keys", "given", "none"])
@pytest.mark.parametrize("grid", [(4, 3), None], ids=["relative", "dense"])
def test_a_second_derivative(grid, content):
    """A penalty on gradients (of all inputs) moves every input as in float64 by einsums."""
    torch.manual_seed(0)
    intra = 1 if content == "keys" else 2
    table = (3, 3, 4, intra) if grid else (12, 12, 4, intra)
    shapes = [(2, 12, 2, 4), (2, 12, 5, intra), {"keys": (2, 12, 4), "given": (2, 4, 5), "none": None}[content], table]
    inputs = [None if shape is None else torch.randn(shape, device=DEVICE) for shape in shapes]

    def fused(queries, values, third, embeddings):
        given = (third, None) if content == "given" else (None, third)
        if grid is None:
            return fused_dense(queries, values, given[0], embeddings, keys=given[1])
        return fused_relative(queries, values, given[0], embeddings, grid, grid, keys=given[1])

    def plain(queries, values, third, embeddings):
        if content == "keys":
            third = torch.einsum("bmk,bmv->bkv", third.softmax(1), values[..., 0])
        return oracle(queries, values, third, dense_of(embeddings, grid, grid, 1) if grid else embeddings)

    def penalty(function, dtype):
        leaves = [None if one is None else one.to(dtype).requires_grad_() for one in inputs]
        kept = [one for one in leaves if one is not None]
        first = torch.autograd.grad(function(*leaves).square().sum(), kept, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), kept)

    for found, right in zip(penalty(fused, torch.float32), penalty(plain, torch.float64), strict=True):
        assert relative_error(found, right) < 1e-5

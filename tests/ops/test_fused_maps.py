"""Lambdas and the pooling after them, in either order, against float64: values and every gradient. Runs as
test_fused.py does, with its letters; P windows of the pooling.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton is not installed")

from lambdanets import LambdaLayer2d
from lambdanets.layers.lambda_layer import LambdaLayer
from lambdanets.layers.pool import AveragePool
from lambdanets.models.resnet import Bottleneck
from lambdanets.ops.triton import fused_relative, operators, pool_first, why_not
from lambdanets.ops.triton.problem import Geometry, Problem
from tests.ops.kernels import (
    CUDA,
    DEVICE,
    DTYPES,
    Graphs,
    check,
    dense_of,
    gradients,
    oracle,
    random_inputs,
    relative_error,
)

REASON = why_not(DEVICE, torch.float32, 16, 16, 4)
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.usefixtures("poisoned_memory", "forget_compiled_code"),
]
LAST = torch.channels_last


@pytest.fixture(params=[True, False], ids=["maps first", "lambdas first"])
def order(request, monkeypatch):
    """Which order runs, whatever would be quicker."""
    take_order(monkeypatch, request.param)
    return request.param


def take_order(monkeypatch, pool_comes_first):
    """`pool_comes_first(backward)`, or always or never."""
    first = pool_comes_first if callable(pool_comes_first) else lambda backward: pool_comes_first
    reason = lambda problem, backward: None if problem.pooled and first(backward) else "not asked for"  # noqa: E731
    monkeypatch.setattr(pool_first, "why_not", reason)


def pooled(output_BNHV, grid):
    """[B, P, H, V], by torch. (Of channels-last images torch's gradients are wrong on a GPU.)"""
    images = output_BNHV.flatten(2).mT.unflatten(2, grid).contiguous()
    return F.avg_pool2d(images, 3, 2, padding=1).flatten(2).mT.unflatten(2, output_BNHV.shape[2:])


def plain(queries, values, content, table, grid):
    return pooled(oracle(queries, values, content, dense_of(table, grid, grid, 1)), grid)


#        batch heads depth value grid scope
CASES = {
    "even": (3, 4, 8, 16, (6, 4), (3, 3)),
    "odd, scope beyond the map": (2, 2, 4, 24, (5, 7), (11, 15)),
    "rectangle, even scope": (1, 3, 4, 8, (4, 9), (4, 2)),
    "odd depth, one head": (2, 1, 5, 16, (3, 6), (3, 1)),
    "a row": (2, 4, 4, 16, (1, 6), (3, 5)),
    "a column": (2, 4, 4, 16, (7, 1), (3, 5)),
    "a pixel": (3, 2, 4, 8, (1, 1), (3, 3)),
    "more than a block of examples": (70, 2, 4, 4, (2, 3), (3, 3)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("content", [True, False], ids=["content", "position only"])
@pytest.mark.parametrize("case", CASES)
def test_pooled(case, content, dtype, order):
    if (
        not CUDA
        and (not order or not content or dtype == torch.float32)
        and case not in ("odd depth, one head", "a row")
    ):
        pytest.skip("no time for it in the interpreter; other cases run the same code")
    batch, heads, depth, value, grid, scope = CASES[case]
    count = grid[0] * grid[1]
    inputs = random_inputs(batch, count, count, heads, depth, value, 1, scope, dtype, content=content)
    check(
        inputs,
        lambda q, v, c, e: fused_relative(q, v, c, e, grid, grid, pooled=True),
        lambda q, v, c, e: plain(q, v, c, e, grid),
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grid", [(4, 5), (4, 4)], ids=["columns to fill up", "none"])
def test_content_of_keys(grid, dtype, order):
    """The gradient of the values is the sum of both parts; the one of the maps has gaps between examples."""
    count = grid[0] * grid[1]
    queries, values, _, table = random_inputs(2, count, count, 4, 8, 16, 1, (3, 5), dtype)
    keys = torch.randn(2, count, 8, device=DEVICE).to(dtype)
    check(
        [queries, values, keys, table],
        lambda q, v, k, e: fused_relative(q, v, None, e, grid, grid, keys=k, pooled=True),
        lambda q, v, k, e: plain(q, v, k.softmax(1).mT @ v.squeeze(-1), e, grid),
        dtype,
    )


@pytest.mark.parametrize("content", ["keys", "given"])
def test_gradients_as_the_compiler_expects_them(content, order):
    """Laid out as the empty ones that it plans with, and none in another's memory; also of slices of a projection."""
    torch.manual_seed(0)
    for batch in (1, 2):
        buffer = torch.randn(batch, 12, 8 + 16 + 4, device=DEVICE)
        queries, values, keys = buffer.split([8, 16, 4], dim=2)
        table, lambdas = torch.randn(3, 3, 4, 1, device=DEVICE), torch.randn(batch, 4, 16, device=DEVICE)
        kept = (keys, None) if content == "keys" else (None, lambdas)
        grids = ([3, 4], [3, 4], 1, True)
        output, found, norm = operators.fused(queries, values, *kept, table, *grids)
        one = fused_relative(queries.reshape(batch, 12, 2, 4), values, kept[1], table, (3, 4), (3, 4), keys=kept[0])
        torch.testing.assert_close(output.unflatten(2, (2, 16)), pooled(one, (3, 4)), rtol=1e-4, atol=1e-4)
        inputs = (torch.randn_like(output), queries, values, keys, found, norm, table)
        if content == "given":
            inputs = (torch.randn_like(output), queries, values, None, lambdas, None, table)
        needs = [True, True, content == "keys", content == "given", True]
        mine = operators.fused_backward(*inputs, *grids, needs)
        like = operators.fused_backward_shape(*inputs, *grids, needs)
        assert [one.shape for one in mine] == [one.shape for one in like]
        assert all(one.is_contiguous() for one in (*mine, *like))
        memory = [one.untyped_storage().data_ptr() for one in mine if one.numel()]
        assert len(set(memory)) == len(memory)


def test_large_gradients_of_float16(order):
    """Sums over the batch that float16 does not hold, whose sum over positions the table's float32 does."""
    torch.manual_seed(0)
    shapes = (64, 16, 4, 4), (64, 16, 8), (3, 3, 4)
    queries, values, table = ((torch.randn(shape) + (i < 2)).to(DEVICE) for i, shape in enumerate(shapes))
    table.requires_grad_()
    output = fused_relative(queries.half(), values.half(), None, table, (4, 4), (4, 4), pooled=True)
    (found,) = torch.autograd.grad(output, table, torch.full_like(output, 300))
    assert torch.isfinite(found).all()
    assert found.abs().max() > torch.finfo(torch.float16).max


@pytest.mark.parametrize("first", ["forward", "backward"])
def test_one_order_forward_and_another_backward(first, monkeypatch):
    """As with a few dozen images."""
    asked = []

    def pool_comes_first(backward):
        asked.append(backward)
        return backward == (first == "backward")

    take_order(monkeypatch, pool_comes_first)
    inputs = random_inputs(2, 12, 12, 2, 4, 8, 1, (3, 3), torch.float32)
    gradient = torch.randn(2, 4, 2, 8, device=DEVICE)
    found = gradients(lambda *x: fused_relative(*x, (3, 4), (3, 4), pooled=True), inputs, gradient)
    right = gradients(lambda *x: plain(*x, (3, 4)), [one.double() for one in inputs], gradient)
    assert asked == [False, True]
    for one, other in zip(found, right, strict=True):
        assert relative_error(one, other) < 1e-5


def test_the_batch_in_parts(monkeypatch):
    """Five examples, two at a time: the same numbers, and the table's gradient is the sum over the parts."""
    take_order(monkeypatch, True)
    inputs = random_inputs(5, 12, 12, 2, 2, 16, 1, (3, 3), torch.float32)
    run = lambda q, v, c, e: fused_relative(q, v, c, e, (3, 4), (3, 4), pooled=True)  # noqa: E731
    gradient = torch.randn(5, 4, 2, 16, device=DEVICE)
    at_once = gradients(run, inputs, gradient)
    _, columns = pool_first.columns_of(12, 2)
    monkeypatch.setattr(pool_first, "WORKSPACE", 2 * 4 * 2 * columns * 4)
    assert [part.stop - part.start for part in pool_first.parts_of(5, 4 * 2 * columns * 4)] == [2, 2, 1]
    assert [part.stop - part.start for part in pool_first.parts_of(2, 10**9)] == [1, 1]  # one at a time at least
    for one, other in zip(gradients(run, inputs, gradient), at_once, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("from_keys", [False, True], ids=["content", "keys"])
def test_only_the_gradients_that_are_asked_for(from_keys, order):
    inputs = random_inputs(2, 9, 9, 2, 2, 16, 1, (3, 3), torch.float32)
    if from_keys:
        inputs[2] = torch.randn(2, 9, 2, device=DEVICE)

    def run(asked):
        leaves = [one.clone().requires_grad_(i in asked) for i, one in enumerate(inputs)]
        content, keys = (None, leaves[2]) if from_keys else (leaves[2], None)
        output = fused_relative(*leaves[:2], content, leaves[3], (3, 3), (3, 3), keys=keys, pooled=True)
        output.square().sum().backward()
        return [one.grad for one in leaves]

    right = run(range(4))
    for asked in range(4):
        found = run([asked])
        assert [one is not None for one in found] == [i == asked for i in range(4)]
        torch.testing.assert_close(found[asked], right[asked])


@pytest.mark.parametrize("content", ["keys", "given", "none"])
def test_registered(content, order, monkeypatch):
    monkeypatch.undo()  # opcheck compares outputs with what torch.empty gives
    take_order(monkeypatch, order)
    queries, values, lambdas, table = random_inputs(2, 12, 12, 2, 2, 24, 1, (3, 3), torch.float32)
    keys = torch.randn(2, 12, 2, device=DEVICE) if content == "keys" else None
    arguments = [queries.flatten(2), values.squeeze(-1), keys, lambdas if content == "given" else None, table]
    leaves = [one if one is None else one.requires_grad_() for one in arguments]
    torch.library.opcheck(operators.fused, (*leaves, [3, 4], [3, 4], 1, True))


def test_a_second_derivative(order):
    inputs = random_inputs(2, 12, 12, 2, 4, 5, 1, (3, 3), torch.float32)

    def penalty(function, dtype):
        leaves = [one.to(dtype).requires_grad_() for one in inputs]
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), leaves)

    found = penalty(lambda q, v, c, e: fused_relative(q, v, c, e, (3, 4), (3, 4), pooled=True), torch.float32)
    right = penalty(lambda q, v, c, e: plain(q, v, c, e, (3, 4)), torch.float64)
    for one, other in zip(found, right, strict=True):
        assert relative_error(one, other) < 1e-5


def test_products_keep_their_type_under_autocast(order):
    """float32 that autocast would round."""
    inputs = random_inputs(2, 12, 12, 2, 4, 8, 1, (3, 3), torch.float32)
    gradient = torch.randn(2, 4, 2, 8, device=DEVICE)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        found = gradients(lambda *x: fused_relative(*x, (3, 4), (3, 4), pooled=True), inputs, gradient)
    right = gradients(lambda *x: plain(*x, (3, 4)), [one.double() for one in inputs], gradient)
    for one, other in zip(found, right, strict=True):
        assert one.dtype == torch.float32
        assert relative_error(one, other) < 1e-5


@pytest.mark.parametrize(
    ("side", "value", "batch", "forward", "backward"),
    [
        (28, 64, 256, True, True),
        (28, 64, 64, False, True),
        (28, 64, 32, False, True),
        (28, 64, 8, False, False),
        (14, 128, 256, True, True),
        (14, 128, 32, True, True),
        (14, 128, 1, False, False),
        (28, 32, 256, False, False),
        (56, 32, 256, False, False),
        (64, 64, 256, False, False),
    ],
)
def test_when_it_pays(side, value, batch, forward, backward):
    """As measured (README.md): in the first block of c4 and of c5 of a ResNet-50, not in that of c3."""
    problem = problem_of(side, B=batch, V=value)
    assert [pool_first.why_not(problem, way) is None for way in (False, True)] == [forward, backward]
    assert "no pooling" in pool_first.why_not(replace(problem, pooled=False), True)
    assert "float32" in pool_first.why_not(replace(problem, dtype=torch.float32), True)
    for other in (dict(stride=2), dict(intra_depth=2), dict(query_grid=None), dict(context_grid=(side, side + 1))):
        elsewhere = replace(problem, geometry=replace(problem.geometry, **other))
        assert "on one grid" in pool_first.why_not(elsewhere, True)


def test_a_scope_beyond_the_map_sees_no_more():
    assert "lambdas first are faster" in pool_first.why_not(problem_of(7, B=256, V=16), True)


def test_windows_need_two_axes():
    queries, values, table = torch.randn(1, 6, 2, 4), torch.randn(1, 6, 4), torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"two axes, got a grid \(6,\)"):
        fused_relative(queries, values, None, table, (6,), (6,), pooled=True)


def test_embeddings_stay_small():
    """Deep keys and values would make it pay on maps whose embeddings of all pairs take gigabytes."""
    assert "too much memory" in pool_first.why_not(problem_of(56, B=256, K=64, V=1024), True)


def problem_of(side, B, V, K=16):
    geometry = Geometry((side, side), (side, side), (23, 23))
    return Problem(geometry, B, side * side, side * side, 4, K, V, torch.bfloat16, DEVICE, pooled=True)


def block_of(**options):
    torch.manual_seed(0)
    layer = LambdaLayer2d(16, downsample="avg", **dict(heads=2, key_depth=4, scope=5) | options)
    block = Bottleneck(8, 16, stride=2, spatial=layer).to(DEVICE, memory_format=LAST)
    nn.init.normal_(block.bn3.weight)
    return block


def images(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype).to(memory_format=LAST).requires_grad_()


def results(block, x):
    """Output, gradients and running statistics of a training step."""
    output = block(x)
    found = torch.autograd.grad(output.square().sum(), [x, *block.parameters()])
    names = [name for name, _ in block.named_parameters()]
    # (After batch norm the size of values makes no difference: a gradient of zero, and rounding.)
    kept = {name: one for name, one in zip(["x", *names], found, strict=True) if "norm_values.weight" not in name}
    return {"output": output, **kept, **dict(block.named_buffers())}


@pytest.fixture
def in_one_step(monkeypatch):
    """The layers that interacted and pooled in one step."""
    seen, interact_pooled = [], LambdaLayer._interact_pooled

    def recorded(layer, *inputs):
        seen.append(layer)
        return interact_pooled(layer, *inputs)

    monkeypatch.setattr(LambdaLayer, "_interact_pooled", recorded)
    return seen


def layer_of(**options):
    return LambdaLayer2d(16, **dict(heads=2, scope=3, downsample="avg") | options).to(DEVICE)


def in_two_steps(layer, x):
    """The same layer without its option, and torch's pooling of images for which it is right."""
    layer.downsample = None
    try:
        return nn.functional.avg_pool2d(layer(x).contiguous(), 3, 2, padding=1)
    finally:
        layer.downsample = "avg"


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((3, 8, 6, 7), {}),
        ((2, 8, 5, 4), dict(content=False)),
        ((2, 8, 5, 4), dict(batch_norm=False)),
        ((2, 8, 4, 5), dict(scope=None, input_size=5)),
    ],
    ids=str,
)
def test_a_block_that_halves_its_map(shape, options, order, monkeypatch, in_one_step):
    """One step is what two are."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # its rounding turns differences of 1e-7 to 1e-3
    x = images(*shape)
    one, two = block_of(**options), block_of(**options)
    two.conv2.downsample, two.pool = None, AveragePool(3, 2, padding=1)
    found, right = results(one, x), results(two, x)
    assert in_one_step == [one.conv2]
    assert found.keys() == right.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, right[name], rtol=2e-4, atol=2e-4, msg=lambda text, name=name: name + text)


def test_hooks_see_the_pooled_output(in_one_step):
    layer, x, shapes = layer_of(), images(2, 16, 4, 6), []
    hooks = [
        layer.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape))),
        nn.modules.module.register_module_forward_hook(lambda module, inputs, output: shapes.append(type(module))),
    ]
    layer(x)
    for hook in hooks:
        hook.remove()
    assert shapes[-2:] == [LambdaLayer2d, (2, 16, 2, 3)]
    assert in_one_step == [layer]


def test_what_changes_a_layer_is_respected():
    layer, x = layer_of().eval(), images(2, 16, 4, 6)
    right = in_two_steps(layer, x)
    spy = SimpleNamespace(calls=0)

    def forward(x):
        spy.calls += 1
        return LambdaLayer2d.forward(layer, x)

    layer.forward = forward  # as tools do that change what a module computes
    torch.testing.assert_close(layer(x), right, rtol=1e-4, atol=1e-4)
    assert spy.calls == 1
    del layer.forward
    layer.interact = lambda *inputs: 2 * LambdaLayer2d.interact(layer, *inputs)
    torch.testing.assert_close(layer(x), 2 * right, rtol=1e-4, atol=1e-4)
    del layer.interact
    graphs = []
    layer.compile(backend=lambda graph, inputs: graphs.append(graph) or graph)
    torch.testing.assert_close(layer(x), right, rtol=1e-4, atol=1e-4)
    assert graphs


class Adapter(nn.Module):
    """In the place of a projection; it has no weight of its own."""

    def __init__(self, linear):
        super().__init__()
        self.inside = linear

    def forward(self, x):
        return self.inside(x)


def test_something_else_in_the_place_of_a_projection():
    layer, x = layer_of().eval(), images(2, 16, 5, 4)
    right = layer(x)
    layer.to_queries = Adapter(layer.to_queries)
    torch.testing.assert_close(layer(x), right, rtol=1e-4, atol=1e-4)


def test_a_fused_layer(in_one_step):
    """Its queries are slices of one projection."""
    layer, x = layer_of().eval(), images(2, 16, 5, 4).detach()
    right = in_two_steps(layer, x)
    torch.testing.assert_close(layer.fuse()(x), right, rtol=1e-4, atol=1e-4)
    assert in_one_step == [layer]


def test_wrong_channels_are_refused_in_the_layers_words():
    with pytest.raises(ValueError, match="x has 8 channels, but this layer was built for 16"):
        layer_of()(images(2, 8, 4, 6))


def test_subclasses():
    class Doubled(LambdaLayer2d):
        def forward(self, x):
            return 2 * super().forward(x)

    class Louder(LambdaLayer2d):
        def interact(self, *inputs):
            return 2 * super().interact(*inputs)

    x = images(2, 16, 4, 6)
    for kind in (Doubled, Louder):
        layer = kind(16, heads=2, scope=3, downsample="avg", batch_norm=False).to(DEVICE)
        plain = layer_of(batch_norm=False)
        plain.load_state_dict(layer.state_dict())
        torch.testing.assert_close(layer(x), 2 * in_two_steps(plain, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        dict(position=False),
        dict(multi_head=True),
        dict(query_softmax=True),
        dict(intra_depth=2),
        dict(position_bias=True),
        dict(dilation=2),
        dict(key_norm="l2"),
        dict(key_norm=None),
        dict(backend="gemm"),
        dict(key_depth=65),
    ],
    ids=str,
)
def test_layers_that_are_pooled_afterwards(options, in_one_step):
    layer, x = layer_of(**options), images(2, 16, 5, 4)
    torch.testing.assert_close(layer(x), in_two_steps(layer, x), rtol=1e-4, atol=1e-4)
    assert not in_one_step


def test_inputs_that_are_pooled_afterwards(in_one_step):
    layer, x = layer_of(), images(2, 16, 5, 4)
    layer(x)
    layer_of(content=False, key_norm="l2")(x)  # there are no keys
    assert len(in_one_step) == 2
    for other, options in (
        (x.detach().contiguous(), {}),
        (images(0, 16, 5, 4), {}),
        (x, dict(mask=torch.ones(20, 20, dtype=torch.bool, device=DEVICE))),
        (x, dict(context_mask=torch.ones(2, 5, 4, dtype=torch.bool, device=DEVICE))),
        (x, dict(context=images(2, 16, 5, 4))),
    ):
        assert layer(other, **options).shape == (len(other), 16, 3, 2)
    assert layer.double()(x.double()).dtype == torch.float64
    assert len(in_one_step) == 2


def test_other_sizes_do_not_compile_again():
    block, graphs = block_of(), Graphs()
    compiled = torch.compile(block, backend=graphs.backend, fullgraph=True, dynamic=True)
    for shape in ((2, 8, 6, 9), (3, 8, 10, 5)):
        x = images(*shape)
        torch.testing.assert_close(compiled(x), block(x), rtol=1e-4, atol=1e-4)
    names = [str(node.target) for graph in graphs.forward for node in graph.graph.nodes]
    mine = [name.split(".")[1] for name in names if name.startswith("lambdanets.")]
    assert mine.count("fused") == 1  # one graph
    assert "average_pool" not in mine


@pytest.mark.parametrize("strict", [False, True])
def test_exported_blocks_are_torch_alone(strict):
    program = torch.export.export(block_of().eval(), (images(2, 8, 4, 6).detach(),), strict=strict)
    assert not [node for node in program.graph.nodes if "lambdanets" in str(node.target)]

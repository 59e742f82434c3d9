"""The norms of queries and values as operators: registered as they should be, and what torch.compile makes of them.
Runs as test_fused.py does.
"""

import shutil
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="Triton is not installed")

from lambdanets import LambdaLayer2d
from lambdanets.ops.triton import norm_operators, why_not
from tests.ops.kernels import CUDA, DEVICE, Graphs, two_norms

REASON = why_not(DEVICE, torch.float32, 16, 16, 4)
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.usefixtures("forget_compiled_code"),
]


@pytest.mark.parametrize("keys", [4, 0])
def test_registered_operators(keys):
    pair, sizes = two_norms((4, 4), torch.float32), [4, 4, keys]
    product = torch.randn(2, 5, sum(sizes), device=DEVICE, requires_grad=True)
    parameters = [getattr(norm, name) for name in ("weight", "bias") for norm in pair]
    statistics = [
        getattr(norm, name) for name in ("running_mean", "running_var", "num_batches_tracked") for norm in pair
    ]
    inputs = (product, *parameters, *statistics, [1e-5, 1e-3], [0.1, 0.25], sizes)
    torch.library.opcheck(norm_operators.normed_parts, inputs)
    *parts, moments = (one.detach() for one in norm_operators.normed_parts(*inputs))
    kept = [one.detach() for one in (product, *parameters)]
    torch.library.opcheck(norm_operators.normed_parts_backward, (*parts, *kept, moments, sizes))


def small_layer(**options):
    torch.manual_seed(0)
    return LambdaLayer2d(8, heads=2, key_depth=4, scope=3, device=DEVICE, backend="fused", **options)


def trained(layer, call, half, sizes=((2, 4, 3), (3, 5, 4), (5, 3, 6))):
    """Three steps: outputs, gradients of inputs and parameters, running statistics."""
    torch.manual_seed(1)
    found = []
    for batch, height, width in sizes:
        x = torch.randn(batch, 8, height, width, device=DEVICE, requires_grad=True)
        with torch.autocast(DEVICE.type, torch.float16, enabled=half):
            output = call(x)
        output.float().square().sum().backward()
        found += [output.detach(), x.grad]
    return found + [one.grad for one in layer.parameters()] + list(layer.buffers())


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("content", [True, False])
def test_a_compiled_layer_trains_as_an_eager_one(content, half):
    graphs, eager, layer = Graphs(), small_layer(content=content), small_layer(content=content)
    right = trained(eager, eager, half)
    found = trained(layer, torch.compile(layer, backend=graphs.backend, fullgraph=True, dynamic=True), half)
    for mine, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3 if half else 1e-5, atol=1e-3 if half else 1e-5)
    assert [int(norm.num_batches_tracked) for norm in (layer.norm_queries, layer.norm_values)] == [3, 3]
    name = "normed_parts"
    assert [Graphs.calls(graph) for graph in graphs.forward] == [[name]]  # once for all sizes
    assert [Graphs.calls(graph) for graph in graphs.backward] == [[f"{name}_backward"]]


@pytest.mark.skipif(not CUDA and shutil.which("c++") is None, reason="inductor needs a C++ compiler on the CPU")
def test_inductor_changes_the_statistics_in_place():
    from torch._inductor.utils import run_and_get_code

    eager, layer = small_layer(), small_layer()
    right = trained(eager, eager, half=True)
    call = torch.compile(layer, fullgraph=True, dynamic=True)
    found, code = run_and_get_code(trained, layer, call, half=True)
    for mine, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-2)
    name = "= torch.ops.lambdanets.normed_parts"
    calls = [line for source in code for line in source.splitlines() if name in line]
    assert ["backward" in line for line in calls] == [False, True]
    # All that it changes are inputs of the graph: buffers of the layer, no copies that would have to be copied back.
    assert calls[0].split("[")[0].count("primals") == 4 + 6


@pytest.mark.skipif(not CUDA and shutil.which("c++") is None, reason="inductor needs a C++ compiler on the CPU")
def test_inductor_with_activation_checkpointing():
    """The norms run twice then, and move the running statistics once."""
    eager, layer, sizes = small_layer(), small_layer(), ((2, 4, 3),) * 2
    right = trained(eager, eager, half=False, sizes=sizes)
    again = partial(checkpoint, layer, use_reentrant=False)
    found = trained(layer, torch.compile(again, fullgraph=True), half=False, sizes=sizes)
    for mine, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_a_compiled_layer_keeps_what_an_eager_one_keeps():
    kept, graphs, layer = {}, Graphs(), small_layer()
    x = torch.randn(2, 8, 16, 16, device=DEVICE, requires_grad=True)

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        eager = layer(x)
    torch.compile(layer, backend=graphs.backend, fullgraph=True)(x).sum().backward()
    assert eager.requires_grad
    (graph,) = graphs.backward
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder") if "tangents" not in node.name]
    assert sum(one.untyped_storage().nbytes() for one in inputs) <= sum(kept.values())


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_layer_is_torch_alone(strict):
    program = torch.export.export(small_layer(), (torch.randn(2, 8, 4, 3, device=DEVICE),), strict=strict)
    targets = [str(node.target) for node in program.graph.nodes]
    assert sum("batch_norm" in target for target in targets) == 2
    assert not [target for target in targets if "lambdanets" in target]


@pytest.mark.parametrize("kind", ["forward_pre", "forward"])
def test_a_hooked_norm_is_called_under_the_compiler(kind):
    graphs, layer, calls = Graphs(), small_layer(), []
    getattr(layer.norm_values, f"register_{kind}_hook")(lambda *a: calls.append(1))
    torch.compile(layer, backend=graphs.backend, fullgraph=True)(torch.randn(2, 8, 4, 3, device=DEVICE))
    assert calls == [1]
    assert [Graphs.calls(graph) for graph in graphs.forward] == [[]]

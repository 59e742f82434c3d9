"""Networks compiled block by block: what is compiled, that it is right, and what is no longer silent."""

import copy
import json
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

from lambdanets.bench import compiled
from lambdanets.bench.check import MismatchError, relative_error
from lambdanets.bench.compiled import as_graph, check_compiled, compile_blocks, many_variants
from lambdanets.bench.networks import BenchNetwork, Entry, make_protocols
from lambdanets.bench.throughput import Protocol, Steps, measure_network
from lambdanets.bench.timing import captured
from lambdanets.cli import main
from lambdanets.models import create_model

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda")
RESNET = ["conv1", "bn1", "act1", "maxpool"]
NARROW = {"widths": (8, 8, 16, 16)}


pytestmark = pytest.mark.usefixtures("forget_compiled_code")


class Block(nn.Module):
    def __init__(self, width=4, dropout=0.0):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), dropout

    def forward(self, x):
        return nn.functional.dropout(x + self.norm(self.conv(x)).relu(), self.drop)


class Breaking(Block):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


class Blocks(nn.Module):
    """A stem, blocks, pooling between them, and a head."""

    def __init__(self, block=Block, widths=(4, 4), **options):
        super().__init__()
        self.stem, self.act, self.head = nn.Conv2d(3, widths[0], 3), nn.ReLU(inplace=True), nn.Linear(widths[-1], 5)
        self.blocks = nn.ModuleList([block(width, **options) for width in widths])

    def forward(self, x):
        x = self.act(self.stem(x))
        for block in self.blocks:
            x = block(nn.functional.interpolate(x, scale_factor=0.5)[:, : block.conv.in_channels])
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize(
    ("text", "count", "first", "rest"),
    [
        ("resnet50", 16, "layer1.0", [RESNET, ["head_drop", "fc"]]),
        ("resnet50,placement=LLLL,layer=axial_attention", 16, "layer1.0", [RESNET, ["head_drop", "fc"]]),
        ("lambda_resnet101", 33, "layer1.0", [RESNET, ["head_drop", "fc"]]),
        ("resnet_rs50", 16, "layer1.0", [RESNET, ["head_drop", "fc"]]),
        ("lambda_mobilenet_v2", 17, "features.1", [["features.0"], ["features.18", "head_drop", "classifier"]]),
        # a single block of its class is no repeated one: it is in the middle, by itself
        (
            "lambda_mobilenet_v2,placement=(10,)",
            16,
            "features.1",
            [["features.0"], ["features.10"], ["features.18", "head_drop", "classifier"]],
        ),
        ("lambda_patch_tiny", 16, "blocks.0.0", [["patch_embed"], ["norm", "head_drop", "head"]]),
        (
            "timm:efficientnet_b0",
            15,
            "blocks.1.0",
            [["conv_stem", "bn1", "blocks.0"], ["conv_head", "bn2", "global_pool", "classifier"]],
        ),
        ("timm:resnet50", 16, "layer1.0", [RESNET, ["global_pool", "fc"]]),
        ("timm:regnety_002", 0, None, [[""]]),
    ],
)
def test_which_modules_are_compiled(text, count, first, rest):
    with torch.device("meta"):
        network = Entry.parse(text).build(None)
    keys = list(network.state_dict())
    found = compile_blocks(network)
    assert len(found.blocks) == count
    assert found.blocks[:1] == ((first,) if first else ())
    assert [list(part) for part in found.rest] == rest
    assert list(network.state_dict()) == keys
    parts = [network.get_submodule(name) for name in found.blocks]
    assert all("forward" in vars(part) for part in parts)
    others = found.parts.children() if count else [network]
    assert sum("forward" in vars(part) for part in others) == len(rest)


def test_a_network_that_cannot_be_cut():
    class Choosing(Blocks):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    with pytest.raises(ValueError, match=r"Choosing cannot be split into blocks .*--compile graphs"):
        compile_blocks(Choosing())


def test_outputs_and_gradients_are_those_of_the_eager_network():
    torch.manual_seed(0)
    network = create_model("lambda_resnet_tiny", depths=(1, 1, 2, 1), **NARROW).double().train()
    for norm in network.modules():  # blocks that start as the identity would hide what they do
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 1.0)
    eager = copy.deepcopy(network)
    counter = CompileCounterWithBackend("aot_eager")
    compile_blocks(network, backend=counter)
    images = torch.randn(3, 3, 16, 24, dtype=torch.float64)
    with many_variants():
        scores = [one(images) for one in (network, eager)]
    assert counter.frame_count == 1 + 5 + 1  # the stem, five different blocks, the head
    for score in scores:
        score.square().sum().backward()
    torch.testing.assert_close(*scores)
    for (name, mine), right in zip(network.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, right.grad, msg=name)
    for (name, mine), right in zip(network.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, right, msg=name)  # running statistics: one step each


@pytest.mark.parametrize("training", [True, False])
def test_the_check_compiles_all_that_steps_need(training):
    counter = CompileCounterWithBackend("aot_eager")
    network = Blocks(widths=(4, 4, 4)).train(training)
    images = torch.randn(2, 3, 34, 34)
    found = compile_blocks(network, backend=counter)
    with many_variants(), torch.inference_mode(not training):
        assert check_compiled(found, images, 1e-5) < 1e-6
        before = counter.frame_count
        # stem, the pooling between (twice: each part's code is its own), three sizes of blocks, head
        assert before == 1 + 2 + 3 + 1
        scores = network(images)
        if training:
            scores.sum().backward()
        assert counter.frame_count == before


def test_a_deeper_network_needs_no_block_compiled_again():
    counter = CompileCounterWithBackend("eager")

    def compiled_by(depth):
        before = counter.frame_count
        network = create_model("resnet_tiny", depths=(depth,) * 4, **NARROW).eval()
        compile_blocks(network, backend=counter)
        with many_variants(), torch.no_grad():
            network(torch.randn(1, 3, 16, 16))
        return counter.frame_count - before

    assert compiled_by(2) == 8 + 2
    assert compiled_by(4) == 2  # its stem and its head


def wrong(graph, inputs):
    return lambda *given: [1.01 * one for one in graph(*given)]


@pytest.mark.parametrize("whole", [False, True])  # torch leaves its own modules eager if it can
def test_a_wrong_output_is_noticed(whole):
    network = (nn.Linear(3, 5) if whole else Blocks()).eval()
    found = compile_blocks(network, backend=wrong)
    images = torch.randn(2, 3) if whole else torch.randn(2, 3, 18, 18)
    with torch.no_grad():
        with pytest.raises(MismatchError, match=r"same part in eager mode by 1\.0e-02, allowed: 0\.001"):
            check_compiled(found, images, 1e-3)
        assert 0.0099 < check_compiled(found, images, 0.1) < 0.0101


def test_a_wrong_gradient_is_noticed():
    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=zeros)
    found = compile_blocks(Blocks().train(), backend=backend)
    with pytest.raises(MismatchError, match=r"by 1\.0e\+00"):
        check_compiled(found, torch.randn(2, 3, 18, 18), 0.1)


def zeros(graph, inputs):
    """A backward pass that gives nothing."""
    return make_boxed_func(lambda *given: [one if one is None else 0 * one for one in graph.forward(*given)])


class Rounding(nn.Linear):
    """Adds four hundred numbers in the type that they have: in bfloat16 the sum stops growing."""

    def forward(self, input):
        total = number = super().forward(input)
        for _ in range(400):
            total = total + number
        return total


def without_autocast(graph, inputs):
    run = torch.autocast("cpu", enabled=False)(graph)
    return lambda *given: run(*(one.float() for one in given))


def halved(graph, inputs):
    return lambda *given: [0.5 * one for one in graph(*given)]


def wrong_gradient(graph, inputs):
    """Right outputs without autocast; gradients half as large as they are."""
    forward = without_autocast(graph, inputs)

    def run(*given):
        outputs = forward(*given)
        return [0.5 * one + 0.5 * one.detach() for one in outputs]

    return run


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_code_may_be_nearer_to_float32_than_eager(dtype, gradients):
    torch.manual_seed(0)
    images, autocast = torch.rand(4, 3).to(dtype), partial(torch.autocast, "cpu", torch.bfloat16)

    def error(backend, network=None):
        found = compile_blocks(network or Rounding(3, 5), backend=backend)
        return check_compiled(found, images, 0.05, autocast)

    with torch.set_grad_enabled(gradients):
        assert 0.05 < error(without_autocast) < 1
        for backend in (halved, *([wrong_gradient] if gradients else [])):
            with pytest.raises(MismatchError, match="differs from the same part in eager mode"):
                error(backend)
        with pytest.raises(MismatchError, match="differs from the same part in eager mode"):
            error(halved, Rounding(3, 5).bfloat16())  # whose weights cannot say


class Faint(nn.Module):
    """A product, and beside it another a thousandth as large."""

    def __init__(self):
        super().__init__()
        self.loud, self.faint = nn.Linear(3, 5), nn.Linear(3, 5, bias=False)

    def forward(self, input):
        return self.loud(input) + 1e-3 * self.faint(input)


@pytest.mark.parametrize(("wrong", "noticed"), [("faint.weight", True), (None, False)])
def test_a_wrong_gradient_that_is_small_is_noticed(wrong, noticed):
    network, autocast = Faint(), partial(torch.autocast, "cpu", torch.bfloat16)

    def backward(graph, inputs):
        def run(*given):
            return [3 * one if wrong and one is not None and one.abs().max() < 0.1 else one for one in graph(*given)]

        return make_boxed_func(run)

    forward = make_boxed_func
    found = compile_blocks(network, backend=aot_autograd(fw_compiler=lambda g, _: forward(g), bw_compiler=backward))
    if not noticed:
        assert check_compiled(found, torch.rand(4, 3), 0.1, autocast) < 0.1
        return
    with pytest.raises(MismatchError, match=f"a wrong gradient for {wrong}"):
        check_compiled(found, torch.rand(4, 3), 0.1, autocast)


def test_numbers_that_are_not_finite_are_noticed():
    network = Blocks().eval()
    nn.init.constant_(network.stem.bias, torch.nan)
    with torch.no_grad(), pytest.raises(MismatchError, match="nan"):
        check_compiled(compile_blocks(network, backend="eager"), torch.randn(2, 3, 18, 18), 0.1)


def test_what_is_random_is_not_compared():
    found = compile_blocks(Blocks(dropout=0.5), backend="eager")
    with many_variants(), torch.no_grad():
        assert check_compiled(found, torch.randn(2, 3, 18, 18), 1e-5) < 1e-6


def test_too_many_variants_are_an_error_and_not_eager(monkeypatch):
    images = torch.randn(2, 3, 70, 70)
    network = Blocks(widths=(7, 6, 5, 4))
    compile_blocks(network, backend="eager")
    with many_variants(), torch.no_grad():
        network(images)
    torch.compiler.reset()
    monkeypatch.setattr(compiled, "VARIANTS", 3)
    with many_variants(), torch.no_grad(), pytest.raises(FailOnRecompileLimitHit):
        network(images)


def test_a_block_that_cannot_be_compiled_whole_is_an_error():
    network = Blocks(Breaking)
    compile_blocks(network, backend="eager")
    with pytest.raises(Unsupported):
        network(torch.randn(2, 3, 18, 18))


def test_the_command(tmp_path, monkeypatch):
    """Blocks of the second network are not compiled again: the first has the same."""
    output = tmp_path / "n.json"
    counter = CompileCounterWithBackend("eager")  # C++ takes a minute
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    arguments = ["--device", "cpu", "--quick", "--image-size", "16", "--compile", "blocks", "--no-latency"]
    arguments += ["--no-train", "--output", str(output)]
    names = [f"resnet_tiny,placement=CCCL,widths=(8,8,16,16),depths={depths}" for depths in ("(1,1,1,2)", "(1,1,1,4)")]
    assert main(["bench", "network", *arguments, *names]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert len(rows) == 2
    assert all(row["protocol"]["blocks"] and not row["protocol"]["graphs"] for row in rows)
    assert all(row["result"]["compile_error"] < 1e-3 for row in rows)
    # 9 if only stem and head are new. Guards on the state of the process compiled three blocks again once.
    assert (1 + 5 + 1) + 2 <= counter.frame_count < 2 * (1 + 5 + 1)


def test_training_steps_by_blocks(monkeypatch):
    """A step compiled by blocks trains as an eager one."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))

    def loss_after_training(blocks):
        torch.manual_seed(0)
        steps = Steps(Blocks(), (3, 18, 18), Protocol("training", compiled=blocks, blocks=blocks), torch.device("cpu"))
        if blocks:
            steps.compile()
        step = steps.timed_step(4)
        return [step().item() for _ in range(3)]

    losses = loss_after_training(False)
    assert len(set(losses)) == 3
    assert loss_after_training(True) == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("device", "how"), [("cpu", "compiled by blocks"), ("cuda", "compiled by blocks, a CUDA graph")]
)
def test_how_it_is_called(device, how):
    options = BenchNetwork(names=("resnet50",), compile="blocks", infer=False)
    assert [protocol.how for protocol in make_protocols(options, torch.device(device))] == [how]


@GPU
@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_measurement_on_a_gpu(mode, precision):
    protocol = Protocol(mode, precision, compiled=True, graphs=True, blocks=True, batch=8, memory_batch=4, repeats=3)
    found = measure_network(partial(create_model, "lambda_resnet_tiny"), (32, 32), protocol, CUDA)
    assert found.batch == found.peak_batch == 8
    assert found.repeats == 3
    assert found.compile_error is not None
    assert (found.latency is None) == (mode == "training")


@GPU
def test_replayed_training_steps_are_steps():
    """What steps of a graph change is what as many steps without change."""

    def changes(graph):
        torch.manual_seed(0)
        with CUDA:
            network = create_model("lambda_resnet_tiny", **NARROW)
        before = [parameter.detach().clone() for parameter in network.parameters()]
        with many_variants():
            steps = Steps(network, (3, 32, 32), Protocol("training", compiled=True, graphs=graph, blocks=True), CUDA)
            steps.compile()
            step = steps.timed_step(8)  # as a graph: a step, three to warm up, and the first replay
            for _ in range(3 if graph else 8):
                step()
        assert all(norm.num_batches_tracked == 8 for norm in network.modules() if isinstance(norm, nn.BatchNorm2d))
        return torch.cat([(p.detach() - q).flatten() for p, q in zip(network.parameters(), before, strict=True)])

    assert relative_error(changes(True), changes(False)) < 0.05


@GPU
def test_a_graph_that_gives_no_numbers():
    x = torch.zeros(3, device=CUDA)
    with pytest.raises(MismatchError, match="not finite"):
        as_graph(lambda: x / x, None)


@GPU
def test_a_graph_that_differs():
    calls = []

    def step():  # what Python does is not in the graph, which has the fifth call
        calls.append(None)
        return torch.full((1,), 11.0 if len(calls) == 5 else 10.0, device=CUDA)

    with pytest.raises(MismatchError, match=r"differs from the eager step by 1\.0e-01"):
        as_graph(step, 1e-2)


@GPU
def test_a_graph_that_does_not_fit():
    """The error says so, whatever the end of the recording says: the batch is halved then."""
    x = torch.ones(3, device=CUDA)

    def full():
        x.add_(1)
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        captured(full, required=True)


@GPU
def test_what_cannot_be_captured():
    x = torch.ones(3, device=CUDA)

    def step():
        x.sum().item()  # waits for the GPU

    assert captured(step) is step
    with pytest.raises(RuntimeError, match="captur"):
        captured(step, required=True)
    assert x.sum().item() == 3  # the GPU goes on

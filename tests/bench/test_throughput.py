"""Throughput: the search for a batch, folding, and the command. Times themselves are not tested."""

import json
import math
from functools import partial

import pytest
import torch
from torch import nn

from lambdanets.bench import networks, throughput
from lambdanets.bench.check import MismatchError
from lambdanets.bench.networks import PRESETS, BenchNetwork, Entry, make_protocols
from lambdanets.bench.throughput import NoMemoryError, Protocol, largest_batch, measure_network
from lambdanets.cli import main
from lambdanets.models import create_model
from lambdanets.models.fold import fold_batch_norm
from lambdanets.models.untrained import settle

CPU = torch.device("cpu")
TINY = "resnet_tiny,placement=CCLL,widths=(8,8,16,16)"


class FullError(RuntimeError):
    """What CUDA's allocator raises, in words."""

    def __init__(self):
        super().__init__("CUDA out of memory. Tried to allocate 3.00 GiB.")


def test_halves_until_it_fits():
    tried = []

    def trial(batch):
        tried.append(batch)
        if batch > 200:
            raise FullError

    assert largest_batch(trial, 1024) == 128
    assert tried == [1024, 512, 256, 128]


def test_nothing_fits_and_other_errors():
    def full(batch):
        raise torch.OutOfMemoryError("no")

    def broken(batch):
        raise RuntimeError("the kernel is wrong")

    with pytest.raises(NoMemoryError):
        largest_batch(full, 4)
    with pytest.raises(RuntimeError, match="kernel is wrong"):
        largest_batch(broken, 4)


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("resnet_tiny", 1 + 8 * 3 + 4),  # the stem, three for each block, a shortcut for each stage
        ("lambda_resnet_tiny", 1 + 8 * 3 + 4 - 4),  # four blocks have a lambda layer, whose norm follows no convolution
        ("resnet26_d", 3 + 8 * 3 + 4),
        ("mobilenet_v2", 52),
    ],
)
def test_folding_gives_the_same_outputs(name, pairs):
    torch.manual_seed(0)
    network = settle(create_model(name, num_classes=5).double(), (2, 3, 33, 40))
    x = torch.randn(2, 3, 33, 40, dtype=torch.float64)
    folded, count = fold_batch_norm(network, x.shape)
    assert count == pairs
    with torch.no_grad():
        found, expected = folded(x), network(x)
    assert expected.std() > 1e-3
    assert (found - expected).abs().max() < 1e-9 * expected.abs().max()
    norms = [sum(isinstance(m, nn.BatchNorm2d) for m in n.modules()) for n in (network, folded)]
    assert norms[0] - norms[1] == pairs


def test_a_norm_that_shares_its_convolution_stays():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.one, self.two = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

        def forward(self, x):
            x = self.conv(x)
            return self.one(x) - self.two(x)

    assert fold_batch_norm(Twice(), (1, 3, 4, 4))[1] == 0


def test_folding_that_changes_the_output_gives_no_number(monkeypatch):
    def wrong(network, shape):
        return create_model("resnet_tiny").to(next(network.parameters()).dtype), 1

    monkeypatch.setattr(throughput, "fold_batch_norm", wrong)
    with pytest.raises(MismatchError, match="folding"):
        measure_network(
            partial(create_model, "resnet_tiny"), (32, 32), Protocol("inference", batch=1, memory_batch=1), CPU
        )


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_measurement_is_consistent(mode, precision):
    protocol = Protocol(mode, precision, batch=4, memory_batch=2, repeats=3)
    found = measure_network(partial(create_model, "lambda_resnet_tiny"), (16, 24), protocol, CPU)
    assert found.batch == 4
    assert found.repeats == 3
    assert math.isclose(found.examples_per_second, 4 / found.seconds)
    assert math.isclose(found.seconds_per_1024, 1024 * found.seconds / 4)
    weights = 2 * sum(p.numel() for p in create_model("lambda_resnet_tiny").parameters())
    assert found.peak_bytes > (weights if mode == "inference" else 6 * weights)  # training: gradients and momentum
    assert (found.latency is None) == (mode == "training")
    assert found.folded == (0 if mode == "training" else 25)


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_a_network_that_needs_a_smaller_batch(mode):
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))

        def forward(self, x):
            if len(x) > 3:
                raise FullError
            return self.layers(x)

    found = measure_network(Large, (8, 8), Protocol(mode, batch=8, memory_batch=4, repeats=3), CPU)
    assert (found.batch, found.peak_batch) == (2, 2)
    assert math.isclose(found.seconds_per_1024, 512 * found.seconds)


@pytest.mark.parametrize(("memory", "first"), [(1e12, 64), (2e6, 32), (5e5, 8), (1.0, 4)])
def test_batches_that_cannot_fit_are_not_tried(memory, first, monkeypatch):
    """48 KiB for each image, of which four fifths are sure to be needed, beside weights and gradients of 80 bytes."""
    tried = []
    network = nn.Conv2d(1, 1, 3)
    steps = throughput.Steps(network, (1, 8, 8), Protocol("training", batch=64, memory_batch=4), CPU)
    monkeypatch.setattr(throughput, "memory_of", lambda device: memory)
    assert steps.may_fit(64, 80 + 4 * 48 * 1024, 4) == first
    monkeypatch.setattr(throughput.Steps, "trial", lambda self, batch: tried.append(batch))
    measure_network(partial(create_model, "resnet_tiny"), (8, 8), Protocol("training", batch=8, memory_batch=2), CPU)
    assert tried == [8 if memory > 1e9 else 2]


@pytest.mark.parametrize(("limit", "batch"), [(2**31, 8), (8 * 4 * 36, 4), (8 * 4 * 36 + 1, 8), (1, 1)])
def test_no_tensor_is_too_large_for_usual_kernels(limit, batch, monkeypatch):
    """The convolution gives 4 channels of 6x6 for each image: with a batch of 8, its output is the largest."""
    monkeypatch.setattr(throughput, "INDEXABLE", limit)

    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 10))

    found = measure_network(network, (8, 8), Protocol("training", batch=8, memory_batch=2, repeats=3), CPU)
    assert found.batch == batch


def test_a_step_that_takes_long_is_timed_alone(monkeypatch):
    """Steps of 1 ms go together, those of 0.1 s by three, longer ones one by one."""
    calls = []

    def once(function, device):
        function()
        return seconds

    monkeypatch.setattr(throughput, "once", once)
    for seconds, together in ((1e-3, 5), (0.1, 3), (3.0, 1)):
        steps = throughput.Steps(nn.Flatten(), (1, 2, 2), Protocol("inference", repeats=4), CPU)
        steps.device = torch.device("cuda")
        monkeypatch.setattr(steps, "step", lambda batch: lambda: calls.append(batch))
        calls.clear()
        assert steps.time(2) == [seconds / together] * 4
        assert len(calls) == throughput.WARM_UP + 4 * together


def test_folding_is_right_where_rounding_alone_is_too_much(monkeypatch):
    monkeypatch.setattr(throughput, "FOLD_TOLERANCE", 0.0)
    network = settle(create_model("lambda_resnet_tiny"), (2, 3, 32, 32))
    folded, count, error = throughput.folded_network(network, (2, 3, 32, 32))
    assert count == 25
    assert 0 < error < 1e-3
    assert next(folded.parameters()).dtype == torch.float32
    monkeypatch.setattr(throughput, "EXACT_TOLERANCE", 0.0)
    with pytest.raises(MismatchError, match="in float64"):
        throughput.folded_network(network, (2, 3, 32, 32))


def test_lambda_layers_do_not_enlarge_images_that_statistics_have_not_seen():
    torch.manual_seed(0)
    network = settle(create_model("resnet26", placement="LLLL"), (2, 3, 48, 48))
    with torch.inference_mode():
        scores = network(torch.randn(16, 3, 48, 48, generator=torch.Generator().manual_seed(1)))
    assert scores.abs().max() < 1e3  # 8e7 where branches add as much as there is


def test_tf32_is_for_gpus():
    with pytest.raises(ValueError, match="tf32"):
        measure_network(partial(create_model, "resnet_tiny"), (8, 8), Protocol("training", "tf32"), CPU)
    assert main(["bench", "network", "resnet_tiny", "--dtype", "tf32", "--device", "cpu"]) == 2


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "network", "--help"])
    out = capsys.readouterr().out
    assert "--preset" in out
    assert "None" not in out


def test_entries():
    entry = Entry.parse("resnet50,placement=CCLL,scope=(7, 7, 23, 23),se=False,layer=lambda")
    assert entry.name == "resnet50"
    assert entry.arguments == {"placement": "CCLL", "scope": (7, 7, 23, 23), "se": False, "layer": "lambda"}
    assert Entry.parse("lambda_resnet152").image_size() == (256, 256)
    assert Entry.parse("timm:resnetrs152").image_size() == (256, 256)
    entry = Entry.parse("accelerate:timm:lambda_resnet26t,num_classes=3")
    assert (entry.name, entry.arguments, entry.accelerated) == ("timm:lambda_resnet26t", {"num_classes": 3}, True)
    with pytest.raises(ValueError, match="is for timm's networks"):
        Entry.parse("accelerate:resnet26").check()


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_timm_networks_with_lambda_layers_are_measured(mode):
    """Their weights of five axes have no channels-last format; those of networks for one size follow --image-size."""
    for text in ("timm:lambda_resnet26rpt_256", "accelerate:timm:lambda_resnet26rpt_256"):
        build = partial(Entry.parse(text).build, (32, 32))
        found = measure_network(build, (32, 32), Protocol(mode, batch=2, repeats=1), CPU)
        assert found.batch == 2


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_can_be_built(preset):
    for text in PRESETS[preset]:
        entry = Entry.parse(text)
        entry.check()
        with torch.device("cpu" if entry.accelerated else "meta"):
            assert entry.build(entry.image_size())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["no networks given"]),
        (["resnet51"], ["resnet51", "resnet50"]),
        (["resnet50,placemet=CCLL"], ["placemet", "placement"]),
        (["timm:nothing"], ["timm:nothing"]),
        (["resnet_tiny", "resnet50,placement=CCXL"], ["resnet50,placement=CCXL: placement of stage c4", "got 'X'"]),
        (["resnet_tiny", "--batch", "0"], ["--batch must be more than 0, got 0"]),
        (["resnet_tiny", "--image-size", "-1"], ["--image-size must be more than 0, got -1"]),
        (["resnet50", "--no-train", "--no-infer"], ["nothing to measure"]),
    ],
)
def test_refusals(arguments, words, capsys):
    assert main(["bench", "network", "--device", "cpu", *arguments]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words)


def test_an_error_stops_only_its_network(tmp_path, capsys, monkeypatch):
    def measured(build, size, protocol, device):
        network = build()
        if len(network.layer1) > 2:
            raise RuntimeError("a kernel failed\nwith a long trace")
        return measure_network(lambda: network, size, protocol, device)

    monkeypatch.setattr(networks, "measure_network", measured)
    output = tmp_path / "n.json"
    names = [TINY, "resnet_tiny,depths=(3,1,1,1)", TINY]
    arguments = ["bench", "network", "--device", "cpu", "--quick", "--image-size", "16", "--output", str(output)]
    assert main([*arguments, *names]) == 1
    rows = json.loads(output.read_text())["rows"]
    assert [(row["network"], row["error"]) for row in rows if row["protocol"]["mode"] == "training"] == [
        (names[0], None),
        (names[1], "RuntimeError: a kernel failed"),
        (names[2], None),
    ]
    assert all(row["result"]["examples_per_second"] > 0 for row in rows if row["error"] is None)
    assert "a kernel failed" in capsys.readouterr().out


def test_results_survive_a_kill_and_minutes_end_a_run(tmp_path, monkeypatch):
    output = tmp_path / "n.json"
    arguments = ["bench", "network", "--device", "cpu", "--quick", "--no-infer", "--image-size", "16"]
    arguments += ["--output", str(output)]

    def killed(build, size, protocol, device):
        raise KeyboardInterrupt

    real, calls = measure_network, []

    def second_is_killed(*given):
        calls.append(given)
        return real(*given) if len(calls) == 1 else killed(*given)

    monkeypatch.setattr(networks, "measure_network", second_is_killed)
    assert main([*arguments, TINY, TINY]) == 130
    assert len(json.loads(output.read_text())["rows"]) == 1
    assert main([*arguments, "--minutes", "1e-9", TINY]) == 1
    assert "--minutes" in json.loads(output.read_text())["rows"][0]["error"]


def test_compiled(tmp_path):
    output = tmp_path / "n.json"
    arguments = ["--device", "cpu", "--quick", "--image-size", "16", "--compile", "both", "--no-latency", "--no-train"]
    monkey = nn.Module.compile
    try:
        # the backend does not matter here, and C++ takes a minute
        nn.Module.compile = lambda self, **options: monkey(self, backend="eager", **options)
        assert main(["bench", "network", *arguments, "--output", str(output), TINY]) == 0
    finally:
        nn.Module.compile = monkey
    rows = json.loads(output.read_text())["rows"]
    assert [row["protocol"]["compiled"] for row in rows] == [False, True]


def test_graphs_are_for_gpus():
    for way in ("graphs", "all"):
        with pytest.raises(ValueError, match=r"--compile graphs .* needs a CUDA GPU"):
            make_protocols(BenchNetwork(names=("resnet50",), compile=way), torch.device("cpu"))
    protocols = make_protocols(BenchNetwork(names=("resnet50",), compile="all", infer=False), torch.device("cuda"))
    assert [protocol.how for protocol in protocols] == [
        "eager",
        "compiled",
        "compiled, CUDA graphs",
        "compiled by blocks, a CUDA graph",
    ]

"""The benchmark runs, writes what it promises, and gives no number for a wrong result. Nothing here times anything."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lambdanets import machine
from lambdanets.bench import check, layers, peers
from lambdanets.bench.cases import BenchCase, Shape, op_inputs, parse_scope
from lambdanets.bench.check import MismatchError, check_operation, check_pooled, check_twin
from lambdanets.bench.timing import peak_bytes
from lambdanets.cli import main
from lambdanets.ops import choose
from tests.support.broken_backend import break_backend
from tests.support.scripts import script

CPU = torch.device("cpu")
plot_results = script("benchmarks/plot_results.py")


def quick(tmp_path, *arguments, what="op"):
    output = tmp_path / "deep" / "result.json"
    code = main(["bench", what, "--device", "cpu", "--quick", "--repeats", "1", "--output", str(output), *arguments])
    return code, json.loads(output.read_text())


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["layer", "--against", "convolution", "--modes", "inference", "--repeats", "1"], "layer-cpu-quick"),
        (["network", "--no-train", "--image-size", "16", "resnet_tiny,depths=(1,1,1,1)"], "networks-cpu-quick"),
    ],
)
def test_the_documents_are_made_from_nothing_that_is_tried(words, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words, "--device", "cpu", "--quick"]) == 0
    written = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert written == [Path("runs/bench") / f"{name}.json"]


def test_nor_from_what_takes_long():
    assert script("benchmarks/loop_overhead.py").BenchEngine(data="mnist").output == Path("runs/bench/engine.json")
    assert script("benchmarks/language_models.py").CompareLanguage().output == Path("runs/bench/language-cpu.json")


def test_op_writes_times_of_backends_and_layers(tmp_path, capsys):
    code, result = quick(tmp_path)
    assert code == 0
    picture = tmp_path / "plot.png"
    assert plot_results.main([str(tmp_path / "deep" / "result.json"), str(picture)]) == 0
    assert picture.stat().st_size > 1000
    assert {"name", "date", "commit", "machine", "versions", "settings", "rows", "left_out"} <= set(result)
    assert {"cpu", "cores", "gpu"} <= set(result["machine"])
    assert {"python", "torch", "triton", "timm", "lambda-networks"} <= set(result["versions"])
    rows = result["rows"]
    operations = {row["contender"] for row in rows if row["kind"] == "operation"}
    assert operations == set(choose.BACKENDS) - {one["contender"] for one in result["left_out"]}
    assert {row["mode"] for row in rows} == {"inference", "training"}
    layers = {row["contender"] for row in rows if row["kind"] == "layer"}
    assert {"ours", "timm", "lucidrains", "timm, global", "lucidrains, global", "conv3x3 + BN"} <= layers
    for row in rows:
        assert row["milliseconds"] > 0
        assert row["peak_bytes"] > 0
        assert row["ratio"] > 0
        if row["family"] in ("ours", "public"):
            assert row["check"] < 1e-3  # no number without one
    chosen = [row for row in rows if row["chosen"]]
    assert len(chosen) == 4  # two scopes, two modes
    shown = capsys.readouterr().out
    assert "Whole layers" in shown
    assert "result.json" in shown


def test_layer_takes_own_shapes_and_all_backends(tmp_path):
    code, result = quick(
        tmp_path,
        *("--shapes", "5x4x12", "--scopes", "3", "--batch", "1", "--heads", "2", "--key-depth", "4"),
        *("--all-backends", "--modes", "inference"),
        what="layer",
    )
    assert code == 0
    assert {row["shape"] for row in result["rows"]} == {"5x4x12"}
    assert {f"ours, {name}" for name in ("gemm", "conv", "depthwise", "dft", "fft")} <= {
        r["contender"] for r in result["rows"]
    }


def test_missing_peers_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers, "installed", lambda package: None)
    code, result = quick(tmp_path, "--modes", "inference", what="layer")
    assert code == 0
    assert {"ours"} <= {row["contender"] for row in result["rows"]}
    assert "public" not in {row["family"] for row in result["rows"]}
    assert "timm is not installed" in capsys.readouterr().out


def test_a_wrong_backend_gets_no_number(tmp_path, monkeypatch, capsys):
    break_backend(monkeypatch, "dft", lambda output: output * 1.01)
    code, result = quick(tmp_path, "--layers", "False", "--modes", "inference")
    assert code == 1
    assert result["mismatches"]
    assert "dft" not in {row["contender"] for row in result["rows"]}
    assert "the check failed" in capsys.readouterr().out


@pytest.mark.parametrize("scope", [3, 15, None])
def test_check_operation_sees_a_wrong_gradient(scope, monkeypatch):
    case = BenchCase(Shape(8, 7, 16), scope, 2)
    assert check_operation(case, "conv", CPU, training=True) < 1e-5
    break_backend(monkeypatch, "conv", lambda output: output + 0.01 * (output - output.detach()))
    with pytest.raises(MismatchError, match="conv"):
        check_operation(case, "conv", CPU, training=True)


def test_check_twin_sees_another_function():
    timm = next(c for c in peers.contenders(CPU, False) if c.name == "timm")
    case = BenchCase(Shape(6, 6, 16), 5, 2)
    assert check_twin(timm, case, CPU) < 1e-4

    def wrong_twin(peer: nn.Module, case: BenchCase) -> nn.Module:
        assert timm.twin is not None
        layer = timm.twin(peer, case)
        layer.get_parameter("positions.table").data = layer.get_parameter("positions.table").data.flip(0)
        return layer

    wrong = replace(timm, twin=wrong_twin)
    with pytest.raises(MismatchError, match="timm"):
        check_twin(wrong, case, CPU)


def test_a_layer_that_pooling_follows(tmp_path, monkeypatch):
    """Beside a convolution that strides; named as such."""
    code, result = quick(tmp_path, "--pooled", "--against", "convolution", what="layer")
    assert code == 0
    assert result["name"] == "layer-cpu-pooled-quick"
    assert all(row["pooled"] for row in result["rows"])
    case = BenchCase(Shape(5, 6, 8), 3, 2, pooled=True)
    ours = [one for one in peers.contenders(CPU, all_backends=True) if one.family == "ours" and "fused" not in one.name]
    builds = [one.build for one in ours] + [peers.convolution, peers.folded_convolution]
    assert len(builds) > 5
    for build in builds:
        assert build(case).eval()(case.image(CPU)).shape == (2, 8, 3, 3)
    monkeypatch.setattr(peers, "compiled", lambda module: module)
    assert peers.compiled_ours(case).downsample == "avg"
    assert layers.with_defaults(layers.BenchLayer(pooled=True), CPU).shapes == ("56x56x128", "28x28x256", "14x14x512")


def test_a_wrong_pooling_gets_no_number(tmp_path, monkeypatch, capsys):
    right = check.pooled_output
    monkeypatch.setattr(check, "pooled_output", lambda *inputs: 1.1 * right(*inputs))
    code, result = quick(tmp_path, "--pooled", "--against", "convolution", what="layer")
    assert code == 1
    assert not [row for row in result["rows"] if row["family"] == "ours"]


def test_what_is_checked_is_what_a_layer_does(monkeypatch):
    """In one step where the kernels can."""
    case = BenchCase(Shape(5, 6, 8), 3, 2, heads=2, key_depth=4, pooled=True)
    asked = []
    monkeypatch.setattr(check.fused, "why_not", lambda *sizes: None)
    monkeypatch.setattr(check.fused, "fused_relative", lambda *inputs, **options: asked.append(options))
    check.pooled_output(op_inputs(case, CPU), case, "auto")
    assert asked[0]["pooled"]


@pytest.mark.parametrize("grid", [(5, 6), (4, 1)], ids=str)
def test_windows_are_those_of_average_pooling(grid):
    count = grid[0] * grid[1]
    one_by_one = torch.eye(count, dtype=torch.float64).view(count, 1, *grid)
    expected = nn.functional.avg_pool2d(one_by_one, 3, 2, padding=1).flatten(1).T
    torch.testing.assert_close(check.shares_of_windows(grid, CPU), expected)


@pytest.mark.parametrize("wrong", [0, 1, 2, 3, 4], ids=["output", "queries", "keys", "values", "table"])
def test_check_pooled_sees_what_is_wrong(wrong, monkeypatch):
    case = BenchCase(Shape(5, 6, 8), 3, 2, heads=2, key_depth=4, pooled=True)
    assert check_pooled(case, "auto", CPU, True) < 1e-6
    right = check.pooled_output

    def broken(inputs, case, backend):
        output = right(inputs, case, backend)
        if wrong == 0:
            return 1.01 * output
        inputs.leaves[wrong - 1].register_hook(lambda gradient: 1.01 * gradient)
        return output

    monkeypatch.setattr(check, "pooled_output", broken)
    with pytest.raises(MismatchError, match=r"auto at 5x6x8 scope 3, pooled: relative error"):
        check_pooled(case, "auto", CPU, True)


def test_attention_layers_are_attention():
    x = torch.randn(2, 8, 3, 5)
    for name in ("attention (SDPA)", "axial attention"):
        contender = next(c for c in peers.attentions(torch.device("cuda")) if c.name == name)
        layer = contender.build(BenchCase(Shape(3, 5, 8), 3, 2, heads=2))
        assert layer(x).shape == x.shape
        constant = x[:, :, :1, :1].expand_as(x)  # attention over equal values gives that value everywhere
        assert torch.allclose(layer(constant), layer(constant)[:, :, :1, :1], atol=1e-6)


def test_peak_counts_what_is_held_together():
    x = torch.zeros(2**18)  # 1 MiB

    def two_at_a_time():
        for _ in range(3):
            y = x + 1
            del y
        return (x + 1) * 2  # the sum lives until the product is there

    assert peak_bytes(two_at_a_time, CPU) // 2**20 == 2


def test_parsing():
    assert Shape.parse("32x16x96") == Shape(32, 16, 96)
    assert parse_scope("global") is None
    assert parse_scope("23") == 23
    for text in ("0", "-3", "all"):
        with pytest.raises(ValueError, match=text):
            parse_scope(text)


def test_machine_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert machine.commit() is None


def test_commit_of_an_archive(monkeypatch, tmp_path):
    package = tmp_path / "lambdanets"
    package.mkdir()
    monkeypatch.setattr(machine, "__file__", str(package / "machine.py"))
    monkeypatch.setenv("PATH", "")
    (tmp_path / ".git_archival.txt").write_text("commit: $Format:%H$\n")
    assert machine.commit() is None  # a checkout: git did not fill it in
    (tmp_path / ".git_archival.txt").write_text("commit: 0123abc\n")
    assert machine.commit() == "0123abc"


def test_only_those_that_are_asked_for(tmp_path):
    output = tmp_path / "result.json"
    assert (
        main(["bench", "layer", "--device", "cpu", "--quick", "--against", "convolution", "--output", str(output)]) == 0
    )
    assert {row["family"] for row in json.loads(output.read_text())["rows"]} == {"ours", "convolution"}


def test_growth_is_drawn_against_the_side(tmp_path):
    pytest.importorskip("matplotlib")
    row = {"kind": "layer", "mode": "inference", "family": "ours", "scope": None, "milliseconds": 1.0, "peak_bytes": 5}
    rows = [
        {**row, "shape": f"{n}x{n}x8", "contender": name} for n in (4, 8, 16, 32) for name in ("ours", "conv3x3 + BN")
    ]
    (tmp_path / "result.json").write_text(json.dumps({"rows": rows}))
    assert plot_results.main([str(tmp_path / "result.json"), str(tmp_path / "growth.svg")]) == 0
    assert "side of the map" in (tmp_path / "growth.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["layer", "--batch", "-3"], "--batch must be more than 0, got -3"),
        (["op", "--repeats", "0"], "--repeats must be more than 0, got 0"),
        (["op", "--key-depth", "0"], "--key-depth must be more than 0, got 0"),
        (["layer", "--pooled"], "--pooled compares with a convolution of stride 2 only: add --against convolution"),
        (["op", "--pooled"], "--pooled is for whole layers: use `lambdanets bench layer --pooled"),
        (["plot", "a.json", "a.png"], r"`lambdanets bench plot` is now `python benchmarks/plot_results.py`"),
        (["engine", "--data", "mnist"], r"`lambdanets bench engine` is now `python benchmarks/loop_overhead.py`"),
    ],
)
def test_refusals(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments, "--device", "cpu", "--quick"]) == 2
    assert re.search(words, capsys.readouterr().err)
    assert not (tmp_path / "benchmarks").exists()  # before anything is measured


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"rows": [{"network": "resnet50"}]}', "is not a result of `bench op`, `bench layer`"),
        ('{"rows": [{"shape": "7x7x512", "group": "forward"}]}', "is not a result of `bench op`, `bench layer`"),
        ("{", "is not usable JSON"),
    ],
)
def test_plots_of_something_else_are_refused(text, said, tmp_path):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        plot_results.main([str(tmp_path / "result.json"), str(tmp_path / "a.png")])

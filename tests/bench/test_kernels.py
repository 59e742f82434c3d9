"""Kernels by groups, what they must do at least, and the tables of it. Nothing here times anything."""

import ast
import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import lambdanets.ops.triton
from lambdanets.bench.cases import BenchCase, Shape
from lambdanets.bench.layers import built
from lambdanets.bench.peers import ours
from lambdanets.bench.roofline import (
    GROUPS,
    KernelTime,
    Peaks,
    group_of,
    grouped,
    lines,
    peaks_of,
    per_step,
    sentence,
    work_of,
)
from lambdanets.cli import main
from tests.support.documents import generate

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SOURCES = sorted(Path(lambdanets.ops.triton.__file__).parent.glob("*.py"))
CASES = [
    BenchCase(Shape(5, 3, 8), 3, 2, "bfloat16", heads=2, key_depth=4),
    BenchCase(Shape(4, 7, 12), 4, 1, "float16", heads=4, key_depth=2),
    BenchCase(Shape(3, 6, 8), None, 3, "float32", heads=1, key_depth=5),
    BenchCase(Shape(2, 3, 8), 6, 1, "bfloat16", heads=2, key_depth=1),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def launched() -> set[str]:
    """Triton functions that some module launches: names behind which a grid stands, as in `kernels.fold[grid](...)`."""
    kernels, calls = set(), set()
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                kernels.add(node.name)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                calls.add(ast.unparse(node.func.value).rpartition(".")[2])
    return kernels & calls


def test_every_kernel_of_ours_has_a_group():
    pooling = {"pool_forward", "pool_backward", "expand_windows", "gather", "scatter"}  # behind a layer, not in it
    assert launched() - pooling == {kernel for kernels in GROUPS.values() for kernel in kernels}


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("forward_window", "forward"),
        ("query_gradients_small", "dq"),
        ("lambda_gradients", "g"),
        ("value_gradients", "dv"),
        ("table_gradients_window", "dT"),
        ("fold", "dT"),
        ("expand", "tables"),
        ("content_backward", "content"),
        ("gradients_of_parts", "norms"),
        ("nvjet_sm90_tst_144x256_64x4_1x2_h_bz_coopA_TNN", "projections"),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16_256x64_64x3_nt_align8>"
            "(cutlass_80_tensorop_s16816gemm_bf16_256x64_64x3_nt_align8::Params)",
            "projections",
        ),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>", "projections"),
        ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize32x32x64_stage6", "projections"),
        ("Memset (Device)", "other"),
        ("Memcpy DtoD (Device -> Device)", "other"),
        ("void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float>>", "other"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<unsigned int>", "other"),
        ("triton_per_fused_fold_0", "other"),  # the compiler's, not ours
    ],
)
def test_kernels_are_known_by_their_names(kernel, group):
    assert group_of(kernel) == group


def pairs(case: BenchCase) -> int:
    """Queries and context positions on the map whose distance has an entry in the table, one by one."""
    height, width = case.grid
    places = [(y, x) for y in range(height) for x in range(width)]
    back = [(scope - 1) // 2 for scope in case.scopes]
    return sum(
        all(0 <= m[axis] - n[axis] + back[axis] < case.scopes[axis] for axis in (0, 1)) for n in places for m in places
    )


@every_case
def test_useful_work_is_what_is_in_scope_and_on_the_map(case):
    B, N, C, H, K = case.batch, case.positions, case.shape.channels, case.heads, case.key_depth
    V, S = C // H, H * K + C // H + K
    position, applied, content = 2 * B * pairs(case) * K * V, 2 * B * N * H * K * V, 2 * B * N * K * V
    projection = 2 * B * N * S * C
    work = {name: one.flops for name, one in work_of(case, "inference", False).items()}
    assert work == {"forward": position + applied, "content": content, "projections": projection}
    work = {name: one.flops for name, one in work_of(case, "training", True).items()}
    both = {"forward": position + applied, "dq": position + applied}
    assert work == both | {
        "g": applied,
        "dv": position,
        "dT": position,
        "content": 3 * content,
        "norms": 0,
        "projections": 3 * projection,
    }
    work = {name: one.flops for name, one in work_of(case, "training", False).items()}
    assert "g" not in work  # dv and dT make it themselves
    assert work["dv"] == work["dT"] == position + applied


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of tensors of these shapes."""
    return sum(torch.empty(shape, dtype=dtype, device="meta").nbytes for shape in shapes)


@every_case
def test_traffic_is_every_operand_once(case):
    B, N, C, H, K = case.batch, case.positions, case.shape.channels, case.heads, case.key_depth
    V, S = C // H, H * K + C // H + K
    table, x, weight, product = (*case.scopes, K), (B, N, C), (S, C), (B, N, S)
    queries, keys, values, output, g = (B, N, H, K), (B, N, K), (B, N, V), (B, N, H, V), (B, N, K, V)
    normed, dtype = (B, N, S - K), case.torch_dtype
    content = tensors((B, K, V), dtype=torch.float32)
    found = {name: one.bytes for name, one in work_of(case, "inference", False).items()}
    assert found == {
        "forward": tensors(queries, values, table, output, dtype=dtype) + content,
        "content": tensors(keys, values, dtype=dtype) + content,
        "projections": tensors(x, weight, product, dtype=dtype),
    }
    found |= {name: one.bytes for name, one in work_of(case, "training", True).items()}
    assert found["dq"] == tensors(output, values, table, queries, dtype=dtype) + content
    assert found["g"] == tensors(queries, output, g, dtype=dtype) + content
    assert found["dv"] == tensors(g, table, values, dtype=dtype)
    assert found["dT"] == tensors(g, values, table, dtype=dtype)
    backward = tensors(keys, values, keys, values, values, dtype=dtype) + 2 * content
    assert found["content"] == tensors(keys, values, dtype=dtype) + content + backward
    moments, norms = tensors(normed, dtype=dtype), tensors(product, product, dtype=dtype)
    backward = tensors(normed, normed, dtype=dtype) + tensors(normed, product, product, dtype=dtype)
    assert found["norms"] == moments + norms + backward
    assert found["projections"] == 3 * tensors(x, weight, product, dtype=dtype)
    found = {name: one.bytes for name, one in work_of(case, "training", False).items()}
    assert found["dv"] == tensors(queries, output, table, values, dtype=dtype) + content
    assert found["dT"] == tensors(queries, output, values, table, dtype=dtype)


def test_projections_are_the_products_that_torch_counts():
    """The layer of the benchmark itself, by an implementation whose other products torch does not name `mm`."""
    case = BenchCase(Shape(4, 5, 16), 3, 2)
    module, x = built(lambda case: ours(case, "reference"), case, "training", torch.channels_last, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        module(x).sum().backward()
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert counted == work_of(case, "training", True)["projections"].flops


def test_a_step_is_the_median_of_steps():
    assert per_step("fold", [1, 2, 30, 40, 5, 6], 3) == KernelTime("fold", 11, 2)
    assert per_step("once", [9.0], 3) == KernelTime("once", 3, 1 / 3)


TIMES = [
    KernelTime("forward_window", 50, 1),
    KernelTime("lambda_gradients", 20, 2),
    KernelTime("table_gradients_window", 30, 1),
    KernelTime("fold", 10, 1),
    KernelTime("nvjet_sm90", 8, 3),
    KernelTime("Memset (Device)", 2, 1),
]
CASE = BenchCase(Shape(20, 20, 64), 5, 256, "bfloat16")


def test_groups_have_rows_with_their_kernels():
    rows = {row["group"]: row for row in grouped(CASE, "training", TIMES)}
    assert list(rows) == ["forward", "g", "dT", "projections", "other"]
    assert (rows["dT"]["microseconds"], rows["dT"]["calls"]) == (40, 2)
    assert [kernel["name"] for kernel in rows["dT"]["kernels"]] == ["table_gradients_window", "fold"]
    work = work_of(CASE, "training", True)
    assert (rows["g"]["flops"], rows["g"]["bytes"]) == (work["g"].flops, work["g"].bytes)
    assert rows["other"]["flops"] is rows["other"]["bytes"] is None
    assert {"shape": "20x20x64", "scope": 5, "batch": 256, "mode": "training"}.items() <= rows["g"].items()


def test_the_nearer_limit_and_its_share():
    peaks = Peaks(flops=100e12, bytes=1e12)
    row = {"group": "dv", "microseconds": 10.0, "calls": 1, "flops": 500e6, "bytes": 2e6}  # 5 µs, and 2
    norms = {"group": "norms", "microseconds": 20.0, "calls": 4, "flops": 0, "bytes": 15e6}  # 15 µs
    other = {"group": "other", "microseconds": 10.0, "calls": 1, "flops": None, "bytes": None}
    assert lines([row, norms, other], peaks) == [
        ["dv", "10", "1", "0.5", "50", "2", "0.2", "50% (compute)"],
        ["norms", "20", "4", "-", "-", "15", "0.75", "75% (memory)"],
        ["other", "10", "1", "-", "-", "-", "-", "-"],
        ["sum", "40", "6", "0.5", "12.5", "-", "-", "50%"],
    ]
    assert sentence([row, norms], peaks) == "30 µs in 5 kernels (dv 10, norms 20); 67% of the limit"
    assert [cells[-1] for cells in lines([row, norms], None)] == ["-"] * 3
    assert "limit" not in sentence([row], None)


def test_limits_are_those_of_known_gpus_in_half_precision():
    assert peaks_of("NVIDIA H200", "bfloat16") == Peaks(989e12, 4.8e12)
    assert peaks_of("NVIDIA H200", "float32") is None
    assert peaks_of("A GPU of tomorrow", "bfloat16") is None


def test_the_documents_show_a_table_for_each_map(tmp_path):
    settings = {"scope": "5", "batch": 256, "dtype": "bfloat16", "heads": 4, "key_depth": 16, "steps": 20}
    result = {
        "name": "kernels-cuda-bfloat16",
        "date": "2021-02-17T00:00:00",
        "machine": {"cpu": "A chip", "cores": 2, "gpu": "A GPU"},
        "versions": {"torch": "2.11"},
        "settings": settings,
        "peaks": {"flops": 989e12, "bytes": 4.8e12},
        "rows": grouped(CASE, "inference", TIMES[:1]) + grouped(CASE, "training", TIMES),
    }
    block = "<!-- bench:kernels-h200 -->\n<!-- /bench -->"
    assert "No measurement yet. `python benchmarks/run.py kernels-h200`" in generate.filled(block, tmp_path)
    (tmp_path / "kernels-h200.json").write_text(json.dumps(result))
    shown = generate.filled(block, tmp_path)
    assert "A GPU. torch 2.11. Measured 2021-02-17; one layer, channels-last, scope 5, batch 256, bfloat16" in shown
    assert "Limits: 989 TFLOP/s and 4.8 TB/s." in shown
    assert "\n20x20x64, inference, folded: 50 µs in 1 kernel (forward 50); " in shown
    table = shown.partition("20x20x64, training:\n\n")[2].splitlines()
    assert table[0] == ("| group | µs | calls | useful GFLOP | useful TFLOP/s | MB | TB/s | share of the limit |")
    assert [line.split(" | ")[0] for line in table[2:8]] == [
        "| forward", "| g", "| dT", "| projections", "| other", "| sum"
    ]  # fmt: skip
    bytes_of_g = work_of(CASE, "training", True)["g"].bytes
    share = f"{bytes_of_g / 4.8e12 / 20e-6:.0%} (memory)"
    assert table[3].startswith("| g | 20 | 2 | ")
    assert table[3].endswith(f"| {share} |")
    (tmp_path / "kernels-h200.json").write_text(json.dumps(result | {"peaks": None}))
    shown = generate.filled(block, tmp_path)
    assert "% (" not in shown
    assert "Limits" not in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_are_no_kernels(tmp_path, capsys):
    for words in ([], ["--device", "cpu"], ["--device", "cuda"]):
        assert main(["bench", "kernels", *words, "--output", str(tmp_path / "kernels.json")]) == 2
        assert "needs a CUDA GPU, torch finds none" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0"], "--steps must be more than 0, got 0"),
        (["--scope", "wide"], "scope must be a positive number or 'global', got 'wide'"),
        (["--shapes", "8x8"], "shape must be HEIGHTxWIDTHxCHANNELS, such as 32x32x96, got '8x8'"),
        (["--shapes", "8x8x30"], "8x8x30 has channels that are not divisible by --heads 4"),
    ],
)
def test_refusals(words, said, capsys):
    assert main(["bench", "kernels", *words]) == 2
    assert said in capsys.readouterr().err


@GPU
@pytest.mark.parametrize(
    ("shape", "scope", "missing"),
    [("18x20x256", "5", set()), ("18x20x64", "5", set()), ("6x7x32", "global", {"g"})],
)
def test_every_group_runs_on_a_gpu(shape, scope, missing, tmp_path, capsys):
    """In the window mode, and in the one of small maps, which writes no g."""
    output = tmp_path / "deep" / "kernels.json"
    words = ["--shapes", shape, "--scope", scope, "--batch", "4", "--steps", "3", "--output", str(output)]
    assert main(["bench", "kernels", *words]) == 0
    result = json.loads(output.read_text())
    assert {"name", "date", "commit", "machine", "versions", "settings", "peaks", "rows"} <= set(result)
    groups = {
        mode: [row["group"] for row in result["rows"] if row["mode"] == mode] for mode in ("inference", "training")
    }
    assert set(groups["training"]) | {"other"} == set(GROUPS) - missing
    assert set(groups["inference"]) | {"other"} == {"forward", "tables", "content", "projections", "other"}
    for row in result["rows"]:
        assert row["microseconds"] > 0
        if row["group"] != "other":
            assert row["calls"] == int(row["calls"])  # a step like the others
    assert "share of the limit" in capsys.readouterr().out

"""What the documents say: their code runs, their numbers are the measured ones, their links lead somewhere."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lambdanets.cli import parse
from lambdanets.train.plan import EFFORT
from tests.support.documents import ROOT, generate
from tests.support.image_runs import folder_of_images

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
OPTIONAL = {"natten", "openvino", "segmentation_models_pytorch", "torchao", "transformers"}  # documents may show them
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


@every_document
def test_code_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder_of_images(tmp_path / "pets", count=20)
    (tmp_path / "pets" / "val" / "class0").rename(tmp_path / "new")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(EFFORT, "cpu", replace(EFFORT["cpu"], views=1, least=1))
    torch.manual_seed(0)
    text = path.read_text()
    names: dict[str, object] = {"__name__": "document"}
    for match in PYTHON.finditer(text):  # the blocks of a document follow each other
        line = text[: match.start(1)].count("\n")
        try:
            exec(compile("\n" * line + match[1], str(path), "exec"), names)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise
            pytest.skip(f"the code from line {line} on needs {error.name}")


@every_document
def test_commands_are_understood(path: Path):
    """Every command line, with its options; `lambdanets` alone, at the start of a line or behind a pipe or torchrun."""
    for block in SHELL.findall(path.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.search(r"(?:^|\| |-m )lambdanets (.*)", line)
            if not found:
                continue
            words = shlex.split(found[1].partition(" < ")[0].rstrip("'"), comments=True)
            if not {"--help", "..."} & set(words):
                parse(words)  # ends the test where a word is not understood


def test_the_readme_has_code():
    assert len(PYTHON.findall((ROOT / "README.md").read_text())) >= 3


def test_no_code_pools_by_half_with_torch():
    """Its gradients are wrong for channels-last images on a GPU, up to torch 2.11: layers have `downsample`."""
    for path in [*DOCUMENTS, *(ROOT / "docs" / "tutorials").glob("*.md")]:
        code = re.findall(r"^```(?:python|\{code-cell\})\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
        assert not re.search(r"avg_pool2d\(|AvgPool2d\(\d+, \d+, padding", "".join(code)), path.name


@every_document
def test_generated_blocks_match_the_measurements(path: Path):
    assert generate.filled(path.read_text()) == path.read_text(), "run python docs/generate.py"


@every_document
def test_links_lead_somewhere(path: Path):
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target


def row(**changes: object) -> dict[str, object]:
    usual = {"shape": "7x7x64", "scope": 23, "batch": 4, "dtype": "float32", "heads": 4, "key_depth": 16}
    usual |= {"kind": "layer", "mode": "inference", "contender": "ours", "milliseconds": 1.5, "ratio": 1.0}
    return usual | {"chosen": False} | changes


def test_a_block_is_filled_from_json(tmp_path: Path):
    rows = [
        row(),
        row(contender="theirs", milliseconds=6.0, ratio=4.0),
        row(scope=None),
        row(kind="operation", contender="gemm", milliseconds=0.25, chosen=True),
    ]
    result = {"date": "2021-02-17T00:00:00", "machine": {"cpu": "A chip", "cores": 2, "gpu": None}, "rows": rows}
    (tmp_path / "op-cpu.json").write_text(json.dumps(result | {"versions": {"torch": "2.11", "triton": None}}))
    text = generate.filled("before\n<!-- bench:op-cpu -->\nold\n<!-- /bench -->\nafter\n", tmp_path)
    assert text.startswith("before\n<!-- bench:op-cpu -->\nA chip, 2 threads. torch 2.11. Measured 2021-02-17;")
    assert text.endswith("<!-- /bench -->\nafter\n")
    assert "| 7x7x64 | 23 | 1.5 ms | 4.00x |\n" in text
    assert "| 7x7x64 | global | 1.5 ms | - |\n" in text
    assert "| 7x7x64 | 23 | 0.25* |\n" in text
    assert "old" not in text
    assert generate.filled(text, tmp_path) == text


def test_hours_of_pseudo_labels_follow_from_measured_speeds(tmp_path: Path):
    block = "<!-- bench:pseudo-hours -->\n<!-- /bench -->"
    assert "No measurement yet" in generate.filled(block, tmp_path)
    speeds = {"labels_per_second": 1000.0, "inference_images_per_second": 2e3}
    small = {"machine": {"gpu": "A GPU"}, "throughput": speeds}
    (tmp_path / "pseudo-imagenette.json").write_text(json.dumps(small))
    assert "No measurement yet" in generate.filled(block, tmp_path)
    found = {
        f"lambda_resnet152 | {how} | batch 1024": {"hardware": "B GPU", "examples_per_second": speed}
        for how, speed in (
            ("288px | inference | bfloat16", 4000.0),
            ("288px | training | bfloat16", 500.0),
            ("288px | training | float32", 1.0),
            ("256px | inference | bfloat16", 2.0),
        )
    }
    (tmp_path / "reproduce-h200").mkdir()
    (tmp_path / "reproduce-h200" / "reproduce.json").write_text(json.dumps({"measurements": found}))
    shown = generate.filled(block, tmp_path)
    network = "LambdaResNet-152, 288 px, network alone"
    assert "| labelling as above, with image loading | A GPU | 1,000 | 36.1 | 4.51 | 0.564 |\n" in shown
    assert f"| labelling, {network} | B GPU | 4,000 | 9.03 | 1.13 | 0.141 |\n" in shown
    assert f"| one pass of training, {network} | B GPU | 500 | 72.2 | 9.03 | 1.13 |\n" in shown


def test_a_language_model_is_shown_beside_its_twin(tmp_path: Path):
    def of(one: object, other: object) -> dict[str, object]:
        return {"lambda": one, "attention": other}

    def kind(bits: float) -> dict[str, object]:
        return {"parameters": 1234, "bits_per_byte": bits, "steps": 90, "bytes_per_second": 4321.0}

    def byte(milliseconds: float, size: int, growth: int | None) -> dict[str, object]:
        return {"milliseconds": milliseconds, "state_bytes": size, "process_growth_bytes": growth}

    text = {"corpus": "a text", "files": 3, "training_bytes": 5000, "validation_bytes": 600, "sha256": "abc"}
    result = {
        "date": "2021-02-17T00:00:00",
        "machine": {"cpu": "A chip", "cores": 1, "gpu": None},
        "versions": {"torch": "2.11"},
        "settings": {"minutes": 2.0, "batch_size": 8, "length": 256, "precision": "float32"},
        "text": text,
        "evaluated_bytes": 512,
        "bigram_bits_per_byte": 3.4567,
        "training": of(kind(2.1), kind(2.2)),
        "equal_steps": {"step": 80, **of(2.15, 2.25)},
        "context": [{"length": 64, **of(2.5, 2.6)}],
        "generation": [{"length": 16384, **of(byte(1.5, 2048, None), byte(7.25, 4096, 3 * 2**20))}],
    }
    (tmp_path / "language-cpu.json").write_text(json.dumps(result))
    shown = generate.filled("<!-- bench:language-cpu -->\n<!-- /bench -->", tmp_path)
    assert "A chip, 1 thread. torch 2.11. Measured 2021-02-17. Text: a text, 3 files, 5,000 bytes" in shown
    assert "| lambda | 1,234 | 2.100 | 2.150 | 90 | 4,321 |\n| attention | 1,234 | 2.200 | 2.250 | 90 |" in shown
    assert "| 64 | 2.500 | 2.600 |\n" in shown
    assert "| 16,384 | 1.50 | 7.25 | 2 | 4 | - | 3.00 |\n" in shown


def test_a_block_without_json_says_how_to_make_it(tmp_path: Path):
    text = generate.filled("<!-- bench:op-cpu -->\n<!-- /bench -->", tmp_path)
    assert "No measurement yet. `python benchmarks/run.py op-cpu` writes op-cpu.json." in text


def test_steps_of_detectors_are_shown_beside_the_first(tmp_path: Path):
    usual = {"height": 800, "width": 1333, "batch": 4, "precision": "bfloat16", "compiled": False, "error": None}
    usual |= {"parameters": 50_000_000, "backbone_seconds": 0.05}
    rows = [
        {"network": "one", "seconds": 0.2, "peak_bytes": 2**33} | usual,
        {"network": "two", "seconds": 0.1, "peak_bytes": 2**32} | usual,
        usual | {"network": "three", "seconds": None, "peak_bytes": None, "error": "out of memory"},
    ]
    result = {"name": "detect", "date": "2021-02-17T00:00:00", "rows": rows, "versions": {"torch": "2.11"}}
    result["machine"] = {"cpu": "A chip", "cores": 1, "gpu": "A GPU"}
    block = "<!-- bench:detect-cuda -->\n<!-- /bench -->"
    assert "`python benchmarks/run.py detect-cuda` writes detect-cuda.json" in generate.filled(block, tmp_path)
    (tmp_path / "detect-cuda.json").write_text(json.dumps(result))
    text = generate.filled(block, tmp_path)
    assert "A training step, 4 images of 1333x800, bfloat16:\n" in text
    assert "| `two` | 50.0M | 100 (0.50) | 50 (1.00) | 4 (0.50) |\n" in text
    assert "| `three` | out of memory | | | |\n" in text


def test_loaders_are_shown_beside_each_other(tmp_path: Path):
    about = {"name": "loader", "date": "2021-02-17", "machine": {"cpu": "A chip", "cores": 1, "gpu": None}}
    rows = [{"name": "theirs", "per_core": 1000.4}, {"name": "ours", "per_core": 2000.6}]
    options = {"image_size": 128, "randaugment_layers": 2}
    (tmp_path / "loader-cpu.json").write_text(
        json.dumps(about | {"versions": {"torch": "2"}, "options": options, "rows": rows})
    )
    text = generate.filled("<!-- bench:loader-cpu -->\n<!-- /bench -->", tmp_path)
    assert "crops of 128 pixels, 2 layers of RandAugment, each applied with probability 0.5." in text
    assert "| theirs | 1,000 |\n| ours | 2,001 |\n" in text


def test_a_comparison_is_shown_once_it_is_measured(tmp_path: Path):
    block = "<!-- bench:compare-imagenette -->\n<!-- /bench -->"
    assert "There is no compare-imagenette.json" in generate.filled(block, tmp_path)

    def one(phase: str, network: str, seed: int, top1: float) -> dict[str, object]:
        usual = {"epochs": 4.0, "batch_size": 64, "parameters": 1234, "examples_per_second": 10.0}
        settings = {"schedule.rate": 0.1, "optimizer.kind": "sgd"}
        return usual | {"phase": phase, "network": network, "seed": seed, "top1": top1, "settings": settings}

    rows = [one("tuning", "CCLL", 0, 0.5)]
    for seed in (0, 1, 2):
        rows.append(one("final", "convolution", seed, 0.70 + 0.01 * seed))
        rows.append(one("final", "CCLL", seed, 0.80 + 0.011 * seed))
    result = {"name": "compare", "date": "2021-02-17T00:00:00", "machine": {"cpu": "A chip", "cores": 2, "gpu": None}}
    result |= {"versions": {"torch": "2.11"}, "image_size": 128, "edges": {"CCLL": ["schedule.rate=0.1"]}, "rows": rows}
    (tmp_path / "compare-imagenette.json").write_text(json.dumps(result))
    text = generate.filled(block, tmp_path)
    assert "A chip, 2 threads. torch 2.11. Measured 2021-02-17; images of 128 pixels." in text
    assert "| convolution | 3 | 71.00 | 1.00 |  | 1,234 | 10 | schedule.rate=0.1, optimizer.kind=sgd |" in text
    assert "| CCLL | 3 | 81.10 | 1.10 | +10.10 (" in text
    assert "| CCLL | schedule.rate=0.1, optimizer.kind=sgd | 50.00 |" in text
    assert "The best trial of CCLL is at the edge of the grid: schedule.rate=0.1." in text


def test_the_initial_size_of_embeddings_is_shown(tmp_path: Path):
    block = "<!-- bench:embedding-std -->\n<!-- /bench -->"
    assert "run.py embedding-std` writes embedding-std.json" in generate.filled(block, tmp_path)
    rows = [
        {"embedding_std": name, "value": value, "held_out_top1": 0.5 + seed / 10, "validation_top1": 0.25}
        for name, value in (("unit", 0.0109), ("1", 1.0))
        for seed in (0, 1)
    ]
    result = {"name": "embedding", "date": "2021-02-17", "machine": {"cpu": "A chip", "cores": 1, "gpu": None}}
    settings = {"network": "resnet26_d", "options": ["widths=(4,8)"], "image_size": 64, "epochs": 4.0}
    result |= {"versions": {"torch": "2"}, "settings": settings, "rows": rows, "means": {"unit": {}, "1": {}}}
    (tmp_path / "embedding-std.json").write_text(json.dumps(result))
    text = generate.filled(block, tmp_path)
    assert "resnet26_d widths=(4,8) with lambda layers in all stages" in text
    assert "| `unit` (0.0109) | 2 | 55.0 (50.0, 60.0) | 25.0 (25.0, 25.0) |" in text
    assert "| 1 | 2 | 55.0 (50.0, 60.0) |" in text


def test_training_on_a_folder_is_shown_beside_a_regression(tmp_path: Path):
    block = "<!-- bench:own-images -->\n<!-- /bench -->"
    assert "run.py own-images` writes own-images.json" in generate.filled(block, tmp_path)
    rows: list[dict[str, object]] = [{"data": "photos", "method": "logistic regression", "test_top1": 0.5}]
    one = {"seed": 0, "epochs": 80.0, "seconds": 99.6, "held_out_top1": 0.75, "network": {"image_size": 96}}
    rows.append({"data": "photos", "method": "lambdanets train", "test_top1": 0.8, **one})
    result = {"name": "own_images", "date": "2021-02-17", "machine": {"cpu": "A chip", "cores": 1, "gpu": None}}
    (tmp_path / "own-images.json").write_text(json.dumps(result | {"versions": {"torch": "2"}, "rows": rows}))
    text = generate.filled(block, tmp_path)
    assert "| photos | logistic regression | 50.0 |  |  |" in text
    assert "| photos | `lambdanets train`: 96 px, 80 epochs, seed 0 | 80.0 | 75.0 | 100 |" in text


def test_memory_is_shown_beside_ours():
    about = {"shape": "7x7x8", "scope": None}
    rows = [about | {"contender": "ours", "peak_bytes": 3 * 2**30}, about | {"contender": "conv", "peak_bytes": 2**30}]
    assert [generate.memory_cell(rows)(row) for row in rows] == ["3,072 MiB", "0.33x"]


def test_a_layer_is_compared_with_the_fastest_form_of_the_convolution():
    def one(contender: str, milliseconds: float, shape: str = "7x7x8", memory_format: str = "channels_last"):
        about = {"shape": shape, "scope": 23, "mode": "inference", "memory_format": memory_format}
        return about | {"contender": contender, "milliseconds": milliseconds}

    rows = [one("ours", 4.0), one("ours, folded", 2.0), one("conv3x3 + BN", 1.6), one("conv3x3, BN folded", 3.0)]
    assert "| 7x7x8 | 23 | 2, folded | 1.6 | 1.25 |\n" in generate.hard_baseline(rows)
    assert generate.hard_baseline(rows[:2]) == ""
    rows[3] = one("conv3x3, BN folded", 1.0, memory_format="contiguous")
    assert "| 7x7x8 | 23 | 2, folded | 1, folded, contiguous | 2.00 |\n" in generate.hard_baseline(rows)


def test_the_summary_compares_the_fastest_forms(tmp_path: Path):
    def row(contender: str, mode: str, milliseconds: float, shape: str, scope: int = 23):
        about = {"kind": "layer", "contender": contender, "mode": mode, "milliseconds": milliseconds}
        return about | {"shape": shape, "scope": scope}

    rows = []
    for shape in generate.summary.MAPS:
        rows += [row("ours", "inference", 4.0, shape), row("ours, folded", "inference", 2.0, shape)]
        rows += [row("conv3x3 + BN", "inference", 3.0, shape), row("ours", "inference", 0.1, shape, scope=7)]
        rows += [row("ours", "training", 3.0, shape), row("conv3x3 + BN", "training", 2.0, shape)]
    for one in rows:
        one["peak_bytes"] = 2**20 if one["contender"].startswith("ours") else 2**21
    result = {"machine": {"gpu": "TESTGPU"}, "date": "2021-02-17T00:00:00", "commit": "123456789+changes", "rows": rows}
    (tmp_path / "layer-cuda-convolution.json").write_text(json.dumps(result))
    text = generate.filled("<!-- bench:summary -->\n<!-- /bench -->", tmp_path)
    line = "| layer, 7x7x512 (c5) | 1.50x faster | 1.50x slower | 0.50x | TESTGPU, batch 256"
    assert line in text
    assert "2021-02-17 at 1234567+ |" in text
    assert "ResNet-50" not in text  # not measured


def test_what_choosing_takes_is_shown_and_computed_for_more(tmp_path: Path):
    block = "<!-- bench:pseudo-select -->\n<!-- /bench -->"
    assert "No measurement yet" in generate.filled(block, tmp_path)
    one = {"entries": 10_000_000, "classes": 1000, "units": 1000, "seconds": 5.4, "cpu_seconds": 4.2}
    one |= {"peak_bytes": 1_500_000_000, "peak_bytes_before": 500_000_000, "label_bytes_per_image": 88.1}
    for name, more in (("", {}), ("-40M", {"entries": 40_000_000, "cpu_seconds": 20.0, "label_bytes_per_image": 28.0})):
        (tmp_path / f"pseudo-select{name}.json").write_text(json.dumps(one | more))
    text = generate.filled(block, tmp_path)
    assert "selecting among 10M labels of 1,000 classes in 1,000 files | 4 s of CPU time, 5 s including fsync" in text
    assert "; 1.50 GB, of which 0.50 GB are Python and torch |" in text
    assert "| size of a label | 28 bytes; with ten soft probabilities 88 bytes |" in text
    assert "| selecting among 130M labels (computed) | 65 s of CPU time |" in text
    assert "| 3.6 GB; with ten soft probabilities 11.5 GB |" in text


def test_contenders_that_are_missing_are_named(tmp_path: Path):
    left = {"case": "7x7x64 scope 23", "contender": "theirs", "reason": "has no local scopes"}
    machine = {"cpu": "A chip", "cores": 2, "gpu": None}
    result = {"date": "2021-02-17", "machine": machine, "versions": {"torch": "2"}, "rows": [row()]}
    result |= {"left_out": [left, left], "mismatches": ["x is 3 from the reference"]}
    (tmp_path / "op-cpu.json").write_text(json.dumps(result))
    text = generate.body("op-cpu", tmp_path)
    assert "- Left out: theirs, all maps: has no local scopes.\n" in text
    assert "- Failed its check: x is 3 from the reference\n" in text


def test_every_measurement_has_a_command_that_is_understood():
    """Each file is written by a command or is the record of an experiment, and pages show or list it."""
    run = generate.run
    names = {path.relative_to(generate.RESULTS).as_posix()[:-5] for path in generate.RESULTS.rglob("*.json")}
    assert names == {*run.COMMANDS, *run.RECORDS}
    for name in run.COMMANDS:
        program, *words = shlex.split(run.command(name).partition(" > ")[0])
        if program == "lambdanets":
            parse(words)  # ends the test where a word is not understood
        else:
            assert program == "python"
            assert (ROOT / words[0]).is_file(), words[0]
    history = (ROOT / "lambdanets/ops/triton/HISTORY.md").read_text()
    assert all(f"{name}.json" in history for name in run.RECORDS)


@pytest.mark.parametrize("compiled", [False, True])
def test_networks_are_shown_beside_the_first_of_their_size(compiled: bool, tmp_path: Path):
    about = {"mode": "training", "precision": "bfloat16", "compiled": compiled, "batch": 8, "memory_batch": 2}
    rows = [
        {"network": name, "image_size": [pixels] * 2, "parameters": 10**6, "protocol": about, "error": None,
         "result": {"examples_per_second": speed, "peak_bytes": 2**30, "peak_batch": 4}}
        for name, pixels, speed in (("a", 224, 100.0), ("b", 224, 50.0), ("c", 160, 300.0), ("d", 160, 150.0))
    ]  # fmt: skip
    machine = {"gpu": "a GPU", "cpu": "", "cores": 1}
    found = {
        "name": "networks-cuda",
        "date": "2026-01-01",
        "machine": machine,
        "versions": {"torch": "2"},
        "rows": rows,
    }
    (tmp_path / "networks-cuda.json").write_text(json.dumps(found))
    table = generate.body("networks-cuda", tmp_path)
    assert "| `b` | 224 | 1.0M | 50 (0.50) | 1.0 GiB (1.00) |" in table
    assert "| `d` | 160 | 1.0M | 150 (0.50) | 1.0 GiB (1.00) |" in table
    assert "training memory, batch 4" in table
    rows[3] |= {"result": None, "error": "out of memory"}
    rows.append(rows[0] | {"result": rows[0]["result"] | {"examples_per_second": 99.0}})
    (tmp_path / "networks-cuda.json").write_text(json.dumps(found))
    table = generate.body("networks-cuda", tmp_path)
    assert "| `d` | 160 | 1.0M | out of memory | out of memory |" in table
    assert "Measured again at the end of the run: `a`, training" in table


def test_contributing_lists_every_folder_of_the_package():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    package = ROOT / "lambdanets"
    for folder in [*package.iterdir(), *(package / "experiments").iterdir()]:
        if (folder / "__init__.py").is_file():
            assert f"`{folder.name}/`" in text, folder
    house = text.partition("| floor |")[2].partition("\n\n")[0]
    for name in re.findall(r"`([a-z0-9_]+/|[a-z0-9_]+\.py)`", house):
        assert list(package.rglob(name.rstrip("/"))), name


def test_helpers_of_tests_are_not_imported_from_tests():
    for path in (ROOT / "tests").rglob("*.py"):
        assert not re.search(r"^\s*from [\w.]*\.test_\w+ import", path.read_text(), re.MULTILINE), path

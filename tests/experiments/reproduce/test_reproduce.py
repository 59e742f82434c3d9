"""Experiments: every table and figure, what kind each number is, resuming, out of memory, pages."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from lambdanets.bench.throughput import NoMemoryError
from lambdanets.cli import main
from lambdanets.experiments.reproduce import DETECTION, ROWS, growth
from lambdanets.experiments.reproduce.experiments import BLOCKS, EXPERIMENTS, KINDS, TRAINING
from lambdanets.experiments.reproduce.jobs import GrowthJob, NetworkJob, Settings, Store
from lambdanets.experiments.reproduce.numbers import counted_cells, found_headlines, numbers, read_accuracy
from lambdanets.experiments.reproduce.page import markdown, pareto_charts
from lambdanets.experiments.reproduce.pareto import published
from lambdanets.experiments.reproduce.run import jobs_of
from lambdanets.files import read_object
from lambdanets.recipes import UNPUBLISHED_350

PAPER = read_object(Path(__file__).parent / "paper_tables.json")  # benchmarks/paper_tables.py writes it
# Tables and figures without numbers of ours or the paper's: definitions, drawings, code.
WITHOUT = {
    *("tab:content_position_interactions", "tab:lambda_layer_quantities"),
    *("fig:visual_example", "fig:lambda_layer_computational_graph", "fig:lambda_layer_graph", "fig:lambda_layer_code"),
    *("fig:complete_lambda_layer_code", "fig:masked_lambda_layer_code", "fig:multihead_lambda_layer_code"),
    "fig:lambda_layer_code_u",
}
SETTINGS = Settings(torch.device("cpu"), quick=True)


def test_every_table_and_figure_of_the_paper_has_a_name():
    labels = set(PAPER["labels"])
    named = {label for one in EXPERIMENTS.values() for label in one.label.split(", ")}
    assert labels - WITHOUT == {label for label in named if not label.startswith("text:")}
    assert labels >= WITHOUT


def test_every_number_of_the_tables_is_shown():
    shown = {
        (label, cell.paper) for one in EXPERIMENTS.values() for label in one.label.split(", ") for cell in one.cells()
    }
    for row in ROWS:
        for name in ("params", "flops", "memory", "infer", "train", "latency", "top1", "pseudo_top1"):
            printed = getattr(row, name)
            if name == "top1" and row.gain is not None:
                printed = f"{printed} ({row.gain})"
            if printed is not None:
                assert (row.table, printed) in shown, (row, name)
        assert row.space is None or (row.table, row.space) in shown
    for row in DETECTION:
        assert {(row.table, number) for number in (row.box, row.mask, *row.box_sizes, *row.mask_sizes)} <= shown


def test_what_kind_each_number_is():
    for one in EXPERIMENTS.values():
        for cell in one.cells():
            assert cell.kind in KINDS
            trained = cell.unit == "%" or "AP" in cell.quantity
            assert (cell.kind == "paper") == trained, cell
            assert (cell.job is not None) == (cell.kind == "measured"), cell
            assert (cell.compute is not None) == (cell.kind == "exact"), cell
            if cell.kind == "paper":
                assert cell.paper is not None


def test_accuracies_of_the_paper_are_never_ours():
    for name in ("normalization", "detection", "pareto"):
        for line in numbers(name, Store(Path("x")), SETTINGS, {}):
            if line.kind == "paper":
                assert line.ours == "-"
                assert "not trained here" in line.note


@pytest.mark.parametrize(("name", "without"), [("blocks", 0), ("settings", 3 * len(UNPUBLISHED_350))])
def test_blocks_and_settings_are_the_papers(name, without):
    """Settings that the paper does not publish say whose they are."""
    lines = numbers(name, Store(Path("x")), SETTINGS, {})
    printed = [one for one in lines if one.paper != "-"]
    assert printed
    assert all(one.paper == one.ours and one.note == "match" for one in printed)
    assert len(lines) - len(printed) == without
    assert all("the paper has no settings: those of" in one.note for one in lines if one.paper == "-")


def test_settings_are_as_printed():
    settings, blocks_of = PAPER["tables"]["tab:pareto_curve_hparams"], PAPER["tables"]["tab:block_config_details"]
    for depth, size, *printed in TRAINING:
        assert f"{depth} & {size} & {' & '.join(printed)}" in settings
    for depth, (blocks, lambdas) in BLOCKS.items():
        assert re.search(
            rf"LambdaResNet-{depth} & \\texttt{{\[{blocks}\]}} & {lambdas}$", "\n".join(blocks_of), re.MULTILINE
        )


@pytest.mark.parametrize(
    ("name", "paper", "ours"), [("efficientnet-params", "43", "43.0"), ("efficientnet-flops", "38", "38.1")]
)
def test_efficientnets_are_counted(name, paper, ours):
    pytest.importorskip("timm")
    line = numbers(name, Store(Path("x")), SETTINGS, {})[0]
    assert (line.paper, line.ours, line.kind) == (paper, ours, "exact")


def test_what_is_not_ours_is_not_called_a_count_of_ours():
    pytest.importorskip("timm")
    lines = numbers("layers", Store(Path("x")), SETTINGS, {})
    chen = next(one for one in lines if "Chen" in one.row and one.quantity == "params")
    assert (chen.paper, chen.ours, chen.kind) == ("33.0", "-", "paper")
    vit = next(one for one in numbers("extra-data", Store(Path("x")), SETTINGS, {}) if one.row == "ViT-L/16")
    assert vit.kind == "exact"
    assert vit.note.startswith("cited; ")  # no "near", which is within 0.3%
    assert vit.note.endswith("-0.7%")


@pytest.mark.parametrize("wrong", [("--batch", "0"), ("--threads", "0"), ("--minutes", "-1"), ("--seconds", "-2")])
def test_settings_that_cannot_be(tmp_path, measured, wrong, capsys):
    assert main(["reproduce", "layers", "--out", str(tmp_path), "--device", "cpu", *wrong]) == 2
    assert re.search(f"{wrong[0]} must be at least [01], got {wrong[1]}\n", capsys.readouterr().err)
    assert measured == []


def test_what_stands_in_the_file_is_not_measured_again(tmp_path, measured, capsys):
    command = ["reproduce", "attention", "--out", str(tmp_path), "--device", "cpu"]
    assert main([*command, "--minutes", "0"]) == 0
    assert measured == []
    assert main(command) == 0
    assert len(measured) == len(set(measured)) == 14  # 7 networks, inference and training
    assert main(command) == 0
    assert len(measured) == 14
    assert main([*command, "--retry"]) == 0
    assert len(measured) == 16  # the two without memory
    assert main([*command, "--batch", "4"]) == 0  # other settings are other measurements
    assert len(measured) == 30
    out = capsys.readouterr().out
    assert "OOM" in out
    assert "1160" in out


def test_a_run_goes_on_after_a_kill(tmp_path, measured, monkeypatch):
    run, left = NetworkJob.run, [3]

    def killed(job, settings):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return run(job, settings)

    monkeypatch.setattr(NetworkJob, "run", killed)
    command = ["reproduce", "hybrids", "--out", str(tmp_path), "--device", "cpu"]
    assert main(command) == 130
    assert len(json.loads((tmp_path / "reproduce.json").read_text())["measurements"]) == 3
    monkeypatch.setattr(NetworkJob, "run", run)
    assert main(command) == 0
    assert len(measured) == len(set(measured)) == 8


def test_parts_come_together_on_one_page(tmp_path, measured):
    for name in ("text", "blocks"):
        assert main(["reproduce", name, "--out", str(tmp_path), "--device", "cpu"]) == 0
    for file in ("reproduce.md", "reproduce.html"):
        text = (tmp_path / file).read_text()
        assert "Memory in the paper" in text
        assert "Blocks of LambdaResNets" in text
    assert list(json.loads((tmp_path / "reproduce.json").read_text())["experiments"]) == ["text", "blocks"]


def test_another_machine_is_refused_but_may_look(tmp_path, measured, capsys):
    command = ["reproduce", "mobilenet", "--out", str(tmp_path), "--device", "cpu"]
    assert main(command) == 0
    path = tmp_path / "reproduce.json"
    path.write_text(re.sub(r'"hardware": "[^"]+"', '"hardware": "Some GPU"', path.read_text()))
    assert main(command) == 2
    assert "Some GPU" in capsys.readouterr().err
    before = path.read_text()
    assert main([*command, "--no-measure"]) == 0
    assert "Some GPU" in capsys.readouterr().out
    assert json.loads(path.read_text()) == json.loads(before)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"measurements": 1}'])
def test_a_file_that_is_none_of_ours(tmp_path, text, capsys):
    (tmp_path / "reproduce.json").write_text(text)
    assert main(["reproduce", "blocks", "--out", str(tmp_path)]) == 2
    assert "another folder" in capsys.readouterr().err


def test_out_of_memory_is_a_result(monkeypatch):
    def no_memory(*_):
        raise NoMemoryError("not even one image fits in memory")

    monkeypatch.setattr("lambdanets.bench.networks.measure_network", no_memory)
    assert NetworkJob("resnet_tiny", 32, "inference").run(SETTINGS) == {"error": "out of memory"}


def test_a_batch_that_did_not_fit_is_said(measured):
    store = Store(Path("x"))
    job = NetworkJob("mobilenet_v2", 224, "inference")
    store.found[job.key(SETTINGS)] = {**job.run(SETTINGS), "hardware": "here"}
    line = next(one for one in numbers("mobilenet", store, SETTINGS, {}) if one.quantity == "inference")
    assert "batch 2, the largest that fits" in line.note
    assert "--quick: 64 px instead of 224" in line.note
    assert line.hardware == "here"


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_network_is_really_measured(mode):
    found = NetworkJob("resnet_tiny", 32, mode).run(Settings(torch.device("cpu"), quick=True))
    assert found["batch"] == 2
    assert found["examples_per_second"] > 0
    assert found["image_size"] == 64
    assert NetworkJob("resnet_rs420", 64, mode).run(SETTINGS)["error"].endswith("too large for --quick")


def test_an_error_stops_only_its_own_measurement(monkeypatch):
    def fails(*_):
        raise RuntimeError("CUDA out of memory. Tried")

    monkeypatch.setattr(growth, "measure_growth", fails)
    job = GrowthJob("tab:complexity_u", "Lambda layer (u > 1)", "u")
    assert job.run(SETTINGS) == {"error": "out of memory"}
    monkeypatch.setattr(growth, "measure_growth", lambda *_: 1 / 0)
    assert job.run(SETTINGS) == {"error": "ZeroDivisionError: division by zero"}


def test_quick_has_no_headline(measured):
    store = Store(Path("x"))
    for job in jobs_of(["pareto"], in_turns=False):
        store.found[job.key(SETTINGS)] = {**job.run(SETTINGS), "hardware": "here"}
    assert found_headlines(store, SETTINGS) == []
    assert [title for title, _ in pareto_charts(numbers("pareto", store, SETTINGS, {}))] == [
        "Published, training step on 8 TPUv3 cores"
    ]


def test_a_figure_alone_is_not_blown_up(tmp_path, measured):
    assert main(["reproduce", "pareto", "--quick", "--out", str(tmp_path), "--device", "cpu"]) == 0
    assert '<div class="chart alone"><h3>Published' in (tmp_path / "reproduce.html").read_text()


# Growth ---------------------------------------------------------------------------------------------------------------


def test_formulas_of_the_complexity_tables():
    sizes = growth.Sizes(b=2, n=8, r=4, h=4, k=16, d=64)
    table = growth.TABLES["tab:interactions_alternatives"]
    assert growth.formula(table["Attention"], sizes, "n") == (4, 4)
    assert growth.formula(table["Linear attention"], sizes, "n") == (2, 1)
    assert growth.formula(table["Lambda layer"], sizes, "h")[0] == 0.5
    assert growth.formula(table["Lambda convolution"], sizes, "r")[0] == 2
    heads = growth.TABLES["tab:multihead_vs_multiquery"]
    both = [heads[name].seconds(sizes) for name in ("Multi-head lambda layer", "Multi-query lambda layer")]
    assert both[0] / both[1] == sizes.h
    knm, bnkv = 16 * 8 * 8, 2 * 8 * 16 * 16
    assert heads["Multi-query lambda layer"].elements(sizes) == knm + bnkv
    assert heads["Multi-head lambda layer"].elements(sizes) == 4 * (knm + bnkv)


@pytest.mark.parametrize(
    ("operation", "letter"),
    [("Attention", "n"), ("Attention", "h"), ("Lambda layer", "n"), ("Lambda layer", "k"), ("Lambda layer", "b")],
)
def test_memory_grows_as_the_formula_says(operation, letter):
    """Memory is counted, not timed: the same on every machine. Small sizes leave a tenth for outputs."""
    row = growth.TABLES["tab:interactions_alternatives"][operation]
    found = growth.measure_growth(row, growth.Sizes(), letter, torch.device("cpu"), 1, 0.0)
    assert found.bytes == pytest.approx(growth.formula(row, growth.Sizes(), letter)[1], rel=0.12)


def test_operations_of_the_complexity_table_are_what_they_say():
    sizes, device = growth.Sizes(b=2, n=6, r=11, h=2, k=3, d=8), torch.device("cpu")
    table = growth.TABLES["tab:interactions_alternatives"]
    dense, _ = table["Lambda layer"].build(sizes, device)
    local, held = table["Lambda convolution"].build(sizes, device)
    for call in (dense, local, *(table[name].build(sizes, device)[0] for name in ("Attention", "Relative attention"))):
        assert call().shape == (2, 6, 2, 4)  # type: ignore[attr-defined]
    assert held[0].shape == (11, 3)
    plain, relative = (table[name].build(sizes, device)[0]() for name in ("Attention", "Relative attention"))
    assert not torch.equal(plain, relative)  # type: ignore[arg-type]


# Accuracy, headline, pages --------------------------------------------------------------------------------------------


def test_our_accuracies_stand_beside_and_not_in_place_of_the_papers(tmp_path, measured):
    rows = [{"phase": "final", "network": "LLLL", "top1": top1, "seed": seed} for seed, top1 in enumerate((0.90, 0.92))]
    rows.append({"phase": "tuning", "network": "LLLL", "top1": 0.1, "seed": 0})
    path = tmp_path / "compare.json"
    about = {"machine": {"cpu": "A CPU", "cores": 2, "gpu": None}, "data": "pets", "rows": rows}
    path.write_text(json.dumps(about))
    found = read_accuracy(str(path))
    assert found["LLLL"].top1 == pytest.approx(91)
    lines = [one for one in numbers("hybrids", Store(Path("x")), SETTINGS, found) if one.row == "LLLL"]
    paper, ours = (next(one for one in lines if one.quantity == q) for q in ("top-1", "top-1 of pets"))
    assert (paper.paper, paper.ours, paper.kind) == ("78.4", "-", "paper")
    assert (ours.paper, ours.ours, ours.hardware) == ("-", "91.00 ± 1.41", "A CPU, 2 threads")
    assert "not comparable with ImageNet" in ours.note
    command = ["reproduce", "hybrids", "--out", str(tmp_path / "out"), "--accuracy", str(path), "--device", "cpu"]
    assert main(command) == 0
    assert "91.00 ± 1.41" in (tmp_path / "out" / "reproduce.html").read_text()
    rows[0]["top1"] = 0.94  # later runs, and nothing to measure
    path.write_text(json.dumps(about))
    assert main([*command, "--no-measure"]) == 0
    assert "93.00 ± 1.41" in (tmp_path / "out" / "reproduce.html").read_text()


@pytest.mark.parametrize("text", [None, "", "[]", '{"rows": [{"phase": "final"}]}'])
def test_no_accuracies(tmp_path, text, capsys):
    path = tmp_path / "compare.json"
    if text is not None:
        path.write_text(text)
    assert main(["reproduce", "hybrids", "--accuracy", str(path), "--device", "cpu"]) == 2
    assert "lambdanets experiments compare" in capsys.readouterr().err


def test_the_headline_comes_from_measurements(tmp_path, measured, capsys):
    assert main(["reproduce", "pareto", "--out", str(tmp_path), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "LambdaResNet over EfficientNet, training, eager: 3.00 to 3.00x (mean 3.00) at 77.4 to 84.3% top-1" in out
    assert "3.2 - 4.4x" in out  # what the paper claims stands beside it
    store, settings = Store.open(tmp_path), Settings(torch.device("cpu"))
    names = {(one.other, one.mode) for one in found_headlines(store, settings)}
    assert len(names) == 6  # three families, training and inference
    page = (tmp_path / "reproduce.html").read_text()
    assert page.count("<svg") == 3
    assert len(published()) * 3 == len(counted_cells("pareto"))


class Tags(HTMLParser):
    """Closes what it opens, loads nothing, runs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        assert tag != "script"
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing(tmp_path, measured):
    assert main(["reproduce", "complexity", "attention", "pareto", "--out", str(tmp_path), "--device", "cpu"]) == 0
    text = (tmp_path / "reproduce.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert all(link.startswith("#") for link in tags.links)
    assert "formula (upper bar) and measurement (lower bar)" in text
    assert "relative to Axial self-attention" in text


def test_markdown_has_whole_lines(measured):
    lines = {name: numbers(name, Store(Path("x")), SETTINGS, {}) for name in ("text", "complexity")}
    rows = [line for line in markdown(lines, []).splitlines() if line.startswith("|")]
    assert len(rows) == sum(map(len, lines.values())) + 2 * 2
    assert {line.count("|") for line in rows} == {9}


# The command ----------------------------------------------------------------------------------------------------------


def test_the_list(capsys):
    assert main(["reproduce", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in EXPERIMENTS)
    assert main(["reproduce", "--list", "--format", "json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == list(EXPERIMENTS)


def test_json_is_json(tmp_path, measured, capsys):
    words = ["hybrids", "memory", "--format", "json", "--out", str(tmp_path), "--device", "cpu"]
    assert main(["reproduce", *words]) == 0
    found = json.loads(capsys.readouterr().out)  # one document, whatever is asked for
    assert found["hybrids"][0]["ours"] == "25.56"
    assert found["memory"][0]["unit"] == "GB"


def test_markdown_is_nothing_but_markdown(tmp_path, measured, capsys):
    assert main(["reproduce", "mobilenet", "--format", "markdown", "--out", str(tmp_path), "--device", "cpu"]) == 0
    assert measured
    assert "ex/s with batch" not in capsys.readouterr().out  # progress


def test_a_wrong_name_is_said_before_anything_is_printed(capsys):
    assert main(["reproduce", "memory", "nonsense"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("arguments", [[], ["everything"], ["scope", "--dtype", "tf32", "--device", "cpu"]])
def test_refused(arguments, capsys):
    assert main(["reproduce", *arguments]) == 2
    assert capsys.readouterr().err


@pytest.mark.slow
def test_quick_for_real(tmp_path):
    assert main(["reproduce", "--quick", "--minutes", "0.2", "--out", str(tmp_path), "--device", "cpu"]) == 0
    found = json.loads((tmp_path / "reproduce.json").read_text())
    assert list(found["experiments"]) == list(EXPERIMENTS)  # without names: all
    assert found["measurements"]

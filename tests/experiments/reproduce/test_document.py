"""docs/reproduce.md says what there is, and its blocks show what was measured."""

import json
import re
from pathlib import Path

import pytest

from lambdanets.cli import main
from lambdanets.experiments.reproduce.experiments import EXPERIMENTS, KINDS
from lambdanets.experiments.reproduce.numbers import Number
from lambdanets.experiments.reproduce.page import count
from lambdanets.experiments.reproduce.pareto import published, published_headlines
from tests.support.documents import generate
from tests.support.scripts import script

DOCS = Path(__file__).resolve().parents[3] / "docs"
paper_tables = script("docs/paper_tables.py")
TEXT = (DOCS / "reproduce.md").read_text()


def first_column(heading: str) -> list[str]:
    section = TEXT.split(heading, 1)[1].split("\n\n| ", 1)[1].split("\n\n", 1)[0]
    cells = [line.strip("| ").split(" | ")[0] for line in section.splitlines()[2:]]
    return [name for cell in cells for name in cell.split(", ")]


def test_every_name_is_documented():
    assert sorted(first_column("## Tables and figures")) == sorted(EXPERIMENTS)
    assert first_column("and the kind of number") == list(KINDS)


@pytest.fixture
def folder(tmp_path, measured):
    command = ["reproduce", "pareto", "attention", "complexity", "--out", str(tmp_path / "reproduce-h200")]
    assert main([*command, "--device", "cpu"]) == 0
    return tmp_path


def test_headlines_and_tables_come_from_the_file(folder):
    data = json.loads((folder / "reproduce-h200" / "reproduce.json").read_text())
    said = paper_tables.summary(data)
    assert all(f"- {text}\n" in said for text in data["headlines"])
    assert "training, eager: 3.00 to 3.00x" in said
    assert "3.2 - 4.4x" in said  # what the paper claims stands beside it
    assert all(said.endswith(f"For comparison, {one.text()}.\n") for one in published_headlines())
    assert said.startswith(f"{data['hardware']}. python ")
    text = paper_tables.tables(data)
    assert re.findall(r"`lambdanets reproduce (.+)`", text) == [
        "complexity",
        "attention",
        "pareto",
    ]  # the paper's order
    rows = {line["row"] for lines in data["experiments"].values() for line in lines}
    assert all(f"| {row} |" in text for row in rows)
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1
    assert "| Global self-attention | Θ(blhn²) | Θ(blhn²) | 120 | 122.8 | OOM | OOM |" in text
    assert "| Lambda convolution (7x7) | Θ(lknm) | Θ(lkr) |" in text
    assert "reading; Θ(lknm) has an embedding for each pair" in text


def test_a_block_shows_the_folder_and_its_figure(folder, monkeypatch):
    block = "<!-- bench:reproduce-h200{} -->\n<!-- /bench -->"
    shown = generate.filled(block.format(""), folder)
    assert "LambdaResNet over EfficientNet, training" in shown
    assert "figures/pareto.svg" in shown
    assert "| LambdaResNet-50, 128 px | 0.058 (1.00) |" in generate.filled(block.format("-tables"), folder)
    draw = script("docs/figures/draw.py")
    monkeypatch.setattr(draw, "REPRODUCED", folder / "reproduce-h200" / "reproduce.json")
    assert draw.pareto().count("<circle") == 2 * len(published())


def test_a_block_without_measurements_says_how_to_make_them(tmp_path):
    text = generate.filled("<!-- bench:reproduce-h200-tables -->\n<!-- /bench -->", tmp_path)
    assert "`lambdanets reproduce all --out benchmarks/results/reproduce-h200`" in text


def number(row: str, quantity: str, paper: str, value: float | None, note: str = "", unit: str = "ex/s") -> Number:
    ours = "-" if value is None else f"{value:g}"
    return Number(row, quantity, unit, paper, ours, "measured", "here", note, value)


def test_speeds_are_beside_the_first_row_that_both_have():
    lines = [
        number("A", "inference", "OOM", 9.0),
        number("B", "inference", "100", 20.0, "float32, batch 2"),
        number("C", "inference", "300", 30.0, "match; float32, batch 2"),
        number("D", "inference", "400", None, "not measured yet"),
    ]
    assert paper_tables.beside_the_first(lines)["C", "inference", "ex/s", "paper"] == " (3.00)"
    text = paper_tables.table(lines, formula=False)
    assert "| A | OOM | 9 |\n| B | 100 (1.00) | 20 (1.00) |\n| C | 300 (3.00) | 30 (1.50) |\n| D | 400 | - |\n" in text
    assert paper_tables.notes(lines, formula=False) == "\n- float32, batch 2. Rows: B; C.\n"


def test_with_extra_data_the_first_network_is_so_many_times_faster():
    """As the paper prints it: 9.5x for 170 where the first network has 1620."""
    lines = [number("A", "training", "1620", 100.0), number("B", "training", "170", 20.0)]
    assert "| A | 1620 | 100 |\n| B | 170 (9.5x) | 20 (5.0x) |\n" in paper_tables.table(
        lines, formula=False, slower=True
    )


def test_why_ratios_to_vit_differ_is_said_with_the_measured_numbers():
    lines = [
        number("LambdaResNet", "flops", "-", 40.0, unit="G"),
        number("LambdaResNet", "inference", "6100", 3000.0),
        number("ViT-L/16", "flops", "-", 360.0, unit="G"),
        number("ViT-L/16", "inference", "640", 1000.0),
    ]
    said = paper_tables.extra_data(lines)
    assert "ViT-L/16 needs 9.0 times as many FLOPs per image as LambdaResNet" in said
    assert "ViT-L/16 runs at 360 TFLOP/s and LambdaResNet at 120" in said
    assert paper_tables.extra_data(lines[:3]) == "" == paper_tables.extra_data(lines[1:])


def test_the_committed_tables_have_gains_citations_and_readings():
    data = json.loads((DOCS.parent / "benchmarks" / "results" / "reproduce-h200" / "reproduce.json").read_text())
    text = paper_tables.tables(data)
    assert re.search(r"\| Lambda layer \(u=4\) \|.* 78.9 \(\+2.0\) \|", text)
    assert re.search(r"\| Local relative self-attention \(Zhao et al.\) \| 20.5 \| 20.52 \|.* 78.2 \(\+1.3\) \|", text)
    assert re.search(r"\| Conv \+ linear attention \(Shen et al.\) \| - \| 28.05 \|.* 77.3 \(\+1.2\) \|", text)
    assert re.search(r"\| EfficientNet-B7, Noisy Student \|.*980 \(6.2x\).*170 \(9.5x\)", text)
    assert "as cited from Xie et al. 2020" in text
    assert "none of the readings that we tried" in text
    assert "no reading" not in text
    assert "reduces parameters and flops by ~10%" in text
    assert "times as many FLOPs per image as LambdaResNet-152" in text
    assert "| LambdaResNet-200-C4, 320 px | - | 15 | - | 0.3 | - | 0.1 |" in text


def test_one_quantity_in_two_units_has_two_columns():
    lines = [number("A", "memory", "64", 64.0, unit="GB"), number("B", "memory", "38.4", 39.06, unit="MB")]
    text = paper_tables.table(lines, formula=False)
    assert "|  | memory (GB), paper | memory (GB), ours | memory (MB), paper | memory (MB), ours |\n" in text
    assert "| A | 64 (1.00) | 64 (1.00) |  |  |\n| B |  |  | 38.4 (1.00) | 39.06 (1.00) |\n" in text


def test_a_note_names_the_quantity_where_a_row_has_several_notes():
    lines = [
        number("A", "training", "1", 1.0, "batch 256"),
        number("A", "inference", "1", 1.0, "batch 1024"),
        number("B", "training", "1", 1.0, "batch 1024"),
        number("B", "inference", "1", 1.0, "batch 1024"),
    ]
    assert (
        paper_tables.notes(lines, formula=False)
        == "\n- batch 256. Rows: A (training).\n- batch 1024. Rows: A (inference); B.\n"
    )


def test_what_is_missing_is_not_counted_as_measured():
    lines = [number("A", "training", "1", 1.0), number("B", "training", "1", None, "not measured yet")]
    assert count(lines) == "1 measured; 1 not measured yet"
    assert count(lines[1:]) == "1 not measured yet"

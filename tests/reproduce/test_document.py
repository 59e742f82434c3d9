"""docs/reproduce.md says what there is, and its blocks show what was measured."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from lambdanets.cli import main
from lambdanets.reproduce.document import beside_the_first, notes, summary, table, tables
from lambdanets.reproduce.experiments import EXPERIMENTS, KINDS
from lambdanets.reproduce.numbers import Number
from lambdanets.reproduce.page import count
from lambdanets.reproduce.pareto import published, published_headlines

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "reproduce.md").read_text()


def script(path: str):
    spec = importlib.util.spec_from_file_location(Path(path).stem, DOCS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first_column(heading: str) -> list[str]:
    section = TEXT.split(heading, 1)[1].split("\n\n| ", 1)[1].split("\n\n", 1)[0]
    cells = [line.strip("| ").split(" | ")[0] for line in section.splitlines()[2:]]
    return [name for cell in cells for name in cell.split(", ")]


def test_every_name_is_documented():
    assert sorted(first_column("## What there is")) == sorted(EXPERIMENTS)
    assert first_column("what kind of number it is") == list(KINDS)


@pytest.fixture
def folder(tmp_path, measured):
    command = ["reproduce", "pareto", "attention", "complexity", "--out", str(tmp_path / "reproduce-h200")]
    assert main([*command, "--device", "cpu"]) == 0
    return tmp_path


def test_headlines_and_tables_come_from_the_file(folder):
    data = json.loads((folder / "reproduce-h200" / "reproduce.json").read_text())
    said = summary(data)
    assert all(f"- {text}\n" in said for text in data["headlines"])
    assert "training, eager: 3.00 to 3.00x" in said
    assert "3.2 - 4.4x" in said  # what the paper claims stands beside it
    assert all(said.endswith(f"For comparison, {one.text()}.\n") for one in published_headlines())
    assert said.startswith(f"{data['hardware']}. python ")
    text = tables(data)
    assert re.findall(r"`lambdanets reproduce (.+)`", text) == [
        "complexity",
        "attention",
        "pareto",
    ]  # the paper's order
    rows = {line["row"] for lines in data["experiments"].values() for line in lines}
    assert all(f"| {row} |" in text for row in rows)
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1
    assert "| Global self-attention | 120 | 122.8 | OOM | OOM |" in text


def test_a_block_shows_the_folder_and_its_figure(folder, monkeypatch):
    generate = script("generate.py")
    block = "<!-- bench:reproduce-h200{} -->\n<!-- /bench -->"
    shown = generate.filled(block.format(""), folder)
    assert "LambdaResNet over EfficientNet, training" in shown
    assert "figures/pareto.svg" in shown
    assert "| LambdaResNet-50, 128 px | 0.058 (1.00) |" in generate.filled(block.format("-tables"), folder)
    draw = script("figures/draw.py")
    monkeypatch.setattr(draw, "REPRODUCED", folder / "reproduce-h200" / "reproduce.json")
    assert draw.pareto().count("<circle") == 2 * len(published())


def test_a_block_without_measurements_says_how_to_make_them(tmp_path):
    text = script("generate.py").filled("<!-- bench:reproduce-h200-tables -->\n<!-- /bench -->", tmp_path)
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
    assert beside_the_first(lines)["C", "inference", "ex/s", "paper"] == " (3.00)"
    text = table(lines, formula=False)
    assert "| A | OOM | 9 |\n| B | 100 (1.00) | 20 (1.00) |\n| C | 300 (3.00) | 30 (1.50) |\n| D | 400 | - |\n" in text
    assert notes(lines, formula=False) == "\n- float32, batch 2. For: B; C.\n"


def test_one_quantity_in_two_units_has_two_columns():
    lines = [number("A", "memory", "64", 64.0, unit="GB"), number("B", "memory", "38.4", 39.06, unit="MB")]
    text = table(lines, formula=False)
    assert "|  | memory (GB), paper | memory (GB), ours | memory (MB), paper | memory (MB), ours |\n" in text
    assert "| A | 64 (1.00) | 64 (1.00) |  |  |\n| B |  |  | 38.4 (1.00) | 39.06 (1.00) |\n" in text


def test_a_note_names_the_quantity_where_a_row_has_several_notes():
    lines = [
        number("A", "training", "1", 1.0, "batch 256"),
        number("A", "inference", "1", 1.0, "batch 1024"),
        number("B", "training", "1", 1.0, "batch 1024"),
        number("B", "inference", "1", 1.0, "batch 1024"),
    ]
    assert notes(lines, formula=False) == "\n- batch 256. For: A (training).\n- batch 1024. For: A (inference); B.\n"


def test_what_is_missing_is_not_counted_as_measured():
    lines = [number("A", "training", "1", 1.0), number("B", "training", "1", None, "not measured yet")]
    assert count(lines) == "1 measured; 1 not measured yet"
    assert count(lines[1:]) == "1 not measured yet"

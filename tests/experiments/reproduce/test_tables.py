"""The paper's tables as data, and the marks beside its numbers."""

import json
import re
from pathlib import Path

import pytest

from lambdanets.cli import main
from lambdanets.experiments.reproduce import DETECTION, ROWS, TABLES, compare
from lambdanets.experiments.reproduce.marks import MARKS, fits, rounded
from lambdanets.files import read_object
from lambdanets.models.registry import configure
from lambdanets.models.zoo import PAPER_TOP1
from tests.models.helpers import parameters

PAPER = read_object(Path(__file__).parent / "paper_tables.json")  # benchmarks/paper_tables.py writes it


@pytest.fixture(scope="module")
def found():
    return {what: compare(what) for what in ("params", "flops", "memory")}


def of(found, table, label):
    return next(one for one in found if one.table == table and one.label == label)


def test_rounding():
    assert rounded(122.8, "120") == "120"
    assert rounded(25.557, "25.6") == "25.6"
    assert rounded(3.5049, "3.50") == "3.50"
    assert rounded(14.9956, "14.9") == "15.0"
    assert fits(601.5, "603") == "near"
    assert fits(15.56, "15.4") is None


@pytest.mark.parametrize(
    ("what", "counts"),
    [
        ("params", {"match": 38, "reading": 1, "misprint": 8, "cited": 5}),
        ("flops", {"match": 3, "near": 1, "reading": 8, "cited": 1}),
        ("memory", {"match": 5, "reading": 4}),
    ],
)
def test_marks(found, what, counts):
    marks = [one.mark for one in found[what]]
    assert {mark: marks.count(mark) for mark in MARKS if mark in marks} == counts


def test_the_misprints_are_those_we_know(found):
    assert {(one.table, one.label) for one in found["params"] if one.mark == "misprint"} == {
        ("tab:content_vs_position", "content and position"),
        ("tab:hybrid_lambdanetworks", "CCLL"),
        *(("tab:ablations", f"k={k}, h={h}, u=1") for k, h in ((8, 2), (8, 16), (2, 4), (2, 8), (4, 8), (32, 8))),
    }


def test_what_does_not_fit_says_why(found):
    for one in (one for comparisons in found.values() for one in comparisons):
        assert bool(one.note) or one.mark == "match", one
        assert one.mark != "unprinted"  # only rows that print a number are compared
        assert (one.reading is not None) == (one.mark == "reading")


def test_no_reason_is_given_to_a_row_that_fits(found):
    used = {(one.table, one.label) for c in found.values() for one in c if one.mark in ("near", "reading", "misprint")}
    for row in ROWS:
        if row.reason or row.reading:
            assert (row.table, row.label) in used, row


def test_numbers_as_written_and_as_read(found):
    scope = of(found["flops"], "tab:scope_sizes", "global")
    assert round(scope.ours, 2) == 8.16
    assert round(scope.reading, 2) == 19.40
    mobile = of(found["flops"], "tab:mobilenets", "MobileNet-v2 with 2 lightweight lambda blocks")
    assert (round(mobile.ours, 1), round(mobile.reading, 1)) == (576.8, 563.6)
    assert round(of(found["flops"], "tab:flops_efficient", "LambdaResNet-270-C4 (7x7)").reading, 1) == 33.7


def test_every_network_of_the_tables_exists():
    for row in (*ROWS, *DETECTION):
        if row.model is not None:
            configure(row.model, **row.arguments)
    assert {row.table for row in ROWS} == set(TABLES)


def test_every_printed_number_is_in_the_papers_table():
    for row in (*ROWS, *DETECTION):
        if row.table.startswith("text:"):
            continue
        numbers = [getattr(row, n, None) for n in ("params", "flops", "memory", "infer", "train", "latency", "top1")]
        numbers += [getattr(row, n, None) for n in ("pseudo_top1", "box", "mask")]
        numbers += [*getattr(row, "box_sizes", ()), *getattr(row, "mask_sizes", ())]
        numbers = [rf"(?<![\d.]){re.escape(number)}(?![\d]|\.\d)" for number in numbers if number]
        # one line has them all, but the table of scopes has a column for each row
        lines = PAPER["tables"][row.table]
        lines = ["\n".join(lines)] if row.table == "tab:scope_sizes" else lines
        assert any(all(re.search(number, line) for number in numbers) for line in lines), (row.table, row.label)


def test_gains_are_those_over_the_papers_own_baseline_or_over_a_cited_one():
    rows = [row for row in ROWS if row.table == "tab:resnet50"]
    baseline = float(rows[0].top1)
    for row in rows:
        if row.gain is not None and row.cited is None:
            assert f"{float(row.top1) - baseline:+.1f}" == row.gain, row.label
    assert [row.gain for row in rows] == [None, "+0.7", None, "+1.2", "+1.3", "+0.5", "+1.0", "+1.3", "+1.5", "+2.0"]


def test_printed_speedups_follow_from_the_printed_speeds():
    first, *others = (row for row in ROWS if row.table == "tab:pseudo_labels")
    for row in others:
        for what, printed in row.speedups.items():
            assert f"{float(getattr(first, what)) / float(getattr(row, what)):.1f}x" == printed
        assert set(row.speedups) == {"train", "infer"}


def test_gains_and_complexities_are_in_the_papers_tables():
    latex = {"Θ": r"\Theta", "²": "^2", "√n": r"\sqrt{n}"}
    for row in ROWS:
        space = row.space or ""
        for letter, command in latex.items():
            space = space.replace(letter, command)
        for printed in filter(None, (row.gain, space, *row.speedups.values())):
            lines = PAPER["tables"][row.table]
            assert any(printed in line and (row.top1 or row.train or "") in line for line in lines), (row, printed)


REMARKS = {  # a number of a remark: the network that has so many million parameters
    "35.64M": ("resnet50", {"se": True, "se_reduction": 4}),
    "19.18M": ("resnet50", {"placement": "LLLL", "layer": "patchwise_attention"}),
    "47.38M": ("lambda_resnet101", {"se": True}),
    "67.17M": ("lambda_resnet152", {"se": True}),
}


def test_numbers_of_remarks_are_counted():
    said = " ".join(row.remark or "" for row in ROWS)
    for printed, (name, arguments) in REMARKS.items():
        assert said.count(printed) == 1
        assert f"{parameters(name, **arguments) / 1e6:.2f}M" == printed
    assert set(re.findall(r"[\d.]+M", said)) == REMARKS.keys()


def test_about_ten_percent_of_mobilenet(found):
    remark = next(row.remark for row in ROWS if row.model == "lambda_mobilenet_v2")
    small, large = "MobileNet-v2 with 2 lightweight lambda blocks", "MobileNet-v2"
    both = [[of(found[what], "tab:mobilenets", row) for what in ("params", "flops")] for row in (large, small)]
    for values in (
        [(float(one.paper), float(other.paper)) for one, other in zip(*both, strict=True)],
        [(one.ours, other.ours) for one, other in zip(*both, strict=True)],
        [(one.ours, other.reading) for one, other in zip(*both, strict=True)],
    ):
        params, flops = (f"{1 - after / before:.1%}" for before, after in values)
        assert f"{params} and {flops}" in remark


def test_how_many_rows_each_table_has():
    rows = {table: sum(row.table == table for row in ROWS) for table in TABLES}
    assert rows == {
        "tab:resnet50": 10,
        "tab:memory_comparison": 7,
        "tab:pseudo_labels": 3,
        "tab:ablations": 16,
        "tab:content_vs_position": 3,
        "tab:scope_sizes": 6,
        "tab:normalization": 5,
        "tab:hybrid_lambdanetworks": 8,
        "tab:c4_hybrid": 8,
        "tab:parameter_efficient": 3,
        "tab:flops_efficient": 2,
        "tab:mobilenets": 2,
        "tab:pareto_curve_details": 13,
        "text:introduction": 1,
        "text:hybrid_attention": 3,
    }
    assert len(DETECTION) == 6


@pytest.mark.parametrize("form", ["table", "markdown", "json"])
def test_reproduce_prints_every_row(form, capsys, found):
    assert main(["reproduce", "memory", "--format", form]) == 0
    out = capsys.readouterr().out
    if form == "json":
        assert [row["paper"] for row in json.loads(out)["memory"]] == [one.paper for one in found["memory"]]
        return
    assert all(one.label.split(",")[0] in out for one in found["memory"])
    assert "122.8 GB" in out
    if form == "markdown":
        assert all(line.count("|") == 7 for line in out.splitlines() if line.startswith("|"))


def test_models_lists_the_accuracies_of_the_tables():
    printed: dict[str, list[tuple[str, int, str]]] = {}
    for row in ROWS:
        if row.model is not None and not row.arguments and row.top1 is not None:
            printed.setdefault(row.model, []).append((row.top1, row.image_size or 224, row.table))
    assert {name: tuple(dict.fromkeys(found)) for name, found in printed.items()} == PAPER_TOP1

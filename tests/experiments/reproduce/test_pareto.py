"""Interpolation on constructed curves, and the published data."""

import re
from math import isclose
from pathlib import Path

import pytest

from lambdanets.bench.networks import Entry
from lambdanets.experiments.reproduce import ROWS
from lambdanets.experiments.reproduce.pareto import (
    OURS,
    Curve,
    Headline,
    Match,
    Point,
    frontier,
    headlines,
    published,
    published_headlines,
    speedups,
)
from lambdanets.files import read_object

PAPER = read_object(Path(__file__).parent / "paper_tables.json")  # benchmarks/paper_tables.py writes it


def exponential(factor: float, accuracies) -> Curve:
    """Time doubles with every percent: straight on a logarithmic axis."""
    return Curve([Point(a, factor * 2.0 ** (a - 80)) for a in accuracies])


def test_a_constant_speedup_is_found_wherever_the_networks_sit():
    found = speedups(exponential(1.0, (78, 80.5, 84)), exponential(3.5, (79, 81.3, 82, 85)))
    assert [m.top1 for m in found] == [79, 80.5, 81.3, 82, 84]  # 78 and 85 have no partner
    assert all(isclose(m.speedup, 3.5) for m in found)


def test_the_middle_is_the_geometric_mean():
    assert isclose(Curve([Point(80, 1.0), Point(82, 4.0)]).seconds_at(81) or 0, 2.0)


@pytest.mark.parametrize("top1", [79.9, 82.1])
def test_nothing_is_extrapolated(top1):
    assert Curve([Point(80, 1.0), Point(82, 4.0)]).seconds_at(top1) is None
    assert Curve([]).seconds_at(top1) is None


def test_what_is_not_measured_yet_is_not_jumped_over():
    """B3 and B7 alone would say what B4 to B6 would not."""
    points = [Point(80, 1.0), Point(81, 2.0), Point(84, 64.0)]
    waiting = Curve(points, unknown=[82, 83])
    assert waiting.seconds_at(82.5) is None
    assert waiting.seconds_at(80.5) == Curve(points).seconds_at(80.5) is not None
    assert (waiting.seconds_at(81), waiting.seconds_at(84)) == (2.0, 64.0)  # these two are
    assert [m.top1 for m in speedups(exponential(1.0, (80, 82.5, 84)), waiting)] == [80, 81, 84]


def test_one_network_is_a_curve_too():
    assert speedups(Curve([Point(80, 1.0)]), Curve([Point(79, 2.0), Point(81, 8.0)])) == [Match(80, 4.0)]


def test_networks_that_nobody_would_choose_are_left_out():
    good, slower_and_worse, slower_alike = Point(82, 2.0), Point(81, 3.0), Point(82, 2.5)
    assert frontier([slower_alike, slower_and_worse, good, Point(80, 1.0)]) == [Point(80, 1.0), good]
    # without the frontier, the speed-up at 81% would come from the bad network
    mine, theirs = Curve([Point(80, 1.0), Point(82, 2.0)]), Curve([good, slower_and_worse, Point(80, 1)])
    assert all(m.speedup < 1.5 for m in speedups(mine, theirs))


def test_curves_that_do_not_meet():
    assert speedups(exponential(1, (70, 75)), exponential(1, (80, 85))) == []
    assert "no accuracy" in Headline("EfficientNet", "training", ()).text()


def test_the_headline_says_both_halves():
    text = Headline("EfficientNet", "training", (Match(80, 2.0), Match(82.5, 2.5), Match(84, 4.0))).text()
    assert "2.00 to 4.00x" in text
    assert "80 to 84% top-1" in text
    assert "2.00x at or below 82%" in text
    assert "4.00x at or above 83%" in text


def test_headlines_from_what_was_measured():
    lambdas = {(p.network, p.image_size): 1.0 * 2 ** (p.top1 - 80) for p in published() if p.family == OURS}
    others = {(p.network, p.image_size): 3.0 * 2 ** (p.top1 - 80) for p in published() if p.family == "EfficientNet"}
    (found,) = headlines(lambdas | others, "training")
    assert found.other == "EfficientNet"
    assert all(isclose(m.speedup, 3.0) for m in found.matches)
    assert headlines(lambdas, "training") == []
    waiting = [key for key in others if key[0] in ("timm:efficientnet_b4", "timm:efficientnet_b5")]
    some = {key: seconds for key, seconds in others.items() if key not in waiting}
    (found,) = headlines(lambdas | some, "training", waiting)
    assert not [m for m in found.matches if 81.6 < m.top1 < 84]  # B3 and B6


def test_the_method_on_published_times():
    (found,) = published_headlines()
    assert found.other == "ResNet-RS w/ SE"
    values = {m.top1: m.speedup for m in found.matches}
    assert isclose(values[84.2], 1.63 / 0.91)  # both have a network there: 350 at 320 and 270 at 256
    assert min(values.values()) < 1 < max(values.values()) < 2.3  # the paper's 1.6 to 2.3 is not in the published times


def test_published_networks_exist_and_have_sources():
    for one in published():
        Entry.parse(one.network).check()
        assert "20" in one.source
    assert {(p.network, p.image_size) for p in published() if p.family == "EfficientNet"} == {
        (f"timm:efficientnet_b{i}", size) for i, size in enumerate((224, 240, 260, 300, 380, 456, 528, 600))
    }
    assert len({(p.network, p.image_size) for p in published()}) == len(published())


def test_lambda_resnets_are_the_papers_rows():
    rows = {
        (row.model, row.image_size, float(row.top1), float(row.latency or 0))
        for row in ROWS
        if row.table == "tab:pareto_curve_details" and row.top1
    }
    assert rows == {(p.network, p.image_size, p.top1, p.tpu_seconds) for p in published() if p.family == OURS}


def test_numbers_without_se_are_in_the_paper():
    rows = "\n".join(row for table in PAPER["tables"].values() for row in table)
    assert re.search(r"ResNet-101 wo/ SE & 224 .* 81\.3", rows)
    assert re.search(r"ResNet-152 wo/ SE & 256 .* 82\.5", rows)
    assert r"0.9\% over the corresponding architecture with standard 3x3" in PAPER["quotes"]

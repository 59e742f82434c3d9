"""docs/reproduce.md says what there is."""

import re
from pathlib import Path

from lambdanets.reproduce.experiments import EXPERIMENTS, KINDS
from lambdanets.reproduce.pareto import published_headlines, spread

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "reproduce.md").read_text()


def first_column(heading: str) -> list[str]:
    section = TEXT.split(heading, 1)[1].split("\n\n| ", 1)[1].split("\n\n", 1)[0]
    cells = [line.strip("| ").split(" | ")[0] for line in section.splitlines()[2:]]
    return [name for cell in cells for name in cell.split(", ")]


def test_every_name_is_documented():
    assert sorted(first_column("## What there is")) == sorted(EXPERIMENTS)
    assert first_column("what kind of number it is") == list(KINDS)


def test_the_numbers_of_the_published_times():
    (found,) = published_headlines()
    low, high, mean = re.findall(r"[\d.]+\d", spread(found.matches))
    assert f"prints {low} to {high} (mean {mean})" in TEXT
    above = [m.speedup for m in found.matches if m.top1 >= 83]
    assert f"{min(above):.2f} to {max(above):.2f} from 83% on" in TEXT

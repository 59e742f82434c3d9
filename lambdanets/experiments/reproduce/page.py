"""The results as Markdown and as one self-contained HTML page with plots, without scripts; all names are escaped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any

from markupsafe import Markup

from lambdanets.experiments.reproduce.experiments import EXPERIMENTS, KINDS
from lambdanets.experiments.reproduce.numbers import COLUMNS, QUICK, Number
from lambdanets.experiments.reproduce.pareto import OTHERS, OURS, claims, published, published_headlines
from lambdanets.files import write_text
from lambdanets.report.plots import COLOURS, INK, LINE, chart
from lambdanets.report.template import rendered
from lambdanets.tables import markdown_line

HERE = Path(__file__).parent
MARKDOWN, HTML = "reproduce.md", "reproduce.html"
FAMILIES = (OURS, *OTHERS)
GROWTH = ("complexity", "multi-head", "intra-depth")
BARS = ("inference", "training", "training step", "time", "space")
INTRODUCTION = (
    "The paper's numbers compared with ours. ImageNet and COCO accuracies are always the published ones. "
    "Each line has one of these kinds:"
)


def comments() -> list[str]:
    """Return the paper's claims, and the same calculation from published times, for comparison with our headlines."""
    said = [f"The paper claims for {OURS} over {other}: {text}." for other, text in claims().items()]
    return [*said, *(f"For comparison, {one.text()}." for one in published_headlines())]


def count(lines: Sequence[Number]) -> str:
    """Describe the number of lines of each kind and the number of missing measurements."""
    missing = [is_missing(one) for one in lines]
    known = {kind: sum(one.kind == kind and not m for one, m in zip(lines, missing, strict=True)) for kind in KINDS}
    text = ", ".join(f"{number} {kind}" for kind, number in known.items() if number)
    return "; ".join(filter(None, [text, f"{sum(missing)} not measured yet" if any(missing) else ""]))


def is_missing(one: Number) -> bool:
    return one.kind == "measured" and one.value is None and one.ours != "OOM"


def markdown(found: Mapping[str, Sequence[Number]], headlines: Sequence[str]) -> str:
    parts = ["# The paper's results and ours\n\n", INTRODUCTION, "\n\n"]
    parts += [f"- **{kind}**: {meaning}\n" for kind, meaning in KINDS.items()]
    if headlines:
        parts += ["\n## Speed at matched accuracy\n\n", *(f"**{text}**\n\n" for text in headlines)]
        parts += [f"{text}\n\n" for text in comments()]
    for name, lines in found.items():
        one = EXPERIMENTS[name]
        parts += [f"\n## {one.title}\n\n`lambdanets reproduce {name}` ({one.label}): {count(lines)}.\n\n"]
        parts += [markdown_line(COLUMNS), markdown_line(["---:" if c in ("paper", "ours") else "---" for c in COLUMNS])]
        parts += [markdown_line([getattr(number, column) for column in COLUMNS]) for number in lines]
    return "".join(parts)


@dataclass(frozen=True)
class Bar:
    """Two bars, the paper's number and ours; widths in percent."""

    label: str
    paper: str
    ours: str
    paper_width: float
    ours_width: float


def bars(name: str, lines: Sequence[Number]) -> list[tuple[str, list[Bar]]]:
    """Return bars for rows with both numbers: growth, or speeds as multiples of the first row (hardware differs)."""
    found = []
    for quantity in BARS:
        pairs = [
            (one.row, float(one.paper), one.value)
            for one in lines
            if one.quantity == quantity and one.value is not None and QUICK not in one.note
            if one.paper.replace(".", "", 1).isdigit()
        ]
        if len(pairs) < 2:
            continue
        paper_one, ours_one = (1.0, 1.0) if name in GROWTH else (pairs[0][1], pairs[0][2])
        ratios = [(row, paper / paper_one, ours / ours_one) for row, paper, ours in pairs]
        widest = max(max(paper, ours) for _, paper, ours in ratios) / 70
        title = f"{quantity}: formula (upper bar) and measurement (lower bar)"
        if name not in GROWTH:
            title = f"{quantity} relative to {pairs[0][0]}: paper on TPUv3 (upper bar) and ours (lower bar)"
        drawn = [Bar(row, f"{p:.2f}x", f"{o:.2f}x", p / widest, o / widest) for row, p, o in ratios]
        found.append((title, drawn))
    return found


def pareto_charts(lines: Sequence[Number]) -> list[tuple[str, Markup]]:
    """Draw time against accuracy: our training and inference times, and published training times."""
    by_title = {(one.row, one.quantity): one.value for one in lines if QUICK not in one.note}
    charts = []
    for quantity in ("training step", "inference step"):
        points = {  # NaN (not measured) interrupts the line
            family: [
                (nan if (seconds := by_title.get((one.title, quantity))) is None else seconds, one.top1)
                for one in published()
                if one.family == family
            ]
            for family in FAMILIES
        }
        charts.append((f"Measured here, {quantity}", pareto_chart(points, quantity)))
    known = {
        family: [(one.tpu_seconds, one.top1) for one in published() if one.family == family and one.tpu_seconds]
        for family in FAMILIES
    }
    charts.append(("Published, training step on 8 TPUv3 cores", pareto_chart(known, "published")))
    return [(title, chart) for title, chart in charts if chart is not None]


def pareto_chart(points: Mapping[str, Sequence[tuple[float, float]]], label: str) -> Markup | None:
    if all(isnan(seconds) for family in points.values() for seconds, _ in family):
        return None
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    def fill(axis: Any) -> None:
        for colour, family in zip(COLOURS, FAMILIES, strict=True):
            if points[family]:
                x, y = zip(*sorted(points[family], key=lambda p: p[1]), strict=True)
                axis.plot(x, y, "o-", color=colour, linewidth=1.6, markersize=4)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel("seconds for 1024 images", color=INK)
        axis.set_ylabel("published top-1 (%)", color=INK)
        axis.grid(color=LINE, linewidth=0.8)

    return chart(fill, f"pareto {label}", 3.6)


def page(found: Mapping[str, Sequence[Number]], headlines: Sequence[str]) -> str:
    experiments = [
        {
            "name": name,
            "title": EXPERIMENTS[name].title,
            "label": EXPERIMENTS[name].label,
            "counts": count(lines),
            "charts": pareto_charts(lines) if name == "pareto" else [],
            "bars": bars(name, lines) if name != "pareto" else [],
            "lines": lines,
        }
        for name, lines in found.items()
    ]
    return rendered(
        HERE,
        title="The paper's results and ours",
        introduction=INTRODUCTION,
        kinds=KINDS,
        experiments=experiments,
        headlines=headlines,
        said=comments(),
        families=[(family, colour) for colour, family in enumerate(FAMILIES, start=1)],
        columns=COLUMNS,
    )


def write(folder: Path, found: Mapping[str, Sequence[Number]], headlines: Sequence[str]) -> None:
    """Write reproduce.md and reproduce.html."""
    for name, text in ((MARKDOWN, markdown(found, headlines)), (HTML, page(found, headlines))):
        write_text(folder / name, text)

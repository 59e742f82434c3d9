"""Line charts as inline SVG in the colours of the page, light or dark, with values that appear on hover.

matplotlib draws in stand-in colours, which then become CSS variables of the page. Text stays text, in the page's font;
names that a user chose never reach matplotlib. The values on hover need no script: each step has an invisible strip,
and page.css shows its readout while the pointer rests on it (on a touch screen: after a tap).
"""

import io
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from lambdanets.report.show import shortened

Points = Sequence[tuple[float, float]]

STAND_INS = {"#010203": "var(--ink)", "#040506": "var(--line)", "#070809": "var(--warn)"}
INK, LINE, WARN = STAND_INS
COLOURS = ("#0a0b0c", "#0d0e0f", "#101112", "#131415")  # become the page's --c1, --c2, ...
MOST_POINTS = 400
WIDTH, HEIGHT = 5.0, 2.8  # inches; 72 units of the SVG each
MOST_STRIPS = 60  # of one chart
FAR = 0.1  # of the width: the value of a single point is shown up to this distance
LONGEST_NAME = 32  # in a readout
LETTER, TEXT_LINE = 5.6, 13.0  # estimated width of a letter and height of a line in a readout, in units of the SVG

STRIP = Markup('<g class="at"><rect class="hit" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>')
READOUT = Markup(
    '<g class="tip"><path d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>{dots}'
    '<rect x="{left:.1f}" y="{over:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4"/>{lines}</g></g>'
)
DOT = Markup('<circle class="d{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>')
TEXT = Markup('<text class="d{colour}" x="{x:.1f}" y="{y:.1f}">{text}</text>')


@dataclass(frozen=True)
class Series:
    """A line.

    Attributes:
        points: (step, value).
        colour: number of one of the page's colours, 1 to 4.
        style: as in matplotlib ("-", "--", "o-").
        name: shown with the values on hover.
    """

    points: Points
    colour: int = 1
    style: str = "-"
    name: str = ""


def curves(
    series: Sequence[Series],
    *,
    label: str,
    percent: bool = False,
    log: bool = False,
    from_zero: bool = False,
    marks: Sequence[float] = (),
) -> Markup | None:
    """Return one chart of values over steps, or None if there is nothing to draw.

    Args:
        series: the lines; those without points are left out.
        label: what the chart shows, for screen readers and as a prefix of ids. It must be unique on the page.
        percent: show values as percentages.
        log: use a logarithmic axis if all values are positive.
        from_zero: start the axis at 0.
        marks: steps with a dotted vertical line.
    """
    drawn = [one for one in series if one.points]
    if not drawn:
        return None
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    def fill(axis: Any) -> None:
        for step in marks:
            axis.axvline(step, color=WARN, linewidth=1, linestyle=":", zorder=1)
        for one in drawn:
            points = thinned(one.points)
            style = one.style if len(points) > 1 or "o" in one.style else "o"
            x, y = zip(*points, strict=True)
            axis.plot(x, y, style, color=COLOURS[one.colour - 1], linewidth=1.6, markersize=3.5, zorder=2)
        if log and all(value > 0 for one in drawn for _, value in one.points):
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_minor_locator(NullLocator())
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        elif from_zero:
            axis.set_ylim(bottom=0)
        if percent:
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}%"))
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: thousands(value)))
        axis.set_xlabel("step", color=INK)
        axis.grid(axis="y", color=LINE, linewidth=0.8)
        for side, spine in axis.spines.items():
            spine.set_visible(side == "bottom")

    return chart(fill, label, HEIGHT, lambda axis: readouts(axis, drawn, percent))


def chart(
    fill: Callable[[Any], None], label: str, height: float, above: Callable[[Any], Markup] | None = None
) -> Markup:
    """Return a chart as inline SVG.

    Args:
        fill: draws into matplotlib's axes.
        label: what the chart shows, unique on the page.
        height: in inches.
        above: returns SVG elements that are added on top, once the axes have their place.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # hashsalt: the same run gives the same file
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": label, "font.size": 10, "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(WIDTH, height), dpi=72, layout="constrained")  # dpi: one pixel is one unit of the SVG
        figure.patch.set_visible(False)
        axis: Any = figure.add_subplot()
        axis.patch.set_visible(False)
        fill(axis)
        axis.tick_params(which="both", colors=INK, length=0)
        for spine in axis.spines.values():
            spine.set_color(LINE)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        added = Markup("") if above is None else above(axis)
    head, end, tail = inline(file.getvalue(), label).rpartition("</svg>")
    return Markup(head) + added + Markup(end + tail)


def readouts(axis: Any, series: Sequence[Series], percent: bool) -> Markup:
    """Return invisible strips side by side, each with the values nearest to its middle."""
    bottom, top = (axis.figure.bbox.height - edge for edge in (axis.bbox.y0, axis.bbox.y1))
    right_edge = axis.figure.bbox.width
    placed = [[(*axis.transData.transform(point), *point) for point in thinned(one.points)] for one in series]
    edges = strips([x for points in placed for x, *_ in points], axis.bbox.x0, axis.bbox.x1)
    parts: list[Markup] = []
    for left, right in itertools.pairwise(edges):
        middle = (left + right) / 2
        nearest = [min(points, key=lambda point: abs(point[0] - middle)) for points in placed]
        at = min(nearest, key=lambda point: abs(point[0] - middle))
        texts = [(0, f"step {at[2]:,.0f}")]
        near = [
            len(points) > 1 or abs(point[0] - middle) <= FAR * axis.bbox.width
            for points, point in zip(placed, nearest, strict=True)
        ]
        for one, (_, _, step, value), shows in zip(series, nearest, near, strict=True):
            if not shows:
                continue
            shown = f"{100 * value:.2f}%" if percent else f"{value:.4g}"
            name = f"{shortened(one.name, LONGEST_NAME)}: " if one.name else ""
            elsewhere = f" (step {step:,.0f})" if round(step) != round(at[2]) else ""
            texts.append((one.colour, f"{name}{shown}{elsewhere}"))
        width = 14 + LETTER * max(len(text) for _, text in texts)
        height = TEXT_LINE * len(texts) + 6
        x = at[0] + 8 if at[0] + 8 + width <= right_edge else max(0.0, at[0] - 8 - width)
        high = sum(point[1] for point in nearest) / len(nearest) > axis.bbox.y0 + axis.bbox.height / 2
        over = bottom - height - 4 if high else top  # away from the lines
        parts.append(STRIP.format(x=left, y=top, width=right - left, height=bottom - top))
        parts.append(
            READOUT.format(
                x=at[0],
                top=top,
                bottom=bottom,
                left=x,
                over=over,
                width=width,
                height=height,
                dots=Markup("").join(
                    DOT.format(colour=one.colour, x=px, y=axis.figure.bbox.height - py)
                    for one, (px, py, _, _), shows in zip(series, nearest, near, strict=True)
                    if shows
                ),
                lines=Markup("").join(
                    TEXT.format(colour=colour, x=x + 7, y=over + TEXT_LINE * (i + 1), text=text)
                    for i, (colour, text) in enumerate(texts)
                ),
            )
        )
    return Markup("").join(parts)


def strips(places: Sequence[float], left: float, right: float) -> list[float]:
    """Return the edges of strips from `left` to `right`: one for each place, or equal ones if there are too many."""
    found = sorted(set(places))
    if len(found) > MOST_STRIPS:
        return [left + (right - left) * i / MOST_STRIPS for i in range(MOST_STRIPS + 1)]
    return [left, *((a + b) / 2 for a, b in itertools.pairwise(found)), right]


def thousands(value: float) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:g}"


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """Return at most `most` points, each the mean of an equal part of the points."""
    if len(points) <= most:
        return points
    bounds = [len(points) * i // most for i in range(most + 1)]
    parts = [points[a:b] for a, b in itertools.pairwise(bounds)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def inline(svg: str, label: str) -> Markup:
    """Return the svg element alone, with ids that start with the label and the colours and font of the page."""
    svg = svg[svg.index("<svg") :]
    for stand_in, variable in STAND_INS.items():
        svg = svg.replace(stand_in, variable)
    for i, stand_in in enumerate(COLOURS, 1):
        svg = svg.replace(stand_in, f"var(--c{i})")
    mine = re.sub(r"\W+", "-", label)
    svg = re.sub(r'id="([^"]+)"', rf'id="{mine}-\1"', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{mine}-", svg)
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font(-family|): [^;\"]*", lambda m: f"font{m[1]}: {font(m[0])}", svg)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{label}">', svg)
    return Markup(svg)


def font(declaration: str) -> str:
    """Return the CSS font of a declaration: its size, and the font of the page."""
    size = re.search(r"[\d.]+px", declaration)
    return f"{size[0]} var(--font)" if size else "var(--font)"

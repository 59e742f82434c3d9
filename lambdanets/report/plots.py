"""Curves as inline SVG that follows the colours of the page, light or dark.

matplotlib draws in stand-in colours, which then become CSS variables of the page. Text stays text, in the page's font;
names that a user chose never reach matplotlib.
"""

import io
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

Points = Sequence[tuple[float, float]]

STAND_INS = {"#010203": "var(--ink)", "#040506": "var(--line)", "#070809": "var(--warn)"}
INK, LINE, WARN = STAND_INS
COLOURS = ("#0a0b0c", "#0d0e0f", "#101112", "#131415")  # become the page's --c1, --c2, ...
MOST_POINTS = 400


@dataclass(frozen=True)
class Series:
    """A line. `colour` is a number, 1 to 4, of the page's colours; `style` as in matplotlib ("-", "--", "o-")."""

    points: Points
    colour: int = 1
    style: str = "-"


def curves(
    series: Sequence[Series],
    *,
    label: str,
    percent: bool = False,
    log: bool = False,
    from_zero: bool = False,
    marks: Sequence[float] = (),
) -> Markup | None:
    """One chart over steps; `marks` are steps with an upright line. None if there is nothing to draw."""
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

    return chart(fill, label, 2.9)


def chart(fill: Callable[[Any], None], label: str, height: float) -> Markup:
    """A chart as inline SVG; `fill` draws into matplotlib's axes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # hashsalt: the same run gives the same file
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": label, "font.size": 10, "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(5.6, height), layout="constrained")
        figure.patch.set_visible(False)
        axis: Any = figure.add_subplot()
        axis.patch.set_visible(False)
        fill(axis)
        axis.tick_params(which="both", colors=INK, length=0)
        for spine in axis.spines.values():
            spine.set_color(LINE)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return inline(file.getvalue(), label)


def thousands(value: float) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:g}"


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most `most` points: the mean of each of as many stretches."""
    if len(points) <= most:
        return points
    bounds = [len(points) * i // most for i in range(most + 1)]
    parts = [points[a:b] for a, b in itertools.pairwise(bounds)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def inline(svg: str, label: str) -> Markup:
    """The svg element alone: ids of its own, colours of the page, as wide as its place."""
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
    """The declared size, in the page's font."""
    size = re.search(r"[\d.]+px", declaration)
    return f"{size[0]} var(--font)" if size else "var(--font)"

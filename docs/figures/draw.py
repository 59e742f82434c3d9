"""Draw the figures of the documents as SVG, from formulas of the package and from benchmarks/results/*.json.

    python docs/figures/draw.py            # write
    python docs/figures/draw.py --check    # exit with 1 if a file is stale

Every figure has its own background and follows the light or dark scheme of the browser.
"""

import json
import sys
from collections.abc import Callable, Iterable
from html import escape
from itertools import groupby
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # summary.py

import summary

from lambdanets.bench.memory import GB, RESNET50, global_attention_bytes, lambda_bytes
from lambdanets.experiments.reproduce.pareto import published

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent.parent / "benchmarks" / "results"
REPRODUCED = RESULTS / "reproduce-h200" / "reproduce.json"
STYLE = """
  .card { fill: #fbfbfd; stroke: #d5d7de }  .text { fill: #1f2430 }  .quiet { fill: #5b6270 }  .line { stroke: #5b6270 }
  .query { fill: #e8853d }  .key { fill: #3d7fd9 }  .value { fill: #2f9e77 }  .place { fill: #8a63d2 }
  .grey { fill: #8a8f98 }
  .query-line { stroke: #e8853d }  .key-line { stroke: #3d7fd9 }  .place-line { stroke: #8a63d2 }
  .value-line { stroke: #2f9e77 }
  .cell { fill: #eceef3; stroke: #c9ccd6 }  .pale { fill-opacity: 0.28 }
  .hollow { fill-opacity: 0.15; stroke-width: 2 }  .value.hollow { stroke: #2f9e77 }
  .key.hollow { stroke: #3d7fd9 }  .place.hollow { stroke: #8a63d2 }  .grey.hollow { stroke: #8a8f98 }
  text { font: 14px system-ui, sans-serif }  .title { font-weight: 600 }  .small { font-size: 12px }
  @media (prefers-color-scheme: dark) {
    .card { fill: #1b1d22; stroke: #3a3e48 }  .text { fill: #e6e8ee }
    .quiet { fill: #a4abb8 }  .line { stroke: #a4abb8 }  .cell { fill: #2a2d35; stroke: #444955 }
  }
"""


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    marker = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="quiet" d="M0 0 8 4 0 8z"/></marker></defs>'
    )
    card = f'<rect class="card" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="10"/>'
    return "\n".join(
        [head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", marker, card, *parts, "</svg>\n"]
    )


def text(x: float, y: float, words: str, kind: str = "text", anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, radius: float = 2) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'


def arrow(*points: tuple[float, float]) -> str:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline class="line" points="{path}" fill="none" stroke-width="1.5" marker-end="url(#tip)"/>'


def matrix(x: float, y: float, rows: int, columns: int, kind: str, size: float = 14) -> list[str]:
    """Return the cells of a matrix, some paler than others."""
    return [
        box(
            x + column * size,
            y + row * size,
            size - 2,
            size - 2,
            kind + (" pale" if (3 * row + 5 * column) % 4 < 2 else ""),
        )
        for row in range(rows)
        for column in range(columns)
    ]


def layer() -> str:
    """How a context becomes a lambda, which is applied to a query."""
    parts: list[str] = []
    parts += [
        text(120, 34, "context", "text title"),
        text(120, 52, "M positions with a key and a value", "quiet small"),
    ]
    parts += matrix(66, 66, 9, 3, "key") + matrix(136, 66, 9, 2, "value")
    parts += [text(86, 208, "keys", "quiet small"), text(150, 208, "values", "quiet small")]
    parts += [text(120, 244, "positions relative", "quiet small"), text(120, 260, "to query n", "quiet small")]
    parts += [*matrix(99, 270, 9, 3, "place"), text(120, 412, "learned embeddings", "quiet small")]

    parts += [text(380, 62, "content lambda", "text title")]
    parts += [text(380, 80, "sum of softmax(key) × value", "quiet small"), *matrix(348, 94, 3, 4, "key", 16)]
    parts += [text(380, 162, "one for all queries", "quiet small"), arrow((176, 118), (338, 118))]
    parts += [text(380, 290, "position lambda", "text title")]
    parts += [text(380, 308, "sum of embedding × value", "quiet small"), *matrix(348, 322, 3, 4, "place", 16)]
    parts += [
        text(380, 390, "one for each query", "quiet small"),
        arrow((176, 150), (230, 150), (230, 336), (338, 336)),
    ]
    parts += [arrow((150, 356), (338, 356))]

    parts += [
        arrow((418, 118), (470, 118), (470, 222), (518, 222)),
        arrow((418, 346), (470, 346), (470, 238), (518, 238)),
    ]
    parts += [text(486, 235, "+", "text title")]
    parts += [text(560, 176, "λ of query n", "text title"), text(560, 194, "K × V numbers", "quiet small")]
    for row in range(3):
        for column in range(4):
            kind = "key" if (row + column) % 2 else "place"
            pale = " pale" if (row + 2 * column) % 3 else ""
            parts.append(box(528 + column * 16, 206 + row * 16, 14, 14, kind + pale))
    parts += [text(560, 274, "a linear function,", "quiet small"), text(560, 290, "of fixed size", "quiet small")]

    parts += [text(704, 92, "query n", "text title"), text(704, 110, "K numbers for each head", "quiet small")]
    parts += [*matrix(683, 122, 1, 3, "query"), arrow((703, 140), (703, 196))]
    parts += [box(667, 202, 72, 56, "cell", 8), text(703, 235, "apply λ"), arrow((598, 230), (663, 230))]
    parts += [arrow((703, 260), (703, 314)), *matrix(675, 320, 1, 4, "value"), text(703, 358, "output y", "text title")]
    return picture(820, 430, "A context becomes a lambda, which is applied to the query", parts)


def memory() -> str:
    """Memory of the interactions of ResNet-50 at 224x224 by batch size: the formulas of the paper's memory table."""
    width, height, left, bottom, right, top = 820, 360, 90, 300, 560, 60
    batches = [1, 32, 64, 96, 128]
    attention = [global_attention_bytes(RESNET50, batch=batch) / GB for batch in batches]
    lambdas = lambda_bytes(RESNET50) / GB
    largest = attention[-1]

    def at(batch: int, size: float) -> tuple[float, float]:
        return left + (right - left) * batch / batches[-1], bottom - (bottom - top) * size / largest

    parts = [text(left - 10, 34, "memory of interactions, ResNet-50 at 224 × 224, float32", "text title", "start")]
    for size in range(0, int(largest) + 1, 40):
        x, y = at(0, size)
        parts += [text(x - 10, y + 5, f"{size} GB", "quiet small", "end")]
        parts += [f'<line class="line" x1="{left}" y1="{y:g}" x2="{right}" y2="{y:g}" stroke-opacity="0.25"/>']
    parts += [text(at(batch, 0)[0], bottom + 22, str(batch), "quiet small") for batch in batches]
    parts += [text((left + right) / 2, bottom + 44, "images in a batch", "quiet")]
    for kind, values in (("query-line", attention), ("key-line", [lambdas] * len(batches))):
        points = " ".join("{:.1f},{:.1f}".format(*at(batch, size)) for batch, size in zip(batches, values, strict=True))
        parts.append(f'<polyline class="{kind}" points="{points}" fill="none" stroke-width="3"/>')
    parts += [
        text(right + 14, at(128, largest)[1] + 5, f"global self-attention: {largest:.0f} GB", "text title", "start")
    ]
    parts += [
        text(right + 14, at(128, largest)[1] + 25, "a map for each image, head and layer", "quiet small", "start")
    ]
    parts += [text(right + 14, at(128, lambdas)[1] - 16, f"lambda layers: {lambdas:.1f} GB", "text title", "start")]
    parts += [text(right + 14, at(128, lambdas)[1] + 4, "embeddings, for any batch size", "quiet small", "start")]
    return picture(width, height, "Memory of interactions by batch size", parts)


def scope() -> str:
    """The context of one query: a 3x3 convolution, a local scope, and content."""
    side, size = 15, 13
    parts: list[str] = []
    titles = (
        ("3 × 3 convolution", "fixed weights, 9 positions", 1, False),
        ("position lambda, scope 7 × 7", "learned per relative position", 3, False),
        ("content lambda", "always the whole context", side, True),
    )
    for number, (title, line, reach, everywhere) in enumerate(titles):
        x0, y0, middle = 36 + number * 262, 70, side // 2
        parts += [
            text(x0 + side * size / 2, 34, title, "text title"),
            text(x0 + side * size / 2, 54, line, "quiet small"),
        ]
        for row in range(side):
            for column in range(side):
                near = max(abs(row - middle), abs(column - middle)) <= reach
                kind = "query" if row == column == middle else "cell"
                if kind == "cell" and near:
                    kind = ("key" if everywhere else "place" if number else "value") + (
                        " pale" if (7 * row * row + 5 * column + row * column) % 5 < 3 else ""
                    )
                parts.append(box(x0 + column * size, y0 + row * size, size - 2, size - 2, kind))
    parts.append(text(410, 292, "orange: the query. A scope limits position interactions only.", "quiet small"))
    return picture(820, 310, "The context of one query", parts)


def pareto() -> str:
    """Seconds for 1024 images against published accuracy, measured by `lambdanets reproduce`."""
    data = reproduced()
    found = {(line["row"], line["quantity"]): line["value"] for line in data["experiments"]["pareto"]}
    families = list(dict.fromkeys(one.family for one in published()))
    kinds = dict(zip(families, ("place", "query", "key", "value"), strict=True))
    title = f"published top-1 (%) by seconds for 1024 images, {data['hardware']}"
    parts = [text(24, 34, title, "text title", "start")]
    for number, mode in enumerate(("training", "inference")):
        points = [(kinds[one.family], found.get((one.title, f"{mode} step")), one.top1) for one in published()]
        if any(seconds is not None for _, seconds, _ in points):
            parts += [text(237 + 420 * number, 62, mode, "quiet"), *panel(points, 64 + 420 * number)]
    for number, (family, kind) in enumerate(kinds.items()):
        parts.append(box(64 + 190 * number, 366, 12, 12, kind))
        parts.append(text(82 + 190 * number, 377, family, "quiet small", "start"))
    return picture(880, 396, "Speed and accuracy", parts)


def panel(points: list[tuple[str, float | None, float]], left: float) -> list[str]:
    """Draw a line for each kind of (kind, seconds, accuracy); the time axis is logarithmic, missing values are gaps."""
    right, top, bottom = left + 346, 76, 324
    known = [(seconds, top1) for _, seconds, top1 in points if seconds is not None]
    times, scores = [log10(seconds) for seconds, _ in known], [top1 for _, top1 in known]
    low, high, least, most = min(times), max(times), floor(min(scores)), floor(max(scores)) + 1
    parts = []

    def at(seconds: float, top1: float) -> tuple[float, float]:
        x = left + (right - left) * (log10(seconds) - low) / ((high - low) or 1)
        return x, bottom - (bottom - top) * (top1 - least) / (most - least)

    for score in range(least, most + 1):
        y = at(1, score)[1]
        line = f'x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"'
        parts.append(text(left - 8, y + 5, f"{score}", "quiet small", "end"))
        parts.append(f'<line class="line" {line} stroke-opacity="0.25"/>')
    for tick in (factor * 10.0**power for power in range(floor(low), ceil(high)) for factor in (1, 2, 5)):
        if low <= log10(tick) <= high:
            parts.append(text(at(tick, least)[0], bottom + 20, f"{tick:g}", "quiet small"))
    for (kind, measured), group in groupby(points, lambda point: (point[0], point[1] is not None)):
        dots = [at(seconds, top1) for _, seconds, top1 in group if seconds is not None]
        if measured:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
            parts.append(f'<polyline class="{kind}-line" points="{path}" fill="none" stroke-width="2"/>')
        parts += [f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in dots]
    return parts


# In the order of the legend: name in the measurements, name in the figure, colour.
CONTENDERS = (
    ("ours", "lambda layer (this package)", "query"),
    ("conv3x3", "3x3 convolution", "key"),
    ("depthwise + 1x1", "depthwise 23x23 + 1x1", "grey"),
    ("attention (SDPA)", "global attention (SDPA)", "value"),
    ("axial attention", "axial attention", "value hollow"),
    ("halo attention", "halo attention (timm)", "key hollow"),
    ("bottleneck attention", "bottleneck attention (timm)", "grey hollow"),
    ("timm", "lambda layer (timm)", "place"),
    ("lucidrains", "lambda layer (lucidrains)", "place hollow"),
)


def speed() -> str:
    """Time of a layer by map, for every contender in its fastest form."""
    rows, _ = summary.newest(RESULTS)
    title = "time of one layer (logarithmic axis, left is faster), NVIDIA H200, batch 256, bfloat16, scope 23"
    panels = [(mode, mode, "milliseconds") for mode in ("inference", "training")]
    return by_map(title, rows, panels, "Time of one layer", (-2, 3))


def layer_memory() -> str:
    """Peak memory of a training step by map, for every contender in its fastest form."""
    rows, _ = summary.newest(RESULTS)
    title = "peak memory of a training step (logarithmic axis), NVIDIA H200, batch 256, bfloat16, scope 23"
    scaled = [row | {"MiB": row["peak_bytes"] / 2**20} for row in rows]
    return by_map(title, scaled, [("training", "beyond the input", "MiB")], "Memory of one layer", (1, 5))


def cpu() -> str:
    """Time of a layer on one CPU thread by map."""
    result = summary.read(RESULTS, "op-cpu")
    rows = [row for row in result["rows"] if row["kind"] == "layer" and row["scope"] == 23]
    where = f"one thread of an {result['machine']['cpu']}, batch 8, float32, scope 23"
    title = f"time of one layer (logarithmic axis, left is faster), {where}"
    panels = [(mode, mode, "milliseconds") for mode in ("inference", "training")]
    return by_map(title, rows, panels, "Time of one layer on a CPU", (0, 4))


def by_map(
    title: str,
    rows: list[dict[str, Any]],
    panels: list[tuple[str, str, str]],  # mode, heading, key of a row
    name: str,
    powers: tuple[int, int],  # of ten: the ends of the axis
) -> str:
    """Draw a dot for each contender and map on logarithmic axes, one panel for each mode."""
    low, high = powers
    width = (320 if len(panels) > 1 else 700) / (high - low)
    parts = [text(24, 34, title, "text title", "start")]
    present = [one for one in CONTENDERS if any(summary.base_of(row["contender"]) == one[0] for row in rows)]
    for number, (mode, heading, key) in enumerate(panels):
        left = 110 + 390 * number
        parts.append(text(left + width * (high - low) / 2, 62, f"{heading}, {key}", "quiet"))
        for power in range(low, high + 1):
            x = left + width * (power - low)
            parts.append(text(x, 272, f"{10.0**power:,g}", "quiet small"))
            parts.append(f'<line class="line" x1="{x:g}" y1="76" x2="{x:g}" y2="254" stroke-opacity="0.25"/>')
        for line, shape in enumerate(summary.MAPS):
            y = 98 + 46 * line
            if not number:
                parts.append(text(left - 12, y + 5, shape.replace("x", " × "), "text small", "end"))
            for contender, _, kind in reversed(present):
                row = summary.best(rows, contender, shape, mode)
                if row is not None:
                    parts.append(dot(left + width * (log10(row[key]) - low), y, kind))
    return picture(880, 300 + 24 * ceil(len(present) / 4), name, [*parts, *legend(present, 306)])


def legend(entries: Iterable[tuple[str, str, str]], y: float) -> list[str]:
    """Return dots with names, four in a line."""
    parts = []
    for number, (_, name, kind) in enumerate(entries):
        x, below = 40 + 208 * (number % 4), y + 24 * (number // 4)
        parts += [dot(x, below - 4, kind), text(x + 12, below, name, "quiet small", "start")]
    return parts


def dot(x: float, y: float, kind: str) -> str:
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:g}" r="5"/>'


def networks() -> str:
    """Images per second of ResNet-50 by placement of the lambda layers."""
    result = summary.read(RESULTS, "networks-cuda-placements")
    found = {(row["network"], row["protocol"]["mode"]): row["result"] for row in reversed(result["rows"])}
    names = {"resnet50": "CCCC (ResNet-50)"}
    names |= {f"resnet50,placement={placement}": placement for placement in ("CCLL", "CLLL", "LLLL")}
    title = f"ResNet-50, images per second, {result['machine']['gpu']}, batch 256, bfloat16, 224 px, compiled by blocks"
    parts = [text(24, 34, title, "text title", "start")]
    for number, mode in enumerate(("training", "inference")):
        left, most = 150 + 370 * number, found["resnet50", mode]["examples_per_second"]
        parts.append(text(left + 115, 62, mode, "quiet"))
        for line, (name, label) in enumerate(names.items()):
            y, value = 76 + 40 * line, found[name, mode]["examples_per_second"]
            if not number:
                parts.append(text(left - 12, y + 19, label, "text small", "end"))
            parts.append(box(left, y, 230 * value / most, 26, "key" if name == "resnet50" else "query"))
            shown = f"{value:,.0f}" + ("" if name == "resnet50" else f" ({value / most:.0%})")
            parts.append(text(left + 230 * value / most + 8, y + 18, shown, "text small", "start"))
    parts.append(
        text(24, 262, "C: stage with 3x3 convolutions, L: stage with lambda layers (c2 to c5)", "quiet small", "start")
    )
    return picture(880, 280, "Throughput of networks", parts)


GROWTH = (
    ("ours", 23, "lambda layer, scope 23", "query"),
    ("ours", None, "lambda layer, global scope", "place"),
    ("conv3x3", 23, "3x3 convolution", "key"),
)


def growth() -> str:
    """Time and memory of inference by the side of the map, on logarithmic axes."""
    result = summary.read(RESULTS, "layer-cuda-growth")
    shapes = list(dict.fromkeys(row["shape"] for row in result["rows"]))
    sides = [int(shape.partition("x")[0]) for shape in shapes]
    title = f"one layer with 64 channels, {result['machine']['gpu']}, batch 8, bfloat16, inference"
    parts = [text(24, 34, title, "text title", "start")]
    for number, (heading, scale, key) in enumerate(
        (("milliseconds", 1.0, "milliseconds"), ("peak memory beyond the input, MiB", 2.0**-20, "peak_bytes"))
    ):
        left, right, top, bottom = 80 + 420 * number, 410 + 420 * number, 80, 300
        lines = []
        for contender, scope, _, kind in GROWTH:
            rows = [row for row in result["rows"] if row["scope"] == scope]
            chosen = [summary.best(rows, contender, shape, "inference") for shape in shapes]
            lines.append((kind, [row[key] * scale if row else None for row in chosen]))
        values = [value for _, line in lines for value in line if value]
        low, high = floor(log10(min(values))), ceil(log10(max(values)))
        parts.append(text((left + right) / 2, 62, heading, "quiet"))

        def at(side: int, value: float) -> tuple[float, float]:
            x = left + (right - left) * log10(side / sides[0]) / log10(sides[-1] / sides[0])  # noqa: B023
            return x, bottom - (bottom - top) * (log10(value) - low) / (high - low)  # noqa: B023

        for power in range(low, high + 1):
            y = at(sides[0], 10.0**power)[1]
            parts.append(text(left - 8, y + 5, f"{10.0**power:,g}", "quiet small", "end"))
            line = f'x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"'
            parts.append(f'<line class="line" {line} stroke-opacity="0.25"/>')
        parts += [text(at(side, 10.0**low)[0], bottom + 20, str(side), "quiet small") for side in sides[:-1]]
        parts.append(text((left + right) / 2, bottom + 42, "side of the map", "quiet"))
        for kind, line in lines:
            dots = [at(side, value) for side, value in zip(sides, line, strict=True) if value]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
            parts.append(f'<polyline class="{kind}-line" points="{path}" fill="none" stroke-width="2"/>')
            parts += [f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in dots]
    parts += legend([(name, label, kind) for name, _, label, kind in GROWTH], 374)
    return picture(880, 394, "Growth with the map", parts)


def reproduced() -> dict[str, Any]:
    return json.loads(REPRODUCED.read_text()) if REPRODUCED.exists() else {"headlines": []}


FIGURES: dict[str, Callable[[], str]] = {"layer.svg": layer, "memory.svg": memory, "scope.svg": scope}
FIGURES |= {"speed.svg": speed, "layer-memory.svg": layer_memory, "growth.svg": growth}
FIGURES |= {"networks.svg": networks, "cpu.svg": cpu}
if reproduced()["headlines"]:
    FIGURES["pareto.svg"] = pareto


def main(arguments: list[str]) -> int:
    stale = [
        name for name, draw in FIGURES.items() if not (HERE / name).exists() or (HERE / name).read_text() != draw()
    ]
    for name in stale:
        print(f"{name}: {'stale, run python docs/figures/draw.py' if arguments else 'written'}")
        if not arguments:
            (HERE / name).write_text(FIGURES[name]())
    return 1 if stale and arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Draws figures as SVG, with the standard library, the package's own formulas and (pareto.svg) its measurements.

    python docs/figures/draw.py            # write
    python docs/figures/draw.py --check    # exit with 1 if a file is stale

Every figure has its own background and follows the reader's light or dark scheme, so it is legible on any page.
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
  .query-line { stroke: #e8853d }  .key-line { stroke: #3d7fd9 }  .place-line { stroke: #8a63d2 }
  .value-line { stroke: #2f9e77 }
  .cell { fill: #eceef3; stroke: #c9ccd6 }  .pale { fill-opacity: 0.28 }
  .hollow { fill-opacity: 0.15; stroke-width: 2 }  .value.hollow { stroke: #2f9e77 }
  .key.hollow { stroke: #3d7fd9 }  .place.hollow { stroke: #8a63d2 }
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
    """Cells of a matrix, some paler than others: numbers differ."""
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
    """How a context becomes a lambda, and a query goes through it."""
    parts: list[str] = []
    parts += [
        text(120, 34, "context", "text title"),
        text(120, 52, "M places: a key and a value each", "quiet small"),
    ]
    parts += matrix(66, 66, 9, 3, "key") + matrix(136, 66, 9, 2, "value")
    parts += [text(86, 208, "keys", "quiet small"), text(150, 208, "values", "quiet small")]
    parts += [text(120, 244, "where a place is,", "quiet small"), text(120, 260, "seen from query n", "quiet small")]
    parts += [*matrix(99, 270, 9, 3, "place"), text(120, 412, "embeddings, learned", "quiet small")]

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
    """Interactions that ResNet-50 keeps at 224x224, by batch: the formulas behind the paper's memory table."""
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
    parts += [text(right + 14, at(128, lambdas)[1] + 4, "embeddings, whatever the batch", "quiet small", "start")]
    return picture(width, height, "Memory of interactions by batch size", parts)


def scope() -> str:
    """What one query sees: a 3x3 convolution, a local scope, and content."""
    side, size = 15, 13
    parts: list[str] = []
    titles = (
        ("3 × 3 convolution", "fixed weights, 9 places", 1, False),
        ("position lambda, scope 7 × 7", "where: learned per relative place", 3, False),
        ("content lambda", "what: always the whole context", side, True),
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
    return picture(820, 310, "What one query sees", parts)


def pareto() -> str:
    """Seconds for 1024 images against published accuracy, from what `lambdanets reproduce` measured."""
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
    """A line for each kind of (kind, seconds, accuracy), time on a logarithmic axis; what is not measured breaks it."""
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


# In the legend's order: name in the measurements, in the figure, colour.
CONTENDERS = (
    ("ours", "lambda layer (this package)", "query"),
    ("conv3x3", "3x3 convolution", "key"),
    ("attention (SDPA)", "global attention (SDPA)", "value"),
    ("axial attention", "axial attention", "value hollow"),
    ("halo attention", "halo attention (timm)", "key hollow"),
    ("timm", "lambda layer (timm)", "place"),
    ("lucidrains", "lambda layer (lucidrains)", "place hollow"),
)


def speed() -> str:
    """Time of a layer by map, for every contender in its fastest form, on a logarithmic axis."""
    measured, _ = summary.newest(RESULTS)
    title = "time of one layer, NVIDIA H200, batch 256, bfloat16, scope 23"
    parts = [text(24, 34, title, "text title", "start")]
    for number, mode in enumerate(("training", "inference")):
        left = 110 + 390 * number
        parts.append(text(left + 160, 62, f"{mode}, milliseconds", "quiet"))
        for power in range(-1, 4):
            x = left + 80 * (power + 1)
            parts.append(text(x, 272, f"{10.0**power:g}", "quiet small"))
            parts.append(f'<line class="line" x1="{x}" y1="76" x2="{x}" y2="254" stroke-opacity="0.25"/>')
        for line, shape in enumerate(("56x56x64", "28x28x128", "14x14x256", "7x7x512")):
            y = 98 + 46 * line
            if not number:
                parts.append(text(left - 12, y + 5, shape.replace("x", " × "), "text small", "end"))
            rows = [row for row in measured if (row["shape"], row["mode"]) == (shape, mode)]
            for name, _, kind in reversed(CONTENDERS):
                times = [row["milliseconds"] for row in rows if summary.base_of(row["contender"]) == name]
                if times:
                    parts.append(dot(left + 80 * (log10(min(times)) + 1), y, kind))
    for number, (_, name, kind) in enumerate(CONTENDERS):
        x, y = 40 + 208 * (number % 4), 306 + 24 * (number // 4)
        parts += [dot(x, y - 4, kind), text(x + 12, y, name, "quiet small", "start")]
    return picture(880, 348, "Time of one layer", parts)


def dot(x: float, y: float, kind: str) -> str:
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:g}" r="5"/>'


def reproduced() -> dict[str, Any]:
    return json.loads(REPRODUCED.read_text()) if REPRODUCED.exists() else {"headlines": []}


FIGURES: dict[str, Callable[[], str]] = {"layer.svg": layer, "memory.svg": memory, "scope.svg": scope}
if (RESULTS / "layer-cuda.json").exists():
    FIGURES["speed.svg"] = speed
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

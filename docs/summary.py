"""Short tables for README.md and the report in docs/benchmarks.md, from the newest measurement of each contender."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
MAPS = {"56x56x64": "c2", "28x28x128": "c3", "14x14x256": "c4", "7x7x512": "c5"}  # of ResNet-50 at 224 pixels

LAYERS = {  # by their names in the measurements
    "ours": "**lambda layer (lambdanets)**",
    "conv3x3": "3x3 convolution",
    "depthwise + 1x1": "depthwise 23x23 and 1x1 convolution",
    "timm": "lambda layer (timm)",
    "timm, global": "lambda layer (timm), global scope",
    "lucidrains": "lambda layer (lucidrains)",
    "lucidrains, global": "lambda layer (lucidrains), global scope",
    "halo attention": "halo attention (timm)",
    "bottleneck attention": "bottleneck attention (timm)",
    "axial attention": "axial attention",
    "attention (SDPA)": "global attention (SDPA)",
}
IN_README = [name for name in LAYERS if not name.endswith(", global") and name != "bottleneck attention"]


def commit_of(result: Row) -> str:
    """Return " at COMMIT" for a measurement; a plus stands for uncommitted changes."""
    commit = result.get("commit")
    return f" at {commit[:7]}{'+' if '+' in commit else ''}" if commit else ""


def when(result: Row) -> str:
    return f"{result['date'][:10]}{commit_of(result)}"


def read(results: Path, name: str) -> Row:
    return json.loads((results / f"{name}.json").read_text())


def newest(results: Path) -> tuple[list[Row], str]:
    """Return the rows of all contenders on a GPU, and a note on both runs that they come from."""
    peers, ours = read(results, "layer-cuda"), read(results, "layer-cuda-convolution")
    note = (
        f"{ours['machine']['gpu']}, bfloat16, batch 256, scope 23. The lambda layer of this package and the "
        f"convolution: one run of {when(ours)}; the others: one run of {when(peers)}."
    )
    return [*ours["rows"], *peers["rows"]], note


def best(rows: list[Row], name: str, shape: str, mode: str) -> Row | None:
    """Return the row of a contender in its fastest form: eager, compiled, or folded for inference."""
    found = [row for row in rows if (row["shape"], row["mode"], base_of(row["contender"])) == (shape, mode, name)]
    return min(found, key=lambda row: row["milliseconds"], default=None)


def contenders(results: Path) -> str:
    """Time and memory of one layer and its alternatives on two maps, each in its fastest form."""
    rows, note = newest(results)
    shapes = ("28x28x128", "14x14x256")
    units = {"inference": "ms", "training": "ms", "memory": "MiB"}
    titles = [f"{shape.rpartition('x')[0]} {what}, {unit}" for shape in shapes for what, unit in units.items()]
    lines = [f"| layer | {' | '.join(titles)} |\n", f"| --- |{' ---: |' * len(titles)}\n"]
    missing = [name for name in IN_README if not any(base_of(row["contender"]) == name for row in rows)]
    for name in IN_README:
        if name in missing:
            continue
        cells = []
        for shape in shapes:
            inference, training = (best(rows, name, shape, mode) for mode in ("inference", "training"))
            cells += [f"{row['milliseconds']:.2f}" if row else "-" for row in (inference, training)]
            cells.append(f"{training['peak_bytes'] / 2**20:,.0f}" if training else "-")
        lines.append(f"| {LAYERS[name]} | {' | '.join(cells)} |\n")
    maps = " and ".join(f"{grid} with {channels} channels" for grid, _, channels in map(split_shape, shapes))
    absent = f" Not measured yet: {', '.join(LAYERS[name] for name in missing)}." if missing else ""
    memory = "Memory is the peak of a training step beyond the input."
    return "".join([*lines, f"\nFeature maps: {maps}. {note} {memory}{absent}\n"])


def split_shape(shape: str) -> tuple[str, str, str]:
    return shape.rpartition("x")


def layers(results: Path) -> str:
    """Inference, training and memory of all contenders on all maps, each in its fastest form."""
    rows, note = newest(results)
    torch = read(results, "layer-cuda-convolution")["versions"]["torch"]
    parts = [f"{note} torch {torch}, 4 heads, key depth 16, medians.\n"]
    missing = [name for name in LAYERS if not any(base_of(row["contender"]) == name for row in rows)]
    tables: dict[str, tuple[str, Callable[[Row], str]]] = {
        "Inference, milliseconds": ("inference", lambda row: f"{row['milliseconds']:.3g}{form(row)}"),
        "Training step, milliseconds": ("training", lambda row: f"{row['milliseconds']:.3g}{form(row)}"),
        "Peak memory of a training step beyond the input, MiB": (
            "training",
            lambda row: f"{row['peak_bytes'] / 2**20:,.0f}",
        ),
    }
    for title, (mode, cell) in tables.items():
        parts.append(f"\n{title}:\n\n| layer | {' | '.join(MAPS)} |\n| --- |{' ---: |' * len(MAPS)}\n")
        for name, label in LAYERS.items():
            if name in missing:
                continue
            found = [best(rows, name, shape, mode) for shape in MAPS]
            parts.append(f"| {label} | {' | '.join(cell(row) if row else '-' for row in found)} |\n")
    names = [f"- Not measured on this machine yet: {LAYERS[name]}.\n" for name in missing]
    return "".join([*parts, "\n", *left_out(read(results, "layer-cuda")), *names])


def left_out(result: Row) -> list[str]:
    """Return a line for each contender that a run left out, with its reason, and for each failed check."""
    cases: dict[tuple[str, str], list[str]] = {}
    for one in result.get("left_out", ()):
        cases.setdefault((one["contender"], one["reason"]), []).append(one["case"])
    lines = [f"- Failed its check: {text}\n" for text in result.get("mismatches", ())]
    every = {f"{row['shape']} {'scope ' + str(row['scope']) if row['scope'] else 'global'}" for row in result["rows"]}
    for (name, reason), found in cases.items():
        where = "all maps" if set(found) >= every else ", ".join(dict.fromkeys(found))
        lines.append(f"- Left out: {name}, {where}: {reason}.\n")
    return lines


def form(row: Row) -> str:
    """Return how a layer ran, if not eager and channels-last (on a CPU the format is not chosen)."""
    contiguous = ", contiguous" if row.get("memory_format") == "contiguous" else ""
    return next((f", {word}" for word in ("folded", "compiled") if word in row["contender"]), "") + contiguous


def base_of(contender: str) -> str:
    """Return the name of the layer without the form it ran in."""
    return contender.partition(", ")[0].removesuffix(" + BN") if ", global" not in contender else contender


def summary(results: Path) -> str:
    """Layers by map, then networks: the fastest form of each contender in one run."""
    titles = ("lambda layers instead of 3x3 convolutions", "inference", "training", "training memory")
    lines = [f"| {' | '.join((*titles, 'measured with'))} |\n| --- |{' ---: |' * 3} --- |\n"]
    for name, where in (("layer-cuda-convolution", "batch 256, bfloat16"), ("op-cpu", "batch 8, float32, one thread")):
        if not (results / f"{name}.json").exists():
            continue
        result = read(results, name)
        rows = [row for row in result["rows"] if row["kind"] == "layer" and row["scope"] == 23]
        device = result["machine"]["gpu"] or f"CPU ({result['machine']['cpu']})"
        for shape, stage in MAPS.items():
            pairs = {mode: [best(rows, side, shape, mode) for side in ("ours", "conv3x3")] for mode in MODES}
            cells = [faster(ratio_of(pairs[mode], "milliseconds")) for mode in MODES]
            cells.append(more(ratio_of(pairs["training"], "peak_bytes")))
            about = f"{device}, {where}; {when(result)}"
            lines.append(f"| layer, {shape} ({stage}) | {' | '.join(cells)} | {about} |\n")
    if (results / "networks-cuda-placements.json").exists():
        result = read(results, "networks-cuda-placements")
        found = {(row["network"], row["protocol"]["mode"]): row["result"] for row in reversed(result["rows"])}
        for placement in ("CCLL", "CLLL", "LLLL"):
            pairs = {mode: [found["resnet50", mode], found[f"resnet50,placement={placement}", mode]] for mode in MODES}
            cells = [faster(ratio_of(pairs[mode], "examples_per_second")) for mode in MODES]
            cells.append(more(ratio_of(pairs["training"][::-1], "peak_bytes")))
            about = f"{result['machine']['gpu']}, batch 256, bfloat16, 224 px, compiled; {when(result)}"
            lines.append(f"| ResNet-50, {placement} | {' | '.join(cells)} | {about} |\n")
    return "".join(lines)


MODES = ("inference", "training")


def ratio_of(pair: list[Row | None], key: str) -> float | None:
    one, other = pair
    return one[key] / other[key] if one and other and one.get(key) and other.get(key) else None


def faster(ratio: float | None) -> str:
    """Describe a ratio of times, ours over theirs."""
    if ratio is None:
        return "not measured"
    return f"{ratio:.2f}x slower" if ratio >= 1 else f"{1 / ratio:.2f}x faster"


def more(ratio: float | None) -> str:
    """Describe a ratio of memory, ours over theirs."""
    return "not measured" if ratio is None else f"{ratio:.2f}x"

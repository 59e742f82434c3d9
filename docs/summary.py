"""Short tables for README.md and the summary of docs/benchmarks.md, from the newest measurement of each."""

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
MAPS = {"56x56x64": "c2", "28x28x128": "c3", "14x14x256": "c4", "7x7x512": "c5"}  # of ResNet-50 at 224 pixels

LAYERS = {  # how the measurements call them, and the README
    "ours": "**lambda layer (lambdanets)**",
    "conv3x3": "3x3 convolution",
    "timm": "lambda layer (timm)",
    "lucidrains": "lambda layer (lucidrains)",
    "halo attention": "halo attention (timm)",
    "axial attention": "axial attention",
    "attention (SDPA)": "global attention (SDPA)",
}


def newest(results: Path) -> tuple[list[Row], str]:
    """Rows of all contenders on a GPU: lambda layer and convolution from their own, later run; and a note on both."""
    every, ours = (
        json.loads((results / f"{name}.json").read_text()) for name in ("layer-cuda", "layer-cuda-convolution")
    )
    peers = [row for row in every["rows"] if base_of(row["contender"]) not in ("ours", "conv3x3")]
    note = (
        f"{ours['machine']['gpu']}, bfloat16, batch 256, scope 23. This lambda layer and the convolution were measured "
        f"in one run on {ours['date'][:10]}, the others on {every['date'][:10]}."
    )
    return [*ours["rows"], *peers], note


def contenders(results: Path) -> str:
    """Time and memory of one layer and its alternatives, each in its fastest form."""
    found, note = newest(results)
    shapes = ("28x28x128", "14x14x256")
    titles = [f"{shape}, {what}" for shape in shapes for what in ("inference", "training", "memory")]
    lines = [f"| layer | {' | '.join(titles)} |\n", f"| --- |{' ---: |' * len(titles)}\n"]
    for name, title in LAYERS.items():
        cells = []
        for shape in shapes:
            rows = [row for row in found if row["shape"] == shape and base_of(row["contender"]) == name]
            best = {
                mode: min((row for row in rows if row["mode"] == mode), key=lambda row: row["milliseconds"])
                for mode in ("inference", "training")
            }
            cells += [f"{best[mode]['milliseconds']:.2f} ms" for mode in best]
            cells.append(f"{best['training']['peak_bytes'] / 2**20:,.0f} MiB")
        lines.append(f"| {title} | {' | '.join(cells)} |\n")
    return "".join([*lines, f"\n{note} Memory is the peak of a training step beyond the input.\n"])


def base_of(contender: str) -> str:
    """The layer, whether it ran eager, compiled or folded."""
    return contender.partition(", ")[0].removesuffix(" + BN") if ", global" not in contender else contender


def summary(results: Path) -> str:
    """Layers by map, then networks: the fastest form of each contender in one run."""
    lines = ["| 3x3 convolution replaced by a lambda layer, scope 23 | inference | training | measured with |\n"]
    lines.append("| --- | --- | --- | --- |\n")
    for name, where in (("layer-cuda-convolution", "batch 256, bfloat16"), ("op-cpu", "batch 8, float32, one thread")):
        path = results / f"{name}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        device = result["machine"]["gpu"] or f"CPU ({result['machine']['cpu']})"
        for shape, stage in MAPS.items():
            cells = [faster(fastest(result, shape, mode)) for mode in ("inference", "training")]
            lines.append(f"| layer, {shape} (stage {stage} of ResNet-50) | {' | '.join(cells)} | {device}, {where} |\n")
    path = results / "networks-cuda-blocks-again.json"
    if path.exists():
        result = json.loads(path.read_text())
        speeds = {(row["network"], row["protocol"]["mode"]): row["result"] for row in reversed(result["rows"])}
        for placement in ("CCLL", "CLLL", "LLLL"):
            both = []
            for mode in ("inference", "training"):
                ours, theirs = speeds[f"resnet50,placement={placement}", mode], speeds["resnet50", mode]
                both.append(faster(theirs["examples_per_second"] / ours["examples_per_second"]))
            lines.append(
                f"| network, ResNet-50 with placement {placement}, 224 pixels | {' | '.join(both)} | "
                f"{result['machine']['gpu']}, batch 256, bfloat16, compiled |\n"
            )
    return "".join(lines)


def fastest(result: Row, shape: str, mode: str) -> float:
    """Time of our layer over that of the convolution, each in its fastest form."""
    rows = [row for row in result["rows"] if row["kind"] == "layer" and (row["shape"], row["mode"]) == (shape, mode)]
    rows = [row for row in rows if row["scope"] == 23]
    times = [
        min(row["milliseconds"] for row in rows if row["contender"].startswith(name)) for name in ("ours", "conv3x3")
    ]
    return times[0] / times[1]


def faster(ratio: float) -> str:
    return f"{ratio:.2f}x slower" if ratio >= 1 else f"{1 / ratio:.2f}x faster"

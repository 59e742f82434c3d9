"""Blocks about pseudo-label selection, near-duplicate images, and interrupted runs."""

import json
from pathlib import Path
from typing import Any

from summary import when

Row = dict[str, Any]


def selection(results: Path, images: int = 130_000_000) -> str:
    """Show the results of benchmarks/pseudo_select.py, and the cost for more images computed from them."""
    found = [json.loads(path.read_text()) for path in sorted(results.glob("pseudo-select*.json"))]
    if not found:
        return "No measurement yet. `python benchmarks/run.py pseudo-select` writes pseudo-select.json.\n"
    found.sort(key=lambda one: one["entries"])
    origins = [f"{one['machine']['cpu']}, one process, {when(one)}" for one in found if "date" in one]
    notes = dict.fromkeys(one["note"] for one in found if "note" in one)
    lines = [f"{'; '.join(origins)}. {' '.join(notes)}".rstrip() + "\n\n"] if origins else []
    lines.append("| task | cost |\n| --- | --- |\n")
    for one in found:
        what = (
            f"selecting among {one['entries'] / 1e6:g}M labels of {one['classes']:,} classes in {one['units']:,} files"
        )
        memory = (
            f"{one['peak_bytes'] / 1e9:.2f} GB, of which {one['peak_bytes_before'] / 1e9:.2f} GB are Python and torch"
        )
        times = f"{one['cpu_seconds']:.0f} s of CPU time, {one['seconds']:.0f} s including fsync"
        lines.append(f"| {what} | {times}; {memory} |\n")
    hard, soft = (pick(one["label_bytes_per_image"] for one in found) for pick in (min, max))
    lines.append(f"| size of a label | {hard:.0f} bytes; with ten soft probabilities {soft:.0f} bytes |\n")
    seconds = found[-1]["cpu_seconds"] / found[-1]["entries"] * images
    lines.append(f"| selecting among {images / 1e6:g}M labels (computed) | {seconds:.0f} s of CPU time |\n")
    sizes = f"{hard * images / 1e9:.1f} GB; with ten soft probabilities {soft * images / 1e9:.1f} GB"
    lines.append(f"| size of these labels (computed) | {sizes} |\n")
    return "".join(lines)


def guard(result: Row, where: str) -> str:
    """Show the result of benchmarks/guard_hashes.py."""
    bits = " | ".join(f"{distance} bits" for distance in result["distances"])
    lines = [f"{where}; {result['changed']} photographs with each change, {result['pairs']:,} pairs of different "]
    lines.append(f"photographs.\n\n| recognized after | {bits} |\n| --- |{' ---: |' * len(result['distances'])}\n")
    for row in result["rows"]:
        lines.append(f"| {row['change']} | {' | '.join(f'{100 * share:.1f}%' for share in row['found'])} |\n")
    taken = " | ".join(f"{count:,}" for count in result["taken_for_the_same"])
    return "".join([*lines, f"| false matches among the pairs | {taken} |\n"])


def kills(result: Row, where: str) -> str:
    """Show the result of benchmarks/kill_and_resume.py."""
    names = {
        "checkpoint": "while a checkpoint was written",
        "end": "after the last step",
        "random": "at random moments",
    }
    moments = ", ".join(f"{count} {names[moment]}" for moment, count in result["moments"].items())
    same = "identical" if result["identical"] else "different"
    return (
        f"{where}; float32, batch 32. A run of {result['steps']} steps was killed with SIGKILL {result['kills']} times "
        f"({moments}) and resumed {result['resumed']} times; {result['damaged']} checkpoints were damaged. Its final "
        f"weights and those of an uninterrupted run are {same} (SHA-256).\n"
    )


def teachers(result: Row, where: str) -> str:
    """Show the accuracy of ImageNet teachers, as benchmarks/teachers.py measured it."""
    keras, lite2 = "`resnet50_keras`", "`timm:tf_efficientnet_lite2`"
    rows: list[tuple[str, str, Row]] = []
    if "evaluate" in result:
        rows.append((keras, "`lambdanets evaluate`", result["evaluate"]))
    for name, row in result.get("plain", {}).items():
        how = "this package" if name == "ours" else f"torchvision and Pillow, {name.removeprefix('plain, ')}"
        rows.append((keras, how, row))
    for name, row in result.get("bits", {}).items():
        if isinstance(row, dict):
            rows.append((keras, f"{name}, {row['bytes'] / 1e6:.1f} MB", row))
    if "lite2" in result:
        rows.append((lite2, "as a teacher of `lambdanets pseudo label`", result["lite2"]))
    lines = [f"{where}.\n\n", "| network | how | images | top-1, % | top-5, % |\n| --- | --- | ---: | ---: | ---: |\n"]
    for network, how, row in rows:
        images = row.get("images", row.get("examples"))
        error = 100 * (row["top1"] * (1 - row["top1"]) / images) ** 0.5
        scores = f"{100 * row['top1']:.1f} ± {error:.1f} | {100 * row['top5']:.1f}"
        lines.append(f"| {network} | {how} | {images:,} | {scores} |\n")
    notes = []
    if "plain" in result:
        different = result["plain"]["plain, bicubic"]["different_answers"]
        notes.append(f"With bicubic resizing torchvision and Pillow give {different} other answers")
    if "bits" in result:
        notes.append(f"8 bits change {result['bits']['different_answers']} of the answers of 32 bits")
    return "".join(lines) + (f"\n± is the standard error. {'. '.join(notes)}.\n" if notes else "")

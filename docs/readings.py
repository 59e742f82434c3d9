"""Sentences about measurements, with every number and every verdict from the file."""

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def selection(results: Path, images: int = 130_000_000) -> str:
    """What `python benchmarks/pseudo_select.py` printed: choosing among made-up labels, and what more would take."""
    found = [json.loads(path.read_text()) for path in sorted(results.glob("pseudo-select*.json"))]
    if not found:
        return "No measurement yet: `python benchmarks/pseudo_select.py` prints one.\n"
    found.sort(key=lambda one: one["entries"])
    lines = ["| | |\n| --- | --- |\n"]
    for one in found:
        what = (
            f"choosing among {one['entries'] / 1e6:g}M labels of {one['classes']:,} classes in {one['units']:,} files"
        )
        memory = f"{one['peak_bytes'] / 1e9:.2f} GB, of which {one['peak_bytes_before'] / 1e9:.2f} are Python and torch"
        times = f"{one['cpu_seconds']:.0f} s of the core, {one['seconds']:.0f} s until all is safe on the disk"
        lines.append(f"| {what} | {times}; {memory} |\n")
    hard, soft = (pick(one["label_bytes_per_image"] for one in found) for pick in (min, max))
    lines.append(f"| a label on the disk | {hard:.0f} bytes, with ten soft probabilities {soft:.0f} |\n")
    seconds = found[-1]["cpu_seconds"] / found[-1]["entries"] * images
    lines.append(f"| choosing among {images / 1e6:g}M (computed) | {seconds:.0f} s of a core |\n")
    sizes = f"{hard * images / 1e9:.1f} GB, with ten soft probabilities {soft * images / 1e9:.1f} GB"
    lines.append(f"| their labels on the disk (computed) | {sizes} |\n")
    return "".join(lines)


def guard(result: Row, where: str) -> str:
    """What benchmarks/guard_hashes.py wrote."""
    bits = " | ".join(f"{distance} bits" for distance in result["distances"])
    lines = [f"{where}; {result['changed']} photographs changed in each way, {result['pairs']:,} pairs of different "]
    lines.append(f"ones.\n\n| found again | {bits} |\n| --- |{' ---: |' * len(result['distances'])}\n")
    for row in result["rows"]:
        lines.append(f"| {row['change']} | {' | '.join(f'{100 * share:.1f}%' for share in row['found'])} |\n")
    taken = " | ".join(f"{count:,}" for count in result["taken_for_the_same"])
    return "".join([*lines, f"| different ones taken for the same | {taken} |\n"])

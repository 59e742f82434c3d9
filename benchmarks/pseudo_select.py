"""Measure the memory and time of selecting pseudo-labels, on synthetic labels.

python benchmarks/pseudo_select.py [--entries 10000000] [--output benchmarks/results/pseudo-select.json]
"""

import json
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro

from lambdanets.files import write_json
from lambdanets.machine import describe
from lambdanets.options import optional
from lambdanets.pseudo.files import Labels, Manifest, Unit, write_labels, write_manifest
from lambdanets.pseudo.select import Selection, select


@dataclass(frozen=True)
class Simulate:
    """Write synthetic labels with a long-tailed class distribution, select among them, and print the cost."""

    entries: int = 10_000_000
    classes: int = 1000
    unit: int = 10_000
    """Images per shard."""
    saturated: float = 0.2
    """Fraction of labels with a confidence of exactly 1, which tie."""
    threshold: float = 0.3
    most: int = 0
    """Largest number of images per class; 0: the fraction of Noisy Student, 130,000 of 130 million."""
    soft: int = 10
    output: Annotated[Path | None, optional("FILE")] = None
    """Write the numbers as JSON."""

    def run(self) -> int:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make(folder, self)
            bytes_on_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            before, began, cpu = peak(), time.perf_counter(), time.process_time()
            most = self.most or max(1, self.entries // 1000)
            counts = select(folder, Selection(threshold=self.threshold, most=most, least=most))
            found = {
                "name": "select",
                **describe(torch.device("cpu")),
                "entries": self.entries,
                "classes": self.classes,
                "units": len(range(0, self.entries, self.unit)),
                "most": most,
                "least": most,
                "kept": sum(counts.kept),
                "used": sum(counts.used),
                "seconds": round(time.perf_counter() - began, 2),
                "cpu_seconds": round(time.process_time() - cpu, 2),
                "peak_bytes": peak(),
                "peak_bytes_before": before,
                "label_bytes_per_image": round(bytes_on_disk / self.entries, 2),
            }
        print(json.dumps(found, indent=2))
        if self.output is not None:
            write_json(self.output, found, indent=2)
        return 0


def peak() -> int:
    """Return the peak memory of this process in bytes."""
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found * 1024


def make(folder: Path, options: Simulate) -> None:
    generator = np.random.default_rng(0)
    firsts = range(0, options.entries, options.unit)
    units = tuple(Unit(f"shard-{n:06d}.tar") for n in range(len(firsts)))
    names = tuple(f"class {i}" for i in range(options.classes))
    write_manifest(folder, Manifest("made up", "shards", units, names, ()))
    weights = 1 / np.arange(1, options.classes + 1)
    for number, first in enumerate(firsts):
        count = min(options.unit, options.entries - first)
        label = generator.choice(options.classes, count, p=weights / weights.sum()).astype(np.int32)
        confidence = generator.random(count, np.float32)
        confidence[generator.random(count) < options.saturated] = 1
        soft = {}
        if options.soft:
            shape = (count, options.soft)
            soft = {"classes": np.zeros(shape, np.int32), "probabilities": np.zeros(shape, np.float16)}
        offset = np.arange(count, dtype=np.int64) * 100_000
        size = np.full(count, 100_000, np.int64)
        position = np.arange(count, dtype=np.int32)
        write_labels(
            folder, number, Labels(position, label, confidence, **soft, offset=offset, size=size, images=count)
        )


if __name__ == "__main__":
    sys.exit(tyro.cli(Simulate).run())

"""Measure the gain of pseudo-labels: 10% of the labels of Imagenette, with and without pseudo-labels for the rest.

    python benchmarks/pseudo_imagenette.py IMAGENETTE OUT --output benchmarks/results/pseudo-imagenette.json

For each seed, a teacher trains on the 10% and labels the rest. A student with the same recipe, number of steps and
batch size trains on both. The script also compares the labels per second with the speed of the teacher alone, with the
same loader. An interrupted run resumes with the same command; --minutes limits its time, and the JSON then lists what
is missing. To run seeds in parallel, start one command per seed with --seeds SEED --repeats 0; then the command
with all seeds collects the results.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro

from lambdanets.data.pack import pack
from lambdanets.data.source import Source, open_source
from lambdanets.data.split import held_out
from lambdanets.machine import describe
from lambdanets.options import chosen_device, optional
from lambdanets.pseudo.config import PseudoData
from lambdanets.pseudo.cotrain import CoTrain
from lambdanets.pseudo.label import LabelOptions, label
from lambdanets.pseudo.select import Selection, select
from lambdanets.pseudo.teacher import Ensemble, open_teachers
from lambdanets.pseudo.units import Place, open_place, read_units
from lambdanets.recipes.pseudo import on_top
from lambdanets.recipes.small import imagenette
from lambdanets.train.classify import Classify
from lambdanets.train.config import ModelConfig, TrainConfig
from lambdanets.train.inference.command import Using
from lambdanets.train.loop import fit
from lambdanets.train.task import Task

BEGAN = time.monotonic()


@dataclass(frozen=True)
class Figure:
    """Measure the gain of pseudo-labels on Imagenette over several seeds."""

    data: Annotated[str, tyro.conf.Positional]
    """Imagenette with a validation split, as a folder or shards."""
    out: Annotated[Path, tyro.conf.Positional]
    """Folder of the runs."""
    seeds: tuple[int, ...] = (0, 1, 2)
    fraction: float = 0.1
    """Fraction of the labels for the teacher."""
    steps: int = 1500
    """Training steps of every network."""
    batch_size: int = 256
    ratio: float = 1.0
    """Pseudo-labelled images per labelled image in a batch."""
    soft: bool = True
    threshold: float = 0.3
    least: int = 0
    most: int = 0
    guard_distance: int = LabelOptions.guard_distance
    """Bits by which a near-duplicate of a validation image may differ; -1: only identical files count."""
    repeats: int = 6
    """Number of passes over the images to measure throughput; 0 does not measure it."""
    minutes: float = 0.0
    """Time budget in minutes; nothing new starts after it. 0: no limit."""
    tiny: bool = False
    """Use a tiny network at 32 pixels, to test the script."""
    workers: Annotated[int | None, optional("N")] = None
    device: Annotated[str | None, optional("DEVICE")] = None
    output: Annotated[Path | None, optional("FILE")] = None

    def run(self) -> int:
        labelled, rest = split_data(self.data, self.out / "data", self.fraction)
        found: dict[str, Any] = {"command": " ".join(sys.argv), "steps": self.steps, "ratio": self.ratio}
        found |= {"fraction": self.fraction, "batch_size": self.batch_size, "soft": self.soft, "seeds": []}
        found |= {"threshold": self.threshold, **describe(chosen_device(self.device))}
        complete = True
        for seed in self.seeds:
            row: dict[str, Any] = {"seed": seed}
            alone, student = self.out / f"alone-{seed}", self.out / f"student-{seed}"
            config = self.config(labelled, alone, seed)
            row["alone"] = self.train(Classify(config), config)
            if row["alone"] is not None:
                labels = self.out / f"labels-{seed}"
                row |= self.labels(str(alone), rest, labels)
                pseudo = PseudoData(path=labels, ratio=self.ratio, soft=self.soft, epoch="pseudo")
                both = on_top(replace(config, out=student), pseudo)
                task = CoTrain(both)
                both = replace(both, epochs=self.steps / task.epoch_steps)
                row["with_pseudo_labels"] = self.train(CoTrain(both), both)
            complete &= row.get("with_pseudo_labels") is not None
            found["seeds"].append(row)
            self.write(found | summary(found["seeds"]))
        first = self.out / f"alone-{self.seeds[0]}"
        if self.repeats and (first / "weights.safetensors").is_file() and not self.late():
            found["throughput"] = self.throughput(str(first), rest)
        found["complete"] = complete
        self.write(found | summary(found["seeds"]))
        return 0 if complete else 3

    def late(self) -> bool:
        return bool(self.minutes) and time.monotonic() - BEGAN > 60 * self.minutes

    def write(self, found: dict[str, Any]) -> None:
        text = json.dumps(found, indent=2)
        print(text, flush=True)
        if self.output is not None:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self.output.write_text(text + "\n")

    def config(self, labelled: Path, out: Path, seed: int) -> TrainConfig:
        base = imagenette()
        model = base.model
        if self.tiny:
            model = ModelConfig(
                name="lambda_resnet_tiny", image_size=32, options=("widths=(4,4,8,8)", "depths=(1,1,1,1)", "scope=3")
            )
        images = len(open_source(labelled, split="train"))
        return replace(
            base,
            out=out,
            seed=seed,
            model=model,
            data=replace(base.data, path=str(labelled), validation=self.data, workers=self.workers, cache="memory"),
            epochs=self.steps / (images // self.batch_size),
            schedule=replace(base.schedule, warmup_epochs=0.05 * self.steps / (images // self.batch_size)),
            batch_size=self.batch_size,
            remainder="drop",
            device=self.device,
            precision="float32" if self.tiny else base.precision,
            evaluate_every=10**6,
            checkpoint_minutes=1.0,
        )

    def train(self, task: Task, config: TrainConfig) -> float | None:
        """Return top-1 on the validation images, or None if the time budget is used up."""
        card = config.out / "score.json"
        if card.is_file():
            return json.loads(card.read_text())
        if self.late():
            return None
        result = fit(task, config, resume=True)
        if not result.finished:
            return None
        score = result.scores["ema"]["validation"]["top1"]
        card.write_text(json.dumps(score))
        return score

    def using(self) -> Using:
        precision = "float32" if self.tiny else "bfloat16"
        return Using(device=self.device, workers=self.workers, batch_size=256, precision=precision)

    def labels(self, teacher: str, images: Path, out: Path) -> dict[str, Any]:
        using = self.using()
        ensemble = open_teachers(teacher, using)
        options = LabelOptions(soft=10 if self.soft else 0, batch_size=using.batch_size, guard=(self.data,))
        options = replace(options, guard_distance=self.guard_distance)
        done = label(ensemble, open_place(str(images)), out, options, workers=using.loader_workers(10**9))
        if done.failed:
            raise ValueError(f"not labelled: {done.failed}")
        counts = select(out, Selection(threshold=self.threshold, most=self.most, least=self.least))
        return {
            "labelled_images": sum(counts.labelled),
            "kept": sum(counts.kept),
            "used": sum(counts.used),
            "leaks": counts.leaks,
            "right": right(out, self.data, self.fraction),
        }

    def throughput(self, teacher: str, images: Path) -> dict[str, float]:
        using = self.using()
        ensemble = open_teachers(teacher, using)
        once = open_place(str(images))
        place = replace(once, units=once.units * self.repeats, paths=once.paths * self.repeats)
        workers = using.loader_workers(10**9)
        inference(ensemble, once, using.batch_size, workers)  # warmup
        alone = inference(ensemble, place, using.batch_size, workers)
        folder = self.out / f"throughput-{time.time_ns()}"
        done = label(ensemble, place, folder, LabelOptions(batch_size=using.batch_size), workers=workers)
        rate = done.images_per_second
        return {"inference_images_per_second": alone, "labels_per_second": rate, "share": rate / alone}


def inference(ensemble: Ensemble, place: Place, batch_size: int, workers: int) -> float:
    """Return images per second of the network with the same loader, without storing labels."""
    began, images, last = time.perf_counter(), 0, None
    numbers = range(len(place.units))
    for batch in read_units(place, numbers, ensemble.transforms(), batch_size=batch_size, workers=workers):
        last = ensemble.probabilities(batch.inputs)
        images += len(batch.positions)
    if last is not None:
        last.sum().item()
    return images / (time.perf_counter() - began)


class Part:
    """Return a subset of a source."""

    def __init__(self, source: Source, indices: np.ndarray, labelled: bool) -> None:
        self.source, self.indices = source, indices
        self.labels = source.labels[indices] if labelled else np.full(len(indices), -1)
        self.class_names = source.class_names if labelled else ()

    def __len__(self) -> int:
        return len(self.indices)

    def name(self, index: int) -> str:
        return self.source.name(int(self.indices[index]))

    def read(self, index: int) -> bytes | np.ndarray:
        return self.source.read(int(self.indices[index]))


def parts(data: str, fraction: float) -> tuple[Source, np.ndarray, np.ndarray]:
    source = open_source(data, split="train")
    rest, chosen = held_out(source.labels, fraction, names=[source.name(i) for i in range(len(source))])
    return source, chosen, rest


def split_data(data: str, folder: Path, fraction: float) -> tuple[Path, Path]:
    """Write the labelled part, and the rest without its labels, as shards."""
    labelled, rest = folder / "labelled", folder / "rest"
    if not (folder / "done").exists():
        source, chosen, others = parts(data, fraction)
        pack(Part(source, chosen, True), labelled)
        pack(Part(source, others, False), rest, images_per_shard=500)
        (folder / "done").touch()
    return labelled, rest


def right(labels: Path, data: str, fraction: float) -> float:
    """Return the fraction of correct labels among the kept ones; `pack` shuffled the images and lists their places."""
    from lambdanets.data import order
    from lambdanets.pseudo.source import PseudoSource

    source, _, rest = parts(data, fraction)
    truth = source.labels[rest][order.permutation(len(rest), 0, 0)]
    pseudo = PseudoSource(labels, source.class_names)
    return float((truth[pseudo.unit.astype(np.int64) * 500 + pseudo.position] == pseudo.labels).mean())


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    pairs = [(r["alone"], r["with_pseudo_labels"]) for r in rows if r.get("with_pseudo_labels") is not None]
    if not pairs:
        return {}
    gains = [100 * (after - before) for before, after in pairs]
    spread = statistics.stdev(gains) if len(gains) > 1 else None
    return {
        "alone_mean": statistics.mean(100 * a for a, _ in pairs),
        "with_pseudo_labels_mean": statistics.mean(100 * b for _, b in pairs),
        "gain_mean": statistics.mean(gains),
        "gain_stdev": spread,
    }


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    sys.exit(tyro.cli(Figure, description=__doc__).run())

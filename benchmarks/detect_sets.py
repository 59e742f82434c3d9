"""Compare Mask R-CNN with a lambda backbone and with a convolutional one, on small sets, from Imagenette weights.

    python benchmarks/detect_sets.py weights IMAGENETTE BACKBONE OUT     # resnet_rs50 and lambda_resnet50
    python benchmarks/detect_sets.py train SET BACKBONE OUT --seed 0     # for every set, backbone and seed
    python benchmarks/detect_sets.py score SETS OUT/kept --output benchmarks/results/detect-sets.json

Every process does one run, and several may share a GPU. Both backbones train for the same number of steps. An
interrupted run resumes with the same command, and a finished one is not repeated. Training does not need
faster-coco-eval: the detections are in OUT/kept, and `score` evaluates them on any machine.
"""

import json
import math
import os
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from PIL import Image

from lambdanets.data.decode import decode
from lambdanets.detect.annotations import read_scenes
from lambdanets.detect.coco import DetectionSet, annotations_of, open_set, splits_of
from lambdanets.detect.config import DetectConfig, Heads
from lambdanets.detect.draw import draw, true_objects
from lambdanets.detect.precision import average_precision
from lambdanets.detect.results import Result, by_picture, read_results, write_results
from lambdanets.detect.task import DETECTIONS, Detect
from lambdanets.detect.use import look_through, open_detector
from lambdanets.machine import describe
from lambdanets.options import chosen_device, optional
from lambdanets.recipes.coco import RATE, small_set
from lambdanets.recipes.small import imagenette
from lambdanets.report.log import Log, number, read_log
from lambdanets.runs import CONFIG, LOG
from lambdanets.train.classify import Classify
from lambdanets.train.config import ModelConfig, TrainConfig
from lambdanets.train.loop import fit

ABOUT, WEIGHTS = "about.json", "weights.safetensors"
EMBEDDING_STD = 0.02  # short schedules hardly change embeddings that start at the paper's 1.0
WARMUP = 0.1  # of the steps
HEADS: dict[str, dict[str, Any]] = {  # settings of a set that differ from the recipe
    "nuclei-seg": {"detections": 300, "anchors": (8.0, 16.0, 32.0, 64.0, 128.0)},
}
SAMPLED = 256  # proposals per image for training the heads
TINY_BACKBONES = {"lambda_resnet50": (), "resnet_rs50": ("placement='CCCC'", "se=True")}
TINY_OPTIONS = ("stem='strided'", "widths=(8,8,16,16)", "depths=(1,1,1,1)", "scope=5")
TINY_HEADS = {"channels": 16, "hidden": 32, "convolutions": 1, "mask_convolutions": 1, "proposals": 50, "sampled": 16}
SHOWN_SCORE, SHOWN_SIDE = 0.5, 560
SMALL = 32**2  # square pixels, as in COCO
SAME = (
    "steps",
    "batch_size",
    "size",
    "rate",
    "precision",
    "together",
    "tiny",
)  # settings that all runs on a set must share
FACTS = ("examples_per_second", "training_seconds", "seconds", "peak_gib", "parameters")


def model_config(backbone: str, tiny: bool) -> ModelConfig:
    if not tiny:
        return ModelConfig(name=backbone, embedding_std=EMBEDDING_STD)
    if backbone not in TINY_BACKBONES:
        raise ValueError(f"{backbone} has no tiny version; choose {' or '.join(TINY_BACKBONES)}")
    options = (*TINY_OPTIONS, *TINY_BACKBONES[backbone])
    return ModelConfig(name="lambda_resnet_tiny", embedding_std=EMBEDDING_STD, options=options)


@dataclass(frozen=True)
class Weights:
    """Train a classifier on Imagenette, from whose weights a backbone starts."""

    data: Annotated[str, tyro.conf.Positional]
    """Imagenette, as a folder or shards."""
    backbone: Annotated[str, tyro.conf.Positional]
    """Name of a network (`lambdanets models`)."""
    out: Annotated[Path, tyro.conf.Positional]
    """Folder of all runs."""
    epochs: float = 30.0
    batch_size: int = 256
    image_size: int = 128
    seed: int = 0
    workers: Annotated[int | None, optional("N")] = None
    device: Annotated[str | None, optional("DEVICE")] = None
    tiny: bool = False
    """Use a tiny network at 32 pixels, to test the script."""

    def config(self) -> TrainConfig:
        base = imagenette()
        size = 32 if self.tiny else self.image_size
        return replace(
            base,
            out=self.out / "weights" / self.backbone,
            seed=self.seed,
            model=replace(
                model_config(self.backbone, self.tiny),
                image_size=size,
                drop_rate=base.model.drop_rate,
                drop_path_rate=base.model.drop_path_rate,
            ),
            data=replace(base.data, path=self.data, workers=self.workers, cache="memory"),
            epochs=self.epochs,
            schedule=replace(base.schedule, warmup_epochs=WARMUP * self.epochs),
            batch_size=self.batch_size,
            remainder="drop",
            device=self.device,
            precision="float32" if self.tiny else base.precision,
            evaluate_every=10**6,
            keep=1,
        )

    def run(self) -> int:
        kept = self.out / "kept" / f"weights-{self.backbone}"
        if (kept / ABOUT).is_file():
            return 0
        config = self.config()
        result = fit(Classify(config), config, resume=True)
        if not result.finished:
            return 3
        top1 = result.scores["ema"]["validation"]["top1"]
        facts = {"backbone": self.backbone, "epochs": self.epochs, "image_size": config.model.image_size, "top1": top1}
        write(kept / ABOUT, facts | of_log(read_log(config.out / LOG)) | describe(chosen_device(self.device)))
        return 0


@dataclass(frozen=True)
class Train:
    """Train a detector from these weights, for one set, one backbone and one seed."""

    data: Annotated[Path, tyro.conf.Positional]
    """A folder with COCO annotations of training and validation images; the name of the folder names the set."""
    backbone: Annotated[str, tyro.conf.Positional]
    """The backbone that `weights` was run with."""
    out: Annotated[Path, tyro.conf.Positional]
    """Folder of all runs."""
    seed: int = 0
    steps: int = 800
    batch_size: int = 8
    size: int = 512
    """Side length of the padded images, in pixels."""
    rate: float = RATE
    """Peak learning rate for a batch of 256; it scales with the batch size."""
    together: int = 1
    """Number of runs that share the GPU, stored with the speeds."""
    pictures: int = 4
    """Number of validation images to draw."""
    workers: Annotated[int | None, optional("N")] = None
    device: Annotated[str | None, optional("DEVICE")] = None
    tiny: bool = False
    """Use a tiny network at 96 pixels, to test the script."""

    @property
    def set_name(self) -> str:
        return self.data.resolve().name

    @property
    def name(self) -> str:
        return f"{self.set_name}-{self.backbone}-{self.seed}"

    def heads(self, usual: Heads) -> Heads:
        heads = replace(usual, sampled=SAMPLED, **HEADS.get(self.set_name, {}))
        return replace(heads, **TINY_HEADS, least_score=0.0) if self.tiny else heads

    def config(self) -> DetectConfig:
        base = small_set()
        weights = self.out / "weights" / self.backbone / WEIGHTS
        if not weights.is_file():
            raise FileNotFoundError(f"{weights} does not exist: run `detect_sets.py weights` first")
        base = replace(
            base,
            out=self.out / "runs" / self.name,
            seed=self.seed,
            model=replace(model_config(self.backbone, self.tiny), pretrained=str(weights)),
            heads=self.heads(base.heads),
            data=replace(base.data, path=str(self.data), workers=self.workers),
            batch_size=self.batch_size,
            remainder="drop",
            micro_batch=self.batch_size,  # a smaller one would change batch norm
            size=96 if self.tiny else self.size,
            device=self.device,
            precision="float32" if self.tiny else base.precision,
            evaluate_every=10**6,
            checkpoint_minutes=3.0,
            keep=1,
        )
        epochs = self.steps / max(1, Detect(base).examples // self.batch_size)
        schedule = replace(base.schedule, rate=self.rate, warmup_epochs=WARMUP * epochs)
        return replace(base, epochs=epochs, schedule=schedule)

    def run(self) -> int:
        kept = self.out / "kept" / self.name
        if (kept / ABOUT).is_file():
            return 0
        config = self.config()
        task = Detect(config)
        result = fit(task, config, resume=True)
        if not result.finished:
            return 3
        kept.mkdir(parents=True, exist_ok=True)
        for name in (LOG, CONFIG):
            (kept / name).write_bytes((config.out / name).read_bytes())
        splits = [split for split in splits_of(str(self.data)) if split != "train"] or [task.split]
        for split in splits:
            found = read_results(config.out / DETECTIONS) if split == task.split else self.look(config, split)
            write_results(kept / f"detections-{split}.json", found)
        draw_some(task, read_results(config.out / DETECTIONS), kept, self.pictures)
        facts = {"set": self.set_name, "backbone": self.backbone, "seed": self.seed, "splits": splits}
        facts |= {"steps": result.steps, "batch_size": self.batch_size, "size": config.size, "rate": self.rate}
        facts |= {"precision": config.precision, "together": self.together, "detections": config.heads.detections}
        facts |= {"tiny": self.tiny, "skipped_steps": result.skipped, "masks": task.masks}
        write(kept / ABOUT, facts | of_log(read_log(config.out / LOG)) | describe(chosen_device(self.device)))
        return 0

    def look(self, config: DetectConfig, split: str) -> list[Result]:
        """Return the detections in another split of the set."""
        trained = open_detector(str(config.out), device=self.device, precision=config.precision)
        about = trained.about
        data = open_set(str(self.data), split, masks="yes" if about.masks else "no", categories=about.categories)
        results: list[Result] = []
        for one in look_through(trained, data, batch_size=config.evaluate_batch):
            if one.error:
                raise ValueError(f"{data.name(one.index)}: {one.error}")
            results += [found.as_coco(data.scenes.pictures[one.index].id, about.categories) for found in one.found]
        return results


def of_log(log: Log) -> dict[str, Any]:
    """Return the cost of a run. The speed is the median of the log after the first steps, which include the warmup."""
    speeds = [speed for _, speed in log.curve("examples_per_second")]
    peak = [number(one.get("peak_gib")) for one in log.evaluated("ema")]
    return {
        "parameters": log.start["parameters"],
        "examples_per_second": statistics.median(speeds[1:] or speeds),
        "training_seconds": number(log.steps[-1]["time"]),
        "seconds": log.seconds,
        "peak_gib": peak[-1] if peak else None,
        "resumed": len(log.resumed),
    }


def draw_some(task: Detect, results: list[Result], folder: Path, count: int) -> None:
    """Draw validation images with the annotations on the left and the detections on the right."""
    data: DetectionSet = task.evaluated
    found = by_picture(results, data.scenes.categories)
    there = [i for i in (task.held if len(task.held) else range(len(data))) if len(data.scenes.pictures[i].labels_N)]
    for place in np.linspace(0, len(there) - 1, min(count, len(there))).round().astype(int).tolist():
        picture, read = data.scenes.pictures[there[place]], data.read(int(there[place]))
        image = Image.fromarray(read) if isinstance(read, np.ndarray) else decode(read, exif_orientation=False)
        sure = [one for one in found.get(picture.id, ()) if one.score >= SHOWN_SCORE]
        left = draw(image, true_objects(picture, data.scenes.masks), data.class_names, scores=False, side=SHOWN_SIDE)
        right = draw(image, sure, data.class_names, side=SHOWN_SIDE)
        both = Image.new("RGB", (left.width + right.width + 8, left.height), (255, 255, 255))
        both.paste(left, (0, 0))
        both.paste(right, (left.width + 8, 0))
        both.save(folder / f"picture-{place:04d}.jpg", quality=85)


@dataclass(frozen=True)
class Score:
    """Compute the average precision of all runs, and means over seeds."""

    data: Annotated[Path, tyro.conf.Positional]
    """Folder with the sets."""
    kept: Annotated[Path, tyro.conf.Positional]
    """The detections of the runs: OUT/kept."""
    output: Annotated[Path | None, optional("FILE")] = None

    def run(self) -> int:
        abouts = {path.parent: json.loads(path.read_text()) for path in sorted(self.kept.glob("*/" + ABOUT))}
        runs = {folder: about for folder, about in abouts.items() if "set" in about}
        if not runs:
            raise ValueError(f"{self.kept} contains no finished run: run `detect_sets.py train` first")
        rows, sets = [], {}
        for folder, about in runs.items():
            first = sets.setdefault(about["set"], {key: about[key] for key in SAME} | {"splits": {}})
            other = [f"{key} {about[key]} instead of {first[key]}" for key in SAME if about[key] != first[key]]
            if other:
                raise ValueError(f"{folder} differs from the other runs on {about['set']}: {', '.join(other)}")
            for split in about["splits"]:
                facts, numbers = self.measure(folder, about, split)
                first["splits"][split] = facts
                rows.append(
                    {key: about[key] for key in ("set", "backbone", "seed", *FACTS)} | {"split": split} | numbers
                )
                print(f"{folder.name}, {split}: {json.dumps(numbers)}", flush=True)
        last = max(runs.values(), key=lambda about: about["date"])
        found = {"name": "sets", **{key: last[key] for key in ("date", "commit", "machine", "versions")}}
        told = ("top1", "epochs", "image_size", *FACTS)
        starts = [about for about in abouts.values() if "top1" in about]
        found["weights"] = {about["backbone"]: {key: about[key] for key in told} for about in starts}
        found |= {"sets": sets, "means": means(rows), "rows": rows}
        if self.output is None:
            print(json.dumps(found, indent=1))
        else:
            write(self.output, found)
        return 0

    def measure(
        self, folder: Path, about: dict[str, Any], split: str
    ) -> tuple[dict[str, int], dict[str, float | None]]:
        place = annotations_of(self.data / about["set"], split)
        if place is None:
            raise FileNotFoundError(f"{self.data / about['set']} has no {split} annotations")
        results = read_results(folder / f"detections-{split}.json")
        scenes = read_scenes(place[1], None, masks="auto")
        masks = scenes.masks and (about.get("masks") or any("segmentation" in one for one in results))
        truth = scenes.as_coco()
        scores = average_precision(truth, results, masks=masks, detections=about["detections"])
        crowds = sum(int(picture.crowd_N.sum()) for picture in scenes.pictures)
        small = sum(one["area"] < SMALL and not one.get("iscrowd") for one in truth["annotations"])
        facts = {"pictures": len(scenes), "objects": scenes.objects, "crowds": crowds, "small": small}
        return facts, {key: value if math.isfinite(value) else None for key, value in scores.numbers.items()}


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return means over seeds, with the minimum and maximum of every AP."""
    found = []
    for key in dict.fromkeys((row["set"], row["split"], row["backbone"]) for row in rows):
        chosen = [row for row in rows if (row["set"], row["split"], row["backbone"]) == key]
        one: dict[str, Any] = dict(zip(("set", "split", "backbone"), key, strict=True))
        one["seeds"] = [row["seed"] for row in chosen]
        for name in chosen[0]:
            values = [row[name] for row in chosen]
            if name in one or name == "seed":
                continue
            whole = all(value is not None for value in values)
            one[name] = statistics.mean(values) if whole else None
            if whole and name.startswith(("box_", "mask_")):
                one[f"{name}_range"] = [min(values), max(values)]
        found.append(one)
    return found


def write(path: Path, found: dict[str, Any]) -> None:
    """Write a file under a temporary name and rename it when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(part, path)


COMMANDS = {"weights": Weights, "train": Train, "score": Score}


def main(words: list[str]) -> int:
    return tyro.extras.subcommand_cli_from_dict(COMMANDS, args=words, description=__doc__).run()


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    sys.exit(main(sys.argv[1:]))

"""Detection as a task of the training loop."""

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from lambdanets.data.loader import LoaderOptions
from lambdanets.data.preprocessing import Preprocessing
from lambdanets.data.split import OWN_HELD_OUT, held_out
from lambdanets.detect import precision
from lambdanets.detect.coco import DetectionSet, open_set, splits_of
from lambdanets.detect.config import DetectConfig
from lambdanets.detect.loader import SceneBatch, SceneLoader
from lambdanets.detect.network import Detector, make_detector
from lambdanets.detect.results import Result, detections, write_results
from lambdanets.detect.transforms import Fitting, Training
from lambdanets.detect.weights import about, save_detector
from lambdanets.files import write_text
from lambdanets.runs import RUN_WEIGHTS
from lambdanets.train.classify import reader_options
from lambdanets.train.distributed import World
from lambdanets.train.identity import labels_digest
from lambdanets.train.task import Outcome, Share, Task

DETECTIONS, PROBLEMS = "detections.json", "problems.txt"
SHOWN_PROBLEMS = 50  # in the log; problems.txt has all


class Detect(Task):
    """Task that trains a detector, with masks if the annotations have them."""

    not_captured = "images have different numbers of objects"

    def __init__(self, config: DetectConfig) -> None:
        self.config, data = config, config.data
        self.data = open_set(data.path, "train", images=data.images, masks=data.masks)
        scenes = self.data.scenes
        self.masks = scenes.masks
        self.score = "mask_ap" if self.masks else "box_ap"
        if (config.early_stopping or config.keep_best) and not precision.available():
            raise ValueError(f"early_stopping and keep_best need average precision, and {precision.MISSING}")
        chosen = np.array(
            [i for i, picture in enumerate(scenes.pictures) if data.empty or (~picture.crowd_N).any()], np.int64
        )
        self.indices, self.held = chosen, np.empty(0, np.int64)
        if data.validation is not None or "validation" in splits_of(data.path):
            self.split = "validation"
            where, images = (
                (data.validation, data.validation_images) if data.validation is not None else (data.path, None)
            )
            split = "validation" if "validation" in splits_of(where) else "train"
            self.evaluated = open_set(
                where, split, images=images, masks="yes" if self.masks else "no", categories=scenes.categories
            )
        else:
            self.split, self.evaluated = "held_out", self.data
            names = [scenes.pictures[i].name for i in chosen]
            kept, held = held_out(np.zeros(len(chosen)), OWN_HELD_OUT, names=names)
            self.indices, self.held = chosen[kept], chosen[held]
        self.examples = len(self.indices)
        self.preprocessing = Preprocessing(mean=data.mean, std=data.std, size=config.size, crop=1.0)
        self.loaders: dict[Any, SceneLoader] = {}
        self.noticed: list[dict[str, Any]] = [
            {"event": "bad_annotation", "name": problem.where, "reason": problem.reason}
            for problem in self.problems[:SHOWN_PROBLEMS]
        ]
        self.results: list[Result] | None = None  # of the final evaluation, for the report

    @property
    def problems(self) -> list[Any]:
        others = () if self.evaluated is self.data else self.evaluated.scenes.problems
        return [*self.data.scenes.problems, *others]

    # Training

    def model(self) -> Detector:
        config = self.config
        torch.backends.cudnn.benchmark = False  # shapes in the heads change in every step
        return make_detector(
            config.model,
            config.heads,
            len(self.data.scenes.categories),
            masks=self.masks,
            size=config.size,
            preprocessing=self.preprocessing,
            channels_last=config.channels_last,
        )

    def batches(self, epoch: int, first_step: int, share: Share) -> Iterator[Any]:
        key = ("train", share.micro_batch)
        if key not in self.loaders:
            transform = Training(self.config.size, self.config.jitter, self.masks)
            options = self.loader_options(share.rank, share.world, share.micro_batch)
            options = replace(options, parts=share.parts, remainder=share.remainder)
            self.loaders[key] = SceneLoader(
                self.data, transform, self.config.size, options, indices=self.indices, training=True
            )
        for batch in self.loaders[key].epoch(epoch, first_step * share.parts):
            assert isinstance(batch, SceneBatch)
            self.notice(batch)
            yield batch.images, list(batch.targets), list(batch.sizes)

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        images, targets, sizes = batch
        losses = model(images, targets, sizes)
        total = torch.stack([loss.float() if loss.dtype != torch.float64 else loss for loss in losses.values()]).sum()
        return Outcome(total, {name: loss.detach() * len(images) for name, loss in losses.items()}, len(images))

    # Evaluation

    def evaluate(self, model: nn.Module, world: World, final: bool) -> dict[str, dict[str, float]]:
        found: list[tuple[int, list[Result]]] = []
        memory = torch.cuda.max_memory_allocated() if world.device.type == "cuda" else 0  # peak of training
        for batch in self.evaluation_loader(world).epoch(0):
            assert isinstance(batch, SceneBatch)
            self.notice(batch)
            if len(batch):
                images = batch.images.to(world.device, non_blocking=True)
                found += self.answers(model(images, sizes=batch.sizes), batch)
        numbers: dict[str, float] = {}
        if world.size > 1:
            found = [one for part in world.gather(found) for one in part]
        if world.main:
            numbers = self.measured(sorted(found, key=lambda one: one[0]), keep=final and self.results is None)
            if memory:
                numbers["peak_gib"] = memory / 2**30
        return {self.split: world.share(numbers)}

    def answers(self, outputs: list[Any], batch: SceneBatch) -> list[tuple[int, list[Result]]]:
        scenes = self.evaluated.scenes
        found = []
        for output, size, index in zip(outputs, batch.sizes, batch.indices.tolist(), strict=True):
            picture = scenes.pictures[index]
            one = detections(output, size, picture.size)
            found.append((index, [detection.as_coco(picture.id, scenes.categories) for detection in one]))
        return found

    def measured(self, found: list[tuple[int, list[Result]]], keep: bool) -> dict[str, float]:
        results = [one for _, part in found for one in part]
        numbers: dict[str, float] = {}
        if precision.available():
            truth = self.evaluated.scenes.as_coco(index for index, _ in found)
            scores = precision.average_precision(
                truth, results, masks=self.masks, detections=self.config.heads.detections
            )
            numbers = scores.numbers
        elif not any(event.get("event") == "no_evaluator" for event in self.noticed):
            self.noticed.append({"event": "no_evaluator", "reason": precision.MISSING})
        if keep:
            self.results = results
        return numbers | {"detections": len(results) / max(len(found), 1), "examples": len(found)}

    def evaluation_loader(self, world: World) -> SceneLoader:
        if "evaluation" not in self.loaders:
            options = self.loader_options(world.rank, world.size, self.config.evaluate_batch, self.examples)
            indices = self.held if self.split == "held_out" else None
            self.loaders["evaluation"] = SceneLoader(
                self.evaluated, Fitting(self.config.size), self.config.size, options, indices=indices, training=False
            )
        return self.loaders["evaluation"]

    # Options, log and files

    def loader_options(self, rank: int, world: int, batch_size: int, others: int = 0) -> LoaderOptions:
        return replace(reader_options(self.config, self.config.data, rank, world, batch_size, others), prefetch=2)

    def notice(self, batch: SceneBatch) -> None:
        self.noticed += [{"event": "broken_image", "name": one.name, "reason": one.reason} for one in batch.broken]

    def events(self) -> list[dict[str, Any]]:
        found, self.noticed = self.noticed, []
        return found

    def describe(self) -> dict[str, Any]:
        evaluated = len(self.held) if self.split == "held_out" else len(self.evaluated)
        return {
            "classes": len(self.data.scenes.categories),
            "objects": self.data.scenes.objects,
            "masks": self.masks,
            "evaluated": {self.split: evaluated},
            "bad_annotations": len(self.problems),
        }

    def identity(self) -> dict[str, Any]:
        pictures = [self.data.scenes.pictures[i] for i in self.indices]
        objects = [array for picture in pictures for array in (picture.labels_N, picture.boxes_N4)]
        return {
            "classes": self.data.scenes.class_names,
            "images": len(pictures),
            "objects": sum(len(picture.labels_N) for picture in pictures),
            "labels": labels_digest(*objects),
        }

    def save(
        self,
        folder: Path,
        moment: Literal["start", "end"],
        models: dict[str, nn.Module],
        scores: dict[str, dict[str, dict[str, float]]],
    ) -> None:
        if moment == "start":
            if self.problems:
                write_text(folder / PROBLEMS, "".join(f"{problem}\n" for problem in self.problems))
            return
        for name, model in models.items():
            self.save_weights(model, folder / RUN_WEIGHTS[name], scores[name])
        if "ema" not in models:
            os.replace(folder / RUN_WEIGHTS["raw"], folder / RUN_WEIGHTS["ema"])
        write_results(folder / DETECTIONS, self.results or [])

    def save_weights(self, model: nn.Module, path: Path, scores: dict[str, dict[str, float]]) -> None:
        assert isinstance(model, Detector)
        metrics = {
            f"{split}_{key}": value
            for split, numbers in scores.items()
            for key, value in numbers.items()
            if math.isfinite(value)
        }
        save_detector(model, path, about(self.config, self.data.scenes.categories, self.masks, metrics))

    def close(self) -> None:
        self.loaders.clear()  # stops their worker processes


def evaluated_set(config: DetectConfig) -> tuple[DetectionSet, np.ndarray, str]:
    """Return the dataset that a run was evaluated on, the indices of the images, and the name of the split."""
    task = Detect(config)
    held = task.split == "held_out"
    return task.evaluated, task.held if held else np.arange(len(task.evaluated)), task.split

"""Measurements for the rules of `plan`: properties of the dataset and the machine, and timed training steps."""

import os
import statistics
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from lambdanets.data.cache import available_memory
from lambdanets.data.check import class_counts
from lambdanets.data.decode import BrokenImageError, open_image
from lambdanets.data.preprocessing import Preprocessing
from lambdanets.data.source import Source, open_source, splits_of
from lambdanets.data.transforms import evaluation
from lambdanets.models.packaged import NONE_PACKAGED, PACKAGED, default_network, packaged_card, packaged_weights
from lambdanets.models.pretrained import read_description
from lambdanets.models.registry import configure, has_only_convolutions, with_placement
from lambdanets.options import chosen_device
from lambdanets.report.show import percent
from lambdanets.runs import CONFIG, WEIGHTS
from lambdanets.train.classify import Classify
from lambdanets.train.config import TrainConfig
from lambdanets.train.plan import SMALL_SIDE, Facts, Machine, Start
from lambdanets.train.precision import autocast
from lambdanets.train.prefetch import on_device
from lambdanets.train.task import Share

SAMPLE, LOOKED_AT = 200, 32  # images whose size is read; those of them whose pixels are read
SIDE = 32  # side to which these are resized
COLOURLESS = 8  # largest difference between channels of a grey image after JPEG compression
# Settings of `model.` that weights of another network do not fit, and arguments of a network that training sets.
OTHER_NETWORK = ("placement", "layer", "embedding_std", "options")
SET_BY_TRAINING = frozenset({"num_classes", "in_chans", "image_size", "drop_rate", "drop_path_rate"})
STEPS = 5  # timed steps, after one that is not timed


def look_at(data: str, validation: str | None = None) -> Facts:
    """Count the images of each class and read a sample of them. Raises ValueError if there is nothing to train on."""
    check_no_run(Path(data).expanduser())
    source = open_source(data, split="train")
    labelled = np.flatnonzero(source.labels >= 0)
    if not len(labelled):
        raise ValueError(f"{data}: no image has a label. Sort the images into one folder per class: {data}/CLASS/*.jpg")
    if len(source.class_names) < 2:
        raise ValueError(
            f"{data} has {len(source.class_names)} class; training needs at least two: add images of another class, in "
            f"a folder of images one folder per class, {data}/CLASS/*.jpg"
        )
    sizes, pictures = sample(source, labelled)
    if not sizes:
        raise ValueError(f"{data}: none of {min(SAMPLE, len(labelled))} sampled images can be read")
    grey = bool(pictures) and all(int(np.ptp(p.astype(np.int16), axis=2).max()) <= COLOURLESS for p in pictures)
    values = np.stack(pictures) / 255 if pictures else np.full(1, 0.5)
    return Facts(
        path=data,
        class_sizes=tuple(class_counts(source).items()),
        short_side=int(np.median([min(size) for size in sizes])),
        pixels=int(np.median([width * height for width, height in sizes])),
        grey=grey,
        mean=round(float(values.mean()), 3),
        std=max(0.05, round(float(values.std()), 3)),
        validation=validation_images(data, validation),
    )


def check_no_run(folder: Path) -> None:
    if not (folder / CONFIG).is_file():
        return
    if (folder / WEIGHTS).is_file():
        raise ValueError(
            f"{folder} is the folder of a run, not of images: use its weights with `lambdanets predict {folder} IMAGES`"
        )
    raise ValueError(
        f"{folder} is the folder of a run, not of images: resume it with `lambdanets train resume {folder}`"
    )


def validation_images(data: str, validation: str | None) -> int:
    """Count the labelled validation images, found in the same way as by `Classify`."""
    if validation is not None:
        split = "validation" if "validation" in splits_of(validation) else "train"
        return int((open_source(validation, split=split).labels >= 0).sum())
    if "validation" not in splits_of(data):
        return 0
    return int((open_source(data, split="validation").labels >= 0).sum())


def sample(source: Source, indices: np.ndarray) -> tuple[list[tuple[int, int]], list[np.ndarray]]:
    """Return the sizes (width, height) of some images, and reduced pixels [SIDE, SIDE, 3] of fewer; skip unreadable
    images."""
    chosen = indices[np.linspace(0, len(indices) - 1, min(SAMPLE, len(indices))).astype(int)]
    every = max(1, len(chosen) // LOOKED_AT)
    reduce = evaluation(Preprocessing((0.0,) * 3, (1.0,) * 3, SIDE, 1.0, "bilinear", True))
    sizes, pictures = [], []
    for number, index in enumerate(chosen):
        try:
            data = source.read(int(index))
            image = Image.fromarray(data) if isinstance(data, np.ndarray) else open_image(data)
            size = image.size
            if number % every == 0:
                image.draft(image.mode, (4 * SIDE, 4 * SIDE))  # decodes a large JPEG at a fraction of its resolution
                pictures.append(reduce(image))
            sizes.append(size)
        except (BrokenImageError, OSError):
            continue
    return sizes, pictures


def find_start(facts: Facts, given: Mapping[str, Any]) -> Start | None:
    """Return the trained weights that training starts from: those that are given, or those that come with the package.

    None where there are none, where the images are smaller than photographs (unless weights are given), or where given
    settings describe another network.
    """
    where, name = given.get("model.pretrained"), given.get("model.name")
    if any(f"model.{setting}" in given for setting in OTHER_NETWORK) or (where not in (None, PACKAGED) and name):
        return None
    if where is None and facts.short_side <= SMALL_SIDE:
        return None
    if where in (None, PACKAGED):
        name = name or default_network()
        path = None if name is None else packaged_weights(name)
        if path is None and where is None:
            return None
        if name is None:
            raise ValueError(f"model.pretrained is {PACKAGED!r}, and {NONE_PACKAGED}")
        if path is None:
            packaged_card(name)  # raises
        assert path is not None
        return start_of(PACKAGED, path)
    try:
        return start_of(str(where), where)
    except ValueError as error:
        raise ValueError(f"{error}. For weights without a description, also pass --model.name") from error


def start_of(where: str, path: str | Path) -> Start:
    """Describe weights. Raise ValueError for weights without a description of their network."""
    found = read_description(path)
    arguments = {key: value for key, value in found.arguments.items() if key not in SET_BY_TRAINING}
    config = configure(found.name, **with_placement(found.name, arguments))
    scopes = config.scope if isinstance(config.scope, tuple) else (config.scope,)
    resizable = has_only_convolutions(config) or (config.layer == "lambda" and None not in scopes)
    top1, images = found.card.metrics.get("top1"), found.card.examples
    about = f"top-1 {percent(top1, 1)}{f' of {images:,} images' if images else ''}" if top1 is not None else ""
    return Start(where, found.name, arguments, found.preprocessing, resizable, about)


def machine_of(device: str | None) -> Machine:
    """Return the properties of this machine."""
    found = chosen_device(device)
    memory = available_memory() or 2**33
    if found.type == "cuda":
        return Machine("cuda", torch.cuda.get_device_name(found), os.cpu_count() or 1, memory)
    return Machine("cpu", cores=torch.get_num_threads(), memory=memory)


def measure(config: TrainConfig) -> float:
    """Return the training images per second including reading: the median of a few steps after the first."""
    device = chosen_device(config.device)
    config = replace(config, data=replace(config.data, max_broken=1.0))  # a few images say nothing about the dataset
    task = Classify(config)
    with closing(task):
        model = task.model().to(device).train()
        if config.channels_last:
            model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        size = min(config.micro_batch or config.batch_size, task.examples)
        while True:
            try:
                return size / seconds_of_step(task, model, size, config)
            except torch.OutOfMemoryError:  # the run also falls back to micro-batches
                if size == 1:
                    raise
                size //= 2
            finally:
                if device.type == "cuda":
                    torch.cuda.empty_cache()


def seconds_of_step(task: Classify, model: nn.Module, size: int, config: TrainConfig) -> float:
    """Time the forward and backward pass of `size` images, always the same ones, so that few are decoded."""
    device = chosen_device(config.device)
    task.close()
    task.indices, task.examples = task.indices[:size], size
    times = []
    for epoch in range(STEPS + 1):
        began = time.perf_counter()
        for batch in on_device(task.batches(epoch, 0, Share(0, 1, size, 1, "carry")), device):
            with autocast(config.precision, device):
                outcome = task.loss(model, batch)
            outcome.loss.backward()
            model.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])  # other jobs may slow the machine down

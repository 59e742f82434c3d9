"""Chooses the weights that the page opens by default, and its example images."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lambdanets.data.decode import BrokenImageError, load
from lambdanets.data.source import Source
from lambdanets.detect.coco import open_set
from lambdanets.detect.config import DetectConfig
from lambdanets.detect.quality import quality
from lambdanets.experiments.webdemo.analyse import Finder, Model, open_model
from lambdanets.report.pictures import picture
from lambdanets.runs import LOG, RUN_WEIGHTS
from lambdanets.train.inference.evaluate import find_images
from lambdanets.typed import from_json

RUNS = Path("runs")
MOST_EXAMPLES = 10
MOST_TRIED = 4  # examples on which a detector is tried, which may take seconds each


@dataclass(frozen=True)
class Example:
    """An example image."""

    image: Image.Image
    name: str  # true class, or "" if it is not known


def newest_run(folder: Path = RUNS, *, weights: str = "ema") -> Path:
    """Return the newest finished run in a folder or its subfolders that has lambda layers, or else the newest run."""
    name = RUN_WEIGHTS[weights]
    files = [file for depth in ("*", "*/*") for file in folder.glob(f"{depth}/{name}")]
    newest: Path | None = None
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        with suppress(ValueError, OSError):  # of another version, or damaged
            if open_model(str(file.parent), weights=weights, device="cpu").looks:
                return file.parent
            newest = newest or file.parent
    if newest is None:
        raise ValueError(
            f"there is no finished run in {folder} with {name}: pass weights, or train a network with `lambdanets demo`"
        )
    return newest


def examples(what: str, model: Model, most: int = MOST_EXAMPLES) -> tuple[Example, ...]:
    """Return some of the images that a run was evaluated on; none for weights alone, or if the images were deleted.

    The first one is an image that the network predicts correctly, if there is one among them.
    """
    found: list[tuple[Example, bool]] = []
    if (Path(what).expanduser() / LOG).is_file():
        with suppress(ValueError, OSError):
            found += (
                finder_examples(model, most) if isinstance(model, Finder) else classifier_examples(what, model, most)
            )
    first = next((i for i, (_, right) in enumerate(found) if right), 0)
    return tuple(one for one, _ in [*found[first : first + 1], *found[:first], *found[first + 1 :]])


def classifier_examples(what: str, model: Model, most: int) -> Iterator[tuple[Example, bool]]:
    """Yield examples, and whether the most probable class is the true one."""
    images = find_images(what)
    source = images.source
    for index in spread(images.indices, most):
        label = int(source.labels[index])
        name = source.class_names[label] if label >= 0 else ""
        for one in readable(source, index, name, model.exif_orientation):
            yield one, bool(name) and model.answer(one.image).found[0].name == name


def finder_examples(finder: Finder, most: int) -> Iterator[tuple[Example, bool]]:
    """Yield examples, and whether all objects are found and nothing else; only the first few are tried."""
    about = finder.trained.about
    data = from_json(DetectConfig, about.recipe).data
    where, images = (data.validation, data.validation_images) if data.validation else (data.path, None)
    masks = "yes" if about.masks else "no"
    pictures: Any = open_set(where, "validation", images=images, masks=masks, categories=about.categories)
    for number, index in enumerate(spread(range(len(pictures)), most)):
        for one in readable(pictures, index, "", finder.exif_orientation):
            yield one, number < MOST_TRIED and all_found(finder, pictures, index, one.image)


def all_found(finder: Finder, pictures: Any, index: int, image: Image.Image) -> bool:
    """Return whether a detector finds all objects of an image, at least one, and nothing else."""
    result = quality(pictures.scenes.pictures[index], finder.trained.look(load(image)))
    return result.right > 0 and not result.missed and not result.wrong


def spread(indices: Sequence[int] | np.ndarray, most: int) -> list[int]:
    """Return at most `most` of the indices, evenly spaced."""
    number = min(most, len(indices))
    return [int(indices[i * len(indices) // number]) for i in range(number)]


def readable(source: Source, index: int, name: str, exif_orientation: bool) -> Iterator[Example]:
    """Yield an image as an example, or nothing if it cannot be read."""
    with suppress(BrokenImageError, OSError):
        yield Example(picture(source, index, exif_orientation=exif_orientation), name)

"""Which weights the page shows when nobody says, and pictures to start with."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lambdanets.data.decode import BrokenImageError
from lambdanets.data.source import Source
from lambdanets.detect.coco import open_set
from lambdanets.detect.config import DetectConfig
from lambdanets.experiments.webdemo.analyse import Finder, Model, open_model
from lambdanets.report.pictures import picture
from lambdanets.runs import LOG, RUN_WEIGHTS
from lambdanets.train.inference.evaluate import find_images
from lambdanets.typed import from_json

RUNS = Path("runs")
MOST_EXAMPLES = 10


@dataclass(frozen=True)
class Example:
    """A picture to start with."""

    image: Image.Image
    name: str  # what is in it, if that is known


def newest_run(folder: Path = RUNS, *, weights: str = "ema") -> Path:
    """The newest finished run at or below a folder that has lambda layers to look into; else the newest of all."""
    name = RUN_WEIGHTS[weights]
    files = [file for depth in ("*", "*/*") for file in folder.glob(f"{depth}/{name}")]
    newest: Path | None = None
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        with suppress(ValueError, OSError):  # of another version, or not whole: the next one
            if open_model(str(file.parent), weights=weights, device="cpu").looks:
                return file.parent
            newest = newest or file.parent
    if newest is None:
        raise ValueError(
            f"there is no finished run in {folder} with {name}: give weights, or train with `lambdanets demo`"
        )
    return newest


def examples(what: str, model: Model, most: int = MOST_EXAMPLES) -> tuple[Example, ...]:
    """Pictures that a run was evaluated on, from all over them; none for weights alone, or where they are gone."""
    found: list[Example] = []
    if (Path(what).expanduser() / LOG).is_file():
        with suppress(ValueError, OSError):
            found += (
                finder_examples(model, most) if isinstance(model, Finder) else classifier_examples(what, model, most)
            )
    return tuple(found)


def classifier_examples(what: str, model: Model, most: int) -> Iterator[Example]:
    images = find_images(what)
    source = images.source
    for index in spread(images.indices, most):
        label = int(source.labels[index])
        yield from readable(source, index, source.class_names[label] if label >= 0 else "", model.exif_orientation)


def finder_examples(finder: Finder, most: int) -> Iterator[Example]:
    about = finder.trained.about
    data = from_json(DetectConfig, about.recipe).data
    where, images = (data.validation, data.validation_images) if data.validation else (data.path, None)
    masks = "yes" if about.masks else "no"
    pictures: Any = open_set(where, "validation", images=images, masks=masks, categories=about.categories)
    for index in spread(range(len(pictures)), most):
        yield from readable(pictures, index, "", finder.exif_orientation)


def spread(indices: Sequence[int] | np.ndarray, most: int) -> list[int]:
    """Some of them, from all over."""
    number = min(most, len(indices))
    return [int(indices[i * len(indices) // number]) for i in range(number)]


def readable(source: Source, index: int, name: str, exif_orientation: bool) -> Iterator[Example]:
    with suppress(BrokenImageError, OSError):
        yield Example(picture(source, index, exif_orientation=exif_orientation), name)

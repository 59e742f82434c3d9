"""A trained detector at work: on the pictures of a set, or on any others."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from lambdanets.data.broken import BrokenImages
from lambdanets.data.decode import load, open_image, upright
from lambdanets.data.loader import LoaderOptions
from lambdanets.detect.coco import DetectionSet
from lambdanets.detect.loader import SceneBatch, SceneLoader
from lambdanets.detect.network import Detector
from lambdanets.detect.results import Detection, detections
from lambdanets.detect.transforms import Fitting, fitted
from lambdanets.detect.weights import About, find_weights, load_detector
from lambdanets.options import chosen_device
from lambdanets.train.config import Precision
from lambdanets.train.precision import autocast


@dataclass(frozen=True, eq=False)
class Trained:
    """A detector on its device, in eval mode."""

    detector: Detector
    about: About
    device: torch.device
    precision: Precision = "float32"

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(category.name for category in self.about.categories)

    @torch.inference_mode()
    def outputs(self, images: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> list[dict[str, torch.Tensor]]:
        with autocast(self.precision, self.device):
            return self.detector(images.to(self.device, non_blocking=True), sizes=sizes)

    def look(self, image: Image.Image, size: int | None = None) -> list[Detection]:
        """What is in one picture; its longer side becomes `size` pixels."""
        pixels = self.pixels(image, size)
        shape = (pixels.shape[1], pixels.shape[2])
        (output,) = self.outputs(pixels[None], [shape])
        return detections(output, shape, (image.height, image.width))

    def pixels(self, image: Image.Image, size: int | None = None) -> torch.Tensor:
        """What the detector sees of a picture, uint8 [3, height, width]."""
        height, width = fitted((image.height, image.width), size or self.about.size)
        resized = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(resized)).permute(2, 0, 1)

    def read(self, data: bytes, size: int | None = None) -> tuple[Image.Image, list[Detection]]:
        """What is in an encoded picture, and the picture, upright. A BrokenImageError if it is none."""
        image = load(upright(open_image(data)))
        return image, self.look(image, size)


def open_detector(
    what: str, *, weights: str = "ema", device: str | None = None, precision: Precision = "float32"
) -> Trained:
    """The detector of a run folder or of a safetensors file."""
    chosen = chosen_device(device)
    detector, card = load_detector(find_weights(what, weights))
    dtype = torch.float64 if precision == "float64" else torch.float32
    detector = detector.to(chosen, dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Trained(detector, card, chosen, precision)


@dataclass(frozen=True)
class Answer:
    """What was found in a picture of a set, or why it could not be read."""

    index: int
    found: tuple[Detection, ...] = ()
    error: str = ""
    seconds: float = 0.0  # its part of the network's time


def look_through(
    trained: Trained,
    data: DetectionSet,
    *,
    indices: Sequence[int] | np.ndarray | None = None,
    size: int | None = None,
    batch_size: int = 8,
    workers: int = 0,
) -> Iterator[Answer]:
    """Every picture of a set, in order, batch by batch."""
    canvas = size or trained.about.size
    options = LoaderOptions(batch_size, workers, prefetch=2, broken=BrokenImages(max_fraction=1.0))
    places = None if indices is None else np.asarray(indices)
    loader = SceneLoader(data, Fitting(canvas), canvas, options, indices=places, training=False)
    for batch in loader.epoch(0):
        assert isinstance(batch, SceneBatch)
        answers = {one.index: Answer(one.index, error=one.reason) for one in batch.broken}
        if len(batch):
            began = time.perf_counter()
            outputs = trained.outputs(batch.images, batch.sizes)
            outputs = [{name: tensor.cpu() for name, tensor in one.items()} for one in outputs]
            seconds = (time.perf_counter() - began) / len(batch)
            for output, shape, index in zip(outputs, batch.sizes, batch.indices.tolist(), strict=True):
                found = detections(output, shape, data.scenes.pictures[index].size)
                answers[index] = Answer(index, tuple(found), seconds=seconds)
        yield from (answers[index] for index in sorted(answers))


__all__ = ["Answer", "Trained", "look_through", "open_detector"]

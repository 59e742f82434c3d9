"""Inference with a trained detector, on single images or on a dataset."""

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
    """A trained detector in evaluation mode on its device; `open_detector` loads one.

    Attributes:
        detector: the network.
        about: configuration, classes and image size.
        device: where the network is.
        precision: autocast dtype of the forward pass.
    """

    detector: Detector
    about: About
    device: torch.device
    precision: Precision = "float32"

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; label i is class_names[i - 1]."""
        return tuple(category.name for category in self.about.categories)

    @torch.inference_mode()
    def outputs(self, images: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> list[dict[str, torch.Tensor]]:
        """Return the detector's outputs for padded images uint8 [B, 3, H, W]; see `Detector.forward`."""
        with autocast(self.precision, self.device):
            return self.detector(images.to(self.device, non_blocking=True), sizes=sizes)

    def look(self, image: Image.Image, size: int | None = None) -> list[Detection]:
        """Detect the objects in an image.

        Args:
            image: any PIL image; it is converted to RGB.
            size: the longer side is resized to this many pixels; by default the size of training.
        """
        pixels = self.pixels(image, size)
        shape = (pixels.shape[1], pixels.shape[2])
        (output,) = self.outputs(pixels[None], [shape])
        return detections(output, shape, (image.height, image.width))

    def pixels(self, image: Image.Image, size: int | None = None) -> torch.Tensor:
        """Return the input of the detector for an image, uint8 [3, height, width]."""
        height, width = fitted((image.height, image.width), size or self.about.size)
        resized = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(resized)).permute(2, 0, 1)

    def read(self, data: bytes, size: int | None = None) -> tuple[Image.Image, list[Detection]]:
        """Decode an image, rotate it by its EXIF orientation, and return it with the detected objects.

        Args:
            data: the contents of an image file. A BrokenImageError is raised if it cannot be decoded.
            size: as for `look`.
        """
        image = load(upright(open_image(data)))
        return image, self.look(image, size)


def open_detector(
    what: str, *, weights: str = "ema", device: str | None = None, precision: Precision = "float32"
) -> Trained:
    """Load a trained detector.

    Args:
        what: a run folder or a .safetensors file.
        weights: weights of a run: "ema" (moving average), "raw" (last step) or "best" (best evaluation).
        device: "cpu" or "cuda"; by default a GPU if there is one.
        precision: autocast dtype of the forward pass.

    >>> from pathlib import Path
    >>> from PIL import Image
    >>> from lambdanets.detect.config import Heads
    >>> from lambdanets.detect.scenes import Category
    >>> from lambdanets.detect.use import open_detector
    >>> from lambdanets.detect.weights import About, save_detector
    >>> from lambdanets.train.config import ModelConfig
    >>> backbone = ModelConfig(name="lambda_resnet_tiny", options=("stem='strided'", "widths=(8,8,16,16)", "scope=7"))
    >>> mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    >>> about = About(model=backbone, heads=Heads(channels=16, hidden=32), categories=(Category(1, "cat"),),
    ...               masks=True, size=64, mean=mean, std=std)
    >>> path = save_detector(about.build(), Path("detector.safetensors"), about)  # untrained weights
    >>> trained = open_detector("detector.safetensors", device="cpu")
    >>> detections = trained.look(Image.new("RGB", (80, 60)))
    >>> all(detection.score >= 0.05 for detection in detections)
    True
    """
    chosen = chosen_device(device)
    detector, card = load_detector(find_weights(what, weights))
    dtype = torch.float64 if precision == "float64" else torch.float32
    detector = detector.to(chosen, dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Trained(detector, card, chosen, precision)


@dataclass(frozen=True)
class Answer:
    """The detections in an image of a dataset.

    Attributes:
        index: the index of the image in the dataset.
        found: the detections.
        error: why the image could not be read; empty if it was.
        seconds: the time of the forward pass, divided by the batch size.
    """

    index: int
    found: tuple[Detection, ...] = ()
    error: str = ""
    seconds: float = 0.0


def look_through(
    trained: Trained,
    data: DetectionSet,
    *,
    indices: Sequence[int] | np.ndarray | None = None,
    size: int | None = None,
    batch_size: int = 8,
    workers: int = 0,
) -> Iterator[Answer]:
    """Detect the objects in the images of a dataset; yield one `Answer` per image, in order.

    Args:
        trained: the detector.
        data: the dataset (`open_set`).
        indices: indices of the images; None for all.
        size: the longer side is resized to this many pixels; by default the size of training.
        batch_size: images per forward pass.
        workers: processes that read images; 0 reads in this process.

    >>> import torch
    >>> from lambdanets.detect.coco import open_set
    >>> from lambdanets.detect.config import Heads
    >>> from lambdanets.detect.use import Trained, look_through
    >>> from lambdanets.detect.weights import About
    >>> from lambdanets.train.config import ModelConfig
    >>> backbone = ModelConfig(name="lambda_resnet_tiny", options=("stem='strided'", "widths=(8,8,16,16)", "scope=7"))
    >>> data, mean, std = open_set("shapes", "validation"), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    >>> about = About(model=backbone, heads=Heads(channels=16, hidden=32), categories=data.scenes.categories,
    ...               masks=True, size=96, mean=mean, std=std)
    >>> trained = Trained(about.build().eval(), about, torch.device("cpu"))  # untrained weights
    >>> [answer.index for answer in look_through(trained, data, indices=range(3))]
    [0, 1, 2]
    """
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

"""Loading of detection batches, with the order, replacements and exact resume of `lambdanets.data.loader`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lambdanets.data.broken import Broken
from lambdanets.data.loader import Batch, Examples, Loader, LoaderOptions, empty_bytes
from lambdanets.data.order import Ticket
from lambdanets.data.source import Source
from lambdanets.detect.coco import DetectionSet
from lambdanets.detect.scenes import Scenes
from lambdanets.detect.transforms import Sample, Scene

Targets = tuple[dict[str, Tensor], ...]


@dataclass(frozen=True, eq=False)
class SceneBatch(Batch):
    """Images [B, 3, H, W], padded with zeros beyond `sizes`; `targets` has boxes, labels and packed masks of each."""

    sizes: tuple[tuple[int, int], ...] = ()
    targets: Targets = ()

    def pin_memory(self) -> "SceneBatch":
        targets = tuple({name: tensor.pin_memory() for name, tensor in one.items()} for one in self.targets)
        pinned = (self.images.pin_memory(), self.labels, self.indices)
        return SceneBatch(*pinned, self.broken, self.gave_up, self.sizes, targets)


class SceneExamples(Examples):
    """Reads the images and objects of a batch, in a worker process."""

    def __init__(
        self,
        source: Source,
        scenes: Scenes,
        transform: Callable[[Scene], Sample],
        canvas: int,
        indices: np.ndarray,
        options: LoaderOptions,
        training: bool,
    ) -> None:
        super().__init__(source, transform, indices, options, training)  # type: ignore[arg-type]
        self.scenes, self.canvas = scenes, canvas

    def __getitems__(self, tickets: list[Ticket]) -> SceneBatch:
        samples: list[Sample] = []
        examples: list[int] = []
        broken: list[Broken] = []
        gave_up = False
        for ticket in tickets:
            found: Any = self.sample(*ticket, broken)
            gave_up |= found is None and self.training
            if found is not None:
                samples.append(found[0])
                examples.append(found[1])
        images = empty_bytes((len(samples), self.canvas, self.canvas, 3)).zero_()
        for place, sample in zip(images, samples, strict=True):
            height, width, _ = sample.pixels.shape
            place[:height, :width] = torch.from_numpy(sample.pixels)
        indices = torch.tensor(examples, dtype=torch.int64)
        sizes = tuple((s.pixels.shape[0], s.pixels.shape[1]) for s in samples)
        targets = tuple(target_of(sample) for sample in samples)
        labels = torch.full_like(indices, -1)
        return SceneBatch(images.permute(0, 3, 1, 2), labels, indices, tuple(broken), gave_up, sizes, targets)

    def image(self, index: int) -> tuple[Image.Image, Any]:  # type: ignore[override]
        return super().image(index), self.scenes.pictures[index]


def target_of(sample: Sample) -> dict[str, Tensor]:
    found = {"boxes": sample.boxes_N4, "labels": sample.labels_N}
    return found if sample.packed_NHW is None else found | {"packed": sample.packed_NHW}


class SceneLoader(Loader):
    """Batches of a detection dataset, padded to `canvas` x `canvas` pixels; see `lambdanets.data.loader.Loader`."""

    def __init__(
        self,
        data: DetectionSet,
        transform: Callable[[Scene], Sample],
        canvas: int,
        options: LoaderOptions,
        *,
        indices: np.ndarray | None = None,
        training: bool = True,
    ) -> None:
        super().__init__(data, transform, options, indices=indices, training=training)  # type: ignore[arg-type]
        self.examples = SceneExamples(self.source, data.scenes, transform, canvas, self.indices, options, training)

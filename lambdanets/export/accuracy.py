"""Top-1 accuracy of exported networks on labelled images, and images to calibrate int8 activations."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lambdanets.data.broken import BrokenImages
from lambdanets.data.loader import Loader, LoaderOptions
from lambdanets.data.transforms import evaluation, normalize
from lambdanets.models.pretrained import Card
from lambdanets.train.inference.evaluate import Images, match_classes

BATCH = 32
CALIBRATED = 64  # number of images for calibration


@dataclass(frozen=True)
class LabelledImages:
    """Labelled images as inputs of a network.

    Args:
        images: the result of `find_images`.
        card: preprocessing (with the exported size) and class names of the network.
        channels: number of input channels.
        classes: number of classes.
        most: maximum number of images, evenly spaced.
    """

    images: Images
    card: Card
    channels: int
    classes: int
    most: int

    def batches(self, most: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs [B, C, height, width] and class indices of the network [B], without unreadable images.

        Args:
            most: maximum number of images, evenly spaced; `self.most` if None.
        """
        source = self.images.source
        indices = self.images.indices[np.asarray(source.labels)[self.images.indices] >= 0]
        most = min(most or self.most, self.most)
        if not len(indices):
            raise ValueError(f"{self.images.data} has no labelled images")
        indices = indices[np.linspace(0, len(indices) - 1, min(most, len(indices))).round().astype(int)]
        names = self.card.class_names or tuple(map(str, range(self.classes)))
        places = torch.tensor(match_classes(tuple(source.class_names), names)[0])
        loader = Loader(
            source,
            evaluation(self.card.preprocessing, self.channels),
            LoaderOptions(BATCH, 0, broken=BrokenImages(max_fraction=1.0)),
            indices=indices,
            training=False,
        )
        for batch in loader.epoch(0):
            if len(batch):
                yield normalize(batch.images, self.card.preprocessing, torch.float32).contiguous(), places[batch.labels]

    @torch.no_grad()
    def accuracies(self, runners: Mapping[str, Callable[[Tensor], Tensor]]) -> tuple[dict[str, float], int]:
        """Return the top-1 accuracy (0 to 1) of each runner, and the number of images."""
        right, total = dict.fromkeys(runners, 0), 0
        for images, labels in self.batches():
            total += len(labels)
            for name, runner in runners.items():
                right[name] += int((runner(images).argmax(1) == labels).sum())
        if not total:
            raise ValueError(f"no image of {self.images.data} can be read")
        return {name: count / total for name, count in right.items()}, total

"""Co-training: batches of labelled and pseudo-labelled images, as a task of the training loop."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lambdanets.data.loader import Loader
from lambdanets.data.transforms import training
from lambdanets.files import read_json, write_json
from lambdanets.pseudo.config import CoTrainConfig
from lambdanets.pseudo.source import PseudoSource
from lambdanets.train.classify import Classify
from lambdanets.train.task import Outcome, Share

PSEUDO = "pseudo.json"  # in the folder of a run
PSEUDO_SEED = 0x5EED  # gives the pseudo-labelled images an order of their own


class CoTrain(Classify):
    """Task that trains a classifier on labelled and pseudo-labelled images together.

    Each micro-batch holds labelled images followed by pseudo-labelled ones, in one forward pass. Step k takes the k-th
    batch of either stream. The images of a step depend only on the seed and the step, not on the number of processes,
    micro-batches or workers, or on where a run was resumed.

    Args:
        config: data, network, schedule and pseudo-labels. A ValueError explains what does not fit: classes that differ,
            a batch that `pseudo.ratio` does not divide, images that changed after labelling.

    >>> from pathlib import Path
    >>> from PIL import Image
    >>> from lambdanets import create_model
    >>> from lambdanets.models import Card, Preprocessing, save_weights
    >>> from lambdanets.pseudo.config import CoTrainConfig, PseudoData
    >>> from lambdanets.pseudo.cotrain import CoTrain
    >>> from lambdanets.pseudo.label import LabelOptions, label
    >>> from lambdanets.pseudo.select import Selection, select
    >>> from lambdanets.pseudo.teacher import open_teachers
    >>> from lambdanets.pseudo.units import open_place
    >>> from lambdanets.train.config import DataConfig, ModelConfig
    >>> from lambdanets.train.inference.command import Using
    >>> network = create_model("lambda_resnet_tiny", num_classes=2, image_size=32)
    >>> weights = save_weights(network, Path("teacher.safetensors"), Card(Preprocessing(size=32), ("cat", "dog")))
    >>> for folder in ("data/train/cat", "data/train/dog", "data/val/cat", "data/val/dog", "images/all"):
    ...     Path(folder).mkdir(parents=True)
    ...     for number in range(8):
    ...         Image.new("RGB", (32, 32), (16 * number, len(folder), 0)).save(f"{folder}/{number}.png")
    >>> teacher = open_teachers("teacher.safetensors", Using(device="cpu"))
    >>> done = label(teacher, open_place("images"), Path("labels"), LabelOptions())
    >>> counts = select(Path("labels"), Selection())
    >>> config = CoTrainConfig(
    ...     model=ModelConfig(name="lambda_resnet_tiny", image_size=32),
    ...     data=DataConfig(path="data", workers=0),
    ...     pseudo=PseudoData(path=Path("labels"), ratio=3.0),
    ...     batch_size=8,
    ... )
    >>> facts = CoTrain(config).describe()
    >>> facts["labelled"], facts["pseudo_labelled"], facts["epoch_of"]
    (16, 8, 'labelled')
    """

    not_resident = "co-training reads two sets of images"

    def __init__(self, config: CoTrainConfig) -> None:
        super().__init__(config)
        _ = self.data_path  # raises for data.cache=device
        self.pseudo = config.pseudo
        self.unlabelled = PseudoSource(self.pseudo.path, self.source.class_names, images=self.pseudo.images)
        if self.pseudo.soft and not self.unlabelled.soft:
            raise ValueError(
                f"{self.pseudo.path} has hard labels only: label again with --soft, or remove --pseudo.soft"
            )
        labelled = labelled_part(config.batch_size, self.pseudo.ratio)
        counts = {"labelled": len(self.indices), "pseudo": len(self.unlabelled)}
        each = {"labelled": labelled, "pseudo": config.batch_size - labelled}
        for name, count in counts.items():
            if count < each[name]:
                raise ValueError(
                    f"a step needs {each[name]} {name} images, but there are only {count}: use a smaller batch_size or "
                    f"another pseudo.ratio"
                )
        self.check_selection(config.out)
        self.epoch_of = self.pseudo.epoch
        if self.epoch_of == "longer":
            self.epoch_of = (
                "labelled" if counts["labelled"] * each["pseudo"] >= counts["pseudo"] * labelled else "pseudo"
            )
        self.examples = counts[self.epoch_of] * config.batch_size // each[self.epoch_of]
        self.epoch_steps = self.examples // config.batch_size  # complete batches

    def batches(self, epoch: int, first_step: int, share: Share) -> Iterator[Any]:
        epochs = share.epochs(self.examples)
        first, end = epochs.first(epoch) + first_step, epochs.first(epoch + 1)
        labelled = self.stream("labelled", share).stream(first * share.parts)
        pseudo = self.stream("pseudo", share).stream(first * share.parts)
        for _ in range((end - first) * share.parts):
            mine, others = next(labelled), next(pseudo)
            self.notice(mine)
            self.notice(others)
            targets = self.unlabelled.targets(others.indices) if self.pseudo.soft else others.labels
            yield torch.cat([mine.images, others.images]), mine.labels, targets

    def stream(self, name: str, share: Share) -> Loader:
        key = (name, share.micro_batch)
        if key not in self.loaders:
            size = labelled_part(share.micro_batch, self.pseudo.ratio)
            data = self.config.data
            transform = training(self.size, self.config.augment, data.channels, exif_orientation=data.exif_orientation)
            options = self.loader_options(share.rank, share.world, size)
            mine = max(1, round(options.workers / (1 + self.pseudo.ratio)))  # the streams share the workers
            if name == "labelled":
                options = replace(options, workers=min(mine, options.workers))
                source, indices = self.source, self.indices
            else:
                workers = options.workers and max(1, options.workers - mine)
                seed = options.seed + PSEUDO_SEED
                size = share.micro_batch - size
                options = replace(options, batch_size=size, workers=workers, seed=seed)
                source, indices = self.unlabelled, None
            options = replace(options, parts=share.parts, remainder=share.remainder)
            self.loaders[key] = Loader(source, transform, options, indices=indices)
        return self.loaders[key]

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        images, labels, targets = batch
        logits = model(self.inputs(images)).float()
        mine, others = logits[: len(labels)], logits[len(labels) :]
        smoothing = self.config.label_smoothing
        labelled = F.cross_entropy(mine, labels, label_smoothing=smoothing, reduction="sum")
        pseudo = pseudo_loss(others, targets, smoothing)
        loss = (self.pseudo.labelled_weight * labelled + self.pseudo.weight * pseudo) / len(logits)
        with torch.no_grad():  # the log divides these sums by the whole batch
            best = targets.argmax(1) if targets.ndim == 2 else targets
            sums = {
                "top1": (mine.argmax(1) == labels).sum() * (len(logits) / len(mine)),
                "pseudo_top1": (others.argmax(1) == best).sum() * (len(logits) / len(others)),
                "labelled_loss": labelled * (len(logits) / len(mine)),
                "pseudo_loss": pseudo * (len(logits) / len(others)),
            }
        return Outcome(loss, sums, len(logits))

    def check_selection(self, folder: Path) -> None:
        """Raise if the run in `folder` was started with another selection of pseudo-labels."""
        path = folder / PSEUDO
        if path.is_file() and read_json(path) != {"selection": self.unlabelled.digest}:
            raise ValueError(
                f"the pseudo-labels in {self.pseudo.path} have changed since the run in {folder} started: start a new "
                f"run with another --out"
            )

    def save(self, folder: Path, moment: Literal["start", "end"], models: dict[str, nn.Module], scores: Any) -> None:
        super().save(folder, moment, models, scores)
        if moment == "start":
            write_json(folder / PSEUDO, {"selection": self.unlabelled.digest}, indent=None)

    def notes(self) -> list[str]:
        kind = {"labelled": "labelled", "pseudo": "pseudo-labelled"}[self.epoch_of]
        return [*super().notes(), f"An epoch is one pass over the {kind} images"]

    def describe(self) -> dict[str, Any]:
        return super().describe() | {
            "pseudo_labelled": len(self.unlabelled),
            "labelled": len(self.indices),
            "epoch_of": self.epoch_of,
            "ratio": self.pseudo.ratio,
        }


def pseudo_loss(logits_BC: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Return the sum of the cross entropies of a batch.

    Args:
        logits_BC: the student's outputs.
        targets: classes [B], or the teacher's probabilities [B, C].
        smoothing: label smoothing, applied to classes only.
    """
    if targets.ndim == 1:
        return F.cross_entropy(logits_BC, targets, label_smoothing=smoothing, reduction="sum")
    return -(targets * logits_BC.log_softmax(1)).sum()


def labelled_part(images: int, ratio: float) -> int:
    """Return the number of labelled images in a batch; raise a ValueError unless the ratio divides the batch."""
    labelled = round(images / (1 + ratio))
    if labelled < 1 or labelled == images or abs(labelled * (1 + ratio) - images) > 1e-6 * images:
        raise ValueError(
            f"a batch of {images} cannot be split into labelled and pseudo-labelled images at 1 to {ratio:g}: "
            f"batch_size and micro_batch must be multiples of {1 + ratio:g}"
        )
    return labelled

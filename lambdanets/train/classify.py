"""The image classification task."""

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lambdanets.data.batch_augment import BatchAugment, Mixed
from lambdanets.data.broken import BrokenImages, TooManyBrokenError
from lambdanets.data.loader import Batch, Loader, LoaderOptions
from lambdanets.data.resident import ResidentImages, ResidentLoader, estimated_bytes
from lambdanets.data.source import Source, notes_on, open_source, splits_of, unlabelled_note
from lambdanets.data.split import OWN_HELD_OUT, held_out
from lambdanets.data.transforms import evaluation, normalize, training
from lambdanets.files import whole_path
from lambdanets.layers import RelativePositions
from lambdanets.models.network import Network
from lambdanets.models.pretrained import Card, save_weights
from lambdanets.models.registry import create_model
from lambdanets.models.stored import new_classifiers, only_finite_weights, shorten
from lambdanets.options import chosen_device
from lambdanets.runs import RUN_WEIGHTS
from lambdanets.train.config import RunConfig, TrainConfig
from lambdanets.train.data_path import DEVICE, DataPath, choose_data_path, free_memory
from lambdanets.train.distributed import World
from lambdanets.train.identity import labels_digest, names_digest
from lambdanets.train.task import Outcome, Share, Task
from lambdanets.typed import to_json

PREDICTIONS, START = "predictions.safetensors", "start.safetensors"
MOST_WORKERS = 16
SIZE_STEP = 16  # pixels by which images grow


class ReadingConfig(Protocol):
    """Settings of reading images that all dataset configurations have."""

    @property
    def workers(self) -> int | None: ...
    @property
    def cache(self) -> Literal["auto", "none", "memory", "device"]: ...
    @property
    def max_broken(self) -> float: ...


class Classify(Task):
    """Image classification. `TrainConfig.make_task` returns it; `lambdanets.train.loop.fit` trains it.

    Args:
        config: the settings. The dataset is opened here.

    Raises ValueError if the dataset or its splits do not fit the settings.

    Example:
        >>> from lambdanets.recipes import digits
        >>> from lambdanets.train.classify import Classify
        >>> task = Classify(digits())
        >>> task.examples
        4000
    """

    score = "top1"
    not_resident: str | None = None
    """Reason why a task cannot keep its training images on the device, if any."""
    keeps_unlabelled = False
    """Whether training uses images without a label."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, data = config, config.data
        self.size = config.model.size
        if data.first_size is not None and data.first_size > self.size:
            raise ValueError(
                f"data.first_size {data.first_size} must not be larger than model.image_size {self.size}: use a "
                f"smaller value, or a larger --model.image-size"
            )
        self.largest_epoch = math.ceil(config.epochs) - 1 if data.first_size is not None else 0
        self.test_size = data.test_size or self.size
        self.preprocessing = data.preprocessing(self.test_size)
        self.source = self.open_images(data.path, "train")
        if len(self.source.class_names) < 2:
            raise ValueError(f"{data.path} has {len(self.source.class_names)} class; training needs at least two")
        validation = data.validation
        if validation is None and "validation" in splits_of(data.path):
            validation = data.path
        fraction = data.held_out or (OWN_HELD_OUT if validation is None else 0.0)
        names = [self.source.name(i) for i in range(len(self.source))]
        labelled = np.flatnonzero(self.source.labels >= 0)
        kept, held = held_out(self.source.labels[labelled], fraction, names=[names[i] for i in labelled])
        if fraction and not len(held):
            raise ValueError(
                f"{data.path}: no class has two images, so none can be held out. Add images, or pass --data.validation"
            )
        self.indices = labelled[kept]
        if self.keeps_unlabelled:
            self.indices = np.union1d(self.indices, np.flatnonzero(self.source.labels < 0))
        if not len(self.indices):
            raise ValueError(
                f"data.held_out {fraction:g} leaves no training images of {data.path}: use a smaller value"
            )
        self.examples = len(self.indices)
        self.parts: dict[str, tuple[Source, np.ndarray | None]] = {}  # splits to evaluate
        if len(held):
            self.parts["held_out"] = (self.source, labelled[held])
        if validation is not None:
            elsewhere = data.validation is not None and "validation" not in splits_of(validation)
            source = self.open_images(validation, "train" if elsewhere else "validation")
            if source.class_names != self.source.class_names:
                raise ValueError(different_classes(validation, source, data.path, self.source))
            with_label = np.flatnonzero(source.labels >= 0)
            if not len(with_label):
                raise ValueError(f"{validation} has no labelled images for validation")
            self.parts["validation"] = (source, None if len(with_label) == len(source) else with_label)
        self.loaders: dict[Any, Any] = {}
        self.kept: dict[str, list[Batch]] = {}  # evaluation batches that stay on the device
        self.noticed: list[dict[str, Any]] = []
        self.said_size: int | None = None  # last logged size of training images, if it grows
        self.predictions: dict[str, Tensor] = {}
        self.loaded_classes: int | None = None  # of the weights that training starts from, if they differ

    def open_images(self, where: str, split: str) -> Source:
        """Open the images of a split; their classes are those of the network."""
        return open_source(where, split=split)

    # Training

    def model(self) -> Network:
        config = self.config.model
        arguments = config.arguments()
        arguments |= {"num_classes": len(self.source.class_names), "in_chans": self.config.data.channels}
        with new_classifiers() as found, only_finite_weights():
            network = create_model(config.name, config.pretrained or False, **arguments)
        self.loaded_classes = found[0].classes if found else None
        tables = (module for module in network.modules() if isinstance(module, RelativePositions))
        if self.test_size > self.size and any(table.is_global for table in tables):
            raise ValueError(
                f"data.test_size {self.test_size}: layers with a global scope support at most model.image_size "
                f"{self.size}. Use a local scope, for example --model.options scope=23"
            )
        for module in network.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = config.batch_norm_momentum
        network.set_grad_checkpointing(config.grad_checkpointing)
        if config.freeze is not None:
            network.freeze(config.freeze)
        return network

    @cached_property
    def data_path(self) -> DataPath:
        """Whether the training images are kept on the device. A resumed run keeps this choice."""
        return choose_data_path(self.config, self.estimated_bytes, self.not_resident)

    def estimated_bytes(self) -> int:
        """Estimate the memory of the decoded training and evaluation images on the device in bytes."""
        channels = self.config.data.channels
        shape = self.size, self.size
        training_images = estimated_bytes(self.source, self.indices, shape, self.config.augment, channels)
        evaluated = sum(len(source) if chosen is None else len(chosen) for source, chosen in self.parts.values())
        return training_images + evaluated * self.test_size**2 * channels

    @cached_property
    def resident(self) -> ResidentImages:
        """The training images on the device."""
        data, device = self.config.data, chosen_device(self.config.device)
        return ResidentImages(
            self.source,
            self.indices,
            (self.size, self.size),
            self.config.augment,
            device,
            free_memory(device),
            channels=data.channels,
            exif_orientation=data.exif_orientation,
        )

    @cached_property
    def variation(self) -> BatchAugment | None:
        """Augmentation of batches on the device; None if there is none."""
        augment, resident = self.config.augment, self.data_path.on_device
        if not resident and not augment.on_batches:
            return None
        return BatchAugment(augment, (self.size, self.size), self.config.data.mean, whole=resident)

    def batches(self, epoch: int, first_step: int, share: Share) -> Iterator[Any]:
        """Yield (images, labels), with progressive resizing also their size, with batch augmentation its random
        numbers.

        `images` are pixels, or indices of images on the device.
        """
        first = (share.epochs(self.examples).first(epoch) + first_step) * share.parts
        batches = self.training_loader(share).epoch(epoch, first_step * share.parts)
        grows, size = self.config.data.first_size is not None, self.size_of_epoch(epoch)
        if grows and self.said_size != size:
            self.noticed.append({"event": "image_size", "epoch": epoch, "size": size})
            self.said_size = size
        for number, batch in enumerate(batches, first):
            self.notice(batch)
            numbers: tuple[Any, ...] = (size,) if grows else ()
            if self.variation is not None:
                places = share.epochs(self.examples).places(number, share.micro_batch, share.rank, share.world)
                numbers += self.variation.numbers(self.config.seed, *places)
            yield batch.images, batch.labels, *numbers

    def size_of_epoch(self, epoch: int) -> int:
        """Return the side of training images in pixels: linear in the epoch, rounded down to the first size plus a
        multiple of 16."""
        first, last = self.config.data.first_size or self.size, self.size
        return (
            last if epoch >= self.grown else first + int(epoch / self.grown * (last - first)) // SIZE_STEP * SIZE_STEP
        )

    @property
    def grown(self) -> float:
        """Number of epochs until training images have their full size; the last epoch always has it."""
        return min(self.config.data.growing * self.config.epochs, math.ceil(self.config.epochs) - 1)

    def training_loader(self, share: Share) -> Loader | ResidentLoader:
        key = ("train", share.micro_batch)
        if key not in self.loaders:
            data = self.config.data
            options = self.loader_options(share.rank, share.world, share.micro_batch)
            options = replace(options, parts=share.parts, remainder=share.remainder)
            if self.data_path.on_device:
                self.loaders[key] = ResidentLoader(self.resident, options)
                return self.loaders[key]
            transform = training(self.size, self.config.augment, data.channels, exif_orientation=data.exif_orientation)
            self.loaders[key] = Loader(self.source, transform, options, indices=self.indices)
        return self.loaders[key]

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        images, labels, mixed, size = self.augmented(batch)
        logits = self.logits(model, images, size)
        smoothing = self.config.label_smoothing
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
        if mixed is not None and self.config.augment.mixes:
            others = labels[mixed.partner_B]
            loss = mixed.weight * loss + (1 - mixed.weight) * F.cross_entropy(logits, others, label_smoothing=smoothing)
            labels = torch.where(mixed.weight >= 0.5, labels, others)  # top-1 counts the class with the larger part
        with torch.no_grad():
            right = (logits.argmax(1) == labels).sum()
        return Outcome(loss, {"top1": right}, len(labels))

    def augmented(self, batch: Any) -> tuple[Tensor, Tensor, Mixed | None, int]:
        """Images and labels of a batch after augmentation, how images were mixed, and the size for the network."""
        images, labels, *numbers = batch
        size = numbers.pop(0) if self.config.data.first_size is not None else self.size
        mixed = self.varied(images, *numbers) if numbers else None
        return images if mixed is None else mixed.images, labels, mixed, size

    def logits(self, model: nn.Module, images: Tensor, size: int) -> Tensor:
        """The network's output in float32 for images that are resized to `size` first (progressive resizing)."""
        if size != self.size:
            images = F.interpolate(images.float(), (size, size), mode="bilinear", antialias=True)
        return model(self.inputs(images)).float()

    @torch.no_grad()
    def varied(self, images: Tensor, numbers: Tensor, how: Tensor) -> Mixed:
        """Crop and augment a batch on the device, in float32 also under autocast."""
        assert self.variation is not None
        with torch.autocast(images.device.type, enabled=False):
            if self.data_path.on_device:
                images = self.resident.cropped(images, self.variation, numbers)
            return self.variation(images, numbers, how)

    def inputs(self, images: Tensor) -> Tensor:
        dtype = torch.float64 if self.config.precision == "float64" else torch.float32
        inputs = normalize(images, self.preprocessing, dtype)
        return inputs.contiguous(memory_format=torch.channels_last) if self.config.channels_last else inputs

    # Evaluation

    def evaluate(self, model: nn.Module, world: World, final: bool) -> dict[str, dict[str, float]]:
        splits = list(self.parts) if final else list(self.parts)[:1]
        return {split: self.evaluate_split(model, world, split, final) for split in splits}

    def evaluate_split(self, model: nn.Module, world: World, split: str, final: bool) -> dict[str, float]:
        keep = final and split == self.shown and not self.predictions  # of the first network, which defines the score
        smoothing = self.config.label_smoothing
        sums = torch.zeros(5, dtype=torch.float64, device=world.device)
        kept: list[tuple[Tensor, ...]] = []
        loader = self.evaluation_loader(split, world)
        for batch in self.evaluation_batches(split, world):
            if not len(batch):  # all of its images are unreadable
                continue
            images, labels = (t.to(world.device, non_blocking=True) for t in (batch.images, batch.labels))
            logits = model(self.inputs(images)).float()
            right = logits.topk(min(5, logits.shape[1]), 1).indices == labels[:, None]
            loss = F.cross_entropy(logits, labels, reduction="sum")
            sums[:3] += torch.stack([loss, right[:, 0].sum(), right.sum()])
            sums[3] += len(labels)
            if smoothing:
                sums[4] += F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
            if keep:
                kept.append((logits.half().cpu(), batch.labels.cpu(), batch.indices))
        loss, top1, top5, examples, smoothed = world.sum_(sums).tolist()
        if not examples and loader.broken:
            raise TooManyBrokenError(list(loader.broken), len(loader.broken), loader.options.broken)
        if keep:
            rows = [row for part in world.gather(kept) for row in part]
            with torch.autocast("cpu", enabled=False):  # autocast does not support torch.cat of float16 on a CPU
                logits, labels, indices = (torch.cat(column) for column in zip(*rows, strict=True))
            order = indices.argsort()
            self.predictions = {"logits": logits[order], "labels": labels[order], "indices": indices[order]}
        count = max(examples, 1)
        found = {"loss": loss / count, "top1": top1 / count, "top5": top5 / count, "examples": int(examples)}
        return found | ({"smoothed_loss": smoothed / count} if smoothing else {})  # comparable with that of training

    @property
    def shown(self) -> str:
        """Split whose predictions are saved for the report."""
        return list(self.parts)[-1]

    def evaluation_loader(self, split: str, world: World) -> Loader:
        if split not in self.loaders:
            source, indices = self.parts[split]
            transform = evaluation(self.preprocessing, self.config.data.channels)
            size = max(1, min(self.config.batch_size // world.size, 256))
            options = self.loader_options(world.rank, world.size, size, others=self.examples)
            self.loaders[split] = Loader(source, transform, options, indices=indices, training=False)
        return self.loaders[split]

    def evaluation_batches(self, split: str, world: World) -> Iterator[Batch]:
        """Return the batches of a split; they are kept on the device if training images are."""
        if split in self.kept:
            yield from self.kept[split]
            return
        seen = []
        loader = self.evaluation_loader(split, world)
        for batch in loader.epoch(0):
            self.notice(batch)
            if self.data_path.on_device:
                images, labels = (t.to(world.device, non_blocking=True) for t in (batch.images, batch.labels))
                batch = replace(batch, images=images, labels=labels)
                seen.append(batch)
            yield batch
        if self.data_path.on_device:
            self.kept[split] = seen
            loader.close()

    # For the loop

    def loader_options(self, rank: int, world: int, batch_size: int, others: int = 0) -> LoaderOptions:
        return reader_options(self.config, self.config.data, rank, world, batch_size, others)

    def notice(self, batch: Batch) -> None:
        self.noticed += [{"event": "broken_image", "name": one.name, "reason": one.reason} for one in batch.broken]

    def events(self) -> list[dict[str, Any]]:
        found, self.noticed = self.noticed, []
        return found

    def describe(self) -> dict[str, Any]:
        sizes = {
            split: len(source) if indices is None else len(indices) for split, (source, indices) in self.parts.items()
        }
        path = DEVICE if self.data_path.on_device else "workers"
        return {"classes": len(self.source.class_names), "evaluated": sizes, "data_path": path}

    def notes(self) -> list[str]:
        data = self.config.data
        every = {"training": self.source} | {name: source for name, (source, _) in self.parts.items()}
        every.pop("held_out", None)  # a part of the training images
        labelled = {k: v for k, v in every.items() if k != "training"} if self.keeps_unlabelled else every
        found = [note for split, source in labelled.items() if (note := unlabelled_note(split, source))]
        if self.config.model.freeze and not self.config.model.pretrained:
            found.append("model.freeze freezes random weights: start from trained weights with --model.pretrained")
        if self.loaded_classes is not None:
            classes = len(self.source.class_names)
            found.append(
                f"Classifier: new, because the weights have {self.loaded_classes} classes and the images {classes}"
            )
        if data.first_size is not None:
            found.append(
                f"Training images grow from {data.first_size} to {self.size} pixels in the first "
                f"{self.grown:.4g} epochs"
            )
        if self.test_size != self.size:
            found.append(f"Evaluation uses {self.test_size} pixels")
        found += [self.data_path.note] if self.data_path.note else []
        return found + notes_on(every.values())

    def identity(self) -> dict[str, Any]:
        labels, names = self.source.labels[self.indices], (self.source.name(int(i)) for i in self.indices)
        return {
            "classes": self.source.class_names,
            "images": len(labels),
            "labels": labels_digest(labels),
            "names": names_digest(names),
            **({"data_path": DEVICE} if self.data_path.on_device else {}),
        }

    def save(
        self,
        folder: Path,
        moment: Literal["start", "end"],
        models: dict[str, nn.Module],
        scores: dict[str, dict[str, dict[str, float]]],
    ) -> None:
        from safetensors.torch import save_file

        if moment == "start":
            with whole_path(folder / START) as part:
                save_file(position_tables(models["raw"]), str(part))
            return
        for name, model in models.items():
            self.save_weights(model, folder / RUN_WEIGHTS[name], scores[name])
        if "ema" not in models:
            os.replace(folder / RUN_WEIGHTS["raw"], folder / RUN_WEIGHTS["ema"])
        with whole_path(folder / PREDICTIONS) as part:
            save_file(self.predictions, str(part), metadata={"split": self.shown})

    def save_weights(self, model: nn.Module, path: Path, scores: dict[str, dict[str, float]]) -> None:
        assert isinstance(model, Network)
        save_weights(model, path, self.card(scores))

    def card(self, scores: dict[str, dict[str, float]]) -> Card:
        metrics = {f"{split}_{name}": value for split, numbers in scores.items() for name, value in numbers.items()}
        return Card(self.preprocessing, self.source.class_names, metrics, to_json(self.config))

    def close(self) -> None:
        self.loaders.clear()  # ends their worker processes
        self.kept.clear()
        self.__dict__.pop("resident", None)


def reader_options(
    config: RunConfig, data: ReadingConfig, rank: int, world: int, batch_size: int, others: int = 0
) -> LoaderOptions:
    """Return the options of a loader for a configuration; `others` is the number of images that other loaders read."""
    workers = data.workers
    if workers is None:  # leave cores for the network on a CPU
        cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        workers = min(cores, MOST_WORKERS) if chosen_device(config.device).type == "cuda" else cores // 4
    return LoaderOptions(
        batch_size=batch_size,
        workers=workers,
        seed=config.seed,
        rank=rank,
        world=world,
        cache="memory" if data.cache == "memory" else "none",
        broken=BrokenImages(data.max_broken, others=others),
    )


def different_classes(where: str, source: Source, there: str, other: Source) -> str:
    names, others = source.class_names, other.class_names
    found = [
        f"only {place} has {shorten(sorted(only))}"
        for place, only in ((where, set(names) - set(others)), (there, set(others) - set(names)))
        if only
    ]
    return f"the classes of {where} and {there} differ: {'; '.join(found) or 'their order differs'}"


def position_tables(model: nn.Module) -> dict[str, Tensor]:
    """Return all tables of relative positions by name; the report shows how far training moved them."""
    tables = {}
    for name, module in model.named_modules():
        if isinstance(module, RelativePositions):
            tables |= {f"{name}.{key}": p.detach().cpu().contiguous().clone() for key, p in module.named_parameters()}
    return tables

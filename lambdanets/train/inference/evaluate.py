"""Evaluation of trained weights: accuracy, metrics per class, and throughput."""

import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from torch import Tensor

from lambdanets.data.broken import BrokenImages
from lambdanets.data.loader import Loader, LoaderOptions
from lambdanets.data.source import NoSplitError, Source, notes_on, open_source
from lambdanets.data.transforms import evaluation
from lambdanets.models.counts import count_parameters
from lambdanets.report import scores
from lambdanets.report.show import percent, rate, shortened
from lambdanets.runs import LOG, StoredConfig, config_of, read_stored
from lambdanets.train.config import TrainConfig
from lambdanets.train.inference.command import SHOWN_CLASSES, Split
from lambdanets.train.inference.trained import Trained
from lambdanets.typed import from_json

ALL = "all"  # split of datasets without splits


@dataclass(frozen=True)
class ClassScore:
    """Metrics of a class.

    Attributes:
        name: name of the class.
        examples: number of images of the class.
        recall: fraction of its images that are predicted correctly; None without images.
        precision: fraction of correct ones among the predictions of this class; None without predictions.
        taken_for: the class that its images are most often confused with, if any.
    """

    name: str
    examples: int
    recall: float | None
    precision: float | None
    taken_for: str | None


@dataclass(frozen=True)
class Evaluation:
    """Result of `evaluate`. Accuracies, recall and precision are between 0 and 1.

    Attributes:
        data, split: what was evaluated.
        examples: number of images.
        top1, top5, loss: metrics over all images.
        per_class: metrics of each class, lowest recall first.
        broken: name and reason of each unreadable image; they do not count.
        image_size: input size in pixels.
        parameters: number of parameters.
        images_per_second: throughput, including reading.
        network_images_per_second: throughput of the network alone.
        device, precision: how the network was run.
        note: how classes were matched, if not by name, and what was left out.
    """

    data: str
    split: str
    examples: int
    top1: float
    top5: float
    loss: float
    per_class: tuple[ClassScore, ...]
    broken: tuple[tuple[str, str], ...]
    image_size: int | tuple[int, int]
    parameters: int
    images_per_second: float
    network_images_per_second: float
    device: str
    precision: str
    note: str = ""


@dataclass(frozen=True)
class Images:
    """Images to evaluate: all images of a source, or those with `indices` (int64 [N])."""

    source: Source
    indices: np.ndarray
    data: str
    split: str


def find_images(what: str, data: str | None = None, split: Split = "auto") -> Images:
    """Return the images of a dataset; without `data`, those that the run was evaluated on.

    Args:
        what: the trained network, as for `open_trained`.
        data: a dataset, as for `open_source`.
        split: "auto" is the validation split if it exists, otherwise all images; "held_out" are the images that the run
            held out from its training images.

    Raises ValueError if there are no such images.

    Example:
        >>> from lambdanets.train.inference.evaluate import find_images
        >>> images = find_images("runs/pets", "mnist")
        >>> images.split, len(images.indices)
        ('validation', 1000)
    """
    if data is None:
        return images_of_run(what, split)
    if split == "held_out":
        raise ValueError("--split held_out is part of the training images of a run: remove DATA")
    chosen = "validation" if split == "auto" else split
    try:
        source = open_source(data, split=chosen)
    except NoSplitError:
        if split != "auto":
            raise
        chosen, source = ALL, open_source(data, split="train")  # a folder of class folders
    return Images(source, np.arange(len(source)), data, chosen)


def images_of_run(what: str, split: Split) -> Images:
    folder = Path(what).expanduser()
    if not (folder / LOG).is_file():
        raise ValueError(f"no images given: {what} is not the folder of a run, so pass them: evaluate {what} DATA")
    config = config_of_run(read_stored(folder))
    path = config.data.path
    if split == "train":
        source = open_source(path, split="train")
        return Images(source, np.arange(len(source)), path, split)
    parts = config.make_evaluated(folder).parts
    chosen = list(parts)[-1] if split == "auto" else split
    if chosen not in parts:
        raise ValueError(
            f"{what} was evaluated on {' and '.join(parts)}, not on {chosen}: pass DATA or another --split"
        )
    source, indices = parts[chosen]
    where = config.data.validation or path if chosen == "validation" else path
    return Images(source, np.arange(len(source)) if indices is None else indices, where, chosen)


def config_of_run(stored: StoredConfig) -> TrainConfig:
    kind = config_of(stored.task)
    if kind is not None and issubclass(kind, TrainConfig):
        return from_json(kind, stored.settings)
    known = {f.name for f in fields(TrainConfig)}  # tasks of other versions may have further settings
    return from_json(TrainConfig, {key: value for key, value in stored.settings.items() if key in known})


def match_classes(data: tuple[str, ...], model: tuple[str, ...]) -> tuple[list[int], str]:
    """Return the index in the model of each class of the data, and a note if classes are not matched by name."""
    places = {name: i for i, name in enumerate(model)}
    unknown = [name for name in data if name not in places]
    if not unknown:
        return [places[name] for name in data], ""
    if set(data) == {str(i) for i in range(len(model))}:  # sorted by name, which is not by number
        return [int(name) for name in data], "classes are matched by number: the data calls them 0, 1, 2, ..."
    if len(data) == len(model):
        note = f"classes are matched by their order, because the model has no class named {unknown[0]!r}"
        return list(range(len(data))), note
    raise ValueError(
        f"the data has the class {unknown[0]!r}, which is not one of the {len(model)} classes of the model "
        f"({', '.join(model[:5])}, ...)"
    )


def evaluate(trained: Trained, images: Images, *, progress: Console | None = None) -> Evaluation:
    """Evaluate a network on labelled images. Unreadable images are listed in the result and do not count.

    Args:
        trained: the network, from `open_trained`.
        images: the images, from `find_images`.
        progress: console for a progress bar.

    Returns an `Evaluation`. Raises ValueError if there are no labelled images or none can be read.

    Example:
        >>> from lambdanets import create_model
        >>> from lambdanets.train.inference.evaluate import evaluate, find_images
        >>> from lambdanets.train.inference.trained import open_trained
        >>> network = create_model("lambda_resnet_tiny", image_size=16, num_classes=10, depths=(1, 1, 1, 1))
        >>> folder = str(network.save_pretrained("digits"))
        >>> found = evaluate(open_trained(folder), find_images(folder, "mnist"))
        >>> found.examples, len(found.per_class), 0 <= found.top1 <= found.top5 <= 1
        (1000, 10, True)
    """
    source, using = images.source, trained.using
    indices = images.indices[np.asarray(source.labels)[images.indices] >= 0]
    if not len(indices):
        raise ValueError(f"{images.data} has no labelled images: use `lambdanets predict` for images without labels")
    places, note = match_classes(tuple(source.class_names), trained.class_names)
    if len(indices) < len(images.indices):
        missing = (
            f"{len(images.indices) - len(indices):,} of {len(images.indices):,} images have no label and do not count"
        )
        note = f"{note}. {missing}" if note else missing
    note = ". ".join(filter(None, [note, *notes_on([source])]))
    loader = Loader(
        source,
        evaluation(trained.card.preprocessing, trained.channels),
        LoaderOptions(using.batch_size, using.loader_workers(len(indices)), broken=BrokenImages(max_fraction=1.0)),
        indices=indices,
        training=False,
    )
    found: list[tuple[Tensor, Tensor]] = []
    broken: list[tuple[str, str]] = []
    clock = Clock()
    batches = trained.answers(loader)
    if progress is not None:
        batches = track(batches, "evaluating", total=len(loader), console=progress, transient=True)
    for batch, logits_BC, seconds in batches:
        clock.tick(len(batch), seconds)
        broken += [(one.name, one.reason) for one in batch.broken]
        found.append((logits_BC, batch.labels))
    logits_NC, labels_N = (torch.cat(column) for column in zip(*found, strict=True))
    labels_N = torch.tensor(places)[labels_N]
    if not len(labels_N):
        raise ValueError(f"none of the {len(indices)} images of {images.data} can be read, the first is {broken[0]}")
    return Evaluation(
        data=images.data,
        split=images.split,
        examples=len(labels_N),
        top1=scores.accuracy(logits_NC, labels_N),
        top5=scores.accuracy(logits_NC, labels_N, 5),
        loss=float(F.cross_entropy(logits_NC, labels_N)),
        per_class=class_scores(logits_NC, labels_N, trained.class_names),
        broken=tuple(broken),
        image_size=trained.card.preprocessing.size,
        parameters=count_parameters(trained.network).total,
        images_per_second=clock.images_per_second,
        network_images_per_second=clock.network_images_per_second,
        device=str(trained.device),
        precision=using.precision,
        note=note,
    )


class Clock:
    """Measures throughput, without the first batch, which includes the startup, if there are others."""

    def __init__(self) -> None:
        self.last = time.perf_counter()
        self.ticks: list[tuple[int, float, float]] = []  # images, seconds, seconds of the network

    def tick(self, images: int, network: float) -> None:
        now = time.perf_counter()
        self.ticks.append((images, now - self.last, network))
        self.last = now

    @property
    def counted(self) -> list[tuple[int, float, float]]:
        return self.ticks[1:] or self.ticks

    @property
    def images_per_second(self) -> float:
        return sum(images for images, _, _ in self.counted) / max(sum(all_ for _, all_, _ in self.counted), 1e-9)

    @property
    def network_images_per_second(self) -> float:
        return sum(images for images, _, _ in self.counted) / max(sum(net for _, _, net in self.counted), 1e-9)


def class_scores(logits_NC: Tensor, labels_N: Tensor, names: tuple[str, ...]) -> tuple[ClassScore, ...]:
    rows = scores.by_class(scores.confusion(*scores.labelled(logits_NC, labels_N)))
    return tuple(
        ClassScore(
            names[row.index],
            row.examples,
            row.recall,
            row.precision,
            None if row.taken_for is None else names[row.taken_for],
        )
        for row in rows
        if row.examples
    )


def show(found: Evaluation, console: Console, classes: int = SHOWN_CLASSES, top5: bool = True) -> None:
    """Print the result as tables, with the top-5 accuracy if `top5`."""
    size = found.image_size
    rows: list[tuple[str, Any]] = [
        ("images", f"{found.examples:,} ({found.data}{'' if found.split == ALL else f', {found.split}'})"),
        ("top-1", percent(found.top1)),
        *([("top-5", percent(found.top5))] if top5 else []),
        ("loss", f"{found.loss:.4f}"),
        ("image size", size if isinstance(size, int) else f"{size[0]}x{size[1]}"),
        ("parameters", f"{found.parameters:,}"),
        ("images/s", f"{rate(found.images_per_second)} (network alone: {rate(found.network_images_per_second)})"),
        ("device", f"{found.device}, {found.precision}"),
    ]
    table = Table(show_header=False, box=None)
    for name, value in rows:
        table.add_row(name, escape(str(value)))
    console.print(table)
    if classes > 0:
        table = Table(title="Classes with the lowest recall" if len(found.per_class) > classes else "Classes")
        for title in ("class", "images", "recall", "precision", "most often confused with"):
            table.add_column(title, justify="right" if title in ("images", "recall", "precision") else "left")
        for one in found.per_class[:classes]:
            taken = shortened(one.taken_for, 40) if one.taken_for is not None else ""
            cells = (
                shortened(one.name, 40),
                str(one.examples),
                percent(one.recall, 1),
                percent(one.precision, 1),
                taken,
            )
            table.add_row(*map(escape, cells))
        console.print(table)
    if found.note:
        console.print(escape(found.note), highlight=False)
    for name, reason in found.broken[:20]:
        console.print(escape(f"unreadable: {name}: {reason}"), highlight=False)
    if len(found.broken) > 20:
        console.print(f"... and {len(found.broken) - 20} more unreadable images")

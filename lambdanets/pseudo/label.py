"""Labelling of images with a teacher.

Process r of N labels the units r, r + N, ...; processes do not communicate. Each finished unit is a file, so an
interrupted run resumes when it is started again, with any number of processes.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lambdanets.data.broken import Broken, BrokenImages, TooManyBrokenError
from lambdanets.data.guard import CONTENT_ONLY, Hashes, hash_images
from lambdanets.files import remove_parts
from lambdanets.pseudo.files import (
    MANIFEST,
    Labels,
    Manifest,
    check_manifest,
    finished,
    label_path,
    write_labels,
    write_manifest,
)
from lambdanets.pseudo.teacher import Ensemble
from lambdanets.pseudo.units import Place, UnlabelledBatch, read_units

IN_FLIGHT = 2  # batches on the device whose results have not been read yet
Progress = Callable[[int, int], object]  # images done, units done


@dataclass(frozen=True)
class LabelOptions:
    """Settings of labelling; all but `max_broken` are part of the manifest.

    Attributes:
        soft: number of classes whose probabilities are kept for each image; 0 keeps only the top class.
        split: the split of the images to label.
        batch_size: images per forward pass.
        max_broken: maximum fraction of unreadable images in a unit; a unit with more is not labelled.
        guard: datasets whose validation images are dropped.
        guard_distance: bits in which the perceptual hashes of copies may differ; -1 compares file contents only.
    """

    soft: int = 0
    split: str = "train"
    batch_size: int = 128
    max_broken: float = 0.05
    guard: tuple[str, ...] = ()
    guard_distance: int = 6

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.soft < 0:
            raise ValueError(
                f"batch_size must be at least 1, got {self.batch_size}, and soft at least 0, got {self.soft}"
            )
        if not 0 <= self.max_broken <= 1:
            raise ValueError(f"max_broken must be between 0 and 1, got {self.max_broken}")
        if not CONTENT_ONLY <= self.guard_distance <= 32:
            raise ValueError(f"guard_distance must be between -1 and 32 bits, got {self.guard_distance}")


@dataclass(frozen=True)
class Labelled:
    """The result of labelling in one process.

    Attributes:
        images: number of images labelled by this call.
        broken: number of unreadable images.
        leaks: number of dropped copies of guarded images.
        seconds: duration of reading, inference and writing.
        network_seconds: time spent waiting for the device.
        units: number of units labelled by this call.
        skipped: number of units of this process that were labelled before.
        failed: name of each unit that could not be labelled, and the reason.
        complete: whether the units of all processes are labelled.
    """

    images: int
    broken: int
    leaks: int
    seconds: float
    network_seconds: float
    units: int
    skipped: int
    failed: tuple[tuple[str, str], ...]
    complete: bool

    @property
    def images_per_second(self) -> float:
        """Labelled images per second."""
        return self.images / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Answers:
    """The K most likely classes of a batch and their probabilities, valid after the event `ready`."""

    values_BK: Tensor
    classes_BK: Tensor
    ready: torch.Event | None = None

    def arrived(self) -> tuple[np.ndarray, np.ndarray]:
        if self.ready is not None:
            self.ready.synchronize()
        return self.values_BK.numpy(), self.classes_BK.numpy()


@dataclass
class Growing:
    """The labels of an unfinished unit."""

    parts: list[dict[str, np.ndarray]] = field(default_factory=list)
    broken: list[tuple[str, str]] = field(default_factory=list)
    leaks: list[tuple[str, str, str]] = field(default_factory=list)


def label(
    ensemble: Ensemble,
    place: Place,
    folder: Path,
    options: LabelOptions,
    *,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
    progress: Progress = lambda images, units: None,
) -> Labelled:
    """Label the units of this process that are not labelled yet.

    Raises a ValueError if `folder` has labels of other images or settings, and an OSError if the disk is full.

    Args:
        ensemble: the teachers (`open_teachers`).
        place: the images (`open_place`).
        folder: where the labels are written.
        options: settings, which the manifest stores.
        workers: processes that read images; 0 reads in this process.
        rank: index of this process.
        world: number of processes that share the units.
        progress: called after each batch with the number of images and units that this process has labelled.

    >>> from pathlib import Path
    >>> from PIL import Image
    >>> from lambdanets import create_model
    >>> from lambdanets.models import Card, Preprocessing, save_weights
    >>> from lambdanets.pseudo.label import LabelOptions, label
    >>> from lambdanets.pseudo.teacher import open_teachers
    >>> from lambdanets.pseudo.units import open_place
    >>> from lambdanets.train.inference.command import Using
    >>> network = create_model("lambda_resnet_tiny", num_classes=2, image_size=32)
    >>> weights = save_weights(network, Path("teacher.safetensors"), Card(Preprocessing(size=32), ("cat", "dog")))
    >>> Path("images/somewhere").mkdir(parents=True)
    >>> for number in range(5):
    ...     Image.new("RGB", (40, 32)).save(f"images/somewhere/{number}.png")
    >>> teacher = open_teachers("teacher.safetensors", Using(device="cpu"))
    >>> done = label(teacher, open_place("images"), Path("labels"), LabelOptions(soft=2))
    >>> done.images, done.complete
    (5, True)
    """
    soft = min(options.soft, len(ensemble.class_names))
    manifest = make_manifest(ensemble, place, replace(options, soft=soft))
    check_manifest(folder, manifest)  # before the guard, which may take long
    done = finished(folder, manifest)
    todo = [number for number in range(rank, len(place.units), world) if not done[number]]
    guard = hash_images(options.guard, options.guard_distance) if options.guard and todo else None
    write_manifest(folder, manifest)
    for number in todo:
        path = label_path(folder, number)
        remove_parts(path.parent, path.name)  # left by a killed process
    run = LabellingRun(ensemble, place, folder, options, soft)
    began = time.perf_counter()
    if todo:
        run.go(todo, workers, guard, progress)
    seconds = time.perf_counter() - began
    return Labelled(
        run.images,
        run.broken,
        run.leaks,
        seconds,
        run.waited,
        run.units,
        sum(done[rank::world]),
        tuple(run.failed),
        all(finished(folder, manifest)),
    )


def make_manifest(ensemble: Ensemble, place: Place, options: LabelOptions) -> Manifest:
    return Manifest(
        images=str(Path(place.where).expanduser().resolve()) if Path(place.where).exists() else place.where,
        kind=place.kind,
        units=place.units,
        class_names=ensemble.class_names,
        teachers=ensemble.about(),
        split=options.split,
        soft=options.soft,
        batch_size=options.batch_size,
        precision=ensemble.precision,
        guard=options.guard,
        guard_distance=options.guard_distance,
        listing=place.listing,
    )


class LabellingRun:
    """Labelling in one process."""

    def __init__(self, ensemble: Ensemble, place: Place, folder: Path, options: LabelOptions, soft: int) -> None:
        self.ensemble, self.place, self.folder, self.options, self.soft = ensemble, place, folder, options, soft
        self.images = self.broken = self.leaks = self.units = 0
        self.waited = 0.0
        self.failed: list[tuple[str, str]] = []
        self.growing = Growing()
        self.manifest = (folder / MANIFEST).read_bytes()

    def go(self, todo: Sequence[int], workers: int, guard: Hashes | None, progress: Progress) -> None:
        flying: deque[tuple[UnlabelledBatch, Answers | None]] = deque()
        batches = read_units(
            self.place,
            todo,
            self.ensemble.transforms(),
            batch_size=self.options.batch_size,
            workers=workers,
            guard=guard,
        )
        try:
            for batch in batches:
                flying.append((batch, self.launch(batch)))
                if len(flying) > IN_FLIGHT:
                    self.land(*flying.popleft())
                    progress(self.images, self.units)
            while flying:
                self.land(*flying.popleft())
                progress(self.images, self.units)
        finally:
            batches.close()  # type: ignore[attr-defined]

    @torch.inference_mode()
    def launch(self, batch: UnlabelledBatch) -> "Answers | None":
        """Start inference on a batch and the copy of its most likely classes to the CPU."""
        if not len(batch.positions):
            return None
        probabilities_BC = self.ensemble.probabilities(batch.inputs)
        values_BK, classes_BK = probabilities_BC.topk(max(1, self.soft), 1)
        if not values_BK.is_cuda:
            return Answers(values_BK, classes_BK)
        # The copy is queued now: queued later, it would wait for the batches launched in between.
        values, classes = (tensor.to("cpu", non_blocking=True) for tensor in (values_BK, classes_BK))
        return Answers(values, classes, torch.cuda.current_stream(values_BK.device).record_event())

    def land(self, batch: UnlabelledBatch, answers: "Answers | None") -> None:
        grown = self.growing
        if answers is not None:
            began = time.perf_counter()
            values_BK, classes_BK = answers.arrived()
            self.waited += time.perf_counter() - began
            if not np.isfinite(values_BK).all():
                raise ValueError(f"{self.place.units[batch.unit].name}: {self.why_not_finite()}")
            part = {
                "position": batch.positions.astype(np.int32),
                "label": classes_BK[:, 0].astype(np.int32),
                "confidence": values_BK[:, 0].astype(np.float32),
            }
            if self.soft:
                part |= {"classes": classes_BK.astype(np.int32), "probabilities": values_BK.astype(np.float16)}
            if batch.offsets is not None and batch.sizes is not None:
                part |= {"offset": batch.offsets, "size": batch.sizes}
            grown.parts.append(part)
        grown.broken += batch.broken
        grown.leaks += batch.leaks
        if batch.last:
            self.finish(batch)

    def why_not_finite(self) -> str:
        precision = self.ensemble.precision
        said = f"the teacher's probabilities are not finite with --precision {precision}"
        if precision not in ("float16", "bfloat16"):
            return f"{said}: its weights are damaged; use another teacher"
        if any(label_path(self.folder, number).exists() for number in range(len(self.place.units))):
            return (
                f"{said}. Use --precision float32 and another folder than {self.folder}, where some units are already "
                f"labelled with {precision}"
            )
        return f"{said}. Run again with --precision float32, into the same folder"

    def finish(self, batch: UnlabelledBatch) -> None:
        """Write the labels of a finished unit, or note why it has none."""
        grown, self.growing = self.growing, Growing()
        name = self.place.units[batch.unit].name
        why_not = batch.error
        policy = BrokenImages(self.options.max_broken)
        if len(grown.broken) > policy.max_fraction * batch.images:
            some = [Broken(0, *one) for one in grown.broken]
            why_not = str(TooManyBrokenError(some, batch.images, policy, self.broken_advice()))
        if why_not:
            self.failed.append((name, why_not))
            return
        columns = list(grown.parts[0]) if grown.parts else ["position", "label", "confidence"]
        arrays = {key: np.concatenate([part[key] for part in grown.parts]) for key in columns} if grown.parts else {}
        if not arrays:  # every image was unreadable or dropped
            none: dict[str, type] = {"position": np.int32, "label": np.int32, "confidence": np.float32}
            arrays = {key: np.empty(0, kind) for key, kind in none.items()}
        count = len(arrays["label"])
        if (self.folder / MANIFEST).read_bytes() != self.manifest:
            raise ValueError(
                f"another command with other settings is labelling into {self.folder}: use a folder for each"
            )
        write_labels(
            self.folder,
            batch.unit,
            Labels(**arrays, images=batch.images, broken=tuple(grown.broken), leaks=tuple(grown.leaks)),
        )
        self.images += count
        self.broken += len(grown.broken)
        self.leaks += len(grown.leaks)
        self.units += 1

    def broken_advice(self) -> str:
        if self.place.kind == "shards":
            return "Write the shard again without them, or allow more with --max-broken"
        # removing a file would shift the images after it, also in units that are finished
        return (
            "Replace them with readable files (removing them would change other units), or allow more with --max-broken"
        )


def who() -> tuple[int, int]:
    """Return the rank of this process and the number of processes, from torchrun's environment variables."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

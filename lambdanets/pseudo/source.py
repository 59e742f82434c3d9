"""The selected pseudo-labelled images as a data source with random access."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lambdanets.data.decode import BrokenImageError
from lambdanets.data.shards import ShardSource
from lambdanets.data.source import Source
from lambdanets.data.strings import printable
from lambdanets.data.tars import unpacked
from lambdanets.pseudo.files import Manifest, item_difference, label_path, read_columns, read_manifest, read_selected
from lambdanets.pseudo.select import read_counts
from lambdanets.pseudo.units import Place, open_place


class PseudoSource:
    """The selected images, with repeats, in the order of units and positions.

    Args:
        folder: the folder that `lambdanets pseudo label` wrote.
        class_names: the classes of the student; labels are indices into them.
        images: where the images are now, if they were moved after labelling.
    """

    def __init__(self, folder: Path, class_names: Sequence[str], *, images: str | None = None) -> None:
        self.folder, self.class_names = folder, tuple(class_names)
        manifest, counts = read_manifest(folder), read_counts(folder)
        self.order = class_numbers(
            manifest, self.class_names, folder
        )  # the student's index of each class of the teacher
        self.soft = bool(manifest.soft)
        place = reopened(manifest, images)
        columns = load_columns(folder, manifest, len(counts.missing))
        if not len(columns["label"]):
            raise ValueError(f"{folder} has no image above the threshold: lower it with `lambdanets pseudo select`")
        self.labels = self.order[columns["label"]].astype(np.int64)
        self.unit, self.position = columns["unit"], columns["position"]
        self.classes_NK, self.probabilities_NK = columns.get("classes"), columns.get("probabilities")
        self.digest = digest(columns)
        self.units = place.units
        self.inner: Source = (
            place.source if place.source is not None else Shards(place, self.unit, columns, self.class_names)
        )
        self.listed = place.source is not None
        self.firsts = np.array([unit.first for unit in place.units], np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def index(self, index: int) -> int:
        """Return the index of an image in the underlying source."""
        return int(self.firsts[self.unit[index]] + self.position[index]) if self.listed else index

    def name(self, index: int) -> str:
        if self.listed:
            return self.inner.name(self.index(index))
        return printable(f"{self.units[self.unit[index]].name}#{self.position[index]}")

    def read(self, index: int) -> bytes | np.ndarray:
        return self.inner.read(self.index(index))

    def targets(self, indices: Tensor) -> Tensor:
        """Return soft targets, float32 [B, C], in the order of the student's classes.

        Only the most likely classes are stored. The remaining probability is distributed evenly over the others.
        """
        if self.classes_NK is None or self.probabilities_NK is None:
            raise ValueError(f"{self.folder} has hard labels only: label again with --soft N")
        rows = indices.numpy()
        classes_BK = torch.from_numpy(self.order[self.classes_NK[rows]].astype(np.int64))
        values_BK = torch.from_numpy(self.probabilities_NK[rows].astype(np.float32))
        return spread(classes_BK, values_BK, len(self.class_names))


class Shards(ShardSource):
    """Images in tar shards, at the offsets that labelling stored."""

    def __init__(
        self, place: Place, unit: np.ndarray, columns: dict[str, np.ndarray], class_names: tuple[str, ...]
    ) -> None:
        self.shards = [str(unpacked(path)) for path in place.paths]
        self.shard, self.offsets, self.sizes = unit, columns["offset"], columns["size"]
        self.class_names, self.labels = class_names, columns["label"]
        self.files = OrderedDict()

    def read(self, index: int) -> bytes:
        try:
            return super().read(index)
        except FileNotFoundError as error:
            raise BrokenImageError(f"its shard is missing: {error.filename}") from error


def spread(classes_BK: Tensor, values_BK: Tensor, classes: int) -> Tensor:
    kept = classes_BK.shape[1]
    rest_B1 = (1 - values_BK.sum(1, keepdim=True)).clamp(min=0)
    if kept >= classes:
        full_BC = torch.zeros(len(values_BK), classes)
    else:
        full_BC = (rest_B1 / (classes - kept)).expand(-1, classes).contiguous()
    full_BC.scatter_(1, classes_BK, values_BK)
    return full_BC / full_BC.sum(1, keepdim=True)  # float16 rounding


def class_numbers(manifest: Manifest, class_names: tuple[str, ...], folder: Path) -> np.ndarray:
    """Return the student's index of each class of the teacher; raise a ValueError if the classes differ."""
    places = {name: i for i, name in enumerate(class_names)}
    theirs = manifest.class_names
    if set(theirs) != set(places) or len(theirs) != len(class_names):
        unknown = [name for name in theirs if name not in places]
        missing = [name for name in class_names if name not in theirs]
        what = (
            f"{unknown[0]!r} is not one of the student's classes" if unknown else f"the teacher has no {missing[0]!r}"
        )
        raise ValueError(
            f"the teacher of {folder} has {len(theirs)} classes and the labelled images {len(class_names)}, and they "
            f"differ: {what}. Name the teacher's classes with --class-names, or use another teacher"
        )
    return np.array([places[name] for name in theirs], np.int64)


def digest(columns: dict[str, np.ndarray]) -> str:
    """Return a hash of all columns."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(columns):
        found.update(name.encode() + np.ascontiguousarray(columns[name]).data)
    return found.hexdigest()


def reopened(manifest: Manifest, images: str | None) -> Place:
    """Open the images; raise a ValueError if they are not those that were labelled."""
    where = images or manifest.images
    stretch = max((unit.images for unit in manifest.units), default=1) or 1
    place = open_place(where, manifest.split, stretch)
    changed = what_changed(manifest, place)
    if changed:
        raise ValueError(
            f"{where} has changed since it was labelled ({changed}): label it again, or set --pseudo.images to where "
            f"the images are now"
        )
    return place


def what_changed(manifest: Manifest, place: Place) -> str:
    """Return how the images differ from those of the manifest, or ""; units of a list depend on --unit."""
    if place.kind != manifest.kind:
        return f"{manifest.kind} then, {place.kind} now"
    if place.source is None:
        before, now = ([unit.name for unit in units] for units in (manifest.units, place.units))
        return "" if before == now else item_difference("shard", before, now)
    before = sum(unit.images for unit in manifest.units)
    if before != len(place.source):
        return f"{before:,} images then, {len(place.source):,} now"
    return "" if place.listing == manifest.listing else "the same number of images, but other names"


def load_columns(folder: Path, manifest: Manifest, missing: int) -> dict[str, np.ndarray]:
    """Return the selected rows of all label files, with repeats: 36 bytes each, and 6 for each soft probability."""
    wanted = ["position", "label"]
    wanted += ["offset", "size"] if manifest.kind == "shards" else []
    wanted += ["classes", "probabilities"] if manifest.soft else []
    parts: dict[str, list[np.ndarray]] = {name: [] for name in [*wanted, "unit"]}
    gone = 0
    for number in range(len(manifest.units)):
        if not label_path(folder, number).exists():
            gone += 1
            continue
        labels = len(read_columns(folder, manifest, number, ("label",))[0]["label"])
        chosen = read_selected(folder, number, labels)
        rows = np.repeat(chosen["row"], chosen["repeats"])
        if not len(rows):
            continue
        columns, _ = read_columns(folder, manifest, number, tuple(wanted))
        for name in wanted:
            parts[name].append(columns[name][rows])
        parts["unit"].append(np.full(len(rows), number, np.int32))
    if gone > missing:
        raise ValueError(f"{folder}: {gone - missing} label files are missing: run `lambdanets pseudo label` again")
    empty = np.empty(0, np.int64)
    return {name: np.concatenate(arrays) if arrays else empty for name, arrays in parts.items()}

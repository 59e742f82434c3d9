"""Selection of pseudo-labels by confidence, with a minimum and a maximum number of images per class.

The rules are those of Noisy Student: labels below a confidence threshold are dropped; a class with too many images
keeps the most confident ones; the images of a class with too few are repeated, the most confident ones once more than
the others.

The selection is exact, and its memory does not depend on the number of images. The n-th most confident image of each
class is found by a radix select: a pass over the labels counts, for each class, how often each leading digit of the
confidence occurs, which determines the digit of the n-th image; the next pass counts the next digit of the images with
that digit. Equal confidences are ordered by a hash of (seed, unit, image), equal hashes by position.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lambdanets.data import order
from lambdanets.files import read_object
from lambdanets.options import check_numbers
from lambdanets.pseudo.files import (
    SELECTION,
    Manifest,
    check_units,
    every_label,
    label_path,
    read_columns,
    read_manifest,
    selected_path,
    write_arrays,
    write_whole,
)
from lambdanets.typed import from_json

BINS = 20  # bins of the confidence histograms
KEY_BITS = 64
COUNTERS = 2**24  # counters of a pass: 128 MiB
MOST_IMAGES = 10**12  # limit of `most` and `least`
MOST_REPEATS = 2**15 - 1


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Rules of the selection."""

    threshold: float = 0.0
    """Minimum confidence of a label, from 0 to 1; Noisy Student uses 0.3."""
    most: int = 0
    """Maximum number of images per class: the most confident ones are kept. 0 keeps all. Noisy Student uses 130,000 for
    300 million images."""
    least: int = 0
    """Minimum number of images per class: the images of smaller classes are repeated. 0 disables repetition."""
    seed: int = 0
    """Seed of the order of images with equal confidence."""
    partial: bool = False
    """Select even if some units have no labels."""

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be between 0 and 1, got {self.threshold}")
        if self.most < 0 or self.least < 0:
            raise ValueError(f"most and least must be 0 or more, got {self.most} and {self.least}")
        if self.most and self.least > self.most:
            raise ValueError(f"least must not be larger than most, got least={self.least} and most={self.most}")
        check_numbers(self, most=(0, MOST_IMAGES), least=(0, MOST_IMAGES))


@dataclass(frozen=True)
class Counts:
    """The result of a selection. Tuples have one entry per class of `class_names`.

    Attributes:
        class_names: the classes of the teacher.
        labelled: number of labelled images.
        confident: number of images at or above the threshold.
        kept: number of different images selected.
        used: number of images selected, with repeats.
        histogram: [class][bin], the confidences of all labelled images in 20 bins from 0 to 1.
        images: number of images in all labelled units, unreadable and dropped ones included.
        broken: number of unreadable images.
        leaks: number of dropped copies of guarded images.
        units: number of units of work.
        missing: names of the units without labels.
        selection: the fields of `Selection`.
    """

    class_names: tuple[str, ...]
    labelled: tuple[int, ...]
    confident: tuple[int, ...]
    kept: tuple[int, ...]
    used: tuple[int, ...]
    histogram: tuple[tuple[int, ...], ...]
    images: int
    broken: int
    leaks: int
    units: int
    missing: tuple[str, ...]
    selection: dict[str, Any] = field(default_factory=dict)


def select(folder: Path, selection: Selection) -> Counts:
    """Select the labels to train on; write the selected rows of each label file and `selection.json`.

    Raises a ValueError if units have no labels, unless `selection.partial`.

    Args:
        folder: the folder that `lambdanets pseudo label` wrote.
        selection: the rules.

    >>> import numpy as np
    >>> from pathlib import Path
    >>> from lambdanets.pseudo.files import Labels, Manifest, Unit, write_labels, write_manifest
    >>> folder, units = Path("labels"), (Unit("images-0", 0, 3),)
    >>> write_manifest(folder, Manifest("images", "list", units, ("cat", "dog"), teachers=()))  # as `label` does
    >>> from lambdanets.pseudo.select import Selection, select
    >>> position, classes = np.arange(3, dtype=np.int32), np.array([0, 1, 1], np.int32)
    >>> write_labels(folder, 0, Labels(position, classes, np.array([0.9, 0.8, 0.4], np.float32), images=3))
    >>> counts = select(folder, Selection(threshold=0.5, least=2))
    >>> counts.labelled, counts.kept, counts.used  # of cat and dog; two images repeat
    ((1, 2), (1, 1), (2, 2))
    """
    manifest = read_manifest(folder)
    check_units(folder, manifest)
    missing = [u.name for n, u in enumerate(manifest.units) if not label_path(folder, n).exists()]
    if missing and not selection.partial:
        raise ValueError(
            f"{folder}: {len(missing)} of {len(manifest.units)} units have no labels ({', '.join(missing[:3])}, ...): "
            f"run `lambdanets pseudo label` again, or select among the others with --partial"
        )
    passes = Passes(folder, manifest, selection)
    labelled, confident, histogram = passes.count()
    wanted = np.zeros(passes.classes, np.int64)  # the `wanted` most confident images of a class are the best
    base = np.ones(passes.classes, np.int64)  # how often each of the others is used
    above = np.full(passes.classes, 1, np.int64)  # how often each of the best is used
    many = (confident > selection.most) if selection.most else np.zeros(passes.classes, bool)
    wanted[many], base[many] = selection.most, 0
    few = (confident > 0) & (confident < selection.least)
    base[few], wanted[few] = selection.least // confident[few], selection.least % confident[few]
    above[few] = base[few] + 1
    if above.max(initial=0) > MOST_REPEATS:
        worst = int(above.argmax())
        raise ValueError(
            f"class {manifest.class_names[worst]!r} has only {confident[worst]} images: to reach {selection.least}, "
            f"each would be repeated {above[worst]:,} times, more than {MOST_REPEATS:,}. Use a smaller --least"
        )
    cut = passes.cut(wanted, confident)
    kept, used = passes.write(wanted, cut, base, above)
    units = [n for n in range(len(manifest.units)) if label_path(folder, n).exists()]
    facts = np.array([facts_of(folder, manifest, n) for n in units])
    images, broken, leaks = facts.sum(0).tolist() if len(facts) else (0, 0, 0)
    counts = Counts(
        class_names=manifest.class_names,
        labelled=tuple(labelled.tolist()),
        confident=tuple(confident.tolist()),
        kept=tuple(kept.tolist()),
        used=tuple(used.tolist()),
        histogram=tuple(tuple(row) for row in histogram.tolist()),
        images=images,
        broken=broken,
        leaks=leaks,
        units=len(manifest.units),
        missing=tuple(missing),
        selection=asdict(selection),
    )
    write_whole(folder / SELECTION, (json.dumps(asdict(counts)) + "\n").encode())
    return counts


def facts_of(folder: Path, manifest: Manifest, number: int) -> tuple[int, int, int]:
    about = read_columns(folder, manifest, number, ("label",))[1]
    return about["images"], len(about["broken"]), len(about["leaks"])


def read_counts(folder: Path) -> Counts:
    """Read and check the `selection.json` of a folder of labels.

    >>> import numpy as np
    >>> from pathlib import Path
    >>> from lambdanets.pseudo.files import Labels, Manifest, Unit, write_labels, write_manifest
    >>> folder, units = Path("labels"), (Unit("images-0", 0, 3),)
    >>> write_manifest(folder, Manifest("images", "list", units, ("cat", "dog"), teachers=()))  # as `label` does
    >>> from lambdanets.pseudo.select import Selection, read_counts, select
    >>> position, classes = np.arange(3, dtype=np.int32), np.array([0, 1, 1], np.int32)
    >>> write_labels(folder, 0, Labels(position, classes, np.array([0.9, 0.8, 0.4], np.float32), images=3))
    >>> counts = select(folder, Selection(threshold=0.5))
    >>> read_counts(folder) == counts
    True
    """
    path = folder / SELECTION
    if not path.is_file():
        raise ValueError(f"{folder} has no {SELECTION}: select labels with `lambdanets pseudo select {folder}`")
    again = f"Run `lambdanets pseudo select {folder}` again"
    try:
        counts = from_json(Counts, read_object(path))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}. {again}") from error
    columns = (counts.labelled, counts.confident, counts.kept, counts.used, counts.histogram)
    if any(len(column) != len(counts.class_names) for column in columns):
        raise ValueError(f"{path} is damaged: its lists must have one number for each class. {again}")
    if any(len(row) != BINS or min(row) < 0 for row in counts.histogram) or min(map(min, columns[:4])) < 0:
        raise ValueError(f"{path} is damaged: a number of images is negative, or a histogram is incomplete. {again}")
    return counts


@dataclass(frozen=True)
class Cut:
    """The limit of the best images of each class: those with keys above `key`, and the first `equal` with that key."""

    key: np.ndarray  # uint64 [C]
    equal: np.ndarray  # int64 [C]


class Passes:
    """Passes over all labels, one unit at a time."""

    def __init__(self, folder: Path, manifest: Manifest, selection: Selection) -> None:
        self.folder, self.manifest, self.selection = folder, manifest, selection
        self.classes = len(manifest.class_names)
        self.threshold = np.float32(selection.threshold)

    def rows(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield (unit, label [N], confidence [N])."""
        for number, columns in every_label(self.folder, self.manifest):
            yield number, columns["label"], columns["confidence"]

    def count(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        labelled = np.zeros(self.classes, np.int64)
        confident = np.zeros(self.classes, np.int64)
        histogram = np.zeros(self.classes * BINS, np.int64)
        for _, label, confidence in self.rows():
            labelled += np.bincount(label, minlength=self.classes)
            confident += np.bincount(label[confidence >= self.threshold], minlength=self.classes)
            bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
            histogram += np.bincount(label.astype(np.int64) * BINS + bins, minlength=len(histogram))
        return labelled, confident, histogram.reshape(self.classes, BINS)

    def keys(self, unit: int, confidence: np.ndarray) -> np.ndarray:
        """Return uint64 sort keys: the bits of the confidence (not negative, so they sort like it), then a hash."""
        bits = np.ascontiguousarray(confidence, np.float32).view(np.uint32).astype(np.uint64)
        hashed = order.mixed(order.mix(self.selection.seed, unit), np.arange(len(confidence)))
        return bits << np.uint64(32) | hashed >> np.uint64(32)

    def cut(self, wanted: np.ndarray, confident: np.ndarray) -> Cut:
        """Return the key of the `wanted`-th best image of each class among those above the threshold."""
        asked = np.flatnonzero((wanted > 0) & (wanted < confident))
        slot = np.full(self.classes, -1, np.int64)  # index of each class in `asked`
        slot[asked] = np.arange(len(asked))
        prefix = np.zeros(len(asked), np.uint64)
        left = wanted[asked].copy()  # how many of the images with this prefix are among the best
        width = min(16, max(4, int(np.log2(COUNTERS / max(1, len(asked))))))
        shift = KEY_BITS
        while shift and len(asked):
            width = min(width, shift)
            shift -= width
            counts = self.digits(slot, prefix, shift, width)
            from_above = counts[:, ::-1].cumsum(1)
            digit = (from_above < left[:, None]).sum(1)  # number of leading bins that are entirely among the best
            rows = np.arange(len(asked))
            before = np.where(digit > 0, from_above[rows, np.maximum(digit, 1) - 1], 0)
            left -= before
            prefix = prefix << np.uint64(width) | ((1 << width) - 1 - digit).astype(np.uint64)
        key, equal = np.zeros(self.classes, np.uint64), np.zeros(self.classes, np.int64)
        key[asked], equal[asked] = prefix, left
        whole = (wanted > 0) & (wanted >= confident)  # classes whose images are all among the best
        equal[whole] = np.iinfo(np.int64).max
        return Cut(key, equal)

    def digits(self, slot: np.ndarray, prefix: np.ndarray, shift: int, width: int) -> np.ndarray:
        """Return how often each digit follows the prefix of its class, [asked, 2^width]."""
        counts = np.zeros(len(prefix) << width, np.int64)
        first = shift + width == KEY_BITS
        for unit, label, confidence in self.rows():
            mine = slot[label]
            inside = (mine >= 0) & (confidence >= self.threshold)
            key, mine = self.keys(unit, confidence)[inside] >> np.uint64(shift), mine[inside]
            if not first:
                same = key >> np.uint64(width) == prefix[mine]
                key, mine = key[same], mine[same]
            digit = (key & np.uint64((1 << width) - 1)).astype(np.int64)
            np.add.at(counts, (mine << width) + digit, 1)
        return counts.reshape(len(prefix), -1)

    def write(self, wanted: np.ndarray, cut: Cut, base: np.ndarray, above: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        kept, used = np.zeros(self.classes, np.int64), np.zeros(self.classes, np.int64)
        left = cut.equal.copy()
        for unit, label, confidence in self.rows():
            keys = self.keys(unit, confidence)
            inside = confidence >= self.threshold
            at = inside & (keys == cut.key[label]) & (wanted[label] > 0)
            best = inside & (keys > cut.key[label]) & (wanted[label] > 0)
            for row in np.flatnonzero(at):  # rarely more than one per class
                if left[label[row]] > 0:
                    left[label[row]] -= 1
                    best[row] = True
            repeats = np.where(best, above[label], base[label])
            repeats[~inside] = 0
            rows = np.flatnonzero(repeats)
            kept += np.bincount(label[rows], minlength=self.classes)
            used += np.bincount(label[rows], repeats[rows], minlength=self.classes).astype(np.int64)
            columns = {"row": rows.astype(np.int32), "repeats": repeats[rows].astype(np.int16)}
            write_arrays(selected_path(self.folder, unit), columns, {})
        return kept, used

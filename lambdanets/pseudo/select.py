"""Which labelled images are used, and how often: confidence, at most and at least so many of a class.

As Noisy Student does it: labels below a confidence are dropped, of a class with too many images the most confident
ones stay, and those of a class with too few are repeated, the most confident ones once more than the others.

Exact, and in memory that does not grow with the number of images. The n most confident of a class are found digit by
digit: a pass over the labels counts, class by class, how often each leading digit of the confidence occurs, which says
in which digit the n-th image lies; the next pass looks only there, at the next digit. Equal confidences go on to a hash
of (seed, unit, image), and what is equal in that too goes by its place.
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

BINS = 20  # of the confidence histograms
KEY_BITS = 64
COUNTERS = 2**24  # of a pass: 128 MiB, whatever the number of classes
MOST_IMAGES = 10**12  # of a class
MOST_REPEATS = 2**15 - 1


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What is kept."""

    threshold: float = 0.0
    """The least confidence; Noisy Student's is 0.3."""
    most: int = 0
    """Images of a class, the most confident ones; 0: all. Noisy Student's is 130,000 of 300 million."""
    least: int = 0
    """Images of a class, by repeating the ones there are; 0: none is repeated."""
    seed: int = 0
    """Decides between equal confidences."""
    partial: bool = False
    """Also where some units are not labelled yet, or cannot be."""

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is between 0 and 1, not {self.threshold}")
        if self.most < 0 or self.least < 0:
            raise ValueError(f"most {self.most} and least {self.least} are 0 or more")
        if self.most and self.least > self.most:
            raise ValueError(f"at least {self.least} and at most {self.most} images of a class cannot both be")
        check_numbers(self, most=(0, MOST_IMAGES), least=(0, MOST_IMAGES))


@dataclass(frozen=True)
class Counts:
    """What the selection did, class by class."""

    class_names: tuple[str, ...]
    labelled: tuple[int, ...]  # images of each class
    confident: tuple[int, ...]  # at or above the threshold
    kept: tuple[int, ...]  # different images
    used: tuple[int, ...]  # with repeats
    histogram: tuple[tuple[int, ...], ...]  # [class][bin] of all confidences, 0 to 1
    images: int  # looked at, in all
    broken: int
    leaks: int
    units: int
    missing: tuple[str, ...]  # units without labels
    selection: dict[str, Any] = field(default_factory=dict)


def select(folder: Path, selection: Selection) -> Counts:
    """Writes which rows of each label file are used and how often, and `selection.json`."""
    manifest = read_manifest(folder)
    check_units(folder, manifest)
    missing = [u.name for n, u in enumerate(manifest.units) if not label_path(folder, n).exists()]
    if missing and not selection.partial:
        raise ValueError(
            f"{folder}: {len(missing)} of {len(manifest.units)} units have no labels ({', '.join(missing[:3])}, ...): "
            f"run `lambdanets pseudo label` again, or take what there is with --partial"
        )
    passes = Passes(folder, manifest, selection)
    labelled, confident, histogram = passes.count()
    wanted = np.zeros(passes.classes, np.int64)  # the best so many of a class are told apart
    base = np.ones(passes.classes, np.int64)  # how often the others are used
    above = np.full(passes.classes, 1, np.int64)  # how often the best are
    many = (confident > selection.most) if selection.most else np.zeros(passes.classes, bool)
    wanted[many], base[many] = selection.most, 0
    few = (confident > 0) & (confident < selection.least)
    base[few], wanted[few] = selection.least // confident[few], selection.least % confident[few]
    above[few] = base[few] + 1
    if above.max(initial=0) > MOST_REPEATS:
        worst = int(above.argmax())
        raise ValueError(
            f"class {manifest.class_names[worst]!r} has {confident[worst]} images, and {selection.least} would repeat "
            f"each {above[worst]:,} times: use a smaller --least"
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
    path = folder / SELECTION
    if not path.is_file():
        raise ValueError(f"{folder} has no {SELECTION}: choose what to use with `lambdanets pseudo select {folder}`")
    again = f"choose again with `lambdanets pseudo select {folder}`"
    try:
        counts = from_json(Counts, read_object(path))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}. {again}") from error
    columns = (counts.labelled, counts.confident, counts.kept, counts.used, counts.histogram)
    if any(len(column) != len(counts.class_names) for column in columns):
        raise ValueError(f"{path} is damaged: its lists do not have one number for each class. {again}")
    if any(len(row) != BINS or min(row) < 0 for row in counts.histogram) or min(map(min, columns[:4])) < 0:
        raise ValueError(f"{path} is damaged: a number of images is negative, or a histogram is incomplete. {again}")
    return counts


@dataclass(frozen=True)
class Cut:
    """Where the best of each class end: keys above `key` are among them, and the first `equal` of those at it."""

    key: np.ndarray  # uint64 [C]
    equal: np.ndarray  # int64 [C]


class Passes:
    """Walks over the labels, one unit at a time."""

    def __init__(self, folder: Path, manifest: Manifest, selection: Selection) -> None:
        self.folder, self.manifest, self.selection = folder, manifest, selection
        self.classes = len(manifest.class_names)
        self.threshold = np.float32(selection.threshold)

    def rows(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(unit, label, confidence)."""
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
        """Larger is better: the bits of the confidence, which is not negative, then a hash."""
        bits = np.ascontiguousarray(confidence, np.float32).view(np.uint32).astype(np.uint64)
        hashed = order.mixed(order.mix(self.selection.seed, unit), np.arange(len(confidence)))
        return bits << np.uint64(32) | hashed >> np.uint64(32)

    def cut(self, wanted: np.ndarray, confident: np.ndarray) -> Cut:
        """The key of the `wanted`-th best of each class with confidence enough, digit by digit."""
        asked = np.flatnonzero((wanted > 0) & (wanted < confident))
        slot = np.full(self.classes, -1, np.int64)  # of the classes that are asked for
        slot[asked] = np.arange(len(asked))
        prefix = np.zeros(len(asked), np.uint64)
        left = wanted[asked].copy()  # how many of those with this prefix
        width = min(16, max(4, int(np.log2(COUNTERS / max(1, len(asked))))))
        shift = KEY_BITS
        while shift and len(asked):
            width = min(width, shift)
            shift -= width
            counts = self.digits(slot, prefix, shift, width)
            from_above = counts[:, ::-1].cumsum(1)
            digit = (from_above < left[:, None]).sum(1)  # how many digits from above are wholly among the best
            rows = np.arange(len(asked))
            before = np.where(digit > 0, from_above[rows, np.maximum(digit, 1) - 1], 0)
            left -= before
            prefix = prefix << np.uint64(width) | ((1 << width) - 1 - digit).astype(np.uint64)
        key, equal = np.zeros(self.classes, np.uint64), np.zeros(self.classes, np.int64)
        key[asked], equal[asked] = prefix, left
        whole = (wanted > 0) & (wanted >= confident)  # all of them
        equal[whole] = np.iinfo(np.int64).max
        return Cut(key, equal)

    def digits(self, slot: np.ndarray, prefix: np.ndarray, shift: int, width: int) -> np.ndarray:
        """How often each digit follows the prefix of its class: [asked, 2^width]."""
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
            for row in np.flatnonzero(at):  # rarely more than one of a class
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

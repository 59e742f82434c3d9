"""The report of a folder of pseudo-labels: counts, confidences and images, read from its files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lambdanets.data.decode import decode
from lambdanets.data.tars import unpacked
from lambdanets.files import write_text
from lambdanets.pseudo.files import Manifest, label_path, read_columns, read_labels, read_manifest, read_selected
from lambdanets.pseudo.select import BINS, Counts, read_counts
from lambdanets.pseudo.source import reopened
from lambdanets.report.pictures import TINY, encoded
from lambdanets.report.show import percent, probability, shortened, some
from lambdanets.report.template import rendered

HERE = Path(__file__).parent
REPORT = "report.html"
SHOWN_CLASSES = 12  # classes with images
PICTURES = 6  # of each class
LISTED = 200  # leaks, and unreadable images
LONG = 40


def write_page(folder: Path, *, pictures: bool = True) -> Path:
    """Write `folder`/report.html and return its path. The folder must have a selection (`lambdanets pseudo select`)."""
    manifest, counts = read_manifest(folder), read_counts(folder)
    text = rendered(HERE, **gather(folder, manifest, counts, pictures))
    write_text(folder / REPORT, text)
    return folder / REPORT


def gather(folder: Path, manifest: Manifest, counts: Counts, pictures: bool) -> dict[str, Any]:
    """Return the values of the page."""
    histogram = np.array(counts.histogram).reshape(-1, BINS)
    threshold = counts.selection.get("threshold", 0.0)
    warnings = []
    if counts.missing:
        warnings.append(
            f"{len(counts.missing)} of {counts.units} units have no labels: {', '.join(counts.missing[:5])}"
        )
    empty = [name for name, used in zip(counts.class_names, counts.used, strict=True) if not used]
    if empty:
        warnings.append(f"{some(len(empty), 'class has', 'classes have')} no images: {', '.join(empty[:10])}")
    total = max(1, sum(counts.labelled))
    tiles = [
        ("images", f"{counts.images:,}"),
        ("labelled", f"{sum(counts.labelled):,}"),
        ("confident", percent(sum(counts.confident) / total, 1)),
        ("kept", f"{sum(counts.kept):,}"),
        ("used, with duplicates", f"{sum(counts.used):,}"),
        ("unreadable", f"{counts.broken:,}"),
        ("leaks dropped", f"{counts.leaks:,}"),
    ]
    rows = zip(counts.class_names, counts.labelled, counts.confident, counts.kept, counts.used, strict=True)
    classes = [
        {
            "name": shortened(name, LONG),
            "numbers": [f"{n:,}" for n in numbers],
            "bins": heights(histogram[i], threshold),
        }
        for i, (name, *numbers) in enumerate(rows)
    ]
    leaks, broken = named(folder, manifest)
    chosen = counts.selection
    teachers = ", ".join(str(teacher["what"]) for teacher in manifest.teachers)
    return {
        "title": f"Pseudo-labels of {Path(manifest.images).name}",
        "subtitle": f"Teachers: {teachers}. Minimum confidence {threshold:g}; images per class: at least "
        f"{chosen.get('least') or 0}, at most {chosen.get('most') or 'unlimited'}.",
        "warnings": warnings,
        "tiles": tiles,
        "all_bins": heights(histogram.sum(0), threshold),
        "classes": classes,
        "pictures": picture_rows(folder, manifest, counts) if pictures else [],
        "lists": [("Dropped leaks", leaks), ("Unreadable images", broken)],
    }


def heights(row: np.ndarray, threshold: float) -> list[tuple[float, bool]]:
    """Return the bars of a histogram: height in percent, and whether the confidence reaches the threshold."""
    most = max(1, int(row.max()))
    return [(100 * int(n) / most, (i + 1) / BINS > threshold) for i, n in enumerate(row)]


def named(folder: Path, manifest: Manifest) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return rows about leaks and about unreadable images."""
    leaks: list[tuple[str, ...]] = []
    broken: list[tuple[str, ...]] = []
    for number in range(len(manifest.units)):
        if len(leaks) >= LISTED and len(broken) >= LISTED:
            break
        if label_path(folder, number).exists():
            about = read_columns(folder, manifest, number, ("label",))[1]
            leaks += map(tuple, about["leaks"])
            broken += map(tuple, about["broken"])
    return leaks[:LISTED], broken[:LISTED]


@dataclass(frozen=True)
class Sample:
    """A kept image."""

    unit: int
    row: int
    label: int
    confidence: float


def picture_rows(folder: Path, manifest: Manifest, counts: Counts) -> list[dict[str, Any]]:
    """Return the kept images with the highest and the lowest confidence, for some classes evenly spaced."""
    there = np.flatnonzero(np.array(counts.kept))
    if not len(there):
        return []
    spread = np.unique(np.linspace(0, len(there) - 1, SHOWN_CLASSES).round().astype(int))
    best = extremes(folder, manifest, [int(c) for c in there[spread]])
    try:
        source = SingleImages(folder, manifest)
    except (ValueError, OSError) as error:
        return [{"name": "", "shown": [{"picture": None, "tiny": False, "text": f"Images not shown: {error}"}]}]
    return [
        {"name": shortened(counts.class_names[label], LONG), "shown": [source.shown(one) for one in rows]}
        for label, rows in best.items()
    ]


def extremes(folder: Path, manifest: Manifest, classes: list[int]) -> dict[int, list[Sample]]:
    """Return the kept images of each class with the highest and the lowest confidence."""
    half = PICTURES // 2
    found: dict[int, list[Sample]] = {label: [] for label in classes}
    for number in range(len(manifest.units)):
        if not label_path(folder, number).exists():
            continue
        columns, _ = read_columns(folder, manifest, number, ("label", "confidence"))
        rows = read_selected(folder, number, len(columns["label"]))["row"]
        labels, confidence = columns["label"][rows], columns["confidence"][rows]
        for label in classes:
            mine = np.flatnonzero(labels == label)
            ends = mine[np.argsort(-confidence[mine], kind="stable")]
            ends = ends if len(ends) <= PICTURES else np.concatenate([ends[:half], ends[-half:]])
            more = [Sample(number, int(rows[i]), label, float(confidence[i])) for i in ends]
            both = sorted(found[label] + more, key=lambda one: -one.confidence)
            found[label] = both if len(both) <= PICTURES else both[:half] + both[-half:]
    return found


class SingleImages:
    """Reads single images of a labelled folder."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.place = folder, reopened(manifest, None)

    def shown(self, one: Sample) -> dict[str, Any]:
        """Return an image with its confidence for the page."""
        text = probability(one.confidence)
        try:
            data = self.read(one)
            image = Image.fromarray(data) if isinstance(data, np.ndarray) else decode(data)
            return {"picture": encoded(image), "tiny": max(image.size) <= TINY, "text": text}
        except (ValueError, OSError, IndexError) as error:
            return {"picture": None, "tiny": False, "text": f"{text}; image not shown: {error}"}

    def read(self, one: Sample) -> bytes | np.ndarray:
        """Return the encoded file or the pixels of an image."""
        labels = read_labels(self.folder, one.unit)
        if self.place.source is not None:
            return self.place.source.read(self.place.units[one.unit].first + int(labels.position[one.row]))
        assert labels.offset is not None
        assert labels.size is not None
        with open(unpacked(self.place.paths[one.unit]), "rb") as file:
            file.seek(int(labels.offset[one.row]))
            return file.read(int(labels.size[one.row]))

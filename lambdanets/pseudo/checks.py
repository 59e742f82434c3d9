"""Validation of label files: allowed types, shapes and values of their columns, and digests of the contents."""

import hashlib
from typing import Any

import numpy as np

AGAIN = "Remove it and run `lambdanets pseudo label` again"
TYPES = {
    "position": np.int32,
    "label": np.int32,
    "confidence": np.float32,
    "classes": np.int32,
    "probabilities": np.float16,
    "offset": np.int64,
    "size": np.int64,
    "row": np.int32,
    "repeats": np.int16,
}
SOFT = ("classes", "probabilities")  # the columns with two dimensions
LARGEST_FILE = 2**31  # bytes of an image
SUM_TOLERANCE = 0.01  # probabilities are rounded to float16


def digest(value: np.ndarray | str) -> str:
    """Return the digest of a column (its type, shape and contents) or of a text."""
    if isinstance(value, str):
        return hashlib.blake2b(value.encode(), digest_size=16).hexdigest()
    found = hashlib.blake2b(f"{value.dtype.str}{value.shape}".encode(), digest_size=16)
    found.update(np.ascontiguousarray(value).data)
    return found.hexdigest()


def what_is_wrong(columns: dict[str, np.ndarray], about: dict[str, Any], classes: int, soft: int, most: int) -> str:
    """Return a description of the first invalid value in a label file, or "" if there is none.

    Args:
        columns: some or all columns of the file.
        about: the counts and names in the header of the file.
        classes: number of classes of the teacher.
        soft: number of probabilities per image; 0 if only the top class is kept.
        most: number of images of the unit; 0 if only `about` has it.
    """
    wrong = wrong_shapes(columns) or wrong_counts(about, most)
    if wrong:
        return wrong
    rows = len(next(iter(columns.values()), ()))
    images = about["images"]
    if rows + len(about["broken"]) + len(about["leaks"]) > images:
        return f"it has {rows} labels for {images} images"
    ranges = {"position": images, "label": classes, "classes": classes}
    for name, limit in ranges.items():
        values = columns.get(name)
        if values is not None and values.size and not 0 <= values.min() <= values.max() < limit:
            wrong = values[(values < 0) | (values >= limit)].flat[0]
            return f"{name} {wrong} is not one of 0 to {limit - 1}"
    if "position" in columns and len(np.unique(columns["position"])) != rows:
        return "an image has two labels"
    if "confidence" in columns and not within(columns["confidence"], 0, 1):
        return "confidences must be numbers from 0 to 1"
    if "offset" in columns and not within(columns["offset"], 0, 2**62):
        return "an offset is negative or too large"
    if "size" in columns and not within(columns["size"], 1, LARGEST_FILE):
        return "the size of an image is 0, negative or too large"
    return wrong_soft(columns, soft) if rows else ""


def wrong_shapes(columns: dict[str, np.ndarray]) -> str:
    for name, values in columns.items():
        if values.dtype != TYPES[name] or values.ndim != 1 + (name in SOFT):
            return f"{name} has the type {values.dtype} and the shape {values.shape}, which does not fit"
    if len({len(values) for values in columns.values()}) > 1:
        return "its columns have different lengths"
    return ""


def wrong_counts(about: dict[str, Any], most: int) -> str:
    images = about.get("images")
    if type(images) is not int or images < 0 or (most and images != most):
        return f"it is for {str(images)[:40]} images" + (f", but the unit has {most}" if most else "")
    for name, words in (("broken", 2), ("leaks", 3)):
        rows = about.get(name)
        if not isinstance(rows, list) or not all(
            isinstance(row, list) and len(row) == words and all(isinstance(word, str) for word in row) for row in rows
        ):
            return f"{name} must be a list of names and reasons"
    return ""


def wrong_soft(columns: dict[str, np.ndarray], soft: int) -> str:
    for name in SOFT:
        if name in columns and columns[name].shape[1] != soft:
            return f"{name} has {columns[name].shape[1]} columns, but labels.json has soft={soft}"
    if "classes" in columns:
        ordered = np.sort(columns["classes"], 1)
        if (ordered[:, 1:] == ordered[:, :-1]).any():
            return "an image has two probabilities for the same class"
        if "label" in columns and (columns["classes"][:, 0] != columns["label"]).any():
            return "a label is not the most likely class"
    if "probabilities" in columns:
        values = columns["probabilities"].astype(np.float64)
        sums = values.sum(1)
        if not within(values, 0, 1) or not within(sums, 1e-6, 1 + SUM_TOLERANCE):
            return "probabilities must be numbers from 0 to 1 whose sum is more than 0 and at most 1"
    return ""


def what_is_wrong_with_rows(columns: dict[str, np.ndarray], labels: int) -> str:
    """Return a description of the first invalid value in a selection of rows from `labels` labels, or ""."""
    wrong = wrong_shapes(columns)
    if wrong:
        return wrong
    rows = columns["row"]
    if len(rows) and (not within(rows, 0, labels - 1) or (np.diff(rows) <= 0).any()):
        return f"rows must be increasing numbers from 0 to {labels - 1}"
    if "repeats" in columns and len(rows) and columns["repeats"].min() < 1:
        return "an image is repeated less than once"
    return ""


def within(values: np.ndarray, low: float, high: float) -> bool:
    """Return whether all values are in the range; NaN is not."""
    return bool(((values >= low) & (values <= high)).all())

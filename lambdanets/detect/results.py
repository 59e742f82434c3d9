"""Detections in pixels of the original images, and COCO result files."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lambdanets.data.decode import LIMITS
from lambdanets.detect import rle
from lambdanets.detect.annotations import LARGEST_ID, MOST_BYTES, number_of, shown, side
from lambdanets.detect.scenes import Category, Picture
from lambdanets.files import read_json, write_json

LARGEST_NUMBER = 1e9  # limit of coordinates and scores
Result = dict[str, Any]  # an entry of a COCO result file


@dataclass(frozen=True, eq=False)
class Detection:
    """A detected object.

    Attributes:
        box: left, top, right, bottom in pixels of the original image.
        label: the class, from 1.
        score: from 0 to 1.
        mask: run lengths of the whole image, as in COCO; None without masks.

    >>> from lambdanets.detect.results import Detection
    >>> from lambdanets.detect.scenes import Category
    >>> found = Detection(box=(4.0, 5.0, 24.0, 15.0), label=1, score=0.75)
    >>> found.as_coco(image_id=3, categories=[Category(7, "nucleus")])
    {'image_id': 3, 'category_id': 7, 'bbox': [4.0, 5.0, 20.0, 10.0], 'score': 0.75}
    """

    box: tuple[float, float, float, float]
    label: int
    score: float
    mask: dict[str, Any] | None = None

    def as_coco(self, image_id: int, categories: Sequence[Category]) -> Result:
        """Return the detection as an entry of a COCO result file."""
        left, top, right, bottom = self.box
        found: Result = {
            "image_id": image_id,
            "category_id": categories[self.label - 1].id,
            "bbox": [round(v, 3) for v in (left, top, right - left, bottom - top)],
            "score": round(self.score, 6),
        }
        return found if self.mask is None else found | {"segmentation": self.mask}


def detections(output: dict[str, Tensor], size: tuple[int, int], original: tuple[int, int]) -> list[Detection]:
    """Convert the output of a detector for an image.

    Args:
        output: boxes, labels, scores and masks in pixels of the resized image.
        size: height and width of the resized image, without padding.
        original: height and width of the original image.
    """
    scale = np.array([original[1] / size[1], original[0] / size[0]] * 2)
    boxes_N4 = output["boxes"].double().cpu().numpy() * scale
    labels, scores = output["labels"].tolist(), output["scores"].double().tolist()
    masks_NHW = output["masks"][:, 0].float().cpu().numpy() if "masks" in output else None
    found = []
    for i, box in enumerate(boxes_N4):
        mask = None if masks_NHW is None else pasted(masks_NHW[i], box, original)
        left, top, right, bottom = box.tolist()
        found.append(Detection((left, top, right, bottom), labels[i], scores[i], mask))
    return found


def pasted(probabilities_HW: np.ndarray, box: np.ndarray, size: tuple[int, int]) -> dict[str, Any]:
    """Return the run lengths of a mask from probabilities inside a box, with a threshold of 0.5 at pixel centres."""
    left, top, right, bottom = box.tolist()
    first_x, first_y = max(0, math.floor(left)), max(0, math.floor(top))
    last_x, last_y = min(size[1], math.ceil(right)), min(size[0], math.ceil(bottom))
    rows = interpolation(first_y, last_y, top, bottom, probabilities_HW.shape[0])
    columns = interpolation(first_x, last_x, left, right, probabilities_HW.shape[1])
    return rle.encode(rows @ probabilities_HW @ columns.T >= 0.5, first_x, first_y, size)


def interpolation(first: int, last: int, begin: float, end: float, cells: int) -> np.ndarray:
    """Return the weights [pixels, cells] of linear interpolation at pixels first to last of cells from begin to end."""
    centres = (np.arange(first, max(first, last)) + 0.5 - begin) / max(end - begin, 1e-6) * cells - 0.5
    return np.maximum(0.0, 1.0 - np.abs(centres[:, None] - np.arange(cells)))


def by_picture(results: Sequence[Result], categories: Sequence[Category]) -> dict[int, list[Detection]]:
    """Return the detections of each image by image id, without those of unknown categories."""
    known = {category.id: label for label, category in enumerate(categories, start=1)}
    found: dict[int, list[Detection]] = {}
    for one in results:
        if one["category_id"] in known:
            left, top, width, height = one["bbox"]
            box = (left, top, left + width, top + height)
            detection = Detection(box, known[one["category_id"]], one["score"], one.get("segmentation"))
            found.setdefault(one["image_id"], []).append(detection)
    return found


def write_results(path: Path, results: Sequence[Result]) -> Path:
    """Write a COCO result file atomically and return its path.

    >>> from pathlib import Path
    >>> from lambdanets.detect.results import Detection, write_results
    >>> from lambdanets.detect.scenes import Category
    >>> found = Detection(box=(4.0, 5.0, 24.0, 15.0), label=1, score=0.75)
    >>> write_results(Path("results.json"), [found.as_coco(3, [Category(7, "nucleus")])]).name
    'results.json'
    """
    write_json(path, list(results), indent=None)
    return path


def read_results(path: Path) -> list[Result]:
    """Read a COCO result file; a ValueError names the first invalid detection.

    >>> from pathlib import Path
    >>> from lambdanets.detect.results import read_results, write_results
    >>> one = {"image_id": 1, "category_id": 2, "bbox": [4.0, 5.0, 20.0, 10.0], "score": 0.75}
    >>> read_results(write_results(Path("results.json"), [one])) == [one]
    True
    """
    data = read_json(path, MOST_BYTES, any_number=True)
    if not isinstance(data, list) or not all(isinstance(one, dict) for one in data):
        raise ValueError(f"{path} is not a COCO result file: it must be a list of detections")
    for i, one in enumerate(data):
        if not {"image_id", "category_id", "score"} <= one.keys() or not {"bbox", "segmentation"} & one.keys():
            raise ValueError(f"{path}: detection {i} must have image_id, category_id, score, and bbox or segmentation")
        for key, right in FIELDS.items():
            if key in one and not right(one[key]):
                raise ValueError(f"{path}: detection {i} has the invalid {key} {shown(one[key], 80)}")
    return data


def check_sizes(path: Path, results: Sequence[Result], pictures: Sequence[Picture]) -> None:
    """Raise a ValueError if the mask of a detection has another size than its image."""
    sizes = {picture.id: [*picture.size] for picture in pictures}
    for i, one in enumerate(results):
        wanted = sizes.get(one["image_id"])
        if wanted is not None and "segmentation" in one and one["segmentation"]["size"] != wanted:
            raise ValueError(
                f"{path}: detection {i} has a mask of {one['segmentation']['size']} pixels (height, width), but image "
                f"{one['image_id']} has {wanted}"
            )


def is_number(value: Any) -> bool:
    return (number := number_of(value)) is not None and abs(number) <= LARGEST_NUMBER


def is_id(value: Any) -> bool:
    return type(value) is int and abs(value) <= LARGEST_ID


def is_box(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(is_number, value)) and min(value[2:]) >= 0


def is_mask(value: Any) -> bool:
    """Return whether a value is a mask of a COCO result file: packed run lengths that cover their size."""
    size = value.get("size") if isinstance(value, dict) else None
    if not isinstance(size, list) or len(size) != 2 or not all(type(v) is int and side(v) for v in size):
        return False
    if size[0] * size[1] > LIMITS.pixels:
        return False
    try:
        counts = rle.unpack(value["counts"])
    except (ValueError, KeyError, AttributeError):
        return False
    return sum(counts) == size[0] * size[1] and min(counts) >= 0


FIELDS = {
    "image_id": is_id,
    "category_id": is_id,
    "score": is_number,
    "bbox": is_box,
    "segmentation": is_mask,
}

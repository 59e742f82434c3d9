"""Pictures with their objects, as data: what annotations of any origin become.

Boxes are left, top, right, bottom in pixels. Labels count from 1: 0 is background, as in torchvision.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lambdanets.detect import rle


@dataclass(frozen=True)
class Problem:
    """An entry of an annotation file that is left out, and why."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True)
class Category:
    """A class, with the number that annotations give it."""

    id: int
    name: str


@dataclass(frozen=True, eq=False)
class Segment:
    """The outline of an object: polygons, or run lengths down the columns of the whole picture."""

    polygons: tuple[np.ndarray, ...] = ()
    counts: np.ndarray | None = None

    def mask(self, size: tuple[int, int]) -> np.ndarray:
        """bool [height, width]."""
        if self.counts is not None:
            return rle.decode(self.counts, size)
        found = rle.fill_polygon(self.polygons[0], size)
        for polygon in self.polygons[1:]:
            found |= rle.fill_polygon(polygon, size)
        return found

    def as_coco(self, size: tuple[int, int]) -> Any:
        if self.counts is None:
            return [polygon.tolist() for polygon in self.polygons]
        return {"size": list(size), "counts": rle.pack(self.counts.tolist())}


@dataclass(frozen=True, eq=False)
class Picture:
    """One picture and its objects."""

    id: int
    name: str  # of its file
    height: int
    width: int
    boxes_N4: np.ndarray  # float32, inside the picture
    labels_N: np.ndarray  # int64, from 1
    crowd_N: np.ndarray  # bool: a group, which is not trained on, and where no answer is wrong
    area_N: np.ndarray  # float64, as the annotations say
    given_N4: np.ndarray  # float64: left, top, width, height, as the annotations say
    segments: tuple[Segment | None, ...]

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width


@dataclass(frozen=True, eq=False)
class Scenes:
    """A set of pictures."""

    categories: tuple[Category, ...]
    pictures: tuple[Picture, ...]
    masks: bool  # whether objects have outlines
    problems: tuple[Problem, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(category.name for category in self.categories)

    @property
    def objects(self) -> int:
        return sum(len(picture.labels_N) for picture in self.pictures)

    def as_coco(self, indices: Iterable[int] | None = None) -> dict[str, Any]:
        """A COCO data set of some pictures. Annotations get new numbers: 0 would mean "no match" to evaluators."""
        chosen: Sequence[Picture] = self.pictures if indices is None else [self.pictures[i] for i in indices]
        annotations = []
        for picture in chosen:
            for i, segment in enumerate(picture.segments):
                one = {
                    "id": len(annotations) + 1,
                    "image_id": picture.id,
                    "category_id": self.categories[picture.labels_N[i] - 1].id,
                    "bbox": picture.given_N4[i].tolist(),
                    "area": float(picture.area_N[i]),
                    "iscrowd": int(picture.crowd_N[i]),
                }
                if self.masks and segment is not None:
                    one["segmentation"] = segment.as_coco(picture.size)
                annotations.append(one)
        return {
            "info": {},
            "images": [{"id": p.id, "file_name": p.name, "height": p.height, "width": p.width} for p in chosen],
            "categories": [{"id": c.id, "name": c.name} for c in self.categories],
            "annotations": annotations,
        }


def make_picture(
    number: int, name: str, size: tuple[int, int], objects: Sequence[tuple[Sequence[float], int, bool, float, Any]]
) -> Picture:
    """From (box as left, top, width, height; label; crowd; area; segment) of each object."""
    height, width = size
    given = np.array([box for box, *_ in objects], np.float64).reshape(-1, 4)
    corners = np.concatenate([given[:, :2], given[:, :2] + given[:, 2:]], axis=1)
    return Picture(
        id=number,
        name=name,
        height=height,
        width=width,
        boxes_N4=np.clip(corners, 0, [width, height, width, height]).astype(np.float32),
        labels_N=np.array([label for _, label, *_ in objects], np.int64),
        crowd_N=np.array([crowd for _, _, crowd, *_ in objects], bool),
        area_N=np.array([area for *_, area, _ in objects], np.float64),
        given_N4=given,
        segments=tuple(segment for *_, segment in objects),
    )

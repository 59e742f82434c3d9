"""Images with annotated objects, independent of the annotation format.

Boxes are left, top, right, bottom in pixels. Labels start at 1; 0 is the background, as in torchvision.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lambdanets.detect import rle


@dataclass(frozen=True)
class Problem:
    """A skipped entry of an annotation file.

    Attributes:
        where: which entry, for example "annotations[3] (id 11)".
        reason: why it was skipped.
    """

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True)
class Category:
    """A class of objects.

    Attributes:
        id: the number of the class in the annotation file.
        name: the name of the class.
    """

    id: int
    name: str


@dataclass(frozen=True, eq=False)
class Segment:
    """The mask of an object, as polygons or as run lengths.

    Attributes:
        polygons: arrays x0, y0, x1, y1, ... in pixels; the mask is their union.
        counts: run lengths of the whole image in column-major order, the first of which counts zeros.

    >>> import numpy as np
    >>> from lambdanets.detect.scenes import Segment
    >>> triangle = Segment((np.array([0.0, 0.0, 4.0, 0.0, 0.0, 4.0]),))
    >>> triangle.mask((4, 5)).astype(int)
    array([[1, 1, 1, 0, 0],
           [1, 1, 0, 0, 0],
           [1, 0, 0, 0, 0],
           [0, 0, 0, 0, 0]])
    """

    polygons: tuple[np.ndarray, ...] = ()
    counts: np.ndarray | None = None

    def mask(self, size: tuple[int, int]) -> np.ndarray:
        """Return the mask, bool [height, width], of an image of `size` (height, width)."""
        if self.counts is not None:
            return rle.decode(self.counts, size)
        found = rle.fill_polygon(self.polygons[0], size)
        for polygon in self.polygons[1:]:
            found |= rle.fill_polygon(polygon, size)
        return found

    def as_coco(self, size: tuple[int, int]) -> Any:
        """Return the value of "segmentation" in COCO annotations of an image of `size` (height, width)."""
        if self.counts is None:
            return [polygon.tolist() for polygon in self.polygons]
        return {"size": list(size), "counts": rle.pack(self.counts.tolist())}


@dataclass(frozen=True, eq=False)
class Picture:
    """An image and its N objects.

    Attributes:
        id: the number of the image in the annotation file.
        name: the name of the image file.
        height: in pixels.
        width: in pixels.
        boxes_N4: float32, left, top, right, bottom, clipped to the image.
        labels_N: int64, from 1.
        crowd_N: bool, groups of objects (`iscrowd`): not trained on, and ignored in evaluation.
        area_N: float64, the area in the annotation file.
        given_N4: float64, left, top, width, height in the annotation file.
        segments: the masks; None for objects without one.
    """

    id: int
    name: str
    height: int
    width: int
    boxes_N4: np.ndarray
    labels_N: np.ndarray
    crowd_N: np.ndarray
    area_N: np.ndarray
    given_N4: np.ndarray
    segments: tuple[Segment | None, ...]

    @property
    def size(self) -> tuple[int, int]:
        """(height, width)."""
        return self.height, self.width


@dataclass(frozen=True, eq=False)
class Scenes:
    """Annotated images with common classes.

    Attributes:
        categories: the classes; label i is categories[i - 1].
        pictures: the images.
        masks: whether objects have masks.
        problems: the entries of the annotation file that were skipped.

    >>> from lambdanets.detect.shapes import Shapes
    >>> scenes = Shapes("test").scenes()
    >>> len(scenes), scenes.objects
    (32, 78)
    >>> coco = scenes.as_coco([0])  # the first image as a COCO dataset
    >>> [one["category_id"] for one in coco["annotations"]] == scenes.pictures[0].labels_N.tolist()
    True
    """

    categories: tuple[Category, ...]
    pictures: tuple[Picture, ...]
    masks: bool
    problems: tuple[Problem, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; label i is class_names[i - 1]."""
        return tuple(category.name for category in self.categories)

    @property
    def objects(self) -> int:
        """Number of objects in all images."""
        return sum(len(picture.labels_N) for picture in self.pictures)

    def as_coco(self, indices: Iterable[int] | None = None) -> dict[str, Any]:
        """Return some or all images as a COCO dataset.

        Annotations get new ids from 1: evaluators treat id 0 as "no match".
        """
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
    """Make a picture from (box as left, top, width, height; label; crowd; area; segment) of each object."""
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

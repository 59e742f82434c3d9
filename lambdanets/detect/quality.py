"""Quality of the detections in one image, for choosing the images of the report."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lambdanets.detect.results import Detection
from lambdanets.detect.scenes import Picture

LEAST_SCORE = LEAST_OVERLAP = 0.5


@dataclass(frozen=True)
class Quality:
    """Numbers of true positives (right), false positives (wrong) and false negatives (missed)."""

    right: int
    wrong: int
    missed: int

    @property
    def f1(self) -> float:
        every = 2 * self.right + self.wrong + self.missed
        return 2 * self.right / every if every else 1.0


def quality(picture: Picture, found: Sequence[Detection]) -> Quality:
    """Match detections, the highest score first, to the object of their class with the largest IoU.

    Unmatched detections inside a crowd are not counted as wrong.
    """
    taken = np.zeros(len(picture.labels_N), bool)
    right = wrong = 0
    for one in sorted(found, key=lambda d: -d.score):
        if one.score < LEAST_SCORE:
            break
        box = np.array(one.box)
        overlap_N, covered_N = overlaps(box, picture.boxes_N4.astype(np.float64))
        same_N = picture.labels_N == one.label
        free_N = np.where(same_N & ~picture.crowd_N & ~taken, overlap_N, 0.0)
        if free_N.max(initial=0.0) >= LEAST_OVERLAP:
            taken[free_N.argmax()] = True
            right += 1
        elif not (same_N & picture.crowd_N & (covered_N >= LEAST_OVERLAP)).any():
            wrong += 1
    return Quality(right, wrong, int((~picture.crowd_N & ~taken).sum()))


def overlaps(box: np.ndarray, boxes_N4: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the IoU with each box [N], and the intersection with each as a fraction of the first box [N]."""
    corner = np.minimum(box[2:], boxes_N4[:, 2:]) - np.maximum(box[:2], boxes_N4[:, :2])
    shared = np.prod(np.clip(corner, 0, None), axis=1)
    own, others = np.prod(box[2:] - box[:2]), np.prod(boxes_N4[:, 2:] - boxes_N4[:, :2], axis=1)
    return shared / np.maximum(own + others - shared, 1e-9), shared / max(own, 1e-9)

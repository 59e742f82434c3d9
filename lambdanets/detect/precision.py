"""COCO's average precision, by faster-coco-eval."""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lambdanets.detect.results import Result

COCO_DETECTIONS = 100  # that COCO counts in a picture
KINDS = {"box": "bbox", "mask": "segm"}
MISSING = "average precision needs faster-coco-eval: pip install 'lambdanets[detect]'"
# Places in COCO's array of precisions: IoU thresholds 0.5, 0.55, ... 0.95; recalls; classes; areas; detections.
AREAS = {"small": 1, "medium": 2, "large": 3}


@dataclass(frozen=True)
class Scores:
    """AP of boxes and masks: {"box_ap", "box_ap50", "box_ap75", "box_small", "box_medium", "box_large", "box_recall",
    "mask_ap", ...}; NaN where there is no such object. And AP of every class, by its id."""

    numbers: dict[str, float]
    classes: dict[str, dict[int, float]] = field(default_factory=dict)  # "box" and "mask"


def available() -> bool:
    return importlib.util.find_spec("faster_coco_eval") is not None


def average_precision(
    truth: dict[str, Any],
    results: Sequence[Result],
    *,
    masks: bool,
    boxes: bool = True,
    detections: int = COCO_DETECTIONS,
) -> Scores:
    """Scores of results on a COCO data set.

    Args:
        truth: as `Scenes.as_coco` makes it, of the pictures that were looked at.
        results: as in a COCO result file.
        masks: of masks.
        boxes: of boxes.
        detections: the best so many of a picture count, and never fewer than COCO's 100.
    """
    try:
        from faster_coco_eval import COCO, COCOeval_faster
    except ImportError as error:
        raise ValueError(MISSING) from error
    numbers: dict[str, float] = {}
    classes: dict[str, dict[int, float]] = {}
    for name in [name for name, wanted in (("box", boxes), ("mask", masks)) if wanted]:
        # with a box beside its mask, a detection would count as large as the box
        key, dropped = ("bbox", "segmentation") if name == "box" else ("segmentation", "bbox")
        found = [{k: value for k, value in one.items() if k != dropped} for one in results if key in one]
        given = COCO(truth, use_deepcopy=True)
        evaluation = COCOeval_faster(given, given.loadRes(found), KINDS[name])  # type: ignore[arg-type]
        evaluation.params.maxDets = [1, 10, max(COCO_DETECTIONS, detections)]
        evaluation.evaluate()
        evaluation.accumulate()
        precision_TRKAM = np.asarray(evaluation.eval["precision"])
        recall_TKAM = np.asarray(evaluation.eval["recall"])
        numbers |= {f"{name}_{key}": value for key, value in summary(precision_TRKAM, recall_TKAM).items()}
        ids = [int(i) for i in evaluation.params.catIds]
        classes[name] = {i: mean(precision_TRKAM[:, :, k, 0, -1]) for k, i in enumerate(ids)}
    return Scores(numbers, classes)


def summary(precision_TRKAM: np.ndarray, recall_TKAM: np.ndarray) -> dict[str, float]:
    found = {
        "ap": mean(precision_TRKAM[:, :, :, 0, -1]),
        "ap50": mean(precision_TRKAM[0, :, :, 0, -1]),
        "ap75": mean(precision_TRKAM[5, :, :, 0, -1]),
        "recall": mean(recall_TKAM[:, :, 0, -1]),
    }
    return found | {name: mean(precision_TRKAM[:, :, :, place, -1]) for name, place in AREAS.items()}


def mean(values: np.ndarray) -> float:
    """Of what COCO could count; -1 marks what it could not."""
    counted = values[values > -1]
    return float(counted.mean()) if counted.size else math.nan

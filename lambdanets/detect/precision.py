"""COCO average precision, computed by faster-coco-eval."""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lambdanets.detect.results import Result

COCO_DETECTIONS = 100  # detections per image that COCO evaluates
KINDS = {"box": "bbox", "mask": "segm"}
MISSING = "average precision needs faster-coco-eval: pip install 'lambdanets[detect]'"
# COCO's array of precisions is [T, R, K, A, M]: IoU thresholds 0.5, 0.55, ... 0.95; recalls; classes; areas; maximum
# numbers of detections. These are indices of areas.
AREAS = {"small": 1, "medium": 2, "large": 3}


@dataclass(frozen=True)
class Scores:
    """Average precision of boxes and masks.

    Attributes:
        numbers: AP by name, from 0 to 1: "box_ap", "box_ap50", "box_ap75", "box_small", "box_medium", "box_large",
            "box_recall", and the same with "mask_". NaN if there is no such object.
        classes: AP by class id, for "box" and "mask".
    """

    numbers: dict[str, float]
    classes: dict[str, dict[int, float]] = field(default_factory=dict)


def available() -> bool:
    """Return whether faster-coco-eval is installed, which `average_precision` needs."""
    return importlib.util.find_spec("faster_coco_eval") is not None


def average_precision(
    truth: dict[str, Any],
    results: Sequence[Result],
    *,
    masks: bool,
    boxes: bool = True,
    detections: int = COCO_DETECTIONS,
) -> Scores:
    """Compute the average precision of detections.

    Args:
        truth: the annotations of the evaluated images as a COCO dataset (`Scenes.as_coco`).
        results: the detections, as in a COCO result file.
        masks: whether to evaluate masks.
        boxes: whether to evaluate boxes.
        detections: maximum number of detections per image, at least COCO's 100.

    Raises:
        ValueError: if faster-coco-eval is not installed.

    >>> from lambdanets.detect.precision import average_precision
    >>> from lambdanets.detect.shapes import Shapes
    >>> truth = Shapes("validation").scenes().as_coco([0, 1])
    >>> results = [{**one, "score": 0.9} for one in truth["annotations"]]  # perfect detections
    >>> round(average_precision(truth, results, masks=True).numbers["mask_ap"], 6)
    1.0
    """
    try:
        from faster_coco_eval import COCO, COCOeval_faster
    except ImportError as error:
        raise ValueError(MISSING) from error
    numbers: dict[str, float] = {}
    classes: dict[str, dict[int, float]] = {}
    for name in [name for name, wanted in (("box", boxes), ("mask", masks)) if wanted]:
        # if a detection has a box too, COCO takes its area for the mask's
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
    """Return the mean of the values that COCO could compute; the others are -1."""
    counted = values[values > -1]
    return float(counted.mean()) if counted.size else math.nan

"""Average precision is pycocotools', on detections at random, with crowds and empty pictures."""

import contextlib
import copy
import io
import math

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from lambdanets.detect import rle
from lambdanets.detect.precision import AREAS, average_precision, mean

HEIGHT, WIDTH = 240, 320


def scene(seed: int, *, pictures: int, categories: int, objects: int, found: int):
    """A COCO data set and results: some objects hit, some nearly, some made up; crowds; pictures without anything."""
    generator = np.random.default_rng(seed)

    def box():
        width, height = generator.choice([12, 60, 220]) * generator.uniform(0.3, 1, 2)
        width, height = max(width, 1.5), max(height, 1.5)
        return [generator.uniform(0, WIDTH - width), generator.uniform(0, HEIGHT - height), width, height]

    def blob(box):
        left, top, width, height = box
        points = [left, top + height / 2, left + width / 2, top, left + width, top + height / 2, left + width / 2]
        return rle.fill_polygon([*points, top + height], (HEIGHT, WIDTH))

    truth = {
        "images": [
            {"id": 7 * i + 3, "height": HEIGHT, "width": WIDTH, "file_name": f"{i}.jpg"} for i in range(pictures)
        ],
        "categories": [{"id": 2 * c + 1, "name": f"kind {c}"} for c in range(categories)],
        "annotations": [],
    }
    results = []
    for image in truth["images"]:
        if generator.random() < 0.2:
            continue  # an empty picture, which may still get detections below
        for _ in range(generator.integers(1, objects + 1)):
            one = box()
            mask = blob(one)
            truth["annotations"].append(
                {
                    "id": len(truth["annotations"]) + 1,
                    "image_id": image["id"],
                    "category_id": int(generator.choice([c["id"] for c in truth["categories"][:-1]])),
                    "bbox": one,
                    "area": float(mask.sum()),
                    "iscrowd": int(generator.random() < 0.15),
                    "segmentation": rle.encode(mask),
                }
            )
    for annotation in truth["annotations"]:
        for _ in range(generator.integers(0, 3)):
            near = [v + generator.normal(0, 2.5) for v in annotation["bbox"]]
            near[2:] = [max(v, 1.0) for v in near[2:]]
            results.append((annotation["image_id"], annotation["category_id"], near))
    for image in truth["images"]:
        for _ in range(generator.integers(0, found + 1)):
            results.append((image["id"], int(generator.choice([c["id"] for c in truth["categories"]])), box()))
    entries = [
        {
            "image_id": image,
            "category_id": category,
            "bbox": one,
            "score": round(float(generator.random()), 2),  # equal scores too
            "segmentation": rle.encode(blob(one)),
        }
        for image, category, one in results
    ]
    return truth, entries


def official(truth, results, kind: str, detections: int) -> COCOeval:
    dropped = {"bbox": "segmentation", "segm": "bbox"}[kind]
    kept = [{k: copy.deepcopy(v) for k, v in one.items() if k != dropped} for one in results]
    with contextlib.redirect_stdout(io.StringIO()):
        given = COCO()
        given.dataset = copy.deepcopy(truth)
        given.dataset["info"] = {}
        given.createIndex()
        evaluation = COCOeval(given, given.loadRes(kept), kind)
        evaluation.params.maxDets = [1, 10, detections]
        evaluation.evaluate()
        evaluation.accumulate()
        if detections == 100:
            evaluation.summarize()
    return evaluation


@pytest.mark.parametrize("seed", range(6))
def test_the_numbers_are_pycocotools_own(seed):
    truth, results = scene(seed, pictures=12, categories=4, objects=8, found=6)
    assert any(a["iscrowd"] for a in truth["annotations"])
    found = average_precision(truth, results, masks=True).numbers
    for name, kind in (("box", "bbox"), ("mask", "segm")):
        stats = official(truth, results, kind, 100).stats
        names = ("ap", "ap50", "ap75", "small", "medium", "large")
        for place, key in enumerate(names):
            wanted = stats[place] if stats[place] > -1 else math.nan
            assert found[f"{name}_{key}"] == pytest.approx(wanted, abs=1e-12, nan_ok=True), key
        assert found[f"{name}_recall"] == pytest.approx(stats[8], abs=1e-12)
        assert 0.02 < found[f"{name}_ap"] < 0.98
        assert math.isfinite(found[f"{name}_small"] + found[f"{name}_medium"] + found[f"{name}_large"])


def test_more_detections_than_a_hundred():
    truth, results = scene(11, pictures=2, categories=2, objects=150, found=400)
    assert max(sum(r["image_id"] == i["id"] for r in results) for i in truth["images"]) > 150
    few = average_precision(truth, results, masks=True).numbers
    many = average_precision(truth, results, masks=True, detections=300).numbers
    assert many["box_recall"] > few["box_recall"]
    for name, kind in (("box", "bbox"), ("mask", "segm")):
        precision = official(truth, results, kind, 300).eval["precision"]
        assert many[f"{name}_ap"] == pytest.approx(precision[:, :, :, 0, -1][precision[:, :, :, 0, -1] > -1].mean())
        for area, place in AREAS.items():
            counted = precision[:, :, :, place, -1]
            wanted = counted[counted > -1].mean() if (counted > -1).any() else math.nan
            assert many[f"{name}_{area}"] == pytest.approx(wanted, nan_ok=True)


def test_each_class_is_its_own_average():
    truth, results = scene(3, pictures=10, categories=4, objects=6, found=3)
    scores = average_precision(truth, results, masks=False)
    precision = official(truth, results, "bbox", 100).eval["precision"]
    for k, category in enumerate(truth["categories"]):
        assert scores.classes["box"][category["id"]] == pytest.approx(mean(precision[:, :, k, 0, -1]), nan_ok=True)
    assert "mask_ap" not in scores.numbers
    assert math.isnan(scores.classes["box"][truth["categories"][-1]["id"]])  # no object of it


def test_nothing_found_is_zero_and_the_truth_is_one():
    truth, _ = scene(5, pictures=6, categories=3, objects=5, found=0)
    assert average_precision(truth, [], masks=True).numbers["mask_ap"] == 0.0
    perfect = [
        {key: a[key] for key in ("image_id", "category_id", "bbox", "segmentation")} | {"score": 1.0}
        for a in truth["annotations"]
        if not a["iscrowd"]
    ]
    numbers = average_precision(truth, perfect, masks=True).numbers
    assert numbers["box_ap"] == pytest.approx(1.0)
    assert numbers["mask_ap"] == pytest.approx(1.0)


def test_what_is_given_stays_as_it_was():
    truth, results = scene(1, pictures=4, categories=2, objects=4, found=4)
    before = copy.deepcopy((truth, results))
    average_precision(truth, results, masks=True)
    assert (truth, results) == before

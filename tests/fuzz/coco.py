"""COCO annotations, compared with an independent reading of each entry."""

import json
import math
import re
from typing import Any

from tests.fuzz import damage
from tests.fuzz.case import FuzzCase, silent
from tests.fuzz.made import picture_bytes

SIZE = 16, 12  # of the images
PROBLEM = re.compile(r"^train: (images|annotations|categories)\[(\d+)\]", re.MULTILINE)


def run(case: FuzzCase) -> bool:
    from lambdanets.detect.annotations import read_scenes
    from lambdanets.detect.command import CheckAnnotations

    draw = case.random
    for i in range(4):
        (case.folder / f"{i}.png").write_bytes(picture_bytes(i, "PNG"))
    path = case.folder / "train.json"
    said, data = "nothing", damage.as_bytes(good())
    if case.number >= 3:
        kind = draw.randrange(10)
        if kind == 0:
            said, data = damage.damaged(draw, data)
        elif kind == 1:
            said, data = huge(draw)
        else:
            said, where, changed = damage.spoilt(draw, good())
            for _ in range(draw.randrange(3)):
                more, _, changed = damage.spoilt(draw, changed)
                said += f", {more}"
            said, data = f"{damage.dotted(where)} {said}", damage.as_bytes(changed)
    case.note(said)
    path.write_bytes(data)
    masks = draw.choice(("auto", "yes", "no"))

    found = case.command(CheckAnnotations(str(path), masks=masks), names=("train.json", str(case.folder)))
    if found.refused:
        if said == "nothing":
            raise silent("refused although it is whole")
        return False
    try:
        content = json.loads(data)
        given = {key: content.get(key, []) for key in ("images", "annotations", "categories")}
        assert all(isinstance(entries, list) for entries in given.values())
    except (ValueError, RecursionError, AssertionError, AttributeError):
        raise silent("of a file that is no COCO") from None
    scenes = read_scenes(path, None, masks=masks)
    named = {(key, int(at)) for key, at in PROBLEM.findall(found.out)}
    counts = {key: len(entries) - sum(k == key for k, _ in named) for key, entries in given.items()}
    kept = re.search(r"train: ([\d,]+) images, ([\d,]+) objects of ([\d,]+) classes", found.out)
    assert kept is not None, found.out
    numbers = dict(
        zip(("images", "annotations", "categories"), (int(n.replace(",", "")) for n in kept.groups()), strict=True)
    )
    if numbers != counts:
        raise silent(f"{numbers} are used and {named} are named of {[(k, len(v)) for k, v in given.items()]}")
    images = {e["id"]: e for i, e in enumerate(given["images"]) if ("images", i) not in named}
    categories = {e["id"] for i, e in enumerate(given["categories"]) if ("categories", i) not in named}
    for i, entry in enumerate(given["annotations"]):
        wrong = what_is_wrong(entry, images, categories)
        if wrong and ("annotations", i) not in named:
            raise silent(f"annotations[{i}]: {wrong}")
    for picture in scenes.pictures:
        inside = (picture.boxes_N4 >= 0).all() and (picture.boxes_N4 <= [picture.width, picture.height] * 2).all()
        if not inside:
            raise silent(f"a box outside of {picture.name}")
    if (found.status == 0) != (" 0 invalid annotations" in found.out and "cannot be used" not in found.out):
        raise silent(f"exit status {found.status}: {found.out}")
    return True


def what_is_wrong(entry: Any, images: dict[int, Any], categories: set[int]) -> str:
    """Return why an annotation must not be used, or "" if it may be."""
    if not isinstance(entry, dict):
        return "no object"
    if not is_id(entry.get("image_id")) or entry["image_id"] not in images:
        return "no picture"
    if not is_id(entry.get("category_id")) or entry["category_id"] not in categories:
        return "no category"
    box = entry.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(map(is_number, box)):
        return "no box"
    left, top, width, height = box
    if width <= 0 or height <= 0 or left >= SIZE[0] or top >= SIZE[1] or left + width <= 0 or top + height <= 0:
        return "a box outside" if images[entry["image_id"]].get("width") == SIZE[0] else ""
    return ""


def is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def good() -> dict[str, Any]:
    """Return four images with two objects each, as polygons and run lengths."""
    outlines = ([[2, 3, 9, 3, 9, 8, 2, 8]], {"size": [12, 16], "counts": [27, 5, 160]})
    return {
        "images": [{"id": i, "file_name": f"{i}.png", "width": SIZE[0], "height": SIZE[1]} for i in range(4)],
        "annotations": [
            {
                "id": 10 * i + j,
                "image_id": i,
                "category_id": 1 + (i + j) % 2,
                "bbox": [2 + j, 3, 7, 5],
                "area": 35,
                "iscrowd": 0,
                "segmentation": outlines[(i + j) % 2],
            }
            for i in range(4)
            for j in range(2)
        ],
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
    }


def huge(draw) -> tuple[str, bytes]:
    """Set sizes whose masks would take hundreds of gigabytes."""
    data = good()
    size = draw.choice((100_000, 1_000_000, 2**31, 10**12))
    image = draw.choice(data["images"])
    image |= {"width": size, "height": draw.choice((size, 1))}
    for entry in data["annotations"]:
        if draw.random() < 0.7:
            del entry["area"]
        if isinstance(entry["segmentation"], dict) and draw.random() < 0.5:
            entry["segmentation"] = {"size": [image["height"], size], "counts": [0, image["height"] * size]}
    return f"a picture of {size} pixels", damage.as_bytes(data)

"""COCO result files, which `lambdanets detect score` measures."""

import json
import math
from functools import cache

from tests.fuzz import damage
from tests.fuzz.case import FuzzCase, silent
from tests.fuzz.coco import SIZE, good, is_id, is_number


def run(case: FuzzCase) -> bool:
    from lambdanets.detect.command import ScoreResults

    draw = case.random
    (case.folder / "annotations.json").write_bytes(damage.as_bytes(good()))
    said, data = "nothing", damage.as_bytes(detections())
    if case.number >= 3:
        if draw.random() < 0.2:
            said, data = damage.damaged(draw, data)
        else:
            said, where, changed = damage.spoilt(draw, detections())
            said, data = f"{damage.dotted(where)} {said}", damage.as_bytes(changed)
    case.note(said)
    path = case.folder / "results.json"
    path.write_bytes(data)
    found = case.command(ScoreResults(path, case.folder / "annotations.json", json=True), names=("results.json",))
    if found.refused:
        if said == "nothing":
            raise silent("refused although it is whole")
        return False
    try:
        content = json.loads(data)
        assert isinstance(content, list)
    except (ValueError, RecursionError, AssertionError):
        raise silent("of a file that is no list of results") from None
    for i, entry in enumerate(content):
        wrong = what_is_wrong(entry)
        if wrong:
            raise silent(f"detection {i}: {wrong}")
    numbers = json.loads(found.out)
    if not all(value is None or 0 <= value <= 1 for key, value in numbers.items() if key.startswith(("box_", "mask_"))):
        raise silent(f"scores {numbers}")
    return True


def what_is_wrong(entry) -> str:
    if not isinstance(entry, dict):
        return "no object"
    if not is_id(entry.get("image_id")) or not is_id(entry.get("category_id")):
        return "no picture or category"
    if not is_number(entry.get("score")):
        return "no score"
    box = entry.get("bbox", [0, 0, 1, 1])
    if not isinstance(box, list) or len(box) != 4 or not all(map(is_number, box)) or min(box[2:]) < 0:
        return "no box"
    if not math.isfinite(math.prod(map(float, box[2:]))):
        return "a box without a finite area"
    mask = entry.get("segmentation")
    if mask is not None and (not isinstance(mask, dict) or mask.get("size") != [SIZE[1], SIZE[0]]):
        return "an outline of another size"
    if mask is not None and decoded(mask["counts"]) != SIZE[0] * SIZE[1]:
        return "an outline that does not cover the picture"
    return "" if "bbox" in entry or "segmentation" in entry else "neither a box nor an outline"


def decoded(text: object) -> int | None:
    """Return the number of pixels that packed run lengths cover, or None if they are invalid."""
    if not isinstance(text, str):
        return None
    counts: list[int] = []
    at = 0
    while at < len(text):
        value = shift = 0
        more = True
        while more:
            if at >= len(text) or not 0 <= (code := ord(text[at]) - 48) < 64:
                return None
            value |= (code & 31) << shift
            more, shift, at = bool(code & 32), shift + 5, at + 1
            if not more and code & 16:
                value -= 1 << shift
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
    return sum(counts) if all(count >= 0 for count in counts) else None


@cache
def packed() -> str:
    from lambdanets.detect import rle

    return rle.pack([27, 5, 160])


def detections() -> list[dict]:
    return [
        {
            "image_id": i,
            "category_id": 1 + i % 2,
            "bbox": [2, 3, 7.5, 5],
            "score": 0.9 - 0.1 * i,
            "segmentation": {"size": [SIZE[1], SIZE[0]], "counts": packed()},
        }
        for i in range(4)
    ]

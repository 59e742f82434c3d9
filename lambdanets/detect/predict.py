"""Detection of objects in image files, with drawings and a JSON file as output."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lambdanets.data.decode import BrokenImageError
from lambdanets.data.source import read_file
from lambdanets.detect.draw import draw, drawn_side
from lambdanets.detect.use import Trained
from lambdanets.train.inference.predict import Given

LINES = "detections.jsonl"


def predict(
    trained: Trained,
    given: Sequence[Given],
    output: Path,
    *,
    least_score: float = 0.5,
    size: int | None = None,
    draw_pictures: bool = True,
) -> Iterator[dict[str, Any]]:
    """Yield a record for each image and write it to `output`/detections.jsonl.

    A record is {"image", "width", "height", "objects", "drawn"} or {"image", "error"}. If there are no objects,
    "highest_score" is the highest score below the threshold. Drawings never overwrite an input image, even if it is in
    `output`. Drawings of images with less than 480 pixels are enlarged.
    """
    output.mkdir(parents=True, exist_ok=True)
    names = trained.class_names
    here = output.resolve()
    taken = {path.name for path in (Path(one.path).resolve() for one in given if one.path) if path.parent == here}
    with (output / LINES).open("w", encoding="utf-8") as lines:
        for one in given:
            record: dict[str, Any] = {"image": one.name}
            try:
                if one.error:
                    raise BrokenImageError(one.error)
                data = one.data if one.data is not None else read_file(one.path)
                image, found = trained.read(data, size)
            except (BrokenImageError, OSError) as error:
                record["error"] = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            else:
                highest = max((detection.score for detection in found), default=0.0)
                found = [detection for detection in found if detection.score >= least_score]
                record |= {"width": image.width, "height": image.height}
                record["objects"] = [
                    {"class": names[f.label - 1], "score": round(f.score, 6), "box": [round(v, 2) for v in f.box]}
                    | ({} if f.mask is None else {"mask": f.mask})
                    for f in found
                ]
                if not found:
                    record["highest_score"] = round(highest, 6)
                if draw_pictures:
                    name = free_name(one.name, taken)
                    draw(image, found, names, side=drawn_side(image)).save(output / name, quality=92)
                    record["drawn"] = name
            lines.write(json.dumps(record) + "\n")
            lines.flush()
            yield record


def free_name(name: str, taken: set[str]) -> str:
    """Return an unused file name for a drawing, without folders or special characters."""
    stem = os.path.splitext(os.path.basename(name))[0]
    plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in stem).lstrip(".")[:100] or "picture"
    found, number = f"{plain}.jpg", 1
    while found in taken:
        number += 1
        found = f"{plain}-{number}.jpg"
    taken.add(found)
    return found

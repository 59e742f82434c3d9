"""Reading of COCO annotation files. Invalid entries are reported and skipped.

An image with invalid annotations is kept without them.
"""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from lambdanets.data.decode import EXTENSIONS, LIMITS, BrokenImageError, open_image
from lambdanets.data.folders import is_image
from lambdanets.data.strings import printable
from lambdanets.detect import rle
from lambdanets.detect.images import ImageFiles
from lambdanets.detect.scenes import Category, Problem, Scenes, Segment, make_picture
from lambdanets.files import read_json

MOST_BYTES = 4 * 2**30  # size limit of a file; the largest public ones have one or two gigabytes
MOST_POINTS = 50_000  # of an object
LEAST_SIDE = 1e-3  # minimum side in pixels of the part of a box inside its image
LARGEST_SIDE = 1_000_000
LARGEST_ID = 2**62
MASKS_ABOVE = 0.5  # a dataset has masks if more than this fraction of the annotations has one

Masks = Literal["auto", "yes", "no"]
Entry = dict[str, Any]


class BadEntryError(ValueError):
    """An entry of an annotation file is invalid; the message says why."""


def refuse(reason: str) -> NoReturn:
    raise BadEntryError(reason)


def read_scenes(
    path: Path, files: ImageFiles | None, *, masks: Masks = "auto", categories: Sequence[Category] = ()
) -> Scenes:
    """Read the images and objects of a COCO file; `Scenes.problems` lists the skipped entries.

    Args:
        path: the annotation file.
        files: where the image files are; None does not check that they exist.
        masks: whether every object needs a mask; "auto": yes if more than half of the objects have one.
        categories: the classes of another file, such as the training set, to use in this order; by default the classes
            of the file itself, ordered by id.
    """
    data = read_coco(path)
    problems: list[Problem] = []
    found = read_categories(data, problems)
    if categories:
        check_categories(path, found, categories)
    chosen = tuple(categories) or tuple(sorted(found, key=lambda c: c.id))
    if not chosen:
        raise ValueError(f"{path} has no categories: a detector needs at least one")
    images = read_images(data, files, problems)
    if not images:
        some = f" ({problems[0]})" if problems else ""
        raise ValueError(f"{path} has no usable image{some}")
    labels = {category.id: label for label, category in enumerate(chosen, start=1)}
    objects, outlined = read_objects(data, images, labels, masks, problems)
    pictures = tuple(make_picture(number, *images[number], objects[number]) for number in images)
    return Scenes(chosen, pictures, outlined, tuple(problems))


def read_coco(path: Path) -> Entry:
    try:
        data = read_json(path, MOST_BYTES, any_number=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except ValueError as error:
        raise ValueError(printable(str(error))[:400]) from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} is not a COCO file: it must be a JSON object with images, annotations and categories")
    for key in ("images", "annotations", "categories"):
        if not isinstance(data.get(key, []), list):
            raise ValueError(f"{path} is not a COCO file: {key} must be a list")
    return data


def entries(data: Entry, key: str, problems: list[Problem], read: Callable[[Entry], None]) -> None:
    """Read each entry of a list and add the invalid ones to `problems`."""
    for position, entry in enumerate(data.get(key, [])):
        named = entry.get("id") if isinstance(entry, dict) else None
        where = f"{key}[{position}]" + (f" (id {shown(named)})" if named is not None else "")
        try:
            if not isinstance(entry, dict):
                refuse("it must be a JSON object")
            read(entry)
        except BadEntryError as error:
            problems.append(Problem(where, str(error)))


# Categories and images ------------------------------------------------------------------------------------------------


def read_categories(data: Entry, problems: list[Problem]) -> list[Category]:
    found: dict[int, Category] = {}

    def read(entry: Entry) -> None:
        number = identity(entry.get("id"))
        if number in found:
            refuse("another category has the same id")
        name = entry.get("name")
        if not isinstance(name, str) or not name.strip():
            problems.append(Problem(f"category {number}", "it has no name: its id is used instead"))
            name = str(number)
        found[number] = Category(number, printable(name))

    entries(data, "categories", problems, read)
    return list(found.values())


def check_categories(path: Path, found: Sequence[Category], wanted: Sequence[Category]) -> None:
    """Raise a ValueError if an id has another name than in training. A file may lack categories."""
    known = {category.id: category.name for category in wanted}
    for category in found:
        if known.get(category.id, category.name) != category.name:
            raise ValueError(
                f"category {category.id} is {category.name!r} in {path}, but {known[category.id]!r} in the training set"
            )


def read_images(
    data: Entry, files: ImageFiles | None, problems: list[Problem]
) -> dict[int, tuple[str, tuple[int, int]]]:
    """Return {id: (file name, (height, width))}."""
    found: dict[int, tuple[str, tuple[int, int]]] = {}
    named = {
        name
        for entry in data.get("images", [])
        if isinstance(entry, dict) and isinstance(name := entry.get("file_name"), str)
    }

    def read(entry: Entry) -> None:
        number = identity(entry.get("id"))
        if number in found:
            refuse("another image has the same id")
        name = entry.get("file_name")
        if not isinstance(name, str) or not name:
            refuse("it has no file_name")
        if files is not None:
            there = files.find(name)
            if there is None and not is_image(os.path.basename(name)):
                refuse(f"{shown(name, 200)} must end in one of {', '.join(EXTENSIONS)}")
            if there is None or (
                there != name and there in named
            ):  # b/1.jpg is missing, and a/1.jpg belongs to another entry
                refuse(f"the file {shown(name, 200)} is missing")
            name = there
        height, width = side(entry.get("height")), side(entry.get("width"))
        if height is None or width is None:
            height, width = measured(files, name)
        if height * width > LIMITS.pixels:
            refuse(f"{shown(name, 200)} has {width} x {height} pixels, more than the limit of {LIMITS.pixels:,}")
        found[number] = (name, (height, width))

    entries(data, "images", problems, read)
    return found


def measured(files: ImageFiles | None, name: str) -> tuple[int, int]:
    """Read the size of an image from its file, for annotations without one."""
    if files is None:
        refuse("it has no width or height")
    try:
        width, height = open_image(files.read(name)).size
    except (BrokenImageError, OSError) as error:
        refuse(f"it has no width or height, and the file cannot be read: {error}")
    return height, width


# Objects --------------------------------------------------------------------------------------------------------------


def read_objects(
    data: Entry,
    images: dict[int, tuple[str, tuple[int, int]]],
    labels: dict[int, int],
    masks: Masks,
    problems: list[Problem],
) -> tuple[dict[int, list[Any]], bool]:
    """Return the objects of each image, and whether they have masks."""
    outlined = masks == "yes" or (masks == "auto" and mostly_outlined(data))
    found: dict[int, list[Any]] = {number: [] for number in images}
    seen: set[int] = set()  # hashes: the values of a million annotations would take hundreds of megabytes

    def read(entry: Entry) -> None:
        number = identity(entry.get("image_id"), "image_id")
        if number not in images:
            refuse(f"there is no image {number}")
        name, size = images[number]
        label = labels.get(identity(entry.get("category_id"), "category_id"))
        if label is None:
            refuse(f"{shown(name, 200)}: unknown category {entry['category_id']}")
        crowd = entry.get("iscrowd", 0)
        if crowd not in (0, 1) or isinstance(crowd, float):
            refuse(f"{shown(name, 200)}: iscrowd must be 0 or 1, got {shown(crowd)}")
        try:
            box = read_box(entry.get("bbox"), size)
            segment = read_segment(entry.get("segmentation"), size) if outlined else None
        except BadEntryError as error:
            raise BadEntryError(f"{shown(name, 200)}: {error}") from error
        same = hash((str(entry.get("id")), number, label, *box))
        if "id" in entry and same in seen:
            refuse(f"{shown(name, 200)}: another annotation has the same id, category and box")
        seen.add(same)
        area = number_of(entry.get("area"))
        if area is None or area <= 0:
            area = box[2] * box[3] if segment is None else float(segment.mask(size).sum())
        found[number].append((box, label, bool(crowd), area, segment))

    entries(data, "annotations", problems, read)
    return found, outlined


def mostly_outlined(data: Entry) -> bool:
    given = [entry for entry in data.get("annotations", []) if isinstance(entry, dict)]
    return sum(bool(entry.get("segmentation")) for entry in given) > MASKS_ABOVE * max(len(given), 1)


def read_box(value: Any, size: tuple[int, int]) -> list[float]:
    """Return left, top, width and height of a box, part of which must be inside the image."""
    numbers = [number_of(v) for v in value] if isinstance(value, list) else []
    if len(numbers) != 4 or None in numbers:
        refuse(f"a box must be four numbers, got {shown(value, 80)}")
    left, top, width, height = (float(n) for n in numbers if n is not None)
    if width <= 0 or height <= 0:
        refuse(f"the box {left:g} {top:g} {width:g} {height:g} is {'inverted' if min(width, height) < 0 else 'empty'}")
    across = min(left + width, size[1]) - max(left, 0.0)
    down = min(top + height, size[0]) - max(top, 0.0)
    if not (across >= LEAST_SIDE and down >= LEAST_SIDE):
        refuse(f"the box {left:g} {top:g} {width:g} {height:g} is outside of the image of {size[1]} x {size[0]} pixels")
    return [left, top, width, height]


def read_segment(value: Any, size: tuple[int, int]) -> Segment:
    if not value:
        refuse("it has no mask (segmentation), but most objects of the file have one")
    return read_runs(value, size) if isinstance(value, dict) else read_polygons(value, size)


def read_polygons(value: Any, size: tuple[int, int]) -> Segment:
    if not isinstance(value, list):
        refuse(f"a mask must be polygons or run lengths, got {shown(value, 80)}")
    if sum(len(polygon) for polygon in value if isinstance(polygon, list)) > 2 * MOST_POINTS:
        refuse(f"the polygons have more than {MOST_POINTS:,} points")
    polygons = []
    for polygon in value:
        numbers = [number_of(v) for v in polygon] if isinstance(polygon, list) else []
        if len(numbers) < 6 or len(numbers) % 2 or None in numbers:
            refuse(f"a polygon must have at least three points, got {shown(polygon, 80)}")
        found = np.array(numbers, np.float64)
        if np.abs(found).max() > LARGEST_SIDE:
            refuse("a polygon reaches far outside of the image")
        polygons.append(found)
    x, y = np.concatenate(polygons).reshape(-1, 2).T  # drawing them would take minutes
    if x.min() == x.max() or y.min() == y.max():
        refuse("the mask has no area")
    if x.max() <= 0 or y.max() <= 0 or x.min() >= size[1] or y.min() >= size[0]:
        refuse("the mask is outside of the image")
    return Segment(tuple(polygons))


def read_runs(value: Entry, size: tuple[int, int]) -> Segment:
    given, counts = value.get("size"), value.get("counts")
    if not isinstance(given, list) or given != list(size):
        refuse(f"the run lengths are for {shown(given)} pixels, but the image has {list(size)} (height, width)")
    if isinstance(counts, str):
        try:
            counts = rle.unpack(counts)
        except ValueError as error:
            refuse(str(error))
    if not isinstance(counts, list) or not all(type(c) is int and 0 <= c <= size[0] * size[1] for c in counts):
        refuse("run lengths must be integers of at least 0")
    if sum(counts) != size[0] * size[1]:
        refuse(f"the run lengths cover {sum(counts)} pixels, but the image has {size[0] * size[1]}")
    if not any(counts[1::2]):
        refuse("the mask is empty")
    return Segment(counts=np.array(counts, np.int64))


# Values ---------------------------------------------------------------------------------------------------------------


def identity(value: Any, name: str = "id") -> int:
    if type(value) is not int or not -LARGEST_ID <= value <= LARGEST_ID:
        refuse(f"{name} must be an integer, got {shown(value)}")
    return value


def shown(value: Any, length: int = 40) -> str:
    """Return the beginning of any value as one line of text."""
    try:
        return printable(str(value)[: 4 * length])[:length]
    except RecursionError:
        return "a deeply nested list"


def number_of(value: Any) -> float | None:
    """Return the value as a float if it is a finite number, otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def side(value: Any) -> int | None:
    number = number_of(value)
    return int(number) if number is not None and number == int(number) and 1 <= number <= LARGEST_SIDE else None

"""COCO JSON to scenes. What is wrong with an entry is said, and the file is used without it.

A picture stays whatever happens to its annotations; it goes only if it cannot be read itself.
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

MOST_BYTES = 4 * 2**30  # of a file; the largest public ones have one or two gigabytes
MOST_POINTS = 50_000  # of an outline
LEAST_SIDE = 1e-3  # pixels of a box inside its picture
LARGEST_SIDE = 1_000_000
LARGEST_ID = 2**62
MASKS_ABOVE = 0.5  # of the annotations; otherwise a set is one of boxes

Masks = Literal["auto", "yes", "no"]
Entry = dict[str, Any]


class BadEntryError(ValueError):
    """One entry of a file, in words."""


def refuse(reason: str) -> NoReturn:
    raise BadEntryError(reason)


def read_scenes(
    path: Path, files: ImageFiles | None, *, masks: Masks = "auto", categories: Sequence[Category] = ()
) -> Scenes:
    """The pictures of a COCO file; `problems` lists every entry that was left out.

    Args:
        path: the JSON.
        files: the pictures' files; None: they are not looked for.
        masks: whether every object needs an outline; "auto": if more than half of them have one.
        categories: the classes that there have to be, in their order; the file's own without it.
    """
    data = read_coco(path)
    problems: list[Problem] = []
    found = read_categories(data, problems)
    if categories:
        check_categories(path, found, categories)
    chosen = tuple(categories) or tuple(sorted(found, key=lambda c: c.id))
    if not chosen:
        raise ValueError(f"{path} names no category: a detector needs at least one")
    images = read_images(data, files, problems)
    if not images:
        some = f" ({problems[0]})" if problems else ""
        raise ValueError(f"{path} has no picture that can be used{some}")
    labels = {category.id: label for label, category in enumerate(chosen, start=1)}
    objects, outlined = read_objects(data, images, labels, masks, problems)
    pictures = tuple(make_picture(number, *images[number], objects[number]) for number in images)
    return Scenes(chosen, pictures, outlined, tuple(problems))


def read_coco(path: Path) -> Entry:
    try:
        data = read_json(path, MOST_BYTES, any_number=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except ValueError as error:
        raise ValueError(printable(str(error))[:400]) from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} is not COCO: an object with images, annotations and categories was expected")
    for key in ("images", "annotations", "categories"):
        if not isinstance(data.get(key, []), list):
            raise ValueError(f"{path} is not COCO: {key} is no list")
    return data


def entries(data: Entry, key: str, problems: list[Problem], read: Callable[[Entry], None]) -> None:
    """Reads each entry of a list; what is wrong with one is noted."""
    for position, entry in enumerate(data.get(key, [])):
        named = entry.get("id") if isinstance(entry, dict) else None
        where = f"{key}[{position}]" + (f" (id {shown(named)})" if named is not None else "")
        try:
            if not isinstance(entry, dict):
                refuse("it is no object")
            read(entry)
        except BadEntryError as error:
            problems.append(Problem(where, str(error)))


# Categories and pictures ----------------------------------------------------------------------------------------------


def read_categories(data: Entry, problems: list[Problem]) -> list[Category]:
    found: dict[int, Category] = {}

    def read(entry: Entry) -> None:
        number = identity(entry.get("id"))
        if number in found:
            refuse("another category has the same id")
        name = entry.get("name")
        if not isinstance(name, str) or not name.strip():
            problems.append(Problem(f"category {number}", "it has no name: its id is shown"))
            name = str(number)
        found[number] = Category(number, printable(name))

    entries(data, "categories", problems, read)
    return list(found.values())


def check_categories(path: Path, found: Sequence[Category], wanted: Sequence[Category]) -> None:
    """Those of the training file decide; another file may leave some out."""
    known = {category.id: category.name for category in wanted}
    for category in found:
        if known.get(category.id, category.name) != category.name:
            raise ValueError(
                f"{path} calls category {category.id} {category.name!r}, where training has {known[category.id]!r}"
            )


def read_images(
    data: Entry, files: ImageFiles | None, problems: list[Problem]
) -> dict[int, tuple[str, tuple[int, int]]]:
    """{id: (name of its file, (height, width))}."""
    found: dict[int, tuple[str, tuple[int, int]]] = {}
    named = {
        name
        for entry in data.get("images", [])
        if isinstance(entry, dict) and isinstance(name := entry.get("file_name"), str)
    }

    def read(entry: Entry) -> None:
        number = identity(entry.get("id"))
        if number in found:
            refuse("another picture has the same id")
        name = entry.get("file_name")
        if not isinstance(name, str) or not name:
            refuse("it has no file_name")
        if files is not None:
            there = files.find(name)
            if there is None and not is_image(os.path.basename(name)):
                refuse(f"{shown(name, 200)} is no file of {', '.join(EXTENSIONS)}")
            if there is None or (there != name and there in named):  # b/1.jpg is not there, and a/1.jpg is another's
                refuse(f"the file {shown(name, 200)} is missing")
            name = there
        height, width = side(entry.get("height")), side(entry.get("width"))
        if height is None or width is None:
            height, width = measured(files, name)
        if height * width > LIMITS.pixels:
            refuse(f"{shown(name, 200)} has {width} x {height} pixels, and {LIMITS.pixels:,} are the most")
        found[number] = (name, (height, width))

    entries(data, "images", problems, read)
    return found


def measured(files: ImageFiles | None, name: str) -> tuple[int, int]:
    """What the file says where the annotations do not."""
    if files is None:
        refuse("it has no width or height")
    try:
        width, height = open_image(files.read(name)).size
    except (BrokenImageError, OSError) as error:
        refuse(f"it has no width or height, and the file tells nothing: {error}")
    return height, width


# Objects --------------------------------------------------------------------------------------------------------------


def read_objects(
    data: Entry,
    images: dict[int, tuple[str, tuple[int, int]]],
    labels: dict[int, int],
    masks: Masks,
    problems: list[Problem],
) -> tuple[dict[int, list[Any]], bool]:
    """Objects of each picture, and whether they have outlines."""
    outlined = masks == "yes" or (masks == "auto" and mostly_outlined(data))
    found: dict[int, list[Any]] = {number: [] for number in images}
    seen: set[int] = set()  # hashes: of a million annotations the values would take hundreds of megabytes

    def read(entry: Entry) -> None:
        number = identity(entry.get("image_id"), "image_id")
        if number not in images:
            refuse(f"there is no picture {number}")
        name, size = images[number]
        label = labels.get(identity(entry.get("category_id"), "category_id"))
        if label is None:
            refuse(f"{shown(name, 200)}: unknown category {entry['category_id']}")
        crowd = entry.get("iscrowd", 0)
        if crowd not in (0, 1) or isinstance(crowd, float):
            refuse(f"{shown(name, 200)}: iscrowd is 0 or 1, not {shown(crowd)}")
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
    """left, top, width, height; some of it inside the picture."""
    numbers = [number_of(v) for v in value] if isinstance(value, list) else []
    if len(numbers) != 4 or None in numbers:
        refuse(f"a box is four numbers, not {shown(value, 80)}")
    left, top, width, height = (float(n) for n in numbers if n is not None)
    if width <= 0 or height <= 0:
        refuse(f"the box {left:g} {top:g} {width:g} {height:g} is {'inverted' if min(width, height) < 0 else 'empty'}")
    across = min(left + width, size[1]) - max(left, 0.0)
    down = min(top + height, size[0]) - max(top, 0.0)
    if not (across >= LEAST_SIDE and down >= LEAST_SIDE):
        refuse(f"the box {left:g} {top:g} {width:g} {height:g} is outside of a picture of {size[1]} x {size[0]}")
    return [left, top, width, height]


def read_segment(value: Any, size: tuple[int, int]) -> Segment:
    if not value:
        refuse("it has no outline, and the others of the file have")
    return read_runs(value, size) if isinstance(value, dict) else read_polygons(value, size)


def read_polygons(value: Any, size: tuple[int, int]) -> Segment:
    if not isinstance(value, list):
        refuse(f"an outline is polygons or run lengths, not {shown(value, 80)}")
    if sum(len(polygon) for polygon in value if isinstance(polygon, list)) > 2 * MOST_POINTS:
        refuse(f"an outline of more than {MOST_POINTS:,} points")
    polygons = []
    for polygon in value:
        numbers = [number_of(v) for v in polygon] if isinstance(polygon, list) else []
        if len(numbers) < 6 or len(numbers) % 2 or None in numbers:
            refuse(f"a polygon is three points or more, not {shown(polygon, 80)}")
        found = np.array(numbers, np.float64)
        if np.abs(found).max() > LARGEST_SIDE:
            refuse("a polygon reaches far out of the picture")
        polygons.append(found)
    x, y = np.concatenate(polygons).reshape(-1, 2).T  # drawing them all would take minutes
    if x.min() == x.max() or y.min() == y.max():
        refuse("the outline has no area")
    if x.max() <= 0 or y.max() <= 0 or x.min() >= size[1] or y.min() >= size[0]:
        refuse("the outline is outside of the picture")
    return Segment(tuple(polygons))


def read_runs(value: Entry, size: tuple[int, int]) -> Segment:
    given, counts = value.get("size"), value.get("counts")
    if not isinstance(given, list) or given != list(size):
        refuse(f"run lengths for {shown(given)} pixels in a picture of {list(size)}, height first")
    if isinstance(counts, str):
        try:
            counts = rle.unpack(counts)
        except ValueError as error:
            refuse(str(error))
    if not isinstance(counts, list) or not all(type(c) is int and 0 <= c <= size[0] * size[1] for c in counts):
        refuse("run lengths are whole numbers of at least 0")
    if sum(counts) != size[0] * size[1]:
        refuse(f"run lengths cover {sum(counts)} of {size[0] * size[1]} pixels")
    if not any(counts[1::2]):
        refuse("the outline is empty")
    return Segment(counts=np.array(counts, np.int64))


# Values ---------------------------------------------------------------------------------------------------------------


def identity(value: Any, name: str = "id") -> int:
    if type(value) is not int or not -LARGEST_ID <= value <= LARGEST_ID:
        refuse(f"{name} is a whole number, not {shown(value)}")
    return value


def shown(value: Any, length: int = 40) -> str:
    """The beginning of a value of any kind, on one line."""
    try:
        return printable(str(value)[: 4 * length])[:length]
    except RecursionError:
        return "a deeply nested list"


def number_of(value: Any) -> float | None:
    """A finite number, or None."""
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

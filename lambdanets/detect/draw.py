"""Boxes, outlines and names onto a picture."""

import colorsys
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lambdanets.detect import rle
from lambdanets.detect.results import Detection
from lambdanets.detect.scenes import Picture

GOLDEN = 0.618034  # turns of the colour wheel between two classes: neighbours never look alike
OPACITY = 0.4
LONGEST_NAME = 30
MOST_NAMED = 40  # objects of a picture


def colour_of(label: int) -> tuple[int, int, int]:
    """The same for a class in every picture."""
    red, green, blue = colorsys.hsv_to_rgb(label * GOLDEN % 1.0, 0.85, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def draw(
    image: Image.Image,
    found: Sequence[Detection],
    names: Sequence[str],
    *,
    scores: bool = True,
    side: int | None = None,
) -> Image.Image:
    """A copy of the picture with what was found; the surest lies on top. Many objects go without their names.

    `side`: the longer side of the copy, the picture's own without it.
    """
    pixels = np.array(image.convert("RGB"))
    ordered = sorted(found, key=lambda one: one.score)
    for one in ordered:
        if one.mask is not None:
            height, width = one.mask["size"]
            mask = rle.decode(rle.unpack(one.mask["counts"]), (height, width))
            colour = np.array(colour_of(one.label))
            pixels[mask] = ((1 - OPACITY) * pixels[mask] + OPACITY * colour).astype(np.uint8)
    drawn = Image.fromarray(pixels)
    zoom = 1.0 if side is None else side / max(image.size)
    if zoom != 1:
        size = (max(1, round(image.width * zoom)), max(1, round(image.height * zoom)))
        drawn = drawn.resize(size, Image.Resampling.LANCZOS if zoom < 1 else Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(drawn)
    longest = max(drawn.size)
    line, font = max(1, longest // 400), ImageFont.load_default(max(9, longest // 45))
    for one in ordered:
        left, top, right, bottom = (zoom * v for v in one.box)
        outline = (left, top, max(left, right - 1), max(top, bottom - 1))
        pen.rectangle(outline, outline=colour_of(one.label), width=line)
        if len(found) <= MOST_NAMED:
            name_it(pen, font, one, (left, top), names, scores)
    return drawn


def name_it(pen: Any, font: Any, one: Detection, at: tuple[float, float], names: Sequence[str], score: bool) -> None:
    """Above the box, or inside where there is no room."""
    name = names[one.label - 1]
    text = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
    text += f" {one.score:.0%}" if score else ""
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    x, y = at[0], max(0.0, at[1] - bottom - 1)
    pen.rectangle((x + left - 1, y + top - 1, x + right + 1, y + bottom + 1), fill=colour_of(one.label))
    pen.text((x, y), text, fill=(0, 0, 0), font=font)


def true_objects(picture: Picture, masks: bool) -> list[Detection]:
    """What the annotations say is there, as something to draw."""
    found = []
    for box_4, label, segment in zip(picture.boxes_N4, picture.labels_N, picture.segments, strict=True):
        left, top, right, bottom = box_4.tolist()
        mask = rle.encode(segment.mask(picture.size)) if masks and segment is not None else None
        found.append(Detection((left, top, right, bottom), int(label), 1.0, mask))
    return found

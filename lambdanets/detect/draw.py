"""Draws boxes, masks and names onto an image."""

import colorsys
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lambdanets.detect import rle
from lambdanets.detect.results import Detection
from lambdanets.detect.scenes import Picture

GOLDEN = 0.618034  # fraction of the colour wheel between two classes, so that neighbours look different
OPACITY = 0.4
LONGEST_NAME = 30
MOST_NAMED = 40  # with more objects, names are left out
LEAST_SIDE = 480  # pixels of the longer side that leave room for names
LINES, LETTERS = 200, 36  # the longer side divided by these is the width of a line and the size of a letter
EDGE = (0, 0, 0)  # around lines, which makes them visible on any background


def colour_of(label: int) -> tuple[int, int, int]:
    """Return the colour of a class, the same in all images."""
    red, green, blue = colorsys.hsv_to_rgb(label * GOLDEN % 1.0, 0.85, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def readable_on(colour: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return black or white, whichever has the higher contrast (WCAG 2.1) on a colour."""
    red, green, blue = ((part / 255) ** 2.2 for part in colour)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return (0, 0, 0) if (luminance + 0.05) ** 2 > 1.05 * 0.05 else (255, 255, 255)


def draw(
    image: Image.Image,
    found: Sequence[Detection],
    names: Sequence[str],
    *,
    scores: bool = True,
    side: int | None = None,
) -> Image.Image:
    """Return a copy of an image with detections drawn on it, those with the highest scores on top.

    Args:
        image: any PIL image; it is converted to RGB.
        found: the detections. Names are left out if there are more than 40.
        names: names of the classes; label 1 is the first.
        scores: whether scores are written after the names.
        side: pixels of the longer side of the copy, by default those of the image.
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
    line, font = max(2, longest // LINES), ImageFont.load_default(max(12, longest // LETTERS))
    for one in ordered:
        left, top, right, bottom = (zoom * v for v in one.box)
        outline = (left, top, max(left, right - 1), max(top, bottom - 1))
        pen.rectangle(outline, outline=EDGE, width=line + 1)
        pen.rectangle(outline, outline=colour_of(one.label), width=line)
        if len(found) <= MOST_NAMED:
            name_it(pen, font, one, (left, top), names, scores)
    return drawn


def drawn_side(image: Image.Image) -> int:
    """Return the longer side of an image, enlarged by a whole factor if it is too small for names."""
    longest = max(image.size)
    return longest * max(1, -(-LEAST_SIDE // longest))


def name_it(pen: Any, font: Any, one: Detection, at: tuple[float, float], names: Sequence[str], score: bool) -> None:
    """Write the name of an object above its box, or inside the box if there is no room above."""
    name = names[one.label - 1]
    text = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
    text += f" {one.score:.0%}" if score else ""
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    x = round(max(0.0, min(at[0], pen.im.size[0] - right - 2)))
    y = round(max(0.0, at[1] - bottom - 1))
    pen.rectangle((x + left - 1, y + top - 1, x + right + 1, y + bottom + 1), fill=colour_of(one.label))
    pen.text((x, y), text, fill=readable_on(colour_of(one.label)), font=font)


def true_objects(picture: Picture, masks: bool) -> list[Detection]:
    """Return the annotated objects as detections, for drawing."""
    found = []
    for box_4, label, segment in zip(picture.boxes_N4, picture.labels_N, picture.segments, strict=True):
        left, top, right, bottom = box_4.tolist()
        mask = rle.encode(segment.mask(picture.size)) if masks and segment is not None else None
        found.append(Detection((left, top, right, bottom), int(label), 1.0, mask))
    return found

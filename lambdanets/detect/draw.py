"""Boxes, outlines and names onto a picture."""

import colorsys
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lambdanets.detect import rle
from lambdanets.detect.results import Detection

GOLDEN = 0.618034  # turns of the colour wheel between two classes: neighbours never look alike
OPACITY = 0.4
LONGEST_NAME = 30


def colour_of(label: int) -> tuple[int, int, int]:
    """The same for a class in every picture."""
    red, green, blue = colorsys.hsv_to_rgb(label * GOLDEN % 1.0, 0.85, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def draw(image: Image.Image, found: Sequence[Detection], names: Sequence[str], *, scores: bool = True) -> Image.Image:
    """A copy of the picture with what was found; the surest lies on top."""
    pixels = np.array(image.convert("RGB"))
    ordered = sorted(found, key=lambda one: one.score)
    for one in ordered:
        if one.mask is not None:
            height, width = one.mask["size"]
            mask = rle.decode(rle.unpack(one.mask["counts"]), (height, width))
            colour = np.array(colour_of(one.label))
            pixels[mask] = ((1 - OPACITY) * pixels[mask] + OPACITY * colour).astype(np.uint8)
    drawn = Image.fromarray(pixels)
    pen = ImageDraw.Draw(drawn)
    side = max(image.size)
    line, font = max(1, side // 400), ImageFont.load_default(max(9, side // 60))
    for one in ordered:
        colour = colour_of(one.label)
        left, top, right, bottom = one.box
        pen.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=colour, width=line)
        name = names[one.label - 1]
        text = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
        text += f" {one.score:.0%}" if scores else ""
        box = pen.textbbox((left, top), text, font=font)
        down = max(0.0, top - (box[3] - box[1]) - 2)
        box = pen.textbbox((left, down), text, font=font)
        pen.rectangle((box[0] - 1, box[1] - 1, box[2] + 1, box[3] + 1), fill=colour)
        pen.text((left, down), text, fill=(0, 0, 0), font=font)
    return drawn

"""Pictures inside a page, as data: URLs."""

import base64
import io
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

    from lambdanets.data.source import Source

THUMBNAIL, LARGE = 160, 320  # pixels of the longer side
TINY = 64  # up to this side, pixels are shown as squares


def encoded(image: "Image", side: int = THUMBNAIL) -> str:
    """Return an image as a data: URL: tiny ones as PNG, others as JPEG of at most `side` pixels."""
    file = io.BytesIO()
    if max(image.size) <= TINY:
        image.save(file, "PNG", optimize=True)
        return address(file, "png")
    image = image.convert("RGB")
    image.thumbnail((side, side))
    image.save(file, "JPEG", quality=82)
    return address(file, "jpeg")


def address(file: io.BytesIO, kind: str) -> str:
    """Return a file as a data: URL; `kind` is "png" or "jpeg"."""
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def picture(source: "Source", index: int, *, exif_orientation: bool = True) -> "Image":
    """Return an image of a `Source`; raise ValueError or OSError if it cannot be read."""
    from PIL import Image

    from lambdanets.data.decode import decode

    read = source.read(index)
    return Image.fromarray(read) if isinstance(read, np.ndarray) else decode(read, exif_orientation=exif_orientation)


def heat(values_HW: Tensor) -> str:
    """Return numbers as a picture, one pixel each, dark for 0 and bright for the largest."""
    from matplotlib import colormaps
    from PIL import Image

    scaled = (values_HW / values_HW.max().clamp_min(1e-12)).double().numpy()
    pixels = (colormaps["viridis"](scaled)[..., :3] * 255).round().astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", optimize=True)
    return address(file, "png")

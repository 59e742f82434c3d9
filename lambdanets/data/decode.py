"""Decode JPEG, PNG, WebP, GIF and BMP images, with limits on their size. Every failure is a `BrokenImageError`.

Animations use their first frame. TIFF is not supported: its variants (floats, many bands, tiles, several codecs) have
no common range of values, and its decoders have had many vulnerabilities.
"""

import io
import warnings
import zlib
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from PIL import ExifTags, Image

from lambdanets.data.strings import printable

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
EXTENSIONS = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp")
ORIENTATION = ExifTags.Base.Orientation
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
TRANSPOSED = (5, 6, 7, 8)  # width and height swap
Box = tuple[int, int, int, int]  # left, top, right, bottom


@dataclass(frozen=True)
class Limits:
    """Limits on the size of an image, because a file of a few kilobytes can decode to gigabytes.

    Example:
        >>> from lambdanets.data.decode import Limits
        >>> strict = Limits(pixels=16_000_000, bytes=16 * 2**20)
    """

    pixels: int = 80_000_000
    """Largest number of pixels."""
    bytes: int = 128 * 2**20
    """Largest file size in bytes."""
    side: int = 65_500
    """Largest width or height in pixels, as in libjpeg. Resizing an image of one row with millions of pixels, which a
    PNG of a few kilobytes can contain, would take gigabytes and minutes."""


LIMITS = Limits()


class BrokenImageError(ValueError):
    """An image cannot be read; the message gives the reason."""


def open_image(data: bytes, limits: Limits = LIMITS) -> Image.Image:
    """Open an image and check its format and size, without decoding its pixels."""
    if len(data) > limits.bytes:
        raise BrokenImageError(f"{len(data):,} bytes, more than the limit of {limits.bytes:,}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the limit is checked below
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise BrokenImageError(f"too many pixels: {error}") from error
    except Exception as error:  # Pillow raises many types on damaged files
        raise BrokenImageError(f"not a readable {' / '.join(FORMATS)} image{describe(error)}") from error
    if image.format == "PNG" and not has_its_checksums(data):
        raise BrokenImageError("the PNG is damaged: the checksum of its pixels does not match")
    if image.width * image.height > limits.pixels:
        raise BrokenImageError(f"{image.width} x {image.height} pixels, more than the limit of {limits.pixels:,}")
    if max(image.size) > limits.side:
        raise BrokenImageError(f"{image.width} x {image.height} pixels, more than the limit of {limits.side:,} a side")
    return image


def has_its_checksums(png: bytes) -> bool:
    """Return whether the checksums of the pixel chunks of a PNG match. Pillow checks those of the other chunks."""
    view, at = memoryview(png), 8
    while at + 12 <= len(png):
        end = at + 12 + int.from_bytes(view[at : at + 4], "big")
        pixels = view[at + 4 : at + 8] == b"IDAT" and end <= len(png)  # Pillow refuses truncated files
        if pixels and zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
            return False
        at = end
    return True


def load(image: Image.Image, mode: str = "RGB") -> Image.Image:
    """Decode an image and convert it to "RGB" or "L"."""
    decoded(image)
    try:
        if image.mode == mode:
            return image
        if image.mode.startswith("I;16") or image.mode in ("I", "F"):  # Pillow would clip 16 bits instead of scaling
            wide = np.clip(np.asarray(image, np.float32) / 256, 0, 255)
            image = Image.fromarray(wide.astype(np.uint8))
        elif image.mode == "P" and "transparency" in image.info:
            image = image.convert("RGBA")
        return image.convert(mode)
    except Exception as error:
        raise BrokenImageError(f"cannot be decoded{describe(error)}") from error


def decoded(image: Image.Image) -> Image.Image:
    """Decode the pixels of an image into memory; the mode is unchanged."""
    try:
        image.load()
    except Exception as error:
        raise BrokenImageError(f"cannot be decoded{describe(error)}") from error
    return image


def orientation_of(image: Image.Image) -> int:
    """Return the EXIF orientation of an opened file, 1 to 8; 1 (upright) if the file does not specify it."""
    if image.format is None:  # made from pixels, or oriented already
        return 1
    if image.format == "PNG":  # its EXIF data may follow the pixels
        decoded(image)
    with warnings.catch_warnings(), suppress(Exception):  # ignore damaged EXIF data
        warnings.simplefilter("ignore")
        value = image.getexif().get(ORIENTATION, 1)
        return value if value in TURNS else 1
    return 1


def turned(image: Image.Image, orientation: int) -> Image.Image:
    """Apply an EXIF orientation to the stored pixels of an image."""
    if orientation not in TURNS:
        return image
    image = image.transpose(TURNS[orientation])
    for key in (
        "exif",
        "Raw profile type exif",
        "XML:com.adobe.xmp",
        "xmp",
    ):  # so that the orientation is not applied twice
        image.info.pop(key, None)
    return image


def stored_box(box: Box, size: tuple[int, int], orientation: int) -> Box:
    """Convert a box (left, top, right, bottom) of the upright image to coordinates of the stored image.

    `size` is the width and height of the stored image.
    """
    left, top, right, bottom = box
    if orientation in TRANSPOSED:
        left, top, right, bottom = top, left, bottom, right
    width, height = size
    if orientation in (2, 3, 7, 8):
        left, right = width - right, width - left
    if orientation in (3, 4, 6, 7):
        top, bottom = height - bottom, height - top
    return left, top, right, bottom


def upright(image: Image.Image) -> Image.Image:
    """Decode an image and apply its EXIF orientation; the mode is unchanged."""
    return turned(decoded(image), orientation_of(image))


def decode(data: bytes, limits: Limits = LIMITS, *, exif_orientation: bool = True) -> Image.Image:
    """Decode an image to RGB; with `exif_orientation`, apply its EXIF orientation."""
    image = open_image(data, limits)
    return load(upright(image) if exif_orientation else image)


def describe(error: BaseException) -> str:
    """Return the message of an error in brackets, or "" if it has none that means something to a user."""
    text = printable(" ".join(str(error).split()))[:200]
    return f" ({text})" if "BytesIO object" not in text and text else ""

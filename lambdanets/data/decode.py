"""Encoded images to pixels: JPEG, PNG, WebP, GIF, BMP, no larger than a limit; anything wrong with one is one error.

Of an animation the first frame counts. TIFF is not read: its variants (floats, many bands, tiles, several codecs) have
no agreed range of values and a long record of unsafe decoders.
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
    """What an image may cost: a few kilobytes can unpack into gigabytes."""

    pixels: int = 80_000_000
    bytes: int = 128 * 2**20
    side: int = 65_500
    """Pixels of width and height: the largest side of a JPEG in libjpeg. Resizing a line of millions of pixels, which a
    PNG of some kilobytes can be, takes gigabytes and minutes."""


LIMITS = Limits()


class BrokenImageError(ValueError):
    """An image that cannot be read, and why."""


def open_image(data: bytes, limits: Limits = LIMITS) -> Image.Image:
    """The header: format and size are known and allowed, pixels are not decoded yet."""
    if len(data) > limits.bytes:
        raise BrokenImageError(f"{len(data):,} bytes, more than the limit of {limits.bytes:,}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # our limit is below
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise BrokenImageError(f"too many pixels: {error}") from error
    except Exception as error:  # garbage raises anything
        raise BrokenImageError(f"not a readable {' / '.join(FORMATS)} image ({describe(error)})") from error
    if image.format == "PNG" and not has_its_checksums(data):
        raise BrokenImageError("the PNG is damaged: a checksum of its pixels is wrong")
    if image.width * image.height > limits.pixels:
        raise BrokenImageError(f"{image.width} x {image.height} pixels, more than the limit of {limits.pixels:,}")
    if max(image.size) > limits.side:
        raise BrokenImageError(f"{image.width} x {image.height} pixels, more than the limit of {limits.side:,} a side")
    return image


def has_its_checksums(png: bytes) -> bool:
    """Whether the pixels of a PNG have the checksums that the file says. Pillow checks those of the other chunks."""
    view, at = memoryview(png), 8
    while at + 12 <= len(png):
        end = at + 12 + int.from_bytes(view[at : at + 4], "big")
        pixels = view[at + 4 : at + 8] == b"IDAT" and end <= len(png)  # Pillow refuses what is cut off
        if pixels and zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
            return False
        at = end
    return True


def load(image: Image.Image, mode: str = "RGB") -> Image.Image:
    """The pixels, as "RGB" or "L"."""
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
        raise BrokenImageError(f"cannot be decoded ({describe(error)})") from error


def decoded(image: Image.Image) -> Image.Image:
    """The image with its pixels in memory; its mode stays."""
    try:
        image.load()
    except Exception as error:
        raise BrokenImageError(f"cannot be decoded ({describe(error)})") from error
    return image


def orientation_of(image: Image.Image) -> int:
    """The EXIF orientation of an opened file, 1 to 8; 1 (stored as it is shown) also where it says nothing."""
    if image.format is None:  # pixels, or an image that has been turned already
        return 1
    if image.format == "PNG":  # its EXIF data may follow the pixels
        decoded(image)
    with warnings.catch_warnings(), suppress(Exception):  # damaged EXIF data is no reason to refuse the image
        warnings.simplefilter("ignore")
        value = image.getexif().get(ORIENTATION, 1)
        return value if value in TURNS else 1
    return 1


def turned(image: Image.Image, orientation: int) -> Image.Image:
    """The stored pixels of an image as they are to be shown."""
    if orientation not in TURNS:
        return image
    image = image.transpose(TURNS[orientation])
    for key in ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp"):  # nobody is to turn it again
        image.info.pop(key, None)
    return image


def stored_box(box: Box, size: tuple[int, int], orientation: int) -> Box:
    """Where the pixels of a box (left, top, right, bottom) of the upright image lie in the stored image.

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
    """Decoded, and turned as its EXIF orientation says, as browsers and telephones show it; its mode stays."""
    return turned(decoded(image), orientation_of(image))


def decode(data: bytes, limits: Limits = LIMITS, *, exif_orientation: bool = True) -> Image.Image:
    """The image as RGB; with `exif_orientation` as it is to be shown, else as it is stored."""
    image = open_image(data, limits)
    return load(upright(image) if exif_orientation else image)


def describe(error: BaseException) -> str:
    text = printable(" ".join(str(error).split()))[:200]
    return text if "BytesIO object" not in text and text else type(error).__name__

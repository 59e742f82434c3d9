"""Encoded images to pixels: JPEG, PNG and WebP, no larger than a limit; anything wrong with one is one error."""

import io
import warnings
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps

from lambdanets.data.strings import printable

FORMATS = ("JPEG", "PNG", "WEBP")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")


@dataclass(frozen=True)
class Limits:
    """What an image may cost: a few kilobytes can unpack into gigabytes."""

    pixels: int = 80_000_000
    bytes: int = 128 * 2**20


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
    if image.width * image.height > limits.pixels:
        raise BrokenImageError(f"{image.width} x {image.height} pixels, more than the limit of {limits.pixels:,}")
    return image


def load(image: Image.Image, mode: str = "RGB") -> Image.Image:
    """The pixels, as "RGB" or "L"."""
    try:
        image.load()
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


def upright(image: Image.Image) -> Image.Image:
    """Decoded, and turned as its camera says (EXIF), as browsers and telephones show it; its mode stays."""
    try:
        image.load()
    except Exception as error:
        raise BrokenImageError(f"cannot be decoded ({describe(error)})") from error
    with suppress(Exception):  # a broken note about the camera is no reason to refuse the picture
        return ImageOps.exif_transpose(image)
    return image


def decode(data: bytes, limits: Limits = LIMITS) -> Image.Image:
    """The image as RGB."""
    return load(open_image(data, limits))


def describe(error: BaseException) -> str:
    text = printable(" ".join(str(error).split()))[:200]
    return text if "BytesIO object" not in text and text else type(error).__name__

"""Transforms from an image to pixels uint8 [H, W, channels], and their normalisation on the device.

Training transforms draw only from Python's `random`, which the loader seeds for each sample.
"""

import math
import random
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lambdanets.data.augment import INTERPOLATIONS, Augment
from lambdanets.data.decode import TRANSPOSED, Box, load, orientation_of, stored_box, turned
from lambdanets.data.preprocessing import Preprocessing

RESAMPLING = {name: Image.Resampling[name.upper()] for name in INTERPOLATIONS}
MODES = {1: "L", 3: "RGB"}
MOST_RESIZED = 64  # resize only the centre of extremely long images; the whole would need gigabytes
CUTOUT_REACH = 40 / 224  # of the shorter side, at magnitude 10
GREY = (128, 128, 128)
ATTEMPTS = 10  # to draw a crop that fits into the image


class Transform(Protocol):
    """Converts a PIL image, decoded or only opened, to uint8 [H, W, channels]. `training` and `evaluation` return
    one."""

    @property
    def exif_orientation(self) -> bool:
        """Whether the EXIF orientation is applied."""
        ...

    def __call__(self, image: Image.Image) -> np.ndarray: ...


def training(
    image_size: int | tuple[int, int],
    augment: Augment | None = None,
    channels: int = 3,
    *,
    exif_orientation: bool = True,
) -> "Training":
    """Return the transform of training images: random crop, flip, RandAugment.

    Args:
        image_size: output size in pixels, one number or (height, width).
        augment: augmentation; by default `Augment()`, random crops and flips.
        channels: 3 for RGB, 1 for greyscale.
        exif_orientation: apply the EXIF orientation.

    Example:
        >>> from lambdanets.data.augment import Augment
        >>> from lambdanets.data.transforms import training
        >>> from PIL import Image
        >>> transform = training(96, Augment(crop_scale=(0.25, 1.0)))
        >>> transform(Image.new("RGB", (200, 150))).shape
        (96, 96, 3)
    """
    return Training(height_width(image_size), augment or Augment(), channels, exif_orientation)


def evaluation(preprocessing: Preprocessing, channels: int = 3) -> "Evaluation":
    """Return the transform of evaluation images: resize the short side to size / crop, then crop the centre.

    Args:
        preprocessing: size, crop ratio, interpolation and EXIF orientation.
        channels: 3 for RGB, 1 for greyscale.

    Example:
        >>> from lambdanets.data.preprocessing import Preprocessing
        >>> from lambdanets.data.transforms import evaluation
        >>> from PIL import Image
        >>> transform = evaluation(Preprocessing(size=96))
        >>> transform(Image.new("RGB", (200, 150))).shape
        (96, 96, 3)
    """
    return Evaluation(preprocessing, channels)


class Training:
    """Transform of training images: random crop, flip, RandAugment."""

    def __init__(
        self, size: tuple[int, int], augment: Augment, channels: int = 3, exif_orientation: bool = True
    ) -> None:
        self.size, self.augment, self.mode = size, augment, mode_of(channels)
        self.exif_orientation = exif_orientation
        self.resample = interpolation_of(augment.interpolation)
        self.operations = rand_augment(augment) if augment.randaugment_layers else []

    def __call__(self, image: Image.Image) -> np.ndarray:
        height, width = self.size
        augment = self.augment
        orientation = orientation_of(image) if self.exif_orientation else 1
        swap = orientation in TRANSPOSED
        if augment.crop_scale is not None:
            shown = (image.height, image.width) if swap else image.size
            box = random_box(shown, augment.crop_scale, augment.crop_ratio)
            box = stored_box(box, image.size, orientation)
            image, box = reduced(image, box, (height, width) if swap else (width, height))
            image = load(image, self.mode).crop(box)
        else:
            image = load(image, self.mode)
        image = turned(image, orientation)
        if image.size != (width, height):
            image = image.resize((width, height), self.resample)
        if augment.padding:
            left = random.randint(-augment.padding, augment.padding)
            top = random.randint(-augment.padding, augment.padding)
            image = image.crop((left, top, left + width, top + height))  # Pillow pads with black
        if augment.flip and random.random() < augment.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.operations:
            image = image.convert("RGB") if self.mode != "RGB" else image
            for operation in random.choices(self.operations, k=augment.randaugment_layers):
                image = operation(image)
            image = image.convert(self.mode) if self.mode != "RGB" else image
        return pixels(image)


class Evaluation:
    """Transform of evaluation images: resize the short side to size / crop, then crop the centre."""

    def __init__(self, preprocessing: Preprocessing, channels: int = 3) -> None:
        self.size, self.mode = height_width(preprocessing.size), mode_of(channels)
        self.exif_orientation = preprocessing.exif_orientation
        self.before = math.floor(self.size[0] / preprocessing.crop), math.floor(self.size[1] / preprocessing.crop)
        self.resample = interpolation_of(preprocessing.interpolation)

    def __call__(self, image: Image.Image) -> np.ndarray:
        orientation = orientation_of(image) if self.exif_orientation else 1
        image = turned(load(image, self.mode), orientation)
        (height, width), (across, down) = self.before, image.size
        whole, top, left = self.place(across, down)
        if whole[0] * whole[1] > MOST_RESIZED * height * width:
            y, x = down / whole[0], across / whole[1]
            box = (left * x, top * y, (left + self.size[1]) * x, (top + self.size[0]) * y)
            return pixels(image.resize((self.size[1], self.size[0]), self.resample, box))
        if (down, across) != whole:
            image = image.resize((whole[1], whole[0]), self.resample)
        return pixels(image.crop((left, top, left + self.size[1], top + self.size[0])))

    def place(self, across: int, down: int) -> tuple[tuple[int, int], int, int]:
        """Return the size (height, width) to which an image is resized, and the top and left edges of the crop."""
        height, width = self.before
        if height * across >= width * down:  # the larger of the two scales, so that the crop fits into the image
            whole = (height, max(width, int(height * across / down)))
        else:
            whole = (max(height, int(width * down / across)), width)
        top, left = (round((whole[axis] - self.size[axis]) / 2) for axis in (0, 1))
        return whole, top, left


def pixels(image: Image.Image) -> np.ndarray:
    array = np.asarray(image)
    return array if array.ndim == 3 else array[:, :, None]


def random_box(size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]) -> Box:
    """Draw (left, top, right, bottom) like torchvision's RandomResizedCrop: area, then log of the aspect ratio."""
    width, height = size
    shapes = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(ATTEMPTS):
        area = width * height * random.uniform(*scale)
        shape = math.exp(random.uniform(*shapes))
        across, down = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < across <= width and 0 < down <= height:
            left, top = random.randint(0, width - across), random.randint(0, height - down)
            return left, top, left + across, top + down
    shape = min(max(width / height, ratio[0]), ratio[1])  # fallback: the largest centred box
    across, down = min(width, round(height * shape)), min(height, round(width / shape))
    across, down = max(1, across), max(1, down)
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


def reduced(image: Image.Image, box: Box, size: tuple[int, int]) -> tuple[Image.Image, Box]:
    """Decode a JPEG that is much larger than needed at 1/2, 1/4 or 1/8 of its size, which is much faster.

    The crop keeps at least twice as many pixels per side as the output, so that the following resize is antialiased.
    """
    if image.format != "JPEG" or not hasattr(image, "draft"):
        return image, box
    factor = min((box[2] - box[0]) // (2 * size[0]), (box[3] - box[1]) // (2 * size[1]))
    if factor < 2:
        return image, box
    width, height = image.size
    image.draft(image.mode, (width // factor, height // factor))  # type: ignore[arg-type]
    across, down = image.size[0] / width, image.size[1] / height
    left, top = int(box[0] * across), int(box[1] * down)
    right, bottom = max(left + 1, round(box[2] * across)), max(top + 1, round(box[3] * down))
    return image, (left, top, min(right, image.size[0]), min(bottom, image.size[1]))


def rand_augment(augment: Augment) -> list[Callable[[Image.Image], Image.Image]]:
    """Return the operations of RandAugment: timm's operations on the paper's scale of magnitudes, and Cutout.

    timm's list is that of the reference implementation (TPU EfficientNet) without Cutout, and with translations
    relative to the image size. torchvision uses another scale of magnitudes.
    """
    from timm.data.auto_augment import rand_augment_ops

    magnitude = augment.randaugment_magnitude
    # Without magnitude_max timm would clip 15 to 10.
    options = {"interpolation": Image.Resampling.BILINEAR, "magnitude_max": max(10, magnitude)}
    operations = rand_augment_ops(magnitude, augment.randaugment_probability, options)
    return [*operations, Cutout(augment)] if augment.randaugment_cutout else operations


class Cutout:
    """Fill a square around a random pixel with grey.

    In the reference implementation, the square reaches 40 pixels from its centre at magnitude 10, for images of 224
    pixels. Here it scales with the image, as timm's translations do.
    """

    def __init__(self, augment: Augment) -> None:
        self.probability = augment.randaugment_probability
        self.reach = CUTOUT_REACH * augment.randaugment_magnitude / 10

    def __call__(self, image: Image.Image) -> Image.Image:
        if self.probability < 1 and random.random() > self.probability:
            return image
        reach = round(self.reach * min(image.size))
        x, y = random.randrange(image.width), random.randrange(image.height)
        image = image.copy()
        image.paste(
            GREY, (max(0, x - reach), max(0, y - reach), min(image.width, x + reach), min(image.height, y + reach))
        )
        return image


def normalize(images: Tensor, preprocessing: Preprocessing, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normalise images with (x / 255 - mean) / std, on their device.

    Args:
        images: uint8 [B, C, H, W].
        preprocessing: mean and std, one number per channel.
        dtype: data type of the result.

    Returns a tensor [B, C, H, W]. Raises ValueError if mean and std do not match the number of channels.

    Example:
        >>> import torch
        >>> from lambdanets.data.preprocessing import Preprocessing
        >>> from lambdanets.data.transforms import normalize
        >>> images = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8)
        >>> normalize(images, Preprocessing()).dtype
        torch.float32
    """
    channels = images.shape[1]
    if not len(preprocessing.mean) == len(preprocessing.std) == channels:
        raise ValueError(
            f"mean and std must have one number for each of {channels} channels, got {preprocessing.mean} and "
            f"{preprocessing.std}"
        )
    scale_C11, shift_C11 = scale_and_shift(preprocessing, images.device)
    return (images.float() * scale_C11 + shift_C11).to(dtype)


@lru_cache(maxsize=16)
def scale_and_shift(preprocessing: Preprocessing, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return scale and shift [C, 1, 1]; cached, because a copy to a GPU would synchronise with it."""
    scale = [1 / (255 * std) for std in preprocessing.std]
    shift = [-mean / std for mean, std in zip(preprocessing.mean, preprocessing.std, strict=True)]
    with torch.inference_mode(False):
        scale_C, shift_C = (torch.tensor(row, device=device) for row in (scale, shift))
    return scale_C.view(-1, 1, 1), shift_C.view(-1, 1, 1)


def height_width(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def mode_of(channels: int) -> str:
    if channels not in MODES:
        raise ValueError(f"channels must be 1 or 3, got {channels}")
    return MODES[channels]


def interpolation_of(name: str) -> Image.Resampling:
    if name not in RESAMPLING:
        raise ValueError(f"interpolation must be one of {', '.join(RESAMPLING)}, got {name!r}")
    return RESAMPLING[name]

"""RandAugment on batches: the operations of `transforms.rand_augment`, with a different operation for each image.

Each group of operations is computed for all images, and each image takes the result of its own operation: lookup tables
of 256 values (AutoContrast, Equalize, Invert, Posterize, Solarize, SolarizeAdd, Contrast, Brightness), affine maps
(rotation, shear, translation), Color, Sharpness, Cutout. Images are float32 with integer values from 0 to 255, rounded
as in Pillow. Affine maps may differ from Pillow by 1, since Pillow sums in double precision; the others are equal.

B: batch, C: channels, H, W: image.
"""

import math
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lambdanets.data.augment import Augment
from lambdanets.data.transforms import CUTOUT_REACH, GREY, Cutout, rand_augment

NUMBERS = 5  # random numbers per layer: operation, whether to apply it, sign, and two for the centre of Cutout
LOOKUP, MAP, COLOR, SHARPNESS, CUTOUT = range(5)  # groups of operations that are computed together
AFFINE = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")
GROUPS = {"Color": COLOR, "Sharpness": SHARPNESS, "Cutout": CUTOUT, **dict.fromkeys(AFFINE, MAP)}  # others: LOOKUP


class BatchRandAugment:
    """RandAugment layers. Each image needs `numbers` random numbers."""

    def __init__(self, augment: Augment) -> None:
        self.layers, self.probability = augment.randaugment_layers, augment.randaugment_probability
        self.numbers = NUMBERS * self.layers
        self.reach = CUTOUT_REACH * augment.randaugment_magnitude / 10
        self.names, self.arguments = zip(*map(described, rand_augment(augment)), strict=True)
        self.tables = np.stack([table(*both) for both in zip(self.names, self.arguments, strict=True)])
        self.constants: dict[tuple[torch.device, int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, images: Tensor, numbers: Tensor) -> Tensor:
        for layer in range(self.layers):
            images = self.layer(images, numbers[:, layer * NUMBERS : (layer + 1) * NUMBERS])
        return images

    def layer(self, images: Tensor, numbers_B5: Tensor) -> Tensor:
        """Apply one random operation to each image."""
        which, whether, sign, y, x = numbers_B5.unbind(1)
        operation_B = (which * len(self.names)).floor().long()
        if self.probability < 1:
            operation_B = torch.where(whether <= self.probability, operation_B, -1)
        return self.apply(images, operation_B, sign > 0.5, torch.stack([y, x], 1))

    def apply(self, images: Tensor, operation_B: Tensor, negative_B: Tensor, centre_B2: Tensor) -> Tensor:
        """Apply operation `operation_B` (-1: none) to each image, with the opposite sign where `negative_B` is true."""
        height, width = images.shape[2:]
        tables_O, maps_O, groups_O = self.constant(images.device, height, width)
        number_B = operation_B.clamp(min=0)
        group_B = torch.where(operation_B < 0, -1, groups_O[number_B])

        def done(group: int) -> Tensor:
            return (group_B == group)[:, None, None, None]

        found = images
        grey, values = luma(images), images.long().flatten(2)
        lut = self.lookup(values, grey, tables_O[number_B], operation_B)
        found = torch.where(done(LOOKUP), lut.gather(2, values).view_as(images), found)
        found = torch.where(done(COLOR), blend(grey, images, self.argument("Color")), found)
        found = torch.where(done(SHARPNESS), blend(smooth(images), images, self.argument("Sharpness")), found)
        found = torch.where(done(MAP), affine(images, maps_O[number_B, negative_B.long()]), found)
        return torch.where(done(CUTOUT), self.cutout(images, centre_B2), found)

    def argument(self, name: str) -> float:
        return self.arguments[self.names.index(name)]

    def constant(self, device: torch.device, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return tables [O, 256], affine maps [O, 2, 6] and groups [O]; cached, because a CUDA graph cannot copy
        them."""
        key = device, height, width
        if key not in self.constants:
            both = zip(self.names, self.arguments, strict=True)
            maps = [[affine_map(*one, sign, height, width) for sign in (1, -1)] for one in both]
            self.constants[key] = (
                torch.from_numpy(self.tables).to(device),
                torch.tensor(maps, dtype=torch.float32, device=device),
                torch.tensor([GROUPS.get(name, LOOKUP) for name in self.names], device=device),
            )
        return self.constants[key]

    def lookup(self, values: Tensor, grey: Tensor, tables_B: Tensor, operation_B: Tensor) -> Tensor:
        """Return the lookup table [B, C, 256] of each image and channel; `values` is int64 [B, C, H * W]."""
        count, channels, pixels = values.shape
        histogram = torch.zeros(count, channels, 256, dtype=torch.int64, device=values.device)
        histogram.scatter_add_(2, values, torch.ones_like(values))
        present = histogram > 0
        low, high = present.byte().argmax(2, True), 255 - present.flip(2).byte().argmax(2, True)
        value = torch.arange(256, device=values.device, dtype=torch.float64)
        lut = tables_B[:, None, :].expand(-1, channels, -1)

        scale = 255 / (high - low).clamp(min=1).double()
        contrast = torch.where(high > low, (value * scale - low * scale).trunc().clamp(0, 255), value)

        step = (pixels - histogram.gather(2, high)) // 255
        before = histogram.cumsum(2) - histogram + step // 2
        equal = torch.where(step > 0, (before // step.clamp(min=1)).clamp(max=255), value.long())

        mean = (grey.double().mean((2, 3), keepdim=True)[:, 0] + 0.5).floor().float()
        factor = self.argument("Contrast")
        around = (mean + factor * (value.float() - mean)).trunc().clamp(0, 255).expand(-1, channels, -1)

        for name, found in (("AutoContrast", contrast), ("Equalize", equal), ("Contrast", around)):
            chosen = operation_B == self.names.index(name)
            lut = torch.where(chosen[:, None, None], found.float(), lut)
        return lut

    def cutout(self, images: Tensor, centre_B2: Tensor) -> Tensor:
        height, width = images.shape[2:]
        reach = round(self.reach * min(height, width))
        y, x = (torch.arange(side, device=images.device) for side in (height, width))
        top, left = (centre_B2[:, :1] * height).floor() - reach, (centre_B2[:, 1:] * width).floor() - reach
        rows, columns = ((at >= edge) & (at < edge + 2 * reach) for at, edge in ((y, top), (x, left)))
        return torch.where(rows[:, None, :, None] & columns[:, None, None, :], float(GREY[0]), images)


def described(operation: object) -> tuple[str, float]:
    """Return the name of an operation and its argument at its magnitude; the sign is drawn for each image."""
    if isinstance(operation, Cutout):
        return "Cutout", 0.0
    name, level = operation.name, operation.level_fn  # type: ignore[attr-defined]
    if level is None:
        return name, 0.0
    most = operation.magnitude_max or 10  # type: ignore[attr-defined]
    before = random.getstate()
    (argument,) = level(max(0.0, min(operation.magnitude, most)), operation.hparams)  # type: ignore[attr-defined]
    random.setstate(before)  # timm draws the sign of some arguments
    return name, abs(argument)


def table(name: str, argument: float) -> np.ndarray:
    """Return the lookup table of an operation that depends only on the pixel value, float32 [256]."""
    value = np.arange(256)
    if name == "Invert":
        value = 255 - value
    elif name == "Posterize" and argument < 8:
        value = value & ~(2 ** (8 - int(argument)) - 1)
    elif name == "Solarize":
        value = np.where(value < argument, value, 255 - value)
    elif name == "SolarizeAdd":
        value = np.where(value < 128, np.minimum(255, value + argument), value)
    elif name == "Brightness":
        value = np.trunc(np.float32(argument) * value.astype(np.float32)).clip(0, 255)
    return value.astype(np.float32)


def affine_map(name: str, argument: float, sign: int, height: int, width: int) -> list[float]:
    """Return (a, b, c, d, e, f) as Pillow defines it: output (x, y) is input (a x + b y + c, d x + e y + f)."""
    argument *= sign
    if name == "ShearX":
        return [1, argument, 0, 0, 1, 0]
    if name == "ShearY":
        return [1, 0, 0, argument, 1, 0]
    if name == "TranslateXRel":
        return [1, 0, argument * width, 0, 1, 0]
    if name == "TranslateYRel":
        return [1, 0, 0, 0, 1, argument * height]
    if name == "Rotate":
        cosine, sine = math.cos(-math.radians(argument)), math.sin(-math.radians(argument))
        x, y = width / 2, height / 2
        return [cosine, sine, x - cosine * x - sine * y, -sine, cosine, y + sine * x - cosine * y]
    return [1, 0, 0, 0, 1, 0]


def affine(images: Tensor, maps_B6: Tensor) -> Tensor:
    """Apply affine maps with bilinear interpolation; pixels from outside the image are grey."""
    height, width = images.shape[2:]
    y = (torch.arange(height, device=images.device) + 0.5)[:, None]
    x = torch.arange(width, device=images.device) + 0.5
    a, b, c, d, e, f = (m[:, None, None] for m in maps_B6.unbind(1))
    across_BHW, down_BHW = a * x + b * y + c, d * x + e * y + f
    grid = torch.stack([2 * across_BHW / width - 1, 2 * down_BHW / height - 1], 3)
    found = F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
    outside = (across_BHW < 0) | (across_BHW >= width) | (down_BHW < 0) | (down_BHW >= height)
    return torch.where(outside[:, None], float(GREY[0]), (found + 1e-3).floor())  # Pillow truncates


def luma(images: Tensor) -> Tensor:
    """Convert to greyscale as Pillow's "L" does, rounded: [B, 1, H, W]. Exact, since all sums are below 2^24."""
    red, green, blue = images.split(1, 1)
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) / 65536).floor()


def blend(other: Tensor, images: Tensor, factor: float) -> Tensor:
    """Blend two images like Pillow's Image.blend."""
    return (other + factor * (images - other)).trunc().clamp(0, 255)


def smooth(images: Tensor) -> Tensor:
    """Apply Pillow's ImageFilter.SMOOTH: a 3x3 kernel of ones with 5 in the centre, divided by 13; the border is
    unchanged."""
    if min(images.shape[2:]) < 3:
        return images
    columns = images[..., :-2] + images[..., 1:-1] + images[..., 2:]
    sums = columns[..., :-2, :] + columns[..., 1:-1, :] + columns[..., 2:, :] + 4 * images[..., 1:-1, 1:-1]
    middle = (sums / 13 + 0.5).floor()
    middle = torch.cat([images[..., 1:-1, :1], middle, images[..., 1:-1, -1:]], 3)
    return torch.cat([images[..., :1, :], middle, images[..., -1:, :]], 2)

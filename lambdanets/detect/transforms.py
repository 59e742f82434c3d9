"""Preprocessing and augmentation of images with objects. Randomness is Python's `random`, seeded by the loader."""

import random
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as V

from lambdanets.data.decode import TRANSPOSED, BrokenImageError, load, orientation_of
from lambdanets.detect.config import Jitter
from lambdanets.detect.scenes import Picture

LEAST_SIDE = 1.0  # minimum side in pixels of a cropped box
Scene = tuple[Image.Image, Picture]


@dataclass(frozen=True, eq=False)
class Sample:
    """A preprocessed image and its objects, before padding."""

    pixels: np.ndarray  # uint8 [height, width, 3]
    boxes_N4: Tensor  # float32, left, top, right, bottom
    labels_N: Tensor
    packed_NHW: Tensor | None  # masks, eight pixels per byte


class Training:
    """Large-scale jitter: resize to a random size, crop at random what exceeds the canvas, flip at random."""

    exif_orientation = False  # annotations refer to the stored pixels

    def __init__(self, size: int, jitter: Jitter, masks: bool) -> None:
        self.size, self.jitter, self.masks = size, jitter, masks

    def __call__(self, scene: Scene) -> Sample:
        image, picture = whole(scene)
        canvas = picture.size
        trained = np.flatnonzero(~picture.crowd_N)
        boxes = tv_tensors.BoundingBoxes(
            torch.from_numpy(picture.boxes_N4[trained]),
            format=tv_tensors.BoundingBoxFormat.XYXY,
            canvas_size=canvas,  # type: ignore[call-overload]
        )
        crop, out = self.crop(canvas)
        image, boxes = V.resized_crop(image, *crop, out), V.resized_crop(boxes, *crop, out)
        flipped = random.random() < self.jitter.flip
        if flipped:
            image, boxes = V.horizontal_flip(image), V.horizontal_flip(boxes)
        boxes = V.clamp_bounding_boxes(boxes)
        sides = boxes[:, 2:] - boxes[:, :2]
        kept = (sides >= LEAST_SIDE).all(dim=1)
        packed = None
        if self.masks:
            masks = self.cut([picture.segments[i] for i in trained[kept.numpy()]], canvas, crop, out, flipped)
            seen = (masks != 0).flatten(1).any(dim=1)
            kept[kept.clone()] = seen
            packed = torch.from_numpy(np.packbits(masks[seen].numpy(), axis=2))
        pixels = np.asarray(image.permute(1, 2, 0))
        return Sample(
            pixels, boxes.as_subclass(Tensor)[kept], torch.from_numpy(picture.labels_N[trained])[kept], packed
        )

    def crop(self, canvas: tuple[int, int]) -> tuple[tuple[int, int, int, int], list[int]]:
        """Return (top, left, height, width) of a random crop, and its height and width after resizing."""
        scale = self.size * random.uniform(*self.jitter.scale) / max(canvas)
        down, across = (min(side, max(1, round(self.size / scale))) for side in canvas)
        top, left = (random.randint(0, side - cut) for side, cut in zip(canvas, (down, across), strict=True))
        out = [min(self.size, max(1, round(cut * scale))) for cut in (down, across)]
        return (top, left, down, across), out

    def cut(self, segments: list, canvas: tuple[int, int], crop: tuple, out: list[int], flipped: bool) -> Tensor:
        """Return the cropped and resized masks, uint8 [N, height, width]."""
        top, left, down, across = crop
        drawn = np.zeros((len(segments), down, across), np.uint8)
        for place, segment in zip(drawn, segments, strict=True):
            place[:] = segment.mask(canvas)[top : top + down, left : left + across]
        masks = tv_tensors.Mask(torch.from_numpy(drawn))
        masks = V.resize(masks, out) if len(segments) else torch.zeros(0, *out, dtype=torch.uint8)
        return (V.horizontal_flip(masks) if flipped else masks).as_subclass(Tensor)


class Fitting:
    """Resize the whole image to fit the canvas, for evaluation."""

    exif_orientation = False

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, scene: Scene) -> Sample:
        image, picture = whole(scene)
        image = V.resize(image, fitted(picture.size, self.size))
        none = torch.empty(0, 4), torch.empty(0, dtype=torch.int64)
        return Sample(np.asarray(image.permute(1, 2, 0)), *none, None)


def fitted(size: tuple[int, int], canvas: int) -> list[int]:
    """Return height and width after resizing the longer side to `canvas`."""
    scale = canvas / max(size)
    return [max(1, round(side * scale)) for side in size]


def whole(scene: Scene) -> tuple[tv_tensors.Image, Picture]:
    """Decode an image; raise a BrokenImageError if its size is not that of its annotations."""
    opened, picture = scene
    image = load(opened)
    if (image.height, image.width) != picture.size:
        hint = ""
        if (image.width, image.height) == picture.size and orientation_of(opened) in TRANSPOSED:
            hint = ", its size after rotation by its EXIF orientation: save the image upright, without EXIF data"
        raise BrokenImageError(
            f"the image is {image.width} x {image.height}, but its annotations are for {picture.width} x "
            f"{picture.height}{hint}"
        )
    return tv_tensors.Image(torch.from_numpy(np.array(image)).permute(2, 0, 1)), picture


def unpacked(packed_NHW: Tensor, width: int) -> Tensor:
    """Unpack masks on their device: uint8 [N, height, width / 8] to uint8 [N, height, width]."""
    bits = torch.arange(7, -1, -1, device=packed_NHW.device, dtype=torch.uint8)
    return (packed_NHW[..., None].bitwise_right_shift(bits) & 1).flatten(2)[:, :, :width]

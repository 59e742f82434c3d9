"""A synthetic detection dataset: coloured shapes with exact boxes and masks."""

from dataclasses import dataclass

import numpy as np

from lambdanets.detect import rle
from lambdanets.detect.scenes import Category, Scenes, Segment, make_picture

NAME = "shapes"
KINDS = ("circle", "square", "triangle")
COUNTS = {"train": 64, "validation": 32, "test": 32}
SIDES = (72, 96)  # range of height and width in pixels
RADII = (8, 20)
LEAST_VISIBLE = 0.4  # minimum visible fraction of an annotated shape
SEED = 20210217


@dataclass(frozen=True)
class Shapes:
    """The images of a split of the synthetic dataset: circles, squares and triangles.

    An image depends only on the seed, the split and its number.

    Args:
        split: "train" (64 images), "validation" (32) or "test" (32).
        seed: changes all images.

    >>> from lambdanets.detect.shapes import Shapes
    >>> shapes = Shapes("validation")
    >>> scenes = shapes.scenes()
    >>> scenes.class_names
    ('circle', 'square', 'triangle')
    >>> pixels = shapes.read(scenes.pictures[0].name)
    >>> pixels.shape[:2] == scenes.pictures[0].size
    True
    """

    split: str = "train"
    seed: int = SEED

    def scenes(self) -> Scenes:
        """Return the annotations of all images."""
        pictures = []
        for number in range(COUNTS[self.split]):
            pixels, objects = self.draw(number)
            found = []
            for label, mask in objects:
                left, top, right, bottom = rle.bounds(mask) or (0, 0, 0, 0)
                segment = Segment(counts=np.array(rle.unpack(rle.encode(mask)["counts"])))
                box = (left, top, right - left, bottom - top)
                found.append((box, label, False, float(mask.sum()), segment))
            size = (pixels.shape[0], pixels.shape[1])
            pictures.append(make_picture(number + 1, f"{NAME}-{self.split}-{number:04d}.png", size, found))
        categories = tuple(Category(i, name) for i, name in enumerate(KINDS, start=1))
        return Scenes(categories, tuple(pictures), masks=True)

    def find(self, name: str) -> str | None:
        """Return the name itself; see `ImageFiles.find`."""
        return name

    def read(self, name: str) -> np.ndarray:
        """Return the pixels of an image, uint8 [H, W, 3]."""
        return self.draw(int(name.removesuffix(".png").rpartition("-")[2]))[0]

    def draw(self, number: int) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
        """Return the pixels of an image, uint8 [H, W, 3], and (label, visible mask [H, W]) of each object."""
        split = list(COUNTS).index(self.split)
        generator = np.random.Generator(np.random.PCG64([self.seed, split, number]))
        height, width = generator.integers(SIDES[0], SIDES[1] + 1, 2)
        pixels = generator.integers(0, 70, 3) + generator.normal(0, 6, (height, width, 1))
        drawn: list[tuple[int, np.ndarray, int]] = []
        for _ in range(generator.integers(1, 5)):
            kind = int(generator.integers(len(KINDS)))
            radius = generator.uniform(*RADII)
            x, y = generator.uniform(radius, width - radius), generator.uniform(radius, height - radius)
            mask = outline(kind, x, y, radius, generator.uniform(0, 2 * np.pi), (int(height), int(width)))
            drawn = [
                (label, before & ~mask, whole) for label, before, whole in drawn
            ]  # later shapes occlude earlier ones
            pixels = np.where(mask[:, :, None], generator.integers(90, 256, 3) + 0.0, pixels)
            drawn.append((kind + 1, mask, int(mask.sum())))
        pixels += generator.normal(0, 4, pixels.shape)
        objects = [(label, mask) for label, mask, whole in drawn if mask.sum() > LEAST_VISIBLE * whole]
        return np.clip(pixels, 0, 255).astype(np.uint8), objects


def outline(kind: int, x: float, y: float, radius: float, turn: float, size: tuple[int, int]) -> np.ndarray:
    """Return the mask of a shape around (x, y), rotated by `turn` radians."""
    if KINDS[kind] == "circle":
        rows, columns = np.mgrid[: size[0], : size[1]] + 0.5
        return (rows - y) ** 2 + (columns - x) ** 2 <= radius**2
    corners = 4 if KINDS[kind] == "square" else 3
    angles = turn + 2 * np.pi * np.arange(corners) / corners
    points = np.stack([x + radius * np.cos(angles), y + radius * np.sin(angles)], axis=1)
    return rle.fill_polygon(points.ravel(), size)

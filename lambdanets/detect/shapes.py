"""Coloured shapes with exact boxes and masks, made from a seed: a data set for every machine."""

from dataclasses import dataclass

import numpy as np

from lambdanets.detect import rle
from lambdanets.detect.scenes import Category, Scenes, Segment, make_picture

NAME = "shapes"
KINDS = ("circle", "square", "triangle")
COUNTS = {"train": 64, "validation": 32, "test": 32}
SIDES = (72, 96)  # pixels of a picture
RADII = (8, 20)
LEAST_VISIBLE = 0.4  # of a shape, or it is no object
SEED = 20210217


@dataclass(frozen=True)
class Shapes:
    """The pictures of a split: each follows from the seed, the split and its number."""

    split: str = "train"
    seed: int = SEED

    def scenes(self) -> Scenes:
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
        return name

    def read(self, name: str) -> np.ndarray:
        return self.draw(int(name.removesuffix(".png").rpartition("-")[2]))[0]

    def draw(self, number: int) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
        """Pixels uint8 [H, W, 3], and (label, visible mask) of each object."""
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
            drawn = [(label, before & ~mask, whole) for label, before, whole in drawn]  # later ones lie above
            pixels = np.where(mask[:, :, None], generator.integers(90, 256, 3) + 0.0, pixels)
            drawn.append((kind + 1, mask, int(mask.sum())))
        pixels += generator.normal(0, 4, pixels.shape)
        objects = [(label, mask) for label, mask, whole in drawn if mask.sum() > LEAST_VISIBLE * whole]
        return np.clip(pixels, 0, 255).astype(np.uint8), objects


def outline(kind: int, x: float, y: float, radius: float, turn: float, size: tuple[int, int]) -> np.ndarray:
    """The mask of a shape around (x, y)."""
    if KINDS[kind] == "circle":
        rows, columns = np.mgrid[: size[0], : size[1]] + 0.5
        return (rows - y) ** 2 + (columns - x) ** 2 <= radius**2
    corners = 4 if KINDS[kind] == "square" else 3
    angles = turn + 2 * np.pi * np.arange(corners) / corners
    points = np.stack([x + radius * np.cos(angles), y + radius * np.sin(angles)], axis=1)
    return rle.fill_polygon(points.ravel(), size)

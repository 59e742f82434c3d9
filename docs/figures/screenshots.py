"""Makes the pictures of the README: predictions with the maps of the lambda layers (looks.png), and the report page
(report.png).

    python docs/figures/screenshots.py FOLDER            # generate images, train, write both pictures
    python docs/figures/screenshots.py FOLDER --report   # only the pictures, from the run that is in FOLDER

All images are generated from a seed: shapes on a coloured background, six classes. A small LambdaResNet learns them in
about five minutes on two CPU cores. The screenshot needs Chromium and playwright (`pip install '.[dev]'`). The weights
depend on the machine in their last digits, so a second run gives similar pictures, not identical ones.
"""

import argparse
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

HERE = Path(__file__).resolve().parent
SIDE = 192  # pixels of a generated image
SEEN = 64  # pixels of a side of the input
COUNTS = {"train": 300, "val": 60}  # images of each class
SEED = 7
OPTIONS = ("stem=strided", "widths=(16,32,64,128)", "depths=(1,1,1,1)")
Pen = Callable[[ImageDraw.ImageDraw, float], None]


def regular(radii: list[float], turn: float) -> list[tuple[float, float]]:
    """Return corners at equal angles around (0, 0), with these radii in turn."""
    angles = [turn + 2 * np.pi * i / len(radii) for i in range(len(radii))]
    return [
        (radius * float(np.cos(angle)), radius * float(np.sin(angle)))
        for radius, angle in zip(radii, angles, strict=True)
    ]


def shape(name: str, radius: float, turn: float, side: int) -> Image.Image:
    """Return the mask of a shape in the middle of a square."""
    large = Image.new("L", (4 * side, 4 * side))
    pen = ImageDraw.Draw(large)
    middle, r = 2.0 * side, 4 * radius

    def polygon(corners: list[tuple[float, float]]) -> None:
        pen.polygon([(middle + x, middle + y) for x, y in corners], fill=255)

    def disc(x: float, y: float, r: float, fill: int) -> None:
        pen.ellipse((middle + x - r, middle + y - r, middle + x + r, middle + y + r), fill=fill)

    if name == "star":
        polygon(regular([r, 0.42 * r] * 5, turn))
    elif name == "triangle":
        polygon(regular([r] * 3, turn))
    elif name == "cross":
        for quarter in (0, np.pi / 2):
            x, y = r * np.cos(turn + quarter), r * np.sin(turn + quarter)
            pen.line((middle - x, middle - y, middle + x, middle + y), fill=255, width=round(0.5 * r))
    else:
        disc(0, 0, 0.9 * r, 255)
        if name == "ring":
            disc(0, 0, 0.5 * r, 0)
        if name == "moon":
            disc(0.5 * r * np.cos(turn), 0.5 * r * np.sin(turn), 0.75 * r, 0)
    return large.resize((side, side), Image.Resampling.LANCZOS)


NAMES = ("circle", "cross", "moon", "ring", "star", "triangle")


def scene(label: int, generator: np.random.Generator) -> Image.Image:
    """Return an image of one shape, with stripes and dots around it."""
    base = generator.uniform(15, 100, 3)
    slope = generator.uniform(-40, 40, (2, 3))
    rows, columns = np.mgrid[:SIDE, :SIDE] / SIDE - 0.5
    pixels = base + rows[..., None] * slope[0] + columns[..., None] * slope[1]
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    for _ in range(generator.integers(2, 7)):
        colour = tuple(int(v) for v in np.clip(base + generator.uniform(-50, 50, 3), 0, 255))
        x, y, u, v = generator.uniform(0, SIDE, 4)
        if generator.random() < 0.5:
            pen.line((x, y, u, v), fill=colour, width=int(generator.integers(2, 7)))
        else:
            r = generator.uniform(3, 8)
            pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    radius = generator.uniform(0.15, 0.28) * SIDE
    mask = shape(NAMES[label], radius, generator.uniform(0, 2 * np.pi), SIDE)
    colour = base
    while (colour - base).mean() < 60:
        colour = generator.uniform(60, 255, 3)
    x, y = (int(v) for v in generator.uniform(-0.5 * SIDE + radius, 0.5 * SIDE - radius, 2))
    image.paste(tuple(int(v) for v in colour), (x, y), mask)
    image = image.filter(ImageFilter.GaussianBlur(0.8))
    noisy = np.asarray(image) + generator.normal(0, 5, (SIDE, SIDE, 1))
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def generate(folder: Path) -> None:
    """Write images as `folder`/SPLIT/CLASS/NUMBER.jpg."""
    for i, (split, count) in enumerate(COUNTS.items()):
        for label, name in enumerate(NAMES):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                generator = np.random.default_rng([SEED, i, label, number])
                scene(label, generator).save(folder / split / name / f"{number:04d}.jpg", quality=92)


def train(data: Path, out: Path) -> None:
    from lambdanets.data.augment import Augment
    from lambdanets.recipes import digits
    from lambdanets.train.command import train as train_run
    from lambdanets.train.config import DataConfig

    start = digits()
    config = replace(
        start,
        recipe="shapes",
        out=out,
        model=replace(start.model, image_size=SEEN, placement="CLLL", embedding_std=0.02, options=OPTIONS),
        data=DataConfig(path=str(data), crop=1.0, workers=0),
        augment=Augment(crop_scale=(0.6, 1.0), flip=0.5),
        schedule=replace(start.schedule, rate=0.2),
        epochs=20.0,
        evaluate_every=2,
        log_every=16,
    )
    if train_run(config, report=False):
        raise SystemExit("training failed")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the pictures of the README.")
    parser.add_argument("folder", type=Path, help="folder for the images and the run")
    parser.add_argument("--keep", action="store_true", help="use the run that is in the folder")
    options = parser.parse_args()
    data, run = options.folder / "shapes", options.folder / "shapes-run"
    if not options.keep:
        shutil.rmtree(run, ignore_errors=True)
        if not data.exists():
            generate(data)
        train(data, run)


if __name__ == "__main__":
    main()

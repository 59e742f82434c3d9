"""Makes the pictures of the README: predictions with the maps of the lambda layers (looks.png), and the report page
(report.png).

    python docs/figures/screenshots.py FOLDER            # generate images, train, write both pictures
    python docs/figures/screenshots.py FOLDER --report   # only the pictures, from the run that is in FOLDER

All images are generated from a seed: shapes on a coloured background, six classes. A small LambdaResNet learns them in
about five minutes on two CPU cores. The screenshot needs Chromium and playwright (`pip install '.[dev]'`). The weights
depend on the machine in their last digits, so a second run gives similar pictures, not identical ones.
"""

import argparse
import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
SIDE = 192  # pixels of a generated image
SEEN = 64  # pixels of a side of the input
COUNTS = {"train": 300, "val": 60}  # images of each class
SEED = 7
EXAMPLES = ((4, 7), (3, 8), (1, 4))  # label and number of validation images
OPTIONS = ("stem=strided", "widths=(16,32,64,128)", "depths=(1,1,1,1)")


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


def scene(label: int, generator: np.random.Generator) -> tuple[Image.Image, tuple[int, int]]:
    """Return an image of one shape with stripes and dots around it, and row and column of its middle."""
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
    radius = generator.uniform(0.11, 0.26) * SIDE
    mask = shape(NAMES[label], radius, generator.uniform(0, 2 * np.pi), SIDE)
    colour = base
    while (colour - base).mean() < 45:
        colour = generator.uniform(40, 255, 3)
    x, y = (int(v) for v in generator.uniform(-0.5 * SIDE + radius, 0.5 * SIDE - radius, 2))
    image.paste(tuple(int(v) for v in colour), (x, y), mask)
    image = image.filter(ImageFilter.GaussianBlur(0.8))
    noisy = np.asarray(image) + generator.normal(0, 13, (SIDE, SIDE, 1))
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)), (y + SIDE // 2, x + SIDE // 2)


def numbered(split: str, label: int, number: int) -> tuple[Image.Image, tuple[int, int]]:
    """Return an image of a split."""
    return scene(label, np.random.default_rng([SEED, list(COUNTS).index(split), label, number]))


def generate(folder: Path) -> None:
    """Write images as `folder`/SPLIT/CLASS/NUMBER.jpg."""
    for split, count in COUNTS.items():
        for label, name in enumerate(NAMES):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                numbered(split, label, number)[0].save(folder / split / name / f"{number:04d}.jpg", quality=92)


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
        epochs=16.0,
        evaluate_every=2,
        log_every=16,
    )
    if train_run(config, report=False):
        raise SystemExit("training failed")


def looks(run: Path, path: Path) -> None:
    """Draw one row for each example: image and prediction, then weights by content and by position."""
    from matplotlib.figure import Figure

    from lambdanets.report.show import probability
    from lambdanets.train.inference.trained import open_trained
    from lambdanets.view import interactions
    from lambdanets.view.command import as_input, likeliest
    from lambdanets.view.draw import CONTENT, INK, POSITION, SIGNED, mark, mean_map, opacity, pale, panel

    trained = open_trained(str(run))
    figure = Figure(figsize=(9.0, 2.4 * len(EXAMPLES) + 0.35), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.04, h_pad=0.04)  # type: ignore[union-attr]
    axes = figure.subplots(len(EXAMPLES), 4)
    for row, (label, number) in enumerate(EXAMPLES):
        image, place = numbered("val", label, number)
        shown, given = as_input(trained, image)
        query = (place[0] * SEEN // SIDE, place[1] * SEEN // SIDE)
        seen = interactions(trained.network, given, query)
        first, second = seen.layers[:2]
        ((name, p),) = likeliest(trained, given, 1)
        panel(axes[row][0], shown)
        mark(axes[row][0], query)
        axes[row][0].set_xlabel(f"prediction: {name} ({probability(p)})", size=11, color=INK)
        for axis, layer, content in zip(axes[row][1:], (first, first, second), (True, False, True), strict=True):
            maps = layer.content if content else layer.position
            assert maps is not None
            weights = mean_map(maps, content).numpy()
            limit = float(np.abs(weights).max())
            panel(axis, pale(shown.numpy()), cmap="gray", vmin=0, vmax=1)
            extent = (-0.5, SEEN - 0.5, SEEN - 0.5, -0.5)
            panel(axis, weights / limit, cmap=SIGNED, vmin=-1, vmax=1, alpha=opacity(weights / limit), extent=extent)
            mark(axis, query)
            if row == 0:
                grid = f"{layer.stage}, {layer.grid[0]} x {layer.grid[1]}"
                axis.set_title(f"{CONTENT if content else POSITION}\n({grid})", size=10.5, color=INK)
        if row == 0:
            axes[row][0].set_title("input, the cross is the query", size=10.5, color=INK)
    save(figure, path)


def save(figure: "Figure", path: Path) -> None:
    """Write an optimised PNG without transparency."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    Image.open(file).convert("RGB").save(path, optimize=True)


def report(run: Path, path: Path) -> None:
    """Write the report of the run and a screenshot of its header, first charts and confusion matrix."""
    from playwright.sync_api import sync_playwright

    from lambdanets.report.page import write_report

    page_path = write_report(run, pictures=12)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 4000}, color_scheme="light")
        page.goto(page_path.resolve().as_uri())
        chart, matrix = (page.locator(name).first.bounding_box() for name in (".chart", "#confusion"))
        assert chart is not None
        assert matrix is not None
        page.mouse.move(chart["x"] + 0.68 * chart["width"], chart["y"] + 0.7 * chart["height"])  # shows the values
        whole = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        browser.close()
    parts = [(0, chart["y"] + chart["height"] + 10), (matrix["y"] - 8, matrix["y"] + matrix["height"] + 20)]
    images = [whole.crop((0, round(top), whole.width, round(bottom))) for top, bottom in parts]
    joined = Image.new("RGB", (whole.width, sum(image.height for image in images)))
    joined.paste(images[0])
    joined.paste(images[1], (0, images[0].height))
    joined.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


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
    looks(run, HERE / "looks.png")
    report(run, HERE / "report.png")


if __name__ == "__main__":
    main()

"""The picture of the tour: made-up scenes, and the weights with which a lambda layer mixes their pixels."""

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

SIDE = 48  # of the pictures
QUERIES = {"the sky": (12, 14), "a ridge": (23, 29), "a wall": (34, 32), "the sun": (8, 40)}  # row, column
INK = "#333333"


def scene(rng: np.random.Generator, side: int = SIDE, oversampling: int = 3) -> np.ndarray:
    """A landscape [side, side, 3] with colours in 0..1: sky, sun, three ranges of hills, two houses."""
    fine = side * oversampling
    y, x = np.mgrid[0:fine, 0:fine] / fine
    sky, haze = np.array([0.25, 0.5, 0.85]), np.array([0.9, 0.75, 0.55])
    image = sky + (haze - sky + rng.uniform(-0.1, 0.1, 3)) * y[..., None]

    def paint(where: np.ndarray, colour: tuple[float, float, float]) -> None:
        image[where] = np.clip(colour + rng.uniform(-0.08, 0.08, 3), 0, 1)

    sun_x, sun_y, radius = rng.uniform(0.1, 0.9), rng.uniform(0.1, 0.35), rng.uniform(0.06, 0.13)
    paint((x - sun_x) ** 2 + (y - sun_y) ** 2 < radius**2, (1.0, 0.9, 0.35))
    for height, colour in ((0.5, (0.45, 0.5, 0.65)), (0.62, (0.3, 0.5, 0.35)), (0.78, (0.2, 0.38, 0.2))):
        waves = (rng.uniform(0.01, 0.07) * np.sin(rng.uniform(3, 14) * x + rng.uniform(0, 6)) for _ in range(3))
        paint(y > height + sum(waves), colour)
    for _ in range(2):
        width, left, top = rng.uniform(0.12, 0.2), rng.uniform(0.05, 0.75), rng.uniform(0.55, 0.72)
        wall = (x > left) & (x < left + width) & (y > top) & (y < top + width)
        roof = (y <= top) & (np.abs(x - left - width / 2) < (y - top + width * 0.6) * 1.1)
        door = wall & (np.abs(x - left - width / 2) < width * 0.12) & (y > top + width * 0.45)
        for part, colour in ((wall, (0.85, 0.75, 0.6)), (roof, (0.7, 0.2, 0.15)), (door, (0.3, 0.15, 0.1))):
            paint(part, colour)
    return image.reshape(side, oversampling, side, oversampling, 3).mean((1, 3))


def draw(path: Path, clean: Tensor, noisy: Tensor, restored: Tensor, position_NM: Tensor, content_NM: Tensor) -> None:
    """The heat maps: a column for each query, its neighbourhood above its two kinds of interaction."""
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke

    figure = Figure(figsize=(12.5, 8.6), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06)  # type: ignore[union-attr]
    figure.suptitle(
        "What four pixels look at: the interactions of a lambda layer that removes noise", size=14, color=INK
    )
    columns = figure.add_gridspec(1, 2, width_ratios=(1, 3.9))
    left: Any = figure.add_subfigure(columns[0])
    right: Any = figure.add_subfigure(columns[1])
    axes = left.subplots(3, 1)
    for axis, image, title in zip(axes, (clean, noisy, restored), ("scene", "noisy input", "output"), strict=True):
        show(axis, as_image(image), title)
    for letter, (row, column) in zip("ABCD", QUERIES.values(), strict=True):
        axes[0].plot(column, row, "o", color="white", markeredgecolor=INK, markersize=5)
        label = axes[0].annotate(letter, (column, row), (4, 4), textcoords="offset points", color="white", size=12)
        label.set_path_effects([withStroke(linewidth=2.5, foreground=INK)])

    reach = 7  # the layer's scope is 15
    around = (-reach - 0.5, reach + 0.5, reach + 0.5, -reach - 0.5)
    grid = right.subplots(3, 4)
    for i, (name, (row, column)) in enumerate(QUERIES.items()):
        pixel = row * SIDE + column
        window = (slice(row - reach, row + reach + 1), slice(column - reach, column + reach + 1))
        show(grid[0, i], as_image(clean)[window], f"{'ABCD'[i]}: {name}", extent=around)
        weights(right, grid[1, i], position_NM[pixel].view(SIDE, SIDE)[window], extent=around)
        weights(right, grid[2, i], content_NM[pixel].view(SIDE, SIDE))
        for axis, x, y in ((grid[0, i], 0, 0), (grid[1, i], 0, 0), (grid[2, i], column, row)):
            axis.plot(x, y, "o", color="none", markeredgecolor=INK, markersize=6)
    labels = (
        "what surrounds it\n15 x 15 pixels",
        "position: q · e(n, m)\n15 x 15 pixels",
        "content: q · k(m)\nthe whole image",
    )
    for axis, label in zip(grid[:, 0], labels, strict=True):
        axis.set_ylabel(label, size=11, color=INK)
    right.supxlabel("weight of each pixel in the mixture: orange adds, purple subtracts", size=11, color=INK)
    figure.savefig(path, dpi=150)


def show(axis: Any, image: Any, title: str = "", **options: Any) -> Any:
    """One panel without ticks."""
    axis.set_xticks([])
    axis.set_yticks([])
    for spine in axis.spines.values():
        spine.set_color("#bbbbbb")
    if title:
        axis.set_title(title, size=12, color=INK)
    return axis.imshow(image, interpolation="nearest", **options)


def weights(figure: Any, axis: Any, values: Tensor, **options: Any) -> None:
    """Signed weights, each panel on its own scale, in colours that colour-blind readers can tell apart."""
    limit = float(values.abs().max())
    drawn = show(axis, values.numpy(), cmap="PuOr_r", vmin=-limit, vmax=limit, **options)
    bar = figure.colorbar(drawn, ax=axis, location="bottom", shrink=0.9, aspect=22, pad=0.03)
    bar.set_ticks([-limit, 0, limit], labels=[f"-{100 * limit:.2g}%", "0", f"{100 * limit:.2g}%"])
    bar.ax.tick_params(labelsize=9, colors=INK, length=2)
    bar.outline.set_visible(False)


def as_image(batch: Tensor) -> np.ndarray:
    return (batch[0] + 0.5).clip(0, 1).permute(1, 2, 0).numpy()

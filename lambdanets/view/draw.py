"""Draws interactions and position tables: as one PNG, and as pictures inside pages and notebooks."""

import html
import io
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lambdanets.report.pictures import address
from lambdanets.view.look import Interactions, untrained

INK, MARK = "#333333", "#d0342c"
SIGNED = "PuOr_r"  # orange adds, purple subtracts; safe for colour-blind readers
GAP = 1  # pixels between the channels of a table
MOST_LAYERS = 40  # in one picture
OPACITY = 0.9  # of the largest weight over the picture
CONTENT, POSITION = "content: q · key − mean", "position: q · embedding"  # titles


def draw(seen: Interactions, path: str | Path, picture: Tensor | None = None) -> Path:
    """Write one PNG and return its path. Each row shows a layer: content weights, position weights, position table.

    Args:
        seen: the interactions of one query.
        path: the file; its folder is created.
        picture: uint8 [height, width, channels], drawn under the maps instead of the normalised image.

    Raises:
        ValueError: there are more than 40 layers.
    """
    from matplotlib.figure import Figure

    if len(seen.layers) > MOST_LAYERS:
        raise ValueError(
            f"{len(seen.layers)} layers are too many for one picture: choose at most {MOST_LAYERS} with --layers"
        )
    shown = as_picture(seen.image) if picture is None else picture.numpy()
    rows = len(seen.layers)
    warning = untrained_tables(seen)
    figure = Figure(figsize=(12.5, 2.9 * rows + 1.0 + 0.4 * bool(warning)), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.05, h_pad=0.06)  # type: ignore[union-attr]
    figure.suptitle(
        f"Weights of all positions for the pixel at row {seen.query[0]}, column {seen.query[1]} (mean of the heads)",
        size=13,
        color=INK,
    )
    if warning:
        figure.supxlabel(textwrap.fill(warning, 170), size=9, color=MARK, ha="center")
    axes = figure.subplots(rows, 4, squeeze=False)
    for number, (layer, reach) in enumerate(zip(seen.layers, seen.reaches, strict=True)):
        image, content, position, table = axes[number]
        panel(image, shown, cmap="gray" if shown.shape[-1] == 1 else None)
        mark(image, seen.query)
        label = f"{layer.stage}  {layer.grid[0]} x {layer.grid[1]}\n{layer.name}"
        image.set_ylabel(label, size=10, color=INK)
        if number == 0:
            for axis, title in ((image, "input"), (content, CONTENT), (position, POSITION)):
                axis.set_title(title, size=11, color=INK)
            table.set_title("norm of the embeddings", size=11, color=INK)
        for axis, maps, far in ((content, layer.content, reach.content), (position, layer.position, reach.position)):
            signed(figure, axis, maps, axis is content, shown, seen.query, far)
        if layer.table is None:
            absent(table, "no position embeddings")
        else:
            drawn = panel(table, table_norm(layer.table).numpy(), cmap="viridis")
            bar(figure, drawn, table)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def untrained_tables(seen: Interactions) -> str:
    """Return the sentence of `untrained` for layers with a position table."""
    return untrained([(one.name, one.table, one.grid) for one in seen.layers if one.table is not None])


def signed(
    figure: Any,
    axis: Any,
    maps: Tensor | None,
    content: bool,
    shown: np.ndarray,
    query: tuple[int, int],
    far: float | None,
) -> None:
    """Draw weights over a pale picture."""
    if maps is None:
        absent(axis, "switched off in this layer")
        return
    weights = mean_map(maps, content).cpu().numpy()
    limit = max(float(np.abs(weights).max()), 1e-30)
    panel(axis, pale(shown), cmap="gray", vmin=0, vmax=1)
    height, width = shown.shape[:2]
    drawn = panel(
        axis,
        weights,
        cmap=SIGNED,
        vmin=-limit,
        vmax=limit,
        alpha=opacity(weights / limit),
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
    )
    mark(axis, query)
    axis.set_xlabel(f"mean distance {far:.0f} pixels", size=9, color=INK)
    bar(figure, drawn, axis)


def mean_map(maps_HUyx: Tensor, content: bool) -> Tensor:
    """Return the mean over heads of weights summed over intra-depth, [height, width].

    The mean over all positions is subtracted from content weights, which are often nearly equal.
    """
    weights = maps_HUyx.sum(1).mean(0)
    return weights - weights.mean() if content else weights


def pale(picture: np.ndarray) -> np.ndarray:
    """Return a picture [height, width, channels] in 0..1 or 0..255 as light grey values [height, width] in 0..1."""
    grey = picture.astype(float).mean(-1) / (255.0 if picture.dtype == np.uint8 else 1.0)
    return 0.4 + 0.6 * grey


def opacity(weights: np.ndarray) -> np.ndarray:
    """Return the opacity of weights in -1..1, so that the picture is visible where they are small."""
    return OPACITY * np.abs(weights) ** 0.7


def mark(axis: Any, place: tuple[int, int]) -> None:
    """Draw a cross at a row and column."""
    axis.plot(place[1], place[0], "+", color="white", markersize=11, markeredgewidth=3.5)
    axis.plot(place[1], place[0], "+", color=MARK, markersize=10, markeredgewidth=1.6)


def bar(figure: Any, drawn: Any, axis: Any) -> None:
    scale = figure.colorbar(drawn, ax=axis, shrink=0.9, aspect=18, pad=0.02)
    scale.ax.tick_params(labelsize=8, colors=INK, length=2)
    scale.outline.set_visible(False)


def panel(axis: Any, image: Any, **options: Any) -> Any:
    axis.set_xticks([])
    axis.set_yticks([])
    for spine in axis.spines.values():
        spine.set_color("#bbbbbb")
    return axis.imshow(image, interpolation="nearest", **options)


def absent(axis: Any, why: str) -> None:
    axis.set_axis_off()
    axis.text(0.5, 0.5, why, ha="center", va="center", size=9, color=INK, transform=axis.transAxes)


def as_picture(image: Tensor) -> np.ndarray:
    """Return an input [C, height, width] as picture [height, width, 1 or 3], scaled to 0..1."""
    image = image.detach().float().cpu()
    image = image if len(image) in (1, 3) else image.mean(0, keepdim=True)
    low, high = image.min(), image.max()
    return ((image - low) / (high - low).clamp_min(1e-12)).permute(1, 2, 0).numpy()


def table_norm(table: Tensor) -> Tensor:
    """Return the norm of each embedding, [*scope]."""
    return table.detach().float().cpu().flatten(2).norm(dim=-1)


def table_channels(table: Tensor) -> Tensor:
    """Return all channels of a table side by side in a square, with NaN in the gaps."""
    channels = table.detach().float().cpu().flatten(2).movedim(-1, 0)  # [channels, *scope]
    count, height, width = channels.shape
    columns = int(np.ceil(np.sqrt(count)))
    rows = -(-count // columns)
    sheet = torch.full((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP), torch.nan)
    for i, channel in enumerate(channels):
        top, left = i // columns * (height + GAP), i % columns * (width + GAP)
        sheet[top : top + height, left : left + width] = channel
    return sheet


def coloured(values_HW: Tensor, colours: str, symmetric: bool) -> str:
    """Return numbers as a PNG in a data: URL, one pixel each; NaN is transparent."""
    from matplotlib import colormaps
    from PIL import Image

    values = values_HW.detach().double().cpu()
    finite = values[values.isfinite()]
    limit = float(finite.abs().max().clamp_min(1e-30)) if len(finite) else 1.0
    scaled = (values / limit + 1) / 2 if symmetric else values / limit
    pixels = (colormaps[colours](scaled.nan_to_num(0.0).numpy()) * 255).round().astype(np.uint8)
    pixels[..., 3] = values.isfinite().numpy() * 255
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", optimize=True)
    return address(file, "png")


def as_html(seen: Interactions) -> str:
    """Return a table of pictures without scripts, for notebooks."""
    from PIL import Image

    file = io.BytesIO()
    shown = as_picture(seen.image)
    Image.fromarray((shown.repeat(3 // shown.shape[-1], axis=-1) * 255).round().astype(np.uint8)).save(file, "PNG")
    style = "width:220px;height:auto;image-rendering:pixelated;border:1px solid #bbb"
    warning = untrained_tables(seen)
    cells = [
        f"<p><b>{html.escape(warning)}</b></p>" if warning else "",
        f"<p>Query: the pixel at row {seen.query[0]}, column {seen.query[1]} of the input<br>"
        f'<img style="{style}" alt="the input" src="{address(file, "png")}"></p>',
        f"<table><tr><th>layer</th><th>{CONTENT}</th><th>{POSITION}</th><th>table</th></tr>",
    ]
    for layer, reach in zip(seen.layers, seen.reaches, strict=True):
        row = [f"{html.escape(layer.stage)}<br>{html.escape(layer.name)}<br>{layer.grid[0]} x {layer.grid[1]}"]
        for name, maps, far in (
            ("content", layer.content, reach.content),
            ("position", layer.position, reach.position),
        ):
            if maps is None:
                row.append("off")
                continue
            source = coloured(mean_map(maps, name == "content"), SIGNED, symmetric=True)
            row.append(f'<img style="{style}" alt="{name}" src="{source}"><br>mean distance {far:.0f} pixels')
        table = "" if layer.table is None else coloured(table_norm(layer.table), "viridis", symmetric=False)
        row.append(f'<img style="{style}" alt="table" src="{table}">' if table else "none")
        cells.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>")
    return "".join(cells) + "</table>"

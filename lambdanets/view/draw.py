"""Pictures of interactions: one PNG, pictures for notebooks, and small ones of position tables."""

import html
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lambdanets.report.pictures import address
from lambdanets.view.look import Interactions, LayerInteractions

INK, MARK = "#333333", "#d0342c"
SIGNED = "PuOr_r"  # orange adds, purple subtracts; colour-blind readers can tell them apart
GAP = 1  # pixels between the channels of a table
MOST_LAYERS = 40  # of one picture


def draw(seen: Interactions, path: str | Path, picture: Tensor | None = None) -> Path:
    """One PNG: for each layer a row with what the query takes by content, by position, and the layer's table.

    `picture` [height, width, channels] in uint8 is shown in place of the normalised image.
    """
    from matplotlib.figure import Figure

    if len(seen.layers) > MOST_LAYERS:
        raise ValueError(
            f"{len(seen.layers)} layers do not fit into one picture: choose at most {MOST_LAYERS} (--layers)"
        )
    shown = as_picture(seen.image) if picture is None else picture.numpy()
    rows = len(seen.layers)
    figure = Figure(figsize=(11.5, 2.5 * rows + 1.0), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.05, h_pad=0.06)  # type: ignore[union-attr]
    figure.suptitle(
        f"What the pixel at row {seen.query[0]}, column {seen.query[1]} takes from the rest, mean of the heads",
        size=13,
        color=INK,
    )
    axes = figure.subplots(rows, 4, squeeze=False)
    for number, (layer, reach) in enumerate(zip(seen.layers, seen.reaches, strict=True)):
        image, content, position, table = axes[number]
        panel(image, shown, cmap="gray" if shown.shape[-1] == 1 else None)
        mark(image, seen.query)
        label = f"{layer.stage}  {layer.grid[0]} x {layer.grid[1]}\n{layer.name}"
        image.set_ylabel(label, size=10, color=INK)
        if number == 0:
            for axis, title in ((image, "input"), (content, "content: q · key"), (position, "position: q · embedding")):
                axis.set_title(title, size=11, color=INK)
            table.set_title("table: size of the embeddings", size=11, color=INK)
        for axis, maps, far in ((content, layer.content, reach.content), (position, layer.position, reach.position)):
            signed(figure, axis, maps, layer, far)
        if layer.table is None:
            absent(table, "no position embeddings")
        else:
            drawn = panel(table, table_norm(layer.table).numpy(), cmap="viridis")
            bar(figure, drawn, table)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def signed(figure: Any, axis: Any, maps: Tensor | None, layer: LayerInteractions, far: float | None) -> None:
    if maps is None:
        absent(axis, "switched off in this layer")
        return
    weights = maps.sum(1).mean(0).cpu()  # over intra-depth, then the heads
    limit = max(float(weights.abs().max()), 1e-30)
    drawn = panel(axis, weights.numpy(), cmap=SIGNED, vmin=-limit, vmax=limit)
    mark(axis, layer.query)
    axis.set_xlabel(f"reaches {far:.0f} pixels on average", size=9, color=INK)
    bar(figure, drawn, axis)


def mark(axis: Any, place: tuple[int, int]) -> None:
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
    """[C, height, width] as seen by the network -> [height, width, 1 or 3] in 0..1, each stretched to its range."""
    image = image.detach().float().cpu()
    image = image if len(image) in (1, 3) else image.mean(0, keepdim=True)
    low, high = image.min(), image.max()
    return ((image - low) / (high - low).clamp_min(1e-12)).permute(1, 2, 0).numpy()


def table_norm(table: Tensor) -> Tensor:
    """The size of each embedding, [*scope]."""
    return table.detach().float().cpu().flatten(2).norm(dim=-1)


def table_channels(table: Tensor) -> Tensor:
    """Every channel of a table side by side with gaps, in a square: NaN where there is nothing."""
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
    """Numbers as a small PNG inside a page, a pixel for each; NaN is transparent."""
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
    """Pictures in a table, without scripts: what a notebook shows."""
    from PIL import Image

    file = io.BytesIO()
    shown = as_picture(seen.image)
    Image.fromarray((shown.repeat(3 // shown.shape[-1], axis=-1) * 255).round().astype(np.uint8)).save(file, "PNG")
    style = "width:150px;height:auto;image-rendering:pixelated;border:1px solid #bbb"
    cells = [
        f'<p>The pixel at row {seen.query[0]}, column {seen.query[1]} of <br><img style="{style}" alt="the input" '
        f'src="{address(file, "png")}"></p>',
        "<table><tr><th>layer</th><th>content: q · key</th><th>position: q · embedding</th><th>table</th></tr>",
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
            source = coloured(maps.sum(1).mean(0), SIGNED, symmetric=True)
            row.append(f'<img style="{style}" alt="{name}" src="{source}"><br>reaches {far:.0f} pixels')
        table = "" if layer.table is None else coloured(table_norm(layer.table), "viridis", symmetric=False)
        row.append(f'<img style="{style}" alt="table" src="{table}">' if table else "none")
        cells.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>")
    return "".join(cells) + "</table>"

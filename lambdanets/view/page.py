"""The page: one HTML file that holds the small tensors, so that any pixel can be asked. Nothing comes from elsewhere.

Letters: N queries, M context positions, H heads, G groups of heads, K key depth, U intra-depth.

A map is q . key or q . table entry: the page keeps queries [N, H, K], normalised keys [G, M, K] and the table
[G, *scope, K] in half precision and multiplies when a pixel is clicked. With intra-depth the maps are summed over u.
"""

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lambdanets.files import write_text
from lambdanets.report.pictures import address
from lambdanets.report.template import rendered
from lambdanets.view.capture import Captured, capture
from lambdanets.view.draw import as_picture, coloured, table_channels, table_norm
from lambdanets.view.look import Reach, checked, middle, reach

HERE = Path(__file__).parent
MOST_BYTES = 48 * 2**20  # of the tensors in one page


@dataclass(frozen=True)
class Page:
    """An interactive page as text; a notebook shows it in a frame."""

    text: str

    def _repr_html_(self) -> str:
        return self.frame("height:860px;border:1px solid #bbb")

    def frame(self, style: str) -> str:
        """The page within another: its scripts can reach nothing but the frame."""
        title = 'title="What lambda layers look at"'
        return (
            f'<iframe {title} style="width:100%;{style}" sandbox="allow-scripts" srcdoc="{html.escape(self.text)}">'
            "</iframe>"
        )

    def save(self, path: str | Path) -> Path:
        path = Path(path)
        write_text(path, self.text)
        return path


def interactive(
    model: nn.Module,
    image: Tensor,
    query: tuple[int, int] | None = None,
    *,
    layers: Sequence[str] = (),
    picture: Tensor | None = None,
    title: str = "What lambda layers look at",
    answers: Sequence[tuple[str, str]] = (),
) -> Page:
    """The interactive page of an image [C, height, width] and every lambda layer; see `interactions`.

    Args:
        picture: [height, width, channels] in uint8, shown in place of the normalised image.
        title, answers: what stands above it; answers are classes with their probability.
    """
    from markupsafe import Markup

    found = [one for one in capture(model, image, layers) if one.allowed_NM is None]
    if not found:
        raise ValueError("every lambda layer here has a mask, so its keys differ from query to query: use interactions")
    image = image[0] if image.ndim == 4 else image
    query = middle(image) if query is None else checked(query, image)
    data = [tensors(one) for one in found]
    weight = sum(len(part) for one in data for part in one.values() if isinstance(part, str))
    if weight > MOST_BYTES:
        raise ValueError(
            f"the page would hold {weight / 1e6:.0f} MB of tensors, more than {MOST_BYTES / 1e6:.0f}: choose some "
            f"layers (--layers layer4), or a smaller image"
        )
    far = [reach(one, image.shape[1:]) for one in found]
    text = rendered(
        HERE,
        css=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        title=title,
        answers=answers,
        data={"image": list(image.shape[1:]), "query": list(query), "layers": data},
        source=picture_source(image, picture),
        size=tuple(image.shape[1:]),
        far=[bars(one, far) for one in far],
        stages=stages(far),
        tables=tables(found),
    )
    return Page(text)


def tensors(one: Captured) -> dict[str, Any]:
    """What the page needs to know of a layer."""
    layer = one.layer
    keys = one.normalised_keys()
    table = None
    if layer.positions is not None:
        table = layer.positions.table.detach()
        table = table.sum(-1) if layer.intra_depth > 1 else table
        table = table.movedim(2, 0) if layer.multi_head else table[None]  # [G, *scope, K]
    return {
        "name": one.name,
        "stage": one.stage,
        "queryGrid": one.query_grid,
        "grid": one.context_grid,
        "heads": layer.heads,
        "depth": layer.key_depth,
        "stride": layer.stride,
        "dilation": (1, 1) if layer.positions is None else layer.positions.dilation,
        "scope": (0, 0) if table is None else tuple(table.shape[1:3]),
        "queries": half(one.queries_NHK),
        "keys": None if keys is None else half(keys.sum(-1), scale_of(keys.sum(-1))),
        "keyScale": 1.0 if keys is None else scale_of(keys.sum(-1)),
        "table": None if table is None else half(table),
    }


def scale_of(tensor: Tensor) -> float:
    """Softmax over thousands of positions gives weights that half precision cannot hold."""
    return float(tensor.abs().max().clamp_min(1e-30))


def half(tensor: Tensor, scale: float = 1.0) -> str:
    """Little-endian float16 in base64."""
    array = (tensor.detach() / scale).clamp(-65504, 65504).to("cpu", torch.float16).contiguous().numpy()
    return base64.b64encode(array.astype("<f2").tobytes()).decode("ascii")


def picture_source(image: Tensor, picture: Tensor | None) -> str:
    from PIL import Image

    pixels = (as_picture(image) * 255).round().astype(np.uint8) if picture is None else picture.cpu().numpy()
    pixels = pixels if pixels.shape[-1] == 3 else pixels.repeat(3, axis=-1)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", optimize=True)
    return address(file, "png")


def bars(one: Reach, all_of_them: Sequence[Reach]) -> dict[str, Any]:
    """A row of the table of reaches, with widths in percent of the widest bar."""
    far = [value for r in all_of_them for value in (r.content, r.position, r.everywhere) if value is not None]
    widest = max(*far, 1e-12)
    row: dict[str, Any] = asdict(one)
    for kind in ("content", "position", "everywhere"):
        value = row[kind]
        row[f"{kind}_width"] = 0 if value is None else round(100 * value / widest, 1)
    row["share"] = round(100 * one.position_share)
    return row


def stages(far: Sequence[Reach]) -> list[str]:
    """One sentence a stage: which look far."""
    groups: dict[str, list[Reach]] = {}
    for one in far:
        groups.setdefault(one.stage, []).append(one)
    sentences = []
    for stage, members in groups.items():
        said = []
        for kind in ("content", "position"):
            values = [value for r in members if (value := getattr(r, kind)) is not None]
            if values:
                said.append(f"{sum(values) / len(values):.0f} pixels by {kind}")
        count = f"{len(members)} layer{'s' * (len(members) > 1)}"
        sentences.append(f"{stage} ({count}): {' and '.join(said)}")
    return sentences


def tables(found: Sequence[Captured]) -> list[dict[str, Any]]:
    """Pictures of the position tables; a shared one once."""
    rows, seen = [], set()
    for one in found:
        positions = one.layer.positions
        if positions is None or id(positions) in seen:
            continue
        seen.add(id(positions))
        table = positions.table.detach()
        rows.append(
            {
                "name": one.name,
                "scope": " x ".join(map(str, positions.scope)),
                "norm": coloured(table_norm(table), "viridis", symmetric=False),
                "channels": coloured(table_channels(table), "PuOr_r", symmetric=True),
                "count": table[0, 0].numel(),
            }
        )
    return rows

"""The interactive page: one self-contained HTML file with the tensors that are needed to show any query.

Letters: N queries, M context positions, H heads, G groups of heads, K key depth, U intra-depth.

A map is q . key or q . table entry. The page holds queries [N, H, K], normalised keys [G, M, K] and the table
[G, *scope, K] in half precision and computes the products when a pixel is clicked. With intra-depth, maps are sums over
u.
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
from lambdanets.view.look import Reach, checked, middle, reach, untrained

HERE = Path(__file__).parent
MOST_BYTES = 48 * 2**20  # of all tensors of a page


@dataclass(frozen=True)
class Page:
    """An interactive page as text; a notebook displays it in a frame."""

    text: str

    def _repr_html_(self) -> str:
        return self.frame("height:860px;border:1px solid #bbb")

    def frame(self, style: str) -> str:
        """Return the page as a sandboxed frame of another page."""
        title = 'title="Interactions of the lambda layers"'
        return (
            f'<iframe {title} style="width:100%;{style}" sandbox="allow-scripts" srcdoc="{html.escape(self.text)}">'
            "</iframe>"
        )

    def save(self, path: str | Path) -> Path:
        """Write the page and return its path."""
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
    title: str = "Interactions of the lambda layers",
    answers: Sequence[tuple[str, str]] = (),
) -> Page:
    """Return an interactive page of an image and every lambda layer: a click on a pixel shows its interactions.

    Args:
        model: a network with `LambdaLayer2d`s, or one such layer.
        image: [C, height, width], normalised as the input of the network.
        query: row and column of the pixel that is shown first; the middle if None.
        layers: only layers whose name contains one of these words; all if empty.
        picture: uint8 [height, width, channels], shown instead of the normalised image.
        title: heading of the page.
        answers: (class, probability) pairs that are shown below the heading.

    Raises:
        ValueError: there is no lambda layer without a mask, the query is outside the image, or the page would be larger
            than 48 MiB.
    """
    from markupsafe import Markup

    found = [one for one in capture(model, image, layers) if one.allowed_NM is None]
    if not found:
        raise ValueError(
            "every lambda layer has a mask, so the keys differ between queries: use `interactions` instead"
        )
    image = image[0] if image.ndim == 4 else image
    query = middle(image) if query is None else checked(query, image)
    data = [tensors(one) for one in found]
    weight = sum(len(part) for one in data for part in one.values() if isinstance(part, str))
    if weight > MOST_BYTES:
        raise ValueError(
            f"the tensors of the page have {weight / 1e6:.0f} MB, more than {MOST_BYTES / 1e6:.0f}: choose some layers "
            f"(--layers layer4) or a smaller image"
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
        warning=untrained([(o.name, p.table, o.context_grid) for o in found if (p := o.layer.positions) is not None]),
    )
    return Page(text)


def tensors(one: Captured) -> dict[str, Any]:
    """Return the data of a layer for the script of the page."""
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
    """Return a factor for keys: a softmax over thousands of positions underflows in half precision."""
    return float(tensor.abs().max().clamp_min(1e-30))


def half(tensor: Tensor, scale: float = 1.0) -> str:
    """Return a tensor divided by `scale` as little-endian float16 in base64."""
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
    """Return one row of the range table, with widths in percent of the widest bar."""
    far = [value for r in all_of_them for value in (r.content, r.position, r.everywhere) if value is not None]
    widest = max(*far, 1e-12)
    row: dict[str, Any] = asdict(one)
    for kind in ("content", "position", "everywhere"):
        value = row[kind]
        row[f"{kind}_width"] = 0 if value is None else round(100 * value / widest, 1)
    row["share"] = round(100 * one.position_share)
    return row


def stages(far: Sequence[Reach]) -> list[str]:
    """Return one sentence for each stage, with the mean range of its layers."""
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
    """Return pictures of the position tables, each shared table once."""
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

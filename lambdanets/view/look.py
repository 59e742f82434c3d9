"""The interactions of one query in every lambda layer, as tensors, and how far each layer looks.

Letters: n some queries, M context positions, H heads, U intra-depth, V value depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lambdanets.view.capture import Captured, capture

SAMPLED = 8  # queries along each side of a map, over which reach is averaged


@dataclass(frozen=True, eq=False)
class LayerInteractions:
    """How one layer answers one query: `(content + position)` applied to `values` is `output`."""

    name: str
    stage: str
    query: tuple[int, int]  # row and column on the layer's grid of queries
    content: Tensor | None  # [H, U, height, width]: q . normalised key
    position: Tensor | None  # [H, U, height, width]: q . embedding, 0 beyond the scope
    constant: Tensor | None  # [H]: q . position_bias, which no paper layer has
    values: Tensor  # [1 or H, V, U, height, width]
    output: Tensor  # [H, V], of the layer itself
    table: Tensor | None  # [*scope, (H,) K(, U)], the learned embeddings

    @property
    def grid(self) -> tuple[int, int]:
        return self.values.shape[-2], self.values.shape[-1]

    def applied(self) -> Tensor:
        """The interactions applied to the values, [H, V]: equal to `output` up to rounding."""
        maps = [m for m in (self.content, self.position) if m is not None]
        values = self.values.expand(maps[0].shape[0], -1, -1, -1, -1)
        output = torch.einsum("huyx,hvuyx->hv", sum(maps[1:], maps[0]), values)
        return output if self.constant is None else output + self.constant[:, None]


@dataclass(frozen=True, eq=False)
class Interactions:
    """What `interactions` found; a notebook shows it as pictures."""

    image: Tensor  # [C, height, width], as the network saw it
    query: tuple[int, int]  # row and column of a pixel
    layers: tuple[LayerInteractions, ...]
    reaches: "tuple[Reach, ...]"

    def _repr_html_(self) -> str:
        from lambdanets.view.draw import as_html

        return as_html(self)


@dataclass(frozen=True)
class Reach:
    """How far a layer looks: mean distance of the context in pixels of the image, weighted by |interaction|.

    Averaged over heads and over queries all over the image. `everywhere` is what equal weights would give: a layer
    that looks near is far below it.
    """

    name: str
    stage: str
    grid: tuple[int, int]
    content: float | None
    position: float | None
    everywhere: float
    position_share: float  # of the size of the output, |position| / (|content| + |position|)


@torch.no_grad()
def interactions(
    model: nn.Module, image: Tensor, query: tuple[int, int] | None = None, *, layers: Sequence[str] = ()
) -> Interactions:
    """The effective interactions of one query pixel in every lambda layer of a network.

    Args:
        model: a network with `LambdaLayer2d`s, or one such layer; it is looked at in eval mode, and left as it was.
        image: [C, height, width], prepared as the network wants it.
        query: row and column of a pixel; the middle if None. Each layer answers for the cell of its map that holds it.
        layers: only those whose name holds one of these words; all if empty.
    """
    found = capture(model, image, layers)
    image = image[0] if image.ndim == 4 else image
    query = middle(image) if query is None else checked(query, image)
    return Interactions(
        image,
        query,
        tuple(interactions_of(one, one.row_of(query, image.shape[1:])) for one in found),
        tuple(reach(one, image.shape[1:]) for one in found),
    )


def reaches(model: nn.Module, image: Tensor, *, layers: Sequence[str] = ()) -> tuple[Reach, ...]:
    """How far each lambda layer looks on an image [C, height, width]."""
    return tuple(reach(one, image.shape[-2:]) for one in capture(model, image, layers))


def middle(image: Tensor) -> tuple[int, int]:
    return image.shape[1] // 2, image.shape[2] // 2


def checked(query: Sequence[int], image: Tensor) -> tuple[int, int]:
    height, width = image.shape[1:]
    row, column = query
    if not (0 <= row < height and 0 <= column < width):
        raise ValueError(f"the query {row} {column} (row, column) is outside the input of {height} x {width} pixels")
    return row, column


def interactions_of(one: Captured, row: int) -> LayerInteractions:
    rows = torch.tensor([row], device=one.queries_NHK.device)

    def on_grid(maps: Tensor | None) -> Tensor | None:
        return None if maps is None else maps[0].unflatten(-1, one.context_grid)

    constant = one.constant(rows)
    return LayerInteractions(
        one.name,
        one.stage,
        (row // one.query_grid[1], row % one.query_grid[1]),
        on_grid(one.content(rows)),
        on_grid(one.position(rows)),
        None if constant is None else constant[0],
        one.values_GMVU.permute(0, 2, 3, 1).unflatten(-1, one.context_grid),
        one.output_NHV[row],
        None if one.layer.positions is None else one.layer.positions.table.detach(),
    )


@torch.no_grad()
def reach(one: Captured, image: Sequence[int]) -> Reach:
    """`Reach` of a layer, from queries on a lattice."""
    rows = lattice(one.query_grid).to(one.queries_NHK.device)
    distance_nM = distances(one, rows, image)
    content, position = one.content(rows), one.position(rows)

    def mean(maps_nHUM: Tensor | None) -> float | None:
        if maps_nHUM is None:
            return None
        weights = maps_nHUM.abs().sum(2)  # [n, H, M]
        total = weights.sum(-1).clamp_min(1e-30)
        return float(((weights * distance_nM[:, None]).sum(-1) / total).mean())

    sizes = [0.0 if maps is None else float(one.apply(maps).norm(dim=-1).mean()) for maps in (content, position)]
    return Reach(
        one.name,
        one.stage,
        one.context_grid,
        mean(content),
        mean(position),
        float(distance_nM.mean()),
        sizes[1] / max(sum(sizes), 1e-30),
    )


def lattice(grid: tuple[int, int]) -> Tensor:
    """Queries evenly over a map, at most SAMPLED along each side."""
    steps = [torch.linspace(0, side - 1, min(side, SAMPLED)).round().long() for side in grid]
    return (steps[0][:, None] * grid[1] + steps[1]).flatten()


def distances(one: Captured, rows: Tensor, image: Sequence[int]) -> Tensor:
    """From queries to every context position, in pixels of the image: [n, M]."""
    height, width = one.context_grid
    unit = image[0] / height, image[1] / width
    query = torch.stack(
        [rows // one.query_grid[1] * one.layer.stride[0], rows % one.query_grid[1] * one.layer.stride[1]]
    )
    context = torch.arange(height * width, device=rows.device)
    down = (context // width)[None] - query[0][:, None]
    across = (context % width)[None] - query[1][:, None]
    return torch.hypot(down * unit[0], across * unit[1])

"""The interactions of one query in every lambda layer, and the effective range of each layer.

Letters: n some queries, M context positions, H heads, U intra-depth, V value depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lambdanets.view.capture import Captured, capture

SAMPLED = 8  # queries along each side of a map, over which the range is averaged
LEAST_CORRELATION = 0.1  # of neighbouring embeddings in a trained table


@dataclass(frozen=True, eq=False)
class LayerInteractions:
    """The interactions of one query in one layer: `(content + position)` applied to `values` is `output`."""

    name: str
    stage: str
    query: tuple[int, int]  # row and column on the layer's grid of queries
    content: Tensor | None  # [H, U, height, width]: q . normalised key
    position: Tensor | None  # [H, U, height, width]: q . embedding, 0 beyond the scope
    constant: Tensor | None  # [H]: q . position_bias; None in the layers of the paper
    values: Tensor  # [1 or H, V, U, height, width]
    output: Tensor  # [H, V], computed by the layer
    table: Tensor | None  # [*scope, (H,) K(, U)], the learned embeddings

    @property
    def grid(self) -> tuple[int, int]:
        """Height and width of the context."""
        return self.values.shape[-2], self.values.shape[-1]

    def applied(self) -> Tensor:
        """Return the interactions applied to the values, [H, V]; equal to `output` up to rounding."""
        maps = [m for m in (self.content, self.position) if m is not None]
        values = self.values.expand(maps[0].shape[0], -1, -1, -1, -1)
        output = torch.einsum("huyx,hvuyx->hv", sum(maps[1:], maps[0]), values)
        return output if self.constant is None else output + self.constant[:, None]


@dataclass(frozen=True, eq=False)
class Interactions:
    """The result of `interactions`; a notebook displays it as pictures."""

    image: Tensor  # [C, height, width], the input of the network
    query: tuple[int, int]  # row and column of a pixel
    layers: tuple[LayerInteractions, ...]
    reaches: "tuple[Reach, ...]"

    def _repr_html_(self) -> str:
        from lambdanets.view.draw import as_html

        return as_html(self)


@dataclass(frozen=True)
class Reach:
    """Effective range of a layer: mean distance to the context in pixels of the image, weighted by |interaction|.

    The mean is over all heads and over queries on a regular grid. `everywhere` is the mean distance with equal
    weights; a layer with local interactions has a much smaller range.
    """

    name: str
    stage: str
    grid: tuple[int, int]
    content: float | None
    position: float | None
    everywhere: float
    position_share: float  # of the output norm, |position| / (|content| + |position|)


@torch.no_grad()
def interactions(
    model: nn.Module, image: Tensor, query: tuple[int, int] | None = None, *, layers: Sequence[str] = ()
) -> Interactions:
    """Return the effective interactions of one query pixel in every lambda layer of a network.

    Args:
        model: a network with `LambdaLayer2d`s, or one such layer. It runs in eval mode and keeps its own mode.
        image: [C, height, width], normalised as the input of the network.
        query: row and column of a pixel; the middle if None. Each layer uses the cell of its map that contains it.
        layers: only layers whose name contains one of these words; all if empty.

    Raises:
        ValueError: the model has no lambda layer (of these names), the query is outside the image, or an output is not
            finite.
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
    """Return the effective range of each lambda layer on an image [C, height, width]."""
    return tuple(reach(one, image.shape[-2:]) for one in capture(model, image, layers))


def middle(image: Tensor) -> tuple[int, int]:
    return image.shape[1] // 2, image.shape[2] // 2


def checked(query: Sequence[int], image: Tensor) -> tuple[int, int]:
    height, width = image.shape[1:]
    row, column = query
    if not (0 <= row < height and 0 <= column < width):
        raise ValueError(
            f"the query {row} {column} (row, column) is outside the input of {height} x {width} pixels; the first row "
            f"and column is 0"
        )
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
    """Return the effective range of a layer, over queries on a lattice."""
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
    """Return queries on a regular grid, at most SAMPLED along each side."""
    steps = [torch.linspace(0, side - 1, min(side, SAMPLED)).round().long() for side in grid]
    return (steps[0][:, None] * grid[1] + steps[1]).flatten()


def distances(one: Captured, rows: Tensor, image: Sequence[int]) -> Tensor:
    """Return the distances from queries to every context position, in pixels of the image: [n, M]."""
    height, width = one.context_grid
    unit = image[0] / height, image[1] / width
    query = torch.stack(
        [rows // one.query_grid[1] * one.layer.stride[0], rows % one.query_grid[1] * one.layer.stride[1]]
    )
    context = torch.arange(height * width, device=rows.device)
    down = (context // width)[None] - query[0][:, None]
    across = (context % width)[None] - query[1][:, None]
    return torch.hypot(down * unit[0], across * unit[1])


# Have the position tables been trained?


def neighbour_correlation(table: Tensor, grid: Sequence[int]) -> float:
    """Return the correlation between embeddings of neighbouring relative positions, in [-1, 1].

    It is about 0 in a random table. Training makes tables smooth or peaked at some place, which raises it.

    Args:
        table: [*scope, ...], the learned embeddings.
        grid: height and width of the context; embeddings of relative positions beyond it are not used and not counted.
    """
    used = table.detach().double().cpu().flatten(2)  # [*scope, channels]
    for axis, side in enumerate(grid):
        size = used.shape[axis]
        first, last = max(0, (size - 1) // 2 - (side - 1)), min(size, (size - 1) // 2 + side)
        used = used.narrow(axis, first, last - first)
    used = used - used.mean((0, 1))
    products = squares = 0.0
    for axis in (0, 1):
        pairs = used.shape[axis] - 1
        one, next_one = used.narrow(axis, 0, pairs), used.narrow(axis, 1, pairs)
        products += float((one * next_one).sum())
        squares += float((one.square() + next_one.square()).sum()) / 2
    return products / squares if squares > 0 else 0.0


def untrained(tables: Sequence[tuple[str, Tensor, Sequence[int]]]) -> str:
    """Return a sentence that names the tables close to their random initialisation, or "" if there are none.

    Args:
        tables: name, table and grid of each layer, as for `neighbour_correlation`.
    """
    found = [(name, neighbour_correlation(table, grid)) for name, table, grid in tables]
    random = [(name, value) for name, value in found if value < LEAST_CORRELATION]
    if not random:
        return ""
    one = len(random) == 1
    which = "The position tables" if len(random) == len(found) else f"{len(random)} of {len(found)} position tables"
    names = ", ".join(name for name, _ in random[:4]) + (", ..." if len(random) > 4 else "")
    highest = max(0.0, *(value for _, value in random))
    if len(found) == 1:
        which, names = "The position table", random[0][0]
    verb, at_most, their = ("is", "", "its") if one else ("are", "at most ", "their")
    return (
        f"{which} ({names}) {verb} still close to the random initialisation (correlation of neighbouring embeddings "
        f"{at_most}{highest:.2f}; random numbers: 0), so {their} position maps mean little. Train longer or start from "
        f"smaller embeddings (--model.embedding-std 0.02)."
    )

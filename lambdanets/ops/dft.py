"""Position lambdas on 2-d maps by matrix products only: Fourier along the rows, Toeplitz along the columns.

Letters: B batch, N queries, M context positions, H heads, K key depth, V value depth, U intra-depth,
Y, X height and width; F frequencies along X with their real and imaginary parts (2 F rows), T tiles of query rows.

Along a row the correlation becomes one product per frequency. Rows are short, so the transform itself is a small matrix
product, which for 40 to 70 points is faster than an FFT call. Along the columns each frequency has a Toeplitz matrix
[query row, context row], applied by another matrix product. For the paper's maps this needs 2 to 3 times fewer
multiply-adds than the convolution, all of them in large products.

Query rows are processed in tiles that share one Toeplitz matrix, each with the context rows that it reaches. The
lambdas of a tile are discarded after use, so that they stay in the processor's cache. Memory: the lambdas of one tile
of a batch chunk, in both domains (with gradients: of all tiles, N K V for every example).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lambdanets.ops.content import content_lambda, shares_content
from lambdanets.ops.positions import Axis, Relative, toeplitz, wrap
from lambdanets.ops.problem import Problem

WORKSPACE = 600_000  # elements of a tile's lambdas in the frequency domain (at least one example): 2.4 MB in float32
TILE = 7  # query rows that share a Toeplitz matrix: few, so that most of its entries are within the scope


def why_not(problem: Problem) -> str | None:
    """Return the reason why this backend cannot run, or None."""
    if not isinstance(problem.positions, Relative):
        return "a Fourier transform needs relative positions on a grid"
    if problem.positions.dims != 2:
        return f"it supports 2-d maps only, got {problem.positions.dims}-d"
    if problem.mask_NM is not None:
        return "a Fourier transform cannot apply a mask, which differs between queries"
    return None


def whole_output(problem: Problem, dtype: torch.dtype) -> Tensor | None:
    """Return the sum of position and content output, [B, N, H, V], or None where this is not faster."""
    if problem.keys_BMKU is None or not shares_content(problem) or not problem.may_overwrite:
        return None
    problem = problem.to(dtype)
    return position_output(problem, content_lambda(problem))


def position_output(problem: Problem, content_BKV: Tensor | None = None) -> Tensor:
    """Return the position output, [B, N, H, V].

    Without gradients the content lambda can be added in the frequency domain, where it is a constant of the first
    frequency.
    """
    positions = problem.positions
    assert isinstance(positions, Relative)
    if problem.causal:
        positions = positions.causal(problem.strict)
    table, (axis_y, axis_x) = positions.clipped()
    B, N, _, H, K, V, U = problem.sizes
    tile, window = tiling(axis_y)
    forward_FX, inverse_XF, weights = positions.once(f"dft {tile}", lambda: matrices(table, axis_y, axis_x))

    chunk = max(1, WORKSPACE // max(1, len(forward_FX) * V * tile * K))
    chunk = -(-B // max(1, -(-B // chunk))) or 1  # equal parts
    room = Room(keep=problem.may_overwrite)
    result = problem.queries_BNHK.new_empty(B, axis_y.queries, axis_x.queries, H, V) if room.keep else None
    outputs = []
    for begin in range(0, max(B, 1), chunk):
        queries = problem.queries_BNHK[begin : begin + chunk]
        spectrum = rows_by_frequency(problem.values_BMVU[begin : begin + chunk], axis_y, axis_x, forward_FX)
        content = None if content_BKV is None else constant(content_BKV[begin : begin + chunk], inverse_XF)
        found = []
        for first in range(0, axis_y.queries, tile):
            seen = rows_seen(axis_y, first, window)
            lambdas = room.bmm(part(weights, 2, seen[0], 2 * U), part(spectrum, 1, seen[1], 2 * U))
            if content is not None:
                lambdas[0, : tile * K].view(tile, K, -1).add_(content)
            if result is None:
                lambdas = inverse_XF @ lambdas.view(len(forward_FX), -1)
                found.append(lambdas.view(-1, tile, K, len(queries), V))
            else:
                rows = slice(first, min(first + tile, axis_y.queries))
                lambdas = room.rows(inverse_XF, lambdas.view(len(forward_FX), tile, -1)[:, : rows.stop - first])
                apply_rows(queries, lambdas.view(-1, K, len(queries), V), result[begin : begin + chunk], rows)
        if result is None:
            outputs.append(apply_tiles(queries, found, axis_y, axis_x))
    return result.view(B, N, H, V) if result is not None else torch.cat(outputs)


def constant(content_BKV: Tensor, inverse_XF: Tensor) -> Tensor:
    """Return the term to add to the real part of the first frequency, so that every position gets the content.

    The result is [K, (B V)].
    """
    return (content_BKV.transpose(0, 1) / inverse_XF[0, 0]).flatten(1)


def matrices(table: Tensor, axis_y: Axis, axis_x: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Return the matrices of the transform and its inverse, and the Toeplitz matrices of one tile.

    The latter are [F, (2 tile K), (window 2 U)]. The context rows that a tile reaches are a range of their columns.
    """
    length = axis_x.unwrapped_length
    tile, window = tiling(axis_y)
    parts = column_parts(wrap_rows(table, axis_x, length), axis_y, tile, axis_y.first, window)
    weights = parts.permute(0, 1, 5, 3, 6, 2, 4).flatten(4).flatten(1, 3)
    return *transforms(length, axis_x, table.dtype, table.device), weights


def apply_rows(queries_BNHK: Tensor, lambdas: Tensor, result: Tensor, rows: slice) -> None:
    """Apply lambdas [(rows X), K, B, V] to their queries, and write to result [B, Y, X, H, V].

    One product per example, so that nothing is copied.
    """
    queries = queries_BNHK.view(*result.shape[:4], -1)[:, rows].flatten(1, 2)
    for one, given, place in zip(queries, lambdas.unbind(2), result[:, rows].flatten(1, 2), strict=True):
        torch.bmm(one, given, out=place)


def apply_tiles(queries_BNHK: Tensor, lambdas: list[Tensor], axis_y: Axis, axis_x: Axis) -> Tensor:
    """Apply lambdas [X, tile, K, B, V] of every tile, differentiably and in few operations: [B, N, H, V]."""
    N, H, V = queries_BNHK.shape[1], queries_BNHK.shape[2], lambdas[0].shape[-1]
    tile = lambdas[0].shape[1]
    queries = query_tiles(queries_BNHK, axis_y, axis_x, tile, len(lambdas))
    found = []
    for asked, tile_lambdas in zip(queries.unbind(1), lambdas, strict=True):
        pairs = zip(asked.unbind(0), tile_lambdas.flatten(0, 1).unbind(2), strict=True)
        found.append(torch.stack([torch.bmm(one, given) for one, given in pairs]))
    output = torch.stack(found, dim=1).view(-1, len(lambdas), axis_x.queries, tile, H, V).transpose(2, 3)
    return output.reshape(len(output), -1, H, V)[:, :N]


class Room:
    """Buffers for the results of products. Allocating them anew would take as long as the products."""

    def __init__(self, keep: bool) -> None:
        self.keep, self.places = keep, {}

    def bmm(self, left: Tensor, right: Tensor, name: str = "frequencies") -> Tensor:
        """Return the batched product of two tensors, in the buffer `name`."""
        return torch.bmm(left, right, out=self.place(name, right, (len(left), left.shape[1], right.shape[2])))

    def rows(self, inverse_XF: Tensor, lambdas: Tensor) -> Tensor:
        """Transform rows back from the frequency domain: [2F, rows, (K B V)] -> [rows, X, (K B V)]."""
        lambdas = lambdas.transpose(0, 1)
        return self.bmm(inverse_XF.expand(len(lambdas), -1, -1), lambdas, "rows")

    def place(self, name: str, like: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        """Return the buffer for a name and a shape. Different names never share one: a product may read another's."""
        if self.keep and (name, shape) not in self.places:
            self.places[name, shape] = like.new_empty(shape)
        return self.places.get((name, shape))


def part(tensor: Tensor, dim: int, rows: slice, size: int) -> Tensor:
    """Return a range of `rows`, each of `size` elements along `dim`; the tensor itself if the range is all of it."""
    start, length = rows.start * size, (rows.stop - rows.start) * size
    return tensor if length == tensor.shape[dim] else tensor.narrow(dim, start, length)


def rows_seen(axis: Axis, first_query: int, window: int) -> tuple[slice, slice]:
    """Return the context rows that a tile reaches, as ranges of its window and of the context, both reversed."""
    last = first_query * axis.stride + axis.first + window - 1
    high = min(axis.context - 1, last)
    low = max(0, last - window + 1)
    if high < low:
        return slice(0, 0), slice(0, 0)
    return slice(last - high, last - low + 1), slice(axis.context - 1 - high, axis.context - low)


def rows_by_frequency(values_BMVU: Tensor, axis_y: Axis, axis_x: Axis, forward_FX: Tensor) -> Tensor:
    """Return the transforms of all context rows in reverse order: [F, (Y 2 U), (B V)]."""
    B, _, V, U = values_BMVU.shape
    values = values_BMVU.view(B, axis_y.context, axis_x.context, V, U).flip(1)
    rows = values.permute(2, 1, 4, 0, 3).reshape(axis_x.context, -1)
    spectrum = (forward_FX @ rows).view(-1, 2, axis_y.context, U, B * V)
    return spectrum.transpose(1, 2).reshape(len(spectrum), -1, B * V)


def query_tiles(queries_BNHK: Tensor, axis_y: Axis, axis_x: Axis, tile: int, tiles: int) -> Tensor:
    """Return the queries in the order of the lambdas, [B, T, (X tile), H, K], with zeros after the last row."""
    B, _, H, K = queries_BNHK.shape
    queries = queries_BNHK.view(B, axis_y.queries, axis_x.queries, H, K)
    queries = F.pad(queries, [0, 0, 0, 0, 0, 0, 0, tiles * tile - axis_y.queries])
    queries = queries.view(B, tiles, tile, axis_x.queries, H, K).transpose(2, 3)
    return queries.reshape(B, tiles, axis_x.queries * tile, H, K)


def tiling(axis: Axis) -> tuple[int, int]:
    """Return the number of query rows in a tile and of context rows in their window."""
    tile = min(TILE, axis.queries)
    return tile, (tile - 1) * axis.stride + axis.last - axis.first + 1


def wrap_rows(table: Tensor, axis: Axis, length: int) -> Tensor:
    """Wrap the rows of the table to circles of a given length: [scope y, length, K, U]."""
    return wrap(table.transpose(0, 1), [axis], [length]).transpose(0, 1)


def column_parts(wrapped: Tensor, axis: Axis, tile: int, start: int, window: int) -> Tensor:
    """Return the Toeplitz matrix along the columns for each frequency, as a view: [F, 2, 2, K, U, tile, window].

    The window is in reverse order. For conj(table) * values, the real part takes (re, im) of the values and the
    imaginary part (-im, re).
    """
    spectrum = torch.fft.rfft(wrapped, dim=1)
    re, im = spectrum.real.movedim(0, -1), spectrum.imag.movedim(0, -1)  # [F, K, U, scope y]
    parts = torch.stack([re, im, -im, re], dim=1).unflatten(1, (2, 2))
    return toeplitz(parts, 5, axis, tile, start, window)


def transforms(length: int, axis: Axis, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the matrices of the transform of a context row, [2F, X], and of its inverse at the queries, [X, 2F].

    The axis 2F is (frequency, real or imaginary part). Angles are computed in float64 and then rounded.
    """
    frequency = torch.arange(length // 2 + 1, dtype=torch.float64, device=device)
    unit = 2 * torch.pi / length
    angle = unit * frequency[:, None] * torch.arange(axis.context, device=device)
    forward = torch.stack([angle.cos(), -angle.sin()], dim=1).flatten(0, 1)
    angle = unit * frequency * torch.arange(axis.queries, device=device)[:, None] * axis.stride
    # Negative frequencies are the conjugates of positive ones; the first and (even length) the last have no partner.
    twice = torch.full_like(frequency, 2.0)
    twice[0] = 1.0
    if length % 2 == 0:
        twice[-1] = 1.0
    inverse = torch.stack([angle.cos(), -angle.sin()], dim=2) * twice[:, None] / length
    return forward.to(dtype), inverse.flatten(1).to(dtype)


def work(problem: Problem) -> tuple[float, float]:
    """Return the numbers of multiply-adds and of intermediate elements for the cost model."""
    positions = problem.positions
    assert isinstance(positions, Relative)
    _, (axis_y, axis_x) = positions.clipped()
    B, N, _, _, K, V, U = problem.sizes
    frequencies = 2 * (axis_x.unwrapped_length // 2 + 1)
    tile, window = tiling(axis_y)
    starts = range(0, axis_y.queries, tile)
    seen = sum(rows.stop - rows.start for _, rows in (rows_seen(axis_y, first, window) for first in starts))
    columns = frequencies * B * V * tile * K  # lambdas of a tile in the frequency domain
    weights = frequencies * 2 * window * U * tile * K
    macs = columns * (2 * U * seen + len(starts) * axis_x.queries)
    return macs, columns * len(starts) + weights + 2 * B * N * K * V

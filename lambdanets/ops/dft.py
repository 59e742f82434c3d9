"""Position lambdas on 2-d maps as matrix products only: Fourier along the rows, Toeplitz along the columns.

Letters: B batch, N queries, M context positions, H heads, K key depth, V value depth, U intra-depth,
Y, X height and width; F frequencies along X with their real and imaginary part (2 F rows), T tiles of query rows.

Along a row the correlation becomes a product for each frequency, and rows are short, so the transform itself is
a small matrix product (a transform of 40 or 70 points by its matrix is faster than a call to an FFT). Along the
columns each frequency keeps a Toeplitz matrix [query row, context row] that is one more matrix product. For the
paper's maps this needs 2 to 3 times fewer multiply-adds than the convolution, all of them in large products.
Rows of queries go in tiles that share one Toeplitz matrix. Memory: lambdas, B N K V, and a batch chunk of them in
the frequency domain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lambdanets.ops.fft import unwrapped_length, wrap
from lambdanets.ops.positions import Axis, Relative, toeplitz
from lambdanets.ops.problem import Problem

WORKSPACE = 2**20  # elements of lambdas in the frequency domain at a time (or one example's)
TILE = 14  # rows of queries that share a Toeplitz matrix, where the map is higher than what they see


def why_not(problem: Problem) -> str | None:
    if not isinstance(problem.positions, Relative):
        return "a Fourier transform needs relative positions on a grid"
    if problem.positions.dims != 2:
        return f"written for 2-d maps, got {problem.positions.dims}-d"
    if problem.mask_NM is not None:
        return "a mask differs from query to query, a convolution theorem needs one kernel for all"
    return None


def position_output(problem: Problem) -> Tensor:
    """[B, N, H, V]."""
    positions = problem.positions
    assert isinstance(positions, Relative)
    if problem.causal:
        positions = positions.causal(problem.strict)
    table, (axis_y, axis_x) = positions.clipped()
    B, N, _, H, K, V, U = problem.sizes
    length = unwrapped_length(axis_x)
    forward_FX, inverse_XF = transforms(length, axis_x, table.dtype, table.device)
    frequencies = forward_FX.shape[0]
    tile, start, window = tiling(axis_y)
    tiles = -(-axis_y.queries // tile)
    weights = column_weights(wrap_rows(table, axis_x, length), axis_y, tile, start, window)

    chunk = max(1, WORKSPACE // max(1, frequencies * V * tiles * tile * K))
    outputs = []
    for begin in range(0, max(B, 1), chunk):
        values = problem.values_BMVU[begin : begin + chunk]
        count = values.shape[0]
        values = values.view(count, axis_y.context, axis_x.context, V, U)
        values = row_windows(values, axis_y, tile, tiles, start, window)  # [B, T, window, X, V, U]
        rows = values.permute(3, 5, 2, 0, 1, 4).reshape(axis_x.context, -1)  # [X, (U window B T V)]
        spectrum = (forward_FX @ rows).view(frequencies // 2, 1, 2 * U * window, count * tiles * V)
        spectrum = spectrum.expand(-1, 2, -1, -1).flatten(0, 1)
        lambdas = torch.bmm(weights, spectrum)  # [2F, (tile K), (B T V)]
        lambdas = (inverse_XF @ lambdas.flatten(1)).view(axis_x.queries * tile, K, count * tiles, V)
        queries = query_tiles(problem.queries_BNHK[begin : begin + chunk], axis_y, axis_x, tile, tiles)
        # A product for each example and tile: lambdas are read where they lie, [K, V] matrices with long rows.
        parts = zip(queries.unbind(0), lambdas.unbind(2), strict=True)
        output = torch.stack([torch.bmm(asked, given) for asked, given in parts])
        output = output.view(count, tiles, axis_x.queries, tile, H, V).transpose(2, 3)
        outputs.append(output.reshape(count, -1, H, V)[:, :N])
    return torch.cat(outputs)


def query_tiles(queries_BNHK: Tensor, axis_y: Axis, axis_x: Axis, tile: int, tiles: int) -> Tensor:
    """[(B T), (X tile), H, K]: queries in the order of the lambdas; rows that fill up the last tile are zero."""
    B, _, H, K = queries_BNHK.shape
    queries = queries_BNHK.view(B, axis_y.queries, axis_x.queries, H, K)
    queries = F.pad(queries, [0, 0, 0, 0, 0, 0, 0, tiles * tile - axis_y.queries])
    queries = queries.view(B, tiles, tile, axis_x.queries, H, K).transpose(2, 3)
    return queries.reshape(B * tiles, axis_x.queries * tile, H, K)


def tiling(axis: Axis) -> tuple[int, int, int]:
    """Rows of queries in a tile; where its window of context rows starts, relative to its first query; its height."""
    reach = (TILE - 1) * axis.stride + axis.last - axis.first + 1
    if axis.queries <= TILE or reach >= axis.context:
        return axis.queries, 0, axis.context  # one tile: its window is the context itself
    return TILE, axis.first, reach


def row_windows(values: Tensor, axis: Axis, tile: int, tiles: int, start: int, window: int) -> Tensor:
    """[B, Y, X, V, U] -> [B, T, window, X, V, U]: the context rows that each tile of query rows sees, backwards."""
    if tiles == 1:
        return values.flip(1).unsqueeze(1)
    step = tile * axis.stride
    below = (tiles - 1) * step + start + window - axis.context
    values = F.pad(values, [0, 0, 0, 0, 0, 0, -start, below])
    return values.unfold(1, window, step).movedim(-1, 2).flip(2)


def wrap_rows(table: Tensor, axis: Axis, length: int) -> Tensor:
    """[scope y, length, K, U]: the table's rows on a circle."""
    return wrap(table.transpose(0, 1), [axis], [length]).transpose(0, 1)


def column_weights(wrapped: Tensor, axis: Axis, tile: int, start: int, window: int) -> Tensor:
    """For each frequency and part, the Toeplitz matrix along the columns: [2F, (tile K), (2 U window)].

    conj(table) * values: the real part takes (re, im) of the values, the imaginary part (-im, re).
    """
    spectrum = torch.fft.rfft(wrapped, dim=1)
    re, im = spectrum.real.movedim(0, -1), spectrum.imag.movedim(0, -1)  # [F, K, U, scope y]
    parts = torch.stack([re, im, -im, re], dim=1).unflatten(1, (2, 2))
    parts = toeplitz(parts, 5, axis, tile, start, window)  # a view: [F, 2, 2, K, U, tile, window]
    return parts.permute(0, 1, 5, 3, 2, 4, 6).flatten(4).flatten(2, 3).flatten(0, 1)


def transforms(length: int, axis: Axis, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Matrices of the transform of a context row, [2F, X], and back to its queries, [X, 2F].

    Rows and columns go (frequency, real or imaginary part). Angles in float64: every dtype rounds from there.
    """
    frequency = torch.arange(length // 2 + 1, dtype=torch.float64, device=device)
    unit = 2 * torch.pi / length
    angle = unit * frequency[:, None] * torch.arange(axis.context, device=device)
    forward = torch.stack([angle.cos(), -angle.sin()], dim=1).flatten(0, 1)
    angle = unit * frequency * torch.arange(axis.queries, device=device)[:, None] * axis.stride
    twice = torch.full_like(frequency, 2.0)  # negative frequencies are the conjugates of positive ones,
    twice[0] = 1.0  # except where the two are one
    if length % 2 == 0:
        twice[-1] = 1.0
    inverse = torch.stack([angle.cos(), -angle.sin()], dim=2) * twice[:, None] / length
    return forward.to(dtype), inverse.flatten(1).to(dtype)


def work(problem: Problem) -> tuple[float, float]:
    """Multiply-adds, and elements of intermediates: what the cost model weighs."""
    positions = problem.positions
    assert isinstance(positions, Relative)
    _, (axis_y, axis_x) = positions.clipped()
    B, N, _, _, K, V, U = problem.sizes
    frequencies = 2 * (unwrapped_length(axis_x) // 2 + 1)
    tile, _, window = tiling(axis_y)
    rows = -(-axis_y.queries // tile) * tile
    columns = frequencies * B * V * rows * K  # lambdas in the frequency domain
    weights = frequencies * 2 * window * U * tile * K
    return columns * (2 * window * U + axis_x.queries), columns + weights + 2 * B * N * K * V

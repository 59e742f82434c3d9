"""The position part of a lambda layer for maps of one size, with constants computed from the table.

Letters: B batch, N queries, M context positions, H heads, K key depth, V value depth, U intra-depth, C = (U M),
Y, X height and width, F frequencies along X, T tiles of query rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lambdanets.ops.dft import column_parts, transforms, wrap_rows
from lambdanets.ops.positions import Axis, Relative
from lambdanets.ops.reference import embed

TILE = 14  # rows of queries that share a Toeplitz matrix, if their context does not cover the map's height


class WrittenOut(nn.Module):
    """Position part from constant embeddings of all pairs, (q . e_nm) v_m, for small maps. File: N M K U numbers."""

    embeddings_NKC: Tensor

    def __init__(self, placed: Relative) -> None:
        super().__init__()
        embeddings_NMKU = embed(placed).detach()
        self.register_buffer("embeddings_NKC", embeddings_NMKU.permute(0, 2, 3, 1).flatten(2).contiguous())

    def forward(self, queries_BHKN: Tensor, values_BVC: Tensor) -> Tensor:
        """Return the position part, [B, H, V, N]."""
        queries_NXK = queries_BHKN.permute(3, 0, 1, 2).flatten(1, 2)  # X runs over (b, h)
        maps_NXC = queries_NXK @ self.embeddings_NKC
        maps_BHCN = maps_NXC.permute(1, 2, 0).unflatten(0, (-1, queries_BHKN.shape[1]))
        return values_BVC[:, None] @ maps_BHCN


def tiling(axis: Axis) -> tuple[int, int, int]:
    """Return a tile's number of query rows, and its context window: start relative to the first query, and height."""
    reach = TILE - 1 + axis.last - axis.first + 1
    if axis.queries <= TILE or reach >= axis.context:
        return axis.queries, 0, axis.context  # one tile: its window is the context itself
    return TILE, axis.first, reach


class ByFrequency(nn.Module):
    """Position part by a Fourier transform along rows and Toeplitz matrices along columns, for large maps.

    The method is that of `ops/dft.py`.
    """

    forward_XF: Tensor  # F runs over (frequency, real or imaginary part)
    inverse_XF: Tensor
    weights: Tensor  # [F, (2 tile K), (2 U window)]

    def __init__(self, placed: Relative) -> None:
        super().__init__()
        table, (axis_y, axis_x) = placed.clipped()
        table = table.detach()
        length = axis_x.unwrapped_length
        forward_FX, inverse_XF = transforms(length, axis_x, table.dtype, table.device)
        self.tile, self.start, self.window = tiling(axis_y)
        self.grid = placed.context_grid
        self.tiles = -(-self.grid[0] // self.tile)
        parts = column_parts(wrap_rows(table, axis_x, length), axis_y, self.tile, self.start, self.window)
        weights = parts.permute(0, 1, 5, 3, 2, 4, 6).flip(-1)  # context rows in increasing order
        self.register_buffer("forward_XF", forward_FX.T.contiguous())
        self.register_buffer("inverse_XF", inverse_XF.contiguous())
        self.register_buffer("weights", weights.flatten(4).flatten(1, 3).contiguous())

    def forward(self, queries_BHKN: Tensor, values_BVC: Tensor) -> Tensor:
        """Return the position part, [B, H, V, N]."""
        (Y, X), tile, tiles, window = self.grid, self.tile, self.tiles, self.window
        _, H, K, _ = queries_BHKN.shape
        V, U = values_BVC.shape[1], values_BVC.shape[2] // (Y * X)
        frequencies = self.weights.shape[0]
        spectrum = values_BVC.reshape(-1, V, U, Y, X) @ self.forward_XF  # [B, V, U, Y, (F 2)]
        if tiles > 1:
            below = (tiles - 1) * tile + self.start + window - Y
            spectrum = F.pad(spectrum, [0, 0, -self.start, below])
        windows = torch.stack([spectrum[:, :, :, t * tile : t * tile + window] for t in range(tiles)], dim=1)
        windows = windows.reshape(-1, tiles, V, U, window, frequencies, 2)
        columns = windows.permute(5, 6, 3, 4, 0, 1, 2).reshape(frequencies, 2 * U * window, -1)  # [F, .., (B T V)]
        lambdas = (self.weights @ columns).reshape(2 * frequencies, -1)  # [(F 2), (tile K B T V)]
        lambdas = (self.inverse_XF @ lambdas).reshape(X, tile, K, -1, tiles, V)
        lambdas = lambdas.permute(3, 4, 1, 0, 2, 5)  # [B, T, tile, X, K, V]
        queries = queries_BHKN.reshape(-1, H, K, Y, X)
        if tiles * tile > Y:
            queries = F.pad(queries, [0, 0, 0, tiles * tile - Y])
        queries = queries.reshape(-1, H, K, tiles, tile, X).permute(0, 3, 4, 5, 1, 2)
        output = (queries @ lambdas).permute(0, 4, 5, 1, 2, 3)  # [B, H, V, T, tile, X]
        return output.reshape(-1, H, V, tiles * tile * X)[..., : Y * X]

"""Relative self-attention on images: global (Bello et al. 2019), axial (Wang et al. 2020), local (Ramachandran 2019).

Letters: B batch, C channels, H heads, K key depth, V value depth, Y and X row and column of a query, I and J row and
column of a context position, S positions of a local window.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lambdanets.layers.arguments import NotScriptable, check_map, fx_leaf, layer_arguments
from lambdanets.ops.positions import per_axis
from lambdanets.typed import Count


class RelativeEmbedding(nn.Module):
    """Embeddings of the relative positions along one axis, `table` [2 size - 1, depth]; the centre is m = n.

    Inputs shorter than `size` use the middle of the table; longer inputs raise ValueError.
    """

    def __init__(
        self,
        size: int,
        depth: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.size = size
        self.table = nn.Parameter(torch.empty(2 * size - 1, depth, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.table.shape[1] ** -0.5)

    def forward(self, length: int) -> Tensor:
        """Return the embedding of m - n for each query n and context position m, [length, length, depth]."""
        if length > self.size:
            raise ValueError(
                f"the input has {length} positions along an axis, but this layer was built with input_size "
                f"{self.size}: build it with a larger input_size"
            )
        place = torch.arange(length, device=self.table.device)
        return self.table[place[None, :] - place[:, None] + self.size - 1]

    def extra_repr(self) -> str:
        return f"size={self.size}, depth={self.table.shape[1]}"


class SelfAttention2d(NotScriptable):
    """Base class of the attention layers: projections with fan-in initialisation, without an output projection."""

    def __init__(
        self,
        channels: int,
        out_channels: int | None,
        heads: int,
        key_depth: int | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        out_channels = channels if out_channels is None else out_channels
        if out_channels % heads:
            raise ValueError(f"out_channels={out_channels} is not divisible by heads={heads}: change one of the two")
        self.channels, self.out_channels, self.heads = channels, out_channels, heads
        self.value_depth = out_channels // heads
        self.key_depth = self.value_depth if key_depth is None else key_depth
        factory = {"device": device, "dtype": dtype}
        self.to_queries = nn.Linear(channels, heads * self.key_depth, bias=False, **factory)
        self.to_keys = nn.Linear(channels, heads * self.key_depth, bias=False, **factory)
        self.to_values = nn.Linear(channels, out_channels, bias=False, **factory)
        for projection in (self.to_queries, self.to_keys, self.to_values):
            nn.init.normal_(projection.weight, std=channels**-0.5)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (scaled by K^-1/2) and keys [B, H, Y, X, K], and values [B, H, Y, X, V]."""
        check_map(x, self.channels, self.to_queries)
        pixels = x.permute(0, 2, 3, 1)  # [B, Y, X, C]
        queries, keys, values = (
            projection(pixels).unflatten(-1, (self.heads, -1)).permute(0, 3, 1, 2, 4)
            for projection in (self.to_queries, self.to_keys, self.to_values)
        )
        return queries * self.key_depth**-0.5, keys, values

    def extra_repr(self) -> str:
        return f"heads={self.heads}, key_depth={self.key_depth}"


def to_image(values_BHYXV: Tensor) -> Tensor:
    """Rearrange [B, H, Y, X, V] to [B, H V, Y, X] in channels-last memory format."""
    return values_BHYXV.permute(0, 2, 3, 1, 4).flatten(3).permute(0, 3, 1, 2)


def keep_format(output: Tensor, x: Tensor) -> Tensor:
    """Return the output in the memory format of x."""
    channels_last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return output.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


class GlobalAttention2d(SelfAttention2d):
    """Self-attention over the whole map with 2-d relative logits q.k + q.r_height + q.r_width.

    Embeddings are shared by the heads, as in attention-augmented convolutions; q is scaled by key_depth^-1/2.

    Args:
        channels: number of input channels.
        out_channels: number of output channels, a multiple of `heads`; `channels` if None.
        input_size: the largest input, (height, width) or one int for both.
        heads: number of attention heads.
        key_depth: depth of queries and keys; the value depth, out_channels / heads, if None.
        device, dtype: of the parameters.

    Shape:
        Input: `[B, channels, height, width]`
        Output: `[B, out_channels, height, width]`

    Example:
        >>> import torch
        >>> from lambdanets.layers import GlobalAttention2d
        >>> layer = GlobalAttention2d(64, input_size=14, heads=8)
        >>> layer(torch.randn(2, 64, 14, 14)).shape
        torch.Size([2, 64, 14, 14])
    """

    @layer_arguments
    def __init__(
        self,
        channels: Count,
        out_channels: Count | None = None,
        *,
        input_size: Count | Sequence[Count],
        heads: Count = 8,
        key_depth: Count | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, out_channels, heads, key_depth, device, dtype)
        height, width = per_axis(input_size, 2, "input_size")
        self.height = RelativeEmbedding(height, self.key_depth, device=device, dtype=dtype)
        self.width = RelativeEmbedding(width, self.key_depth, device=device, dtype=dtype)

    @fx_leaf
    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.project(x)
        rows = torch.einsum("bhyxk,yik->bhyxi", queries, self.height(x.shape[2]))
        columns = torch.einsum("bhyxk,xjk->bhyxj", queries, self.width(x.shape[3]))
        bias = (rows[..., :, None] + columns[..., None, :]).flatten(4).flatten(2, 3)  # [B, H, YX, IJ]
        output = nn.functional.scaled_dot_product_attention(
            queries.flatten(2, 3), keys.flatten(2, 3), values.flatten(2, 3), attn_mask=bias, scale=1.0
        )
        return keep_format(to_image(output.unflatten(2, x.shape[2:])), x)


class AxialAttention2d(NotScriptable):
    """Self-attention along the columns, then along the rows, each with relative logits q.k + q.r.

    Each axis has its own projections; those of the columns change the number of channels. Embeddings are shared by the
    heads.

    Args:
        channels: number of input channels.
        out_channels: number of output channels, a multiple of `heads`; `channels` if None.
        input_size: the largest input, (height, width) or one int for both.
        heads: number of attention heads.
        key_depth: depth of queries and keys; the value depth, out_channels / heads, if None.
        device, dtype: of the parameters.

    Shape:
        Input: `[B, channels, height, width]`
        Output: `[B, out_channels, height, width]`

    Example:
        >>> import torch
        >>> from lambdanets.layers import AxialAttention2d
        >>> layer = AxialAttention2d(64, input_size=(14, 20))
        >>> layer(torch.randn(2, 64, 14, 20)).shape
        torch.Size([2, 64, 14, 20])
    """

    @layer_arguments
    def __init__(
        self,
        channels: Count,
        out_channels: Count | None = None,
        *,
        input_size: Count | Sequence[Count],
        heads: Count = 8,
        key_depth: Count | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        height, width = per_axis(input_size, 2, "input_size")
        self.columns = SelfAttention2d(channels, out_channels, heads, key_depth, device, dtype)
        self.rows = SelfAttention2d(self.columns.out_channels, None, heads, key_depth, device, dtype)
        self.height = RelativeEmbedding(height, self.columns.key_depth, device=device, dtype=dtype)
        self.width = RelativeEmbedding(width, self.rows.key_depth, device=device, dtype=dtype)

    @fx_leaf
    def forward(self, x: Tensor) -> Tensor:
        check_map(x, self.columns.channels, self.columns.to_queries)
        between = self._along(self.columns, self.height, x.transpose(2, 3)).transpose(2, 3)
        return keep_format(self._along(self.rows, self.width, between), x)

    @staticmethod
    def _along(attention: SelfAttention2d, embedding: RelativeEmbedding, x: Tensor) -> Tensor:
        """Apply attention along the last axis of x [B, C, Y, X]."""
        queries, keys, values = attention.project(x)
        bias = torch.einsum("bhyxk,xjk->bhyxj", queries, embedding(x.shape[3]))
        output = nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=1.0)
        return to_image(output)


class LocalAttention2d(SelfAttention2d):
    """Self-attention in a window around each position, with relative logits q.k + q.r (stand-alone self-attention).

    One half of the depth of an embedding encodes the row of the relative position, the other half its column. Each
    head has its own embeddings. Positions outside the map are excluded from the softmax.

    Args:
        channels: number of input channels.
        out_channels: number of output channels, a multiple of `heads`; `channels` if None.
        scope: size of the window, odd: an int or (height, width).
        heads: number of attention heads.
        key_depth: depth of queries and keys, even; the value depth, out_channels / heads, if None.
        device, dtype: of the parameters.

    Shape:
        Input: `[B, channels, height, width]`
        Output: `[B, out_channels, height, width]`

    Example:
        >>> import torch
        >>> from lambdanets.layers import LocalAttention2d
        >>> layer = LocalAttention2d(64, 128, scope=7)
        >>> layer(torch.randn(2, 64, 14, 14)).shape
        torch.Size([2, 128, 14, 14])
    """

    @layer_arguments
    def __init__(
        self,
        channels: Count,
        out_channels: Count | None = None,
        *,
        scope: Count | Sequence[Count] = 7,
        heads: Count = 8,
        key_depth: Count | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, out_channels, heads, key_depth, device, dtype)
        self.scope = per_axis(scope, 2, "scope")
        if any(s % 2 == 0 for s in self.scope):
            raise ValueError(f"scope must be odd along both axes, so that the window has a centre, got {self.scope}")
        if self.key_depth % 2:
            raise ValueError(f"key_depth must be even (half for rows, half for columns), got {self.key_depth}")
        half, factory = self.key_depth // 2, {"device": device, "dtype": dtype}
        self.height = nn.Parameter(torch.empty(heads, self.scope[0], half, **factory))
        self.width = nn.Parameter(torch.empty(heads, self.scope[1], half, **factory))
        for table in (self.height, self.width):
            nn.init.normal_(table, std=self.key_depth**-0.5)

    @fx_leaf
    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.project(x)
        queries = queries.flatten(2, 3)  # [B, H, N, K]
        logits = torch.einsum("bhnk,bhksn->bhns", queries, self._windows(keys, self.key_depth))
        logits = logits + torch.einsum("bhnk,hsk->bhns", queries, self._positions())
        inside = nn.functional.unfold(x.new_ones(1, 1, *x.shape[2:]), self.scope, padding=self._padding)  # [1, S, N]
        weights = logits.masked_fill(inside.transpose(1, 2)[:, None] == 0, float("-inf")).softmax(-1)
        output = torch.einsum("bhns,bhvsn->bhnv", weights, self._windows(values, self.value_depth))
        return keep_format(to_image(output.unflatten(2, x.shape[2:])), x)

    @property
    def _padding(self) -> tuple[int, int]:
        return self.scope[0] // 2, self.scope[1] // 2

    def _positions(self) -> Tensor:
        """Return the embedding of each position of a window, [H, S, K].

        Separate logits for rows and columns would need fewer products, but torch 2.11 compiles their gradients to
        reads with wrong strides (pytorch/pytorch#180898).
        """
        rows, columns = self.height[:, :, None], self.width[:, None]
        window = (-1, *self.scope, -1)
        return torch.cat((rows.expand(window), columns.expand(window)), -1).flatten(1, 2)

    def _windows(self, features: Tensor, depth: int) -> Tensor:
        """Gather the window of each position, zeros outside the map: [B, H, Y, X, depth] -> [B, H, depth, S, N]."""
        windows = nn.functional.unfold(to_image(features), self.scope, padding=self._padding)
        return windows.unflatten(1, (self.heads, depth, -1))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scope={self.scope}"

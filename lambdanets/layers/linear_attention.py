"""Linear attention, phi(Q) (phi(K)^T V), without position embeddings, in any number of dimensions.

Letters: B batch, C channels, N positions, H heads, K key depth, V value depth.
"""

import torch
from torch import Tensor, nn

from lambdanets.layers.arguments import NotScriptable, check_map, fx_leaf, layer_arguments
from lambdanets.layers.attention import keep_format
from lambdanets.typed import Count

FEATURE_MAPS = ("softmax", "elu")


class LinearAttention(NotScriptable):
    """Linear attention in any number of dimensions, without an output projection.

    Args:
        channels: number of input channels.
        out_channels: number of output channels, a multiple of `heads`; `channels` if None.
        heads: number of heads.
        key_depth: depth of queries and keys; the value depth, out_channels / heads, if None.
        feature_map: "softmax" applies a softmax over the depth of the queries and over the positions of the keys (Shen
            et al. 2018); "elu" is elu(x) + 1 for both, normalised by the sum of the weights (Katharopoulos et al.
            2020).
        multi_query: share one set of keys and values between all heads, as lambda layers do.
        device, dtype: of the parameters.

    Shape:
        Input: `[B, channels, *space]` with at least one spatial axis
        Output: `[B, out_channels, *space]`

    Example:
        >>> import torch
        >>> from lambdanets.layers import LinearAttention
        >>> layer = LinearAttention(64, feature_map="elu")
        >>> layer(torch.randn(2, 64, 100)).shape
        torch.Size([2, 64, 100])
    """

    @layer_arguments
    def __init__(
        self,
        channels: Count,
        out_channels: Count | None = None,
        *,
        heads: Count = 8,
        key_depth: Count | None = None,
        feature_map: str = "softmax",
        multi_query: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out_channels = channels if out_channels is None else out_channels
        if out_channels % heads:
            raise ValueError(f"out_channels={out_channels} is not divisible by heads={heads}: change one of the two")
        if feature_map not in FEATURE_MAPS:
            raise ValueError(f"unknown feature_map {feature_map!r}; choose one of 'softmax', 'elu'")
        self.channels, self.out_channels, self.heads = channels, out_channels, heads
        self.value_depth = out_channels // heads
        self.key_depth = self.value_depth if key_depth is None else key_depth
        self.feature_map, self.multi_query = feature_map, multi_query
        groups = 1 if multi_query else heads
        factory = {"device": device, "dtype": dtype}
        self.to_queries = nn.Linear(channels, heads * self.key_depth, bias=False, **factory)
        self.to_keys = nn.Linear(channels, groups * self.key_depth, bias=False, **factory)
        self.to_values = nn.Linear(channels, groups * self.value_depth, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for projection in (self.to_queries, self.to_keys, self.to_values):
            nn.init.normal_(projection.weight, std=self.channels**-0.5)

    @fx_leaf
    def forward(self, x: Tensor) -> Tensor:
        check_map(x, self.channels, self.to_queries, dims=None)
        inputs = x.flatten(2).transpose(1, 2)  # [B, N, C]
        groups = 1 if self.multi_query else self.heads
        queries = self.to_queries(inputs).unflatten(-1, (self.heads, self.key_depth)).transpose(1, 2)  # [B, H, N, K]
        keys = self.to_keys(inputs).unflatten(-1, (groups, self.key_depth)).transpose(1, 2)  # [B, 1 or H, N, K]
        values = self.to_values(inputs).unflatten(-1, (groups, self.value_depth)).transpose(1, 2)
        if self.feature_map == "softmax":  # the rows of the implied attention map sum to 1
            queries, keys = queries.softmax(-1), keys.softmax(-2)
            output = queries @ (keys.transpose(-1, -2) @ values)  # [B, H, N, V]
        else:
            queries, keys = nn.functional.elu(queries) + 1, nn.functional.elu(keys) + 1
            weights = queries @ keys.sum(-2, keepdim=True).transpose(-1, -2)  # [B, H, N, 1]
            output = queries @ (keys.transpose(-1, -2) @ values) / weights
        return keep_format(output.transpose(1, 2).flatten(2).transpose(1, 2).unflatten(2, x.shape[2:]), x)

    def extra_repr(self) -> str:
        options = f"heads={self.heads}, key_depth={self.key_depth}, feature_map={self.feature_map!r}"
        return options + (", multi_query=True" if self.multi_query else "")

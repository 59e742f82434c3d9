"""Attention-augmented convolution (Bello et al. 2019): channels of a convolution beside channels of self-attention."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor, nn

from lambdanets.layers.arguments import NotScriptable, check_map, check_odd, fx_leaf, layer_arguments
from lambdanets.layers.attention import GlobalAttention2d
from lambdanets.typed import Bounds, Count

SMALLEST_KEY_DEPTH = 20  # of a head, in the attention-augmented networks


class AugmentedConvolution2d(NotScriptable):
    """[conv(x), project(attention(x))] along the channels: a convolution with global relative self-attention.

    Args:
        channels: channels of x [B, channels, height, width].
        out_channels: channels of the output, `channels` if None.
        input_size: the largest input, (height, width) or one for both.
        heads: attention maps for each position.
        key_ratio: key channels of all heads together, as a part of out_channels; no head gets fewer than 20.
        value_ratio: attention's part of the output channels, rounded down to a multiple of `heads`.
        key_depth: the depth of a head's keys, instead of `key_ratio`.
        kernel_size: of the convolution, odd.
    """

    @layer_arguments
    def __init__(
        self,
        channels: Count,
        out_channels: Count | None = None,
        *,
        input_size: Count | Sequence[Count],
        heads: Count = 8,
        key_ratio: Annotated[float, Bounds(0)] = 0.2,
        value_ratio: Annotated[float, Bounds(0, 1)] = 0.1,
        key_depth: Count | None = None,
        kernel_size: Count = 3,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out_channels = channels if out_channels is None else out_channels
        attended = max(int(out_channels * value_ratio) // heads, 1) * heads
        check_odd(kernel_size)
        if attended >= out_channels:
            raise ValueError(f"{heads} heads leave no channel of {out_channels} to the convolution: use fewer heads")
        if key_depth is None:
            key_depth = max(int(out_channels * key_ratio) // heads, SMALLEST_KEY_DEPTH)
        factory = {"device": device, "dtype": dtype}
        self.conv = nn.Conv2d(
            channels, out_channels - attended, kernel_size, padding=kernel_size // 2, bias=False, **factory
        )
        self.attention = GlobalAttention2d(
            channels, attended, input_size=input_size, heads=heads, key_depth=key_depth, **factory
        )
        self.project = nn.Conv2d(attended, attended, 1, bias=False, **factory)

    @fx_leaf
    def forward(self, x: Tensor) -> Tensor:
        check_map(x, self.conv.in_channels, self.conv)
        return torch.cat([self.conv(x), self.project(self.attention(x))], dim=1)

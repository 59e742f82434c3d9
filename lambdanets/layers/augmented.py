"""Attention-augmented convolution (Bello et al. 2019): a convolution concatenated with self-attention."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor, nn

from lambdanets.layers.arguments import NotScriptable, check_map, check_odd, fx_leaf, layer_arguments
from lambdanets.layers.attention import GlobalAttention2d
from lambdanets.typed import Bounds, Count

SMALLEST_KEY_DEPTH = 20  # per head, as in the paper's attention-augmented networks


class AugmentedConvolution2d(NotScriptable):
    """A convolution concatenated with global relative self-attention: [conv(x), project(attention(x))] in channels.

    Args:
        channels: number of input channels.
        out_channels: number of output channels; `channels` if None.
        input_size: the largest input, (height, width) or one int for both.
        heads: number of attention heads.
        key_ratio: key channels of all heads together, as a fraction of out_channels; at least 20 per head.
        value_ratio: output channels of the attention, as a fraction of out_channels, rounded down to a multiple of
            `heads`.
        key_depth: depth of the keys of a head; overrides `key_ratio`.
        kernel_size: kernel size of the convolution, odd.
        device, dtype: of the parameters.

    Shape:
        Input: `[B, channels, height, width]`
        Output: `[B, out_channels, height, width]`

    Example:
        >>> import torch
        >>> from lambdanets.layers import AugmentedConvolution2d
        >>> layer = AugmentedConvolution2d(64, input_size=14, heads=2)
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
            raise ValueError(
                f"the attention takes {attended} of {out_channels} output channels and leaves none for the "
                f"convolution: use fewer heads, now {heads}, or a smaller value_ratio, now {value_ratio}"
            )
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

"""A convolution with linear attention behind it: the paper's "Conv + linear attention"."""

import torch
from torch import Tensor, nn

from lambdanets.layers.arguments import NotScriptable, check_map, check_odd, fx_leaf, layer_arguments
from lambdanets.layers.linear_attention import LinearAttention
from lambdanets.typed import Count


class ConvolutionLinearAttention2d(NotScriptable):
    """y + project(attention(y)) with y = conv(x): efficient attention (Shen et al. 2018) as a residual module.

    The attention is `LinearAttention` with softmax over the depth of queries and over the positions of keys; a 1x1
    convolution brings its values back to the channels of y.

    Args:
        channels: channels of x [B, channels, height, width].
        out_channels: channels of the output, `channels` if None; a multiple of twice `heads`.
        heads: queries of each position, each with keys and values of its own.
        key_depth: depth of a query and a key; out_channels / (2 heads) if None, as values have.
        kernel_size: of the convolution, odd.
    """

    @layer_arguments
    def __init__(
        self,
        channels: Count,
        out_channels: Count | None = None,
        *,
        heads: Count = 1,
        key_depth: Count | None = None,
        kernel_size: Count = 3,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out_channels = channels if out_channels is None else out_channels
        check_odd(kernel_size)
        if out_channels % (2 * heads):
            raise ValueError(
                f"out_channels={out_channels} is not divisible by twice heads={heads}: use another of the two"
            )
        inner, factory = out_channels // 2, {"device": device, "dtype": dtype}
        self.conv = nn.Conv2d(channels, out_channels, kernel_size, padding=kernel_size // 2, bias=False, **factory)
        self.attention = LinearAttention(out_channels, inner, heads=heads, key_depth=key_depth, **factory)
        self.project = nn.Conv2d(inner, out_channels, 1, bias=False, **factory)

    @fx_leaf
    def forward(self, x: Tensor) -> Tensor:
        check_map(x, self.conv.in_channels, self.conv)
        y = self.conv(x)
        return y + self.project(self.attention(y))

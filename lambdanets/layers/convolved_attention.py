"""A convolution followed by linear attention: the paper's "Conv + linear attention"."""

import torch
from torch import Tensor, nn

from lambdanets.layers.arguments import NotScriptable, check_map, check_odd, fx_leaf, layer_arguments
from lambdanets.layers.linear_attention import LinearAttention
from lambdanets.typed import Count


class ConvolutionLinearAttention2d(NotScriptable):
    """A convolution followed by residual linear attention (Shen et al. 2018): y + project(attention(y)), y = conv(x).

    The attention is `LinearAttention` with a softmax over the depth of the queries and over the positions of the keys.
    It has out_channels / 2 value channels; a 1x1 convolution projects them to the channels of y.

    Args:
        channels: number of input channels.
        out_channels: number of output channels, a multiple of 2 * `heads`; `channels` if None.
        heads: number of attention heads.
        key_depth: depth of queries and keys; the value depth, out_channels / (2 * heads), if None.
        kernel_size: kernel size of the convolution, odd.
        device, dtype: of the parameters.

    Shape:
        Input: `[B, channels, height, width]`
        Output: `[B, out_channels, height, width]`

    Example:
        >>> import torch
        >>> from lambdanets.layers import ConvolutionLinearAttention2d
        >>> layer = ConvolutionLinearAttention2d(64, 128)
        >>> layer(torch.randn(2, 64, 14, 14)).shape
        torch.Size([2, 128, 14, 14])
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
                f"out_channels={out_channels} is not divisible by 2 * heads, with heads={heads}: change one of the two"
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

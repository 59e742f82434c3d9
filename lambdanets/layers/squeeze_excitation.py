"""Squeeze-and-excitation (Hu et al. 2017), the channel attention that the paper compares with."""

import torch
from torch import Tensor, nn

from lambdanets.layers.arguments import NotScriptable, check_map, fx_leaf, layer_arguments
from lambdanets.typed import Count


class SqueezeExcitation2d(NotScriptable):
    """Squeeze-and-excitation: scale each channel by a weight computed from the mean of all channels over the map.

    In the terms of the paper, a diagonal lambda that all positions share. It has no spatial interactions, so it
    complements a convolution and cannot replace it.

    Args:
        channels: number of input and output channels.
        reduction: the hidden layer has channels / reduction channels.
        hidden: number of hidden channels; overrides `reduction`.
        device, dtype: of the parameters.

    Shape:
        Input: `[B, channels, height, width]`
        Output: `[B, channels, height, width]`

    Example:
        >>> import torch
        >>> from lambdanets.layers import SqueezeExcitation2d
        >>> layer = SqueezeExcitation2d(64)
        >>> layer(torch.randn(2, 64, 14, 14)).shape
        torch.Size([2, 64, 14, 14])
    """

    @layer_arguments
    def __init__(
        self,
        channels: Count,
        *,
        reduction: Count = 4,
        hidden: Count | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if hidden is None:
            hidden = channels // reduction
        if not hidden:
            raise ValueError(
                f"reduction={reduction} leaves no hidden channel for channels={channels}: use a smaller reduction, or "
                f"set hidden"
            )
        self.channels = channels
        # 1x1 convolutions named fc1 and fc2, as timm and torchvision store them
        self.fc1 = nn.Conv2d(channels, hidden, 1, device=device, dtype=dtype)
        self.fc2 = nn.Conv2d(hidden, channels, 1, device=device, dtype=dtype)

    @fx_leaf
    def forward(self, x: Tensor, *, context_mask: Tensor | None = None) -> Tensor:
        """Scale x [B, channels, height, width].

        Args:
            x: the input.
            context_mask: bool `[B, height, width]`, False at padding, which the mean leaves out.
        """
        check_map(x, self.channels, self.fc1)
        if context_mask is None:
            squeezed = x.mean((2, 3), keepdim=True)  # [B, C, 1, 1]
        else:
            counted = context_mask[:, None].to(x.dtype)
            squeezed = (x * counted).sum((2, 3), keepdim=True) / counted.sum((2, 3), keepdim=True).clamp(min=1)
        return x * self.fc2(self.fc1(squeezed).relu()).sigmoid()

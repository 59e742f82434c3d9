"""Squeeze-and-excitation (Hu et al. 2017), the channel attention that the paper compares with."""

import torch
from torch import Tensor, nn

from lambdanets.layers.arguments import NotScriptable, check_map, fx_leaf, layer_arguments
from lambdanets.typed import Count


class SqueezeExcitation2d(NotScriptable):
    """Scales each channel of [B, C, height, width] by a weight that the mean over the map decides.

    In the paper's words a diagonal lambda that all positions share. It keeps no spatial information, so it stands
    beside a convolution and never in its place.

    Args:
        channels: channels in and out.
        reduction: hidden width is channels / reduction.
        hidden: the hidden width itself, instead of `reduction`.
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
            raise ValueError(f"{channels} channels with reduction={reduction} leave no hidden channel: give hidden=")
        self.channels = channels
        # 1x1 convolutions named fc1 and fc2, as timm and torchvision store them
        self.fc1 = nn.Conv2d(channels, hidden, 1, device=device, dtype=dtype)
        self.fc2 = nn.Conv2d(hidden, channels, 1, device=device, dtype=dtype)

    @fx_leaf
    def forward(self, x: Tensor, *, context_mask: Tensor | None = None) -> Tensor:
        """x [B, channels, height, width]; `context_mask`, bool [B, height, width], is False where it is padding."""
        check_map(x, self.channels, self.fc1)
        if context_mask is None:
            squeezed = x.mean((2, 3), keepdim=True)  # [B, C, 1, 1]
        else:
            counted = context_mask[:, None].to(x.dtype)
            squeezed = (x * counted).sum((2, 3), keepdim=True) / counted.sum((2, 3), keepdim=True).clamp(min=1)
        return x * self.fc2(self.fc1(squeezed).relu()).sigmoid()

"""Vector self-attention in a window (Zhao et al. 2020), with a separate weight for each group of channels.

Letters: B batch, C channels, K depth of queries and keys, G groups of value channels that share a weight, S positions
of a window (the footprint), N positions of the map, Y and X its height and width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lambdanets.layers.arguments import NotScriptable, check_map, fx_leaf, layer_arguments
from lambdanets.layers.attention import keep_format
from lambdanets.ops.positions import per_axis
from lambdanets.typed import Count


def reflected(x: Tensor, margin: tuple[int, int]) -> Tensor:
    """Pad x [B, C, Y, X] by reflection, with `margin` rows and columns on each side.

    Unlike torch's reflection padding it allows a margin that is wider than the map.
    """
    for dim, extra in zip((2, 3), margin, strict=True):
        last = x.shape[dim] - 1
        place = torch.arange(-extra, last + 1 + extra, device=x.device) % max(2 * last, 1)
        x = x.index_select(dim, torch.minimum(place, 2 * last - place).clamp(min=0))
    return x


class VectorAttention2d(NotScriptable):
    """Base class of pairwise and patchwise attention: projections with biases, windows and the weighted sum.

    The arguments are those of `PairwiseAttention2d`.
    """

    @layer_arguments
    def __init__(
        self,
        channels: Count,
        out_channels: Count | None = None,
        *,
        scope: Count | Sequence[Count] = 7,
        key_depth: Count | None = None,
        group: Count = 8,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out_channels = channels if out_channels is None else out_channels
        if out_channels % group:
            raise ValueError(f"out_channels={out_channels} is not divisible by group={group}: change one of the two")
        self.scope = per_axis(scope, 2, "scope")
        if any(s % 2 == 0 for s in self.scope):
            raise ValueError(f"scope must be odd along both axes, so that the window has a centre, got {self.scope}")
        self.channels, self.out_channels, self.group = channels, out_channels, group
        self.key_depth = max(out_channels // 4, 1) if key_depth is None else key_depth
        self.groups, self.positions = out_channels // group, self.scope[0] * self.scope[1]
        self.to_queries = nn.Conv2d(channels, self.key_depth, 1, device=device, dtype=dtype)
        self.to_keys = nn.Conv2d(channels, self.key_depth, 1, device=device, dtype=dtype)
        self.to_values = nn.Conv2d(channels, out_channels, 1, device=device, dtype=dtype)
        self.relate(device=device, dtype=dtype)

    def relate(self, **factory: Any) -> None:
        """Create the modules that `weights` uses."""
        raise NotImplementedError

    @fx_leaf
    def forward(self, x: Tensor) -> Tensor:
        check_map(x, self.channels, self.to_queries)
        weights = self.weights(x)  # [B, G, S, N]
        values = self.footprints(self.to_values(x)).unflatten(1, (self.groups, self.group))
        output = torch.einsum("bgsn,bgcsn->bgcn", weights, values)
        return keep_format(output.flatten(1, 2).unflatten(2, x.shape[2:]), x)

    def weights(self, x: Tensor) -> Tensor:
        """Return the weight of each position of a window for each group of channels, [B, G, S, N]."""
        raise NotImplementedError

    def footprints(self, features: Tensor) -> Tensor:
        """Gather the window of each position, reflected outside the map: [B, C, Y, X] -> [B, C, S, N]."""
        margin = (self.scope[0] // 2, self.scope[1] // 2)
        return nn.functional.unfold(reflected(features, margin), self.scope).unflatten(1, (-1, self.positions))

    def extra_repr(self) -> str:
        return f"scope={self.scope}, key_depth={self.key_depth}, group={self.group}"


class PairwiseAttention2d(VectorAttention2d):
    """Pairwise vector self-attention in a window around each position (Zhao et al. 2020).

    y_i = sum_j softmax_j(gamma([phi(x_i) - psi(x_j), p_i - p_j])) * beta(x_j), where j runs over the window around i.
    gamma is batch norm, ReLU, 1x1 convolution, batch norm, ReLU, 1x1 convolution with one output per group of
    channels. p is a learned linear map of the coordinates, which range from -1 to 1.

    Args:
        channels: number of input channels.
        out_channels: number of output channels, a multiple of `group`; `channels` if None.
        scope: size of the window, odd: an int or (height, width).
        key_depth: channels of phi and psi; out_channels / 4 if None.
        group: number of channels that share a weight.
        device, dtype: of the parameters.

    Shape:
        Input: `[B, channels, height, width]`
        Output: `[B, out_channels, height, width]`

    Example:
        >>> import torch
        >>> from lambdanets.layers import PairwiseAttention2d
        >>> layer = PairwiseAttention2d(64, scope=7)
        >>> layer(torch.randn(2, 64, 14, 14)).shape
        torch.Size([2, 64, 14, 14])
    """

    def relate(self, **factory: Any) -> None:
        depth = self.key_depth
        self.to_positions = nn.Conv2d(2, 2, 1, bias=False, **factory)  # a bias would cancel in differences
        self.mapping = nn.Sequential(
            nn.BatchNorm2d(depth + 2, **factory),
            nn.ReLU(inplace=True),
            nn.Conv2d(depth + 2, depth, 1, bias=False, **factory),
            nn.BatchNorm2d(depth, **factory),
            nn.ReLU(inplace=True),
            nn.Conv2d(depth, self.groups, 1, bias=False, **factory),  # a bias would cancel in the softmax
        )

    def weights(self, x: Tensor) -> Tensor:
        rows, columns = (torch.linspace(-1, 1, side, device=x.device, dtype=x.dtype) for side in x.shape[2:])
        places = self.to_positions(torch.stack(torch.meshgrid(columns, rows, indexing="xy"))[None])  # [1, 2, Y, X]
        places = self._differences(places, places)
        relations = self._differences(self.to_queries(x), self.to_keys(x))
        return self.mapping(torch.cat([relations, places.expand(len(x), -1, -1, -1)], 1)).softmax(2)

    def _differences(self, here: Tensor, there: Tensor) -> Tensor:
        """Return each position minus the positions of its window, [B, C, S, N]."""
        return here.flatten(2)[:, :, None] - self.footprints(there)


class PatchwiseAttention2d(VectorAttention2d):
    """Patchwise vector self-attention in a window around each position (Zhao et al. 2020).

    y_i = sum_j gamma([phi(x_i), psi(x_k) for all k of the window])_j * beta(x_j), where j runs over the window around
    i. All weights of a window are computed together from its content, without a softmax, so the layer is a convolution
    with a content-dependent kernel. gamma is batch norm, ReLU, 1x1 convolution to one channel per group, batch norm,
    ReLU, 1x1 convolution.

    Args:
        channels: number of input channels.
        out_channels: number of output channels, a multiple of `group`; `channels` if None.
        scope: size of the window, odd: an int or (height, width).
        key_depth: channels of phi and psi; out_channels / 4 if None.
        group: number of channels that share a weight.
        device, dtype: of the parameters.

    Shape:
        Input: `[B, channels, height, width]`
        Output: `[B, out_channels, height, width]`

    Example:
        >>> import torch
        >>> from lambdanets.layers import PatchwiseAttention2d
        >>> layer = PatchwiseAttention2d(64, scope=(3, 7))
        >>> layer(torch.randn(2, 64, 14, 14)).shape
        torch.Size([2, 64, 14, 14])
    """

    def relate(self, **factory: Any) -> None:
        patch = self.key_depth * (self.positions + 1)
        self.mapping = nn.Sequential(
            nn.BatchNorm2d(patch, **factory),
            nn.ReLU(inplace=True),
            nn.Conv2d(patch, self.groups, 1, bias=False, **factory),
            nn.BatchNorm2d(self.groups, **factory),
            nn.ReLU(inplace=True),
            nn.Conv2d(self.groups, self.groups * self.positions, 1, **factory),
        )

    def weights(self, x: Tensor) -> Tensor:
        keys = self.footprints(self.to_keys(x)).flatten(1, 2).unflatten(2, x.shape[2:])  # [B, K S, Y, X]
        weights = self.mapping(torch.cat([self.to_queries(x), keys], 1))
        return weights.flatten(2).unflatten(1, (self.groups, self.positions))

"""Attention baselines of the same width as the lambda layer, with PyTorch's own kernels.

Letters: B batch, C channels, H heads, D depth of a head, Y, X height and width.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class GlobalAttention(nn.Module):
    """Multi-head self-attention over all positions of a map, by scaled_dot_product_attention (flash on GPUs)."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(channels, 3 * channels, bias=False)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        B, C, Y, X = x_BCYX.shape
        output = attend(self.to_qkv(x_BCYX.flatten(2).transpose(1, 2)), self.heads)
        return output.transpose(1, 2).reshape(B, C, Y, X)


class AxialAttention(nn.Module):
    """Self-attention along the rows, then along the columns."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.along_rows = nn.Linear(channels, 3 * channels, bias=False)
        self.along_columns = nn.Linear(channels, 3 * channels, bias=False)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        x_BYXC = x_BCYX.permute(0, 2, 3, 1)
        x_BYXC = attend(self.along_rows(x_BYXC), self.heads)
        x_BXYC = attend(self.along_columns(x_BYXC.transpose(1, 2)), self.heads)
        return x_BXYC.permute(0, 3, 2, 1)


def attend(qkv: Tensor, heads: int) -> Tensor:
    """Apply multi-head attention along the positions: [..., positions, 3 C] -> [..., positions, C]."""
    queries, keys, values = qkv.unflatten(-1, (3, heads, -1)).movedim((-3, -2), (0, -3)).unbind(0)
    output = F.scaled_dot_product_attention(queries, keys, values)
    return output.transpose(-3, -2).flatten(-2)

"""Global self-attention by PyTorch's flex_attention, to measure against.

The same function as `GlobalAttention2d`, whose kernels write out a bias for every pair of positions; here the two
relative logits of a pair are looked up inside the kernel.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from lambdanets.layers.attention import GlobalAttention2d, keep_format, to_image


@cache
def compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


class FlexAttention2d(GlobalAttention2d):
    """Arguments and weights are those of GlobalAttention2d. Compiled on a GPU; elsewhere as plain torch runs it."""

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.project(x)
        width = x.shape[3]
        rows = torch.einsum("bhyxk,yik->bhyxi", queries, self.height(x.shape[2])).flatten(2, 3).contiguous()
        columns = torch.einsum("bhyxk,xjk->bhyxj", queries, self.width(width)).flatten(2, 3).contiguous()

        def with_positions(score: Tensor, b: Tensor, h: Tensor, n: Tensor, m: Tensor) -> Tensor:
            return score + rows[b, h, n, m // width] + columns[b, h, n, m % width]

        attend = compiled() if x.is_cuda else flex_attention
        flat = [part.flatten(2, 3) for part in (queries, keys, values)]
        output = attend(*flat, score_mod=with_positions, scale=1.0)
        return keep_format(to_image(output.unflatten(2, x.shape[2:])), x)

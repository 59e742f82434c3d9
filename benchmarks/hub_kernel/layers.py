"""Stateless layers for `kernels`, which replaces the forward pass of other layers with them."""

from torch import Tensor, nn

from . import Relative, lambda_op


class LambdaLayer2d(nn.Module):
    """The forward pass of a lambda layer [B, C, height, width] -> [B, heads * value depth, height, width].

    It uses these attributes of the replaced layer:

    - `to_queries`, `to_values`: linear maps to heads * key depth and to value depth channels
    - `to_keys`: a linear map to key depth channels, or None without content lambdas
    - `norm_queries`, `norm_values`: batch norm, or nn.Identity
    - `heads`: number of queries per position
    - `table`: embeddings of relative positions [scope, scope, key depth], or None without position lambdas
    """

    has_backward = True
    can_torch_compile = True

    to_queries: nn.Module
    to_values: nn.Module
    to_keys: nn.Module | None
    norm_queries: nn.Module
    norm_values: nn.Module
    heads: int
    table: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        B, _, height, width = x.shape
        inputs = x.flatten(2).transpose(1, 2)
        queries = normed(self.norm_queries, self.to_queries(inputs)).unflatten(-1, (self.heads, -1))
        values = normed(self.norm_values, self.to_values(inputs))
        keys = None if self.to_keys is None else self.to_keys(inputs)
        positions = None if self.table is None else Relative(self.table, (height, width))
        output = lambda_op(queries, keys, values, positions, content=keys is not None)
        return output.flatten(2).transpose(1, 2).reshape(B, -1, height, width)


def normed(norm: nn.Module, part_BNC: Tensor) -> Tensor:
    """Apply batch norm over the channels of [B, N, C]."""
    if isinstance(norm, nn.Identity):
        return part_BNC
    B, N, C = part_BNC.shape
    return norm(part_BNC.reshape(B * N, C, 1, 1)).view(B, N, C)

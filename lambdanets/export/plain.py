"""Networks in a form that other runtimes execute efficiently: folded norms, and no branches that depend on the size.

Letters: B batch, C channels, N queries, M context positions, H heads, K key depth, V value depth, U intra-depth.

For a fixed image size, the tensors that a lambda layer computes from its table in each call become constants: the
embeddings of all pairs, or their Fourier transform. Tensors stay [B, channels, positions], so no large one is
transposed.
"""

from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lambdanets.export.positions import ByFrequency, WrittenOut
from lambdanets.layers import LambdaLayer2d
from lambdanets.layers.projection import is_plain
from lambdanets.models.fold import fold_batch_norm
from lambdanets.ops.reference import normalise

MOST_EMBEDDINGS = 2**22  # largest constant embeddings of a layer (16 MiB); larger maps use the Fourier transform


def plain_network(network: nn.Module, shape: tuple[int, int, int, int], fixed: bool) -> nn.Module:
    """Return a copy for inference with equal results, for images of `shape`, or of any size if not `fixed`."""
    copied, _ = fold_batch_norm(network, shape)
    copied = copied.to(memory_format=torch.contiguous_format).requires_grad_(False)  # type: ignore[call-overload]
    grids = input_grids(copied, shape) if fixed else {}
    for name, module in list(copied.named_modules()):
        if isinstance(module, nn.AvgPool2d) and module.ceil_mode:
            if not fixed:
                copied.set_submodule(name, OpenPool(module))
        elif name in grids and can_be_fixed(module):
            assert isinstance(module, LambdaLayer2d)
            copied.set_submodule(name, FixedLambda2d(module, grids[name]))
    return copied


def input_grids(network: nn.Module, shape: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """Return the input size of each lambda layer that is called exactly once with one positional argument."""
    found: dict[str, list[tuple[int, int] | None]] = {}

    def record(name: str, module: nn.Module, arguments: tuple[Tensor, ...], options: dict[str, Tensor]) -> None:
        alone = len(arguments) == 1 and not options
        grid = (arguments[0].shape[2], arguments[0].shape[3]) if alone else None
        found.setdefault(name, []).append(grid)

    hooks = [
        module.register_forward_pre_hook(partial(record, name), with_kwargs=True)
        for name, module in network.named_modules()
        if isinstance(module, LambdaLayer2d)
    ]
    like = next(network.parameters())
    try:
        with torch.no_grad():
            network(torch.zeros(shape, device=like.device, dtype=like.dtype))
    finally:
        for hook in hooks:
            hook.remove()
    return {name: grids[0] for name, grids in found.items() if len(grids) == 1 and grids[0] is not None}


def can_be_fixed(layer: nn.Module) -> bool:
    """Return whether `FixedLambda2d` can replace this layer; other layers are kept."""
    if not isinstance(layer, LambdaLayer2d) or layer.multi_head or layer.causal or set(layer.stride) != {1}:
        return False
    if layer.fused_projection is None or any(norm is not None for norm in layer.fused_projection.norms):
        return False
    return all(is_plain(linear, norm) for linear, norm in layer._projections())


class FixedLambda2d(nn.Module):
    """A lambda layer for maps of one size: [B, C, height, width] -> [B, H V, height, width]."""

    weight: Tensor
    bias: Tensor | None
    position_bias: Tensor | None

    def __init__(self, layer: LambdaLayer2d, grid: tuple[int, int]) -> None:
        super().__init__()
        assert layer.fused_projection is not None
        self.grid, self.heads, self.key_depth = grid, layer.heads, layer.key_depth
        self.value_depth, self.intra_depth = layer.value_depth, layer.intra_depth
        self.downsample = layer.downsample
        self.sizes, self.key_norm, self.query_softmax = (
            layer.fused_projection.sizes,
            layer.key_norm,
            layer.query_softmax,
        )
        bias = layer.fused_projection.bias
        self.register_buffer("weight", layer.fused_projection.weight.detach().clone())
        self.register_buffer("bias", None if bias is None else bias.detach().clone()[:, None])
        self.positions: WrittenOut | ByFrequency | None = None
        self.register_buffer("position_bias", None)
        if layer.positions is not None:
            placed = layer.positions(grid, grid, layer.stride)
            if layer.intra_depth == 1:  # add the axis U
                placed = placed.with_table(placed.table[..., None])
            small = prod(grid) ** 2 * layer.key_depth * layer.intra_depth <= MOST_EMBEDDINGS
            self.positions = WrittenOut(placed) if small else ByFrequency(placed)
        if layer.position_bias is not None:
            self.position_bias = layer.position_bias.detach().clone()[:, None]

    def forward(self, x: Tensor) -> Tensor:
        N = prod(self.grid)
        parts = self.weight @ x.flatten(2)
        queries, values, *keys = (parts if self.bias is None else parts + self.bias).split(self.sizes, dim=1)
        queries_BHKN = queries.reshape(-1, self.heads, self.key_depth, N)
        if self.query_softmax:
            queries_BHKN = queries_BHKN.softmax(dim=2)
        values_BVC = values.reshape(-1, self.value_depth, self.intra_depth * N)
        outputs = []
        if keys:
            keys_BKUM = keys[0].reshape(-1, self.key_depth, self.intra_depth, N)
            if self.key_norm == "softmax":
                keys_BKUM = keys_BKUM.softmax(dim=-1)
            else:
                keys_BKUM = normalise(keys_BKUM.movedim(-1, 1), self.key_norm).movedim(1, -1)
            lambda_BVK = values_BVC @ keys_BKUM.flatten(2).transpose(1, 2)
            outputs.append(lambda_BVK[:, None] @ queries_BHKN)  # [B, H, V, N]
        if self.positions is not None:
            outputs.append(self.positions(queries_BHKN, values_BVC))
        output = outputs[0] if len(outputs) == 1 else outputs[0] + outputs[1]
        if self.position_bias is not None:
            output = output + (queries_BHKN * self.position_bias).sum(2, keepdim=True)
        output = output.reshape(-1, self.heads * self.value_depth, *self.grid)
        return output if self.downsample is None else F.avg_pool2d(output, 3, 2, padding=1)


class OpenPool(nn.Module):
    """2x2 average pooling that rounds up and ignores padding, without a branch for odd sizes.

    The last row and column are repeated, which does not change the mean of a window that contains only them.
    """

    def __init__(self, pool: nn.AvgPool2d) -> None:
        super().__init__()
        kernel, stride = pair(pool.kernel_size), pair(pool.stride)
        if kernel != (2, 2) or stride != (2, 2) or pair(pool.padding) != (0, 0) or pool.count_include_pad:
            raise ValueError(f"{pool} cannot be exported for every image size: use a fixed one")

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(F.pad(x, [0, 1, 0, 1], mode="replicate"), 2, 2)


def pair(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)

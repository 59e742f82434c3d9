"""Masking of padding, so that it does not change the result of an image.

The images of a batch are padded to one size. Every layer that mixes positions gets zeros in the padding, as it would at
the border of an unpadded image: the inputs of convolutions and pooling are masked, averages are over the image only,
and lambda layers get their `context_mask`. In evaluation mode an image then has the same features alone and in a batch
with larger ones; in training mode batch norm mixes the images of a batch.

Layers that work on each position separately are not masked. If no image is padded, nothing is masked.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lambdanets.layers import SqueezeExcitation2d
from lambdanets.layers.lambda_layer import LambdaLayer

NEVER = -1e4  # objectness logit of positions in the padding
Size = tuple[int, int]


class Padding:
    """Masks of the positions inside the images of a batch, for maps of every size from repeated halving."""

    def __init__(self) -> None:
        self.inside: dict[Size, Tensor] = {}  # bool [B, height, width]; empty if no image is padded
        self.outside: dict[Size, Tensor] = {}
        self.counts: dict[Size, Tensor] = {}

    def set(self, sizes: Sequence[Size], canvas: Size, device: torch.device) -> None:
        self.inside, self.outside, self.counts = {}, {}, {}
        if all(tuple(size) == tuple(canvas) for size in sizes):
            return
        sizes_B2 = torch.tensor(sizes, device=device)
        height, width = canvas
        while True:
            rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
            down, across = rows < sizes_B2[:, :1], columns < sizes_B2[:, 1:]
            self.inside[height, width] = down[:, :, None] & across[:, None, :]
            self.outside[height, width] = ~self.inside[height, width][:, None]
            if height == width == 1:
                return
            height, width, sizes_B2 = -(-height // 2), -(-width // 2), (sizes_B2 + 1) // 2

    def clear(self, x: Tensor) -> Tensor:
        """Return x [B, C, height, width] with zeros in the padding."""
        outside = self.outside.get((x.shape[2], x.shape[3]))
        return x if outside is None else x.masked_fill(outside, 0)

    def covered(self, x: Tensor, pool: nn.AvgPool2d) -> Tensor:
        """Return the fraction of each pooling window inside the image, [B, 1, height, width], for the input x."""
        size = (x.shape[2], x.shape[3])
        if size not in self.counts:
            shares = F.avg_pool2d(
                self.inside[size][:, None].float(),
                pool.kernel_size,
                pool.stride,
                pool.padding,
                pool.ceil_mode,
                pool.count_include_pad,
            )
            self.counts[size] = torch.where(shares > 0, shares, 1.0)
        return self.counts[size]

    # Hooks

    def clear_input(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return (self.clear(inputs[0]), *inputs[1:]) if self.inside else None

    def count_inside(self, module: nn.AvgPool2d, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        size = (inputs[0].shape[2], inputs[0].shape[3])
        return output / self.covered(inputs[0], module).to(output.dtype) if size in self.inside else None

    def tell_context(self, module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        inside = self.inside.get((inputs[0].shape[2], inputs[0].shape[3]))
        return None if inside is None else (inputs, options | {"context_mask": inside})

    def forget_outside(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Suppress region proposals in the padding and convert the outputs to float32."""
        logits, deltas = output
        found = []
        for level in logits:
            outside = self.outside.get((level.shape[2], level.shape[3]))
            level = at_least_float(level)
            found.append(level if outside is None else level.masked_fill(outside, NEVER))
        return found, [at_least_float(level) for level in deltas]

    def attach(self, module: nn.Module) -> None:
        """Register hooks on every submodule that mixes positions."""
        for layer in module.modules():
            if isinstance(layer, LambdaLayer | SqueezeExcitation2d):
                layer.register_forward_pre_hook(self.tell_context, with_kwargs=True)
            elif isinstance(layer, nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d):
                if layer.kernel_size not in (1, (1, 1)):
                    layer.register_forward_pre_hook(self.clear_input)
                if isinstance(layer, nn.AvgPool2d) and not layer.count_include_pad:
                    layer.register_forward_hook(self.count_inside)  # type: ignore[arg-type]


def at_least_float(x: Tensor) -> Tensor:
    """Convert half precision to float32: near 1000, bfloat16 has a resolution of 4 pixels."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def float_output(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    """Forward hook that converts boxes and scores to float32."""
    return tuple(map(at_least_float, output)) if isinstance(output, tuple) else at_least_float(output)

"""Padding that no picture sees.

Pictures of several sizes share a canvas. What lies beyond a picture must not change its result, so every layer that
mixes positions gets zeros there, which is what it would find outside of a canvas of the picture's own size: the inputs
of convolutions and pooling are masked, means count the picture only, lambda layers get their `context_mask`. Then a
picture alone and beside a larger one gives the same features (in eval mode: batch norm in training mixes a batch).

Layers in between, which work on each position by itself, are left alone; with nothing to mask nothing is done.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lambdanets.layers import SqueezeExcitation2d
from lambdanets.layers.lambda_layer import LambdaLayer

NEVER = -1e4  # the logit of what is not there
Size = tuple[int, int]


class Padding:
    """Which positions of the maps of a batch belong to pictures, for maps of every size that halving leads to."""

    def __init__(self) -> None:
        self.inside: dict[Size, Tensor] = {}  # bool [B, height, width]; nothing if no picture is padded
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
        """x [B, C, height, width] with zeros where it is padding."""
        outside = self.outside.get((x.shape[2], x.shape[3]))
        return x if outside is None else x.masked_fill(outside, 0)

    def covered(self, x: Tensor, pool: nn.AvgPool2d) -> Tensor:
        """The part of each window of a pooling that is picture, [B, 1, height, width]; x is what goes in."""
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

    # What is attached to modules

    def clear_input(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return (self.clear(inputs[0]), *inputs[1:]) if self.inside else None

    def count_inside(self, module: nn.AvgPool2d, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        size = (inputs[0].shape[2], inputs[0].shape[3])
        return output / self.covered(inputs[0], module).to(output.dtype) if size in self.inside else None

    def tell_context(self, module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        inside = self.inside.get((inputs[0].shape[2], inputs[0].shape[3]))
        return None if inside is None else (inputs, options | {"context_mask": inside})

    def forget_outside(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Region proposals: none from outside of a picture; all numbers in float32."""
        logits, deltas = output
        found = []
        for level in logits:
            outside = self.outside.get((level.shape[2], level.shape[3]))
            level = at_least_float(level)
            found.append(level if outside is None else level.masked_fill(outside, NEVER))
        return found, [at_least_float(level) for level in deltas]

    def attach(self, module: nn.Module) -> None:
        """To every layer inside that mixes positions."""
        for layer in module.modules():
            if isinstance(layer, LambdaLayer | SqueezeExcitation2d):
                layer.register_forward_pre_hook(self.tell_context, with_kwargs=True)
            elif isinstance(layer, nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d):
                if layer.kernel_size not in (1, (1, 1)):
                    layer.register_forward_pre_hook(self.clear_input)
                if isinstance(layer, nn.AvgPool2d) and not layer.count_include_pad:
                    layer.register_forward_hook(self.count_inside)  # type: ignore[arg-type]


def at_least_float(x: Tensor) -> Tensor:
    """bfloat16 tells pixel 1000 from 1004 and no finer: boxes need more."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def float_output(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    """A hook for what puts out boxes and scores."""
    return tuple(map(at_least_float, output)) if isinstance(output, tuple) else at_least_float(output)

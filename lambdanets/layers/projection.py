"""Projections of a layer's input: linear maps with the norms behind them, several of them as one product.

Only plain `nn.Linear`s are merged. One with hooks, one whose weight is a tensor of another kind (torchao's quantised
ones), or something else in its place (an adapter) is called as the module that it is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lambdanets.ops.operation import accumulation_dtype
from lambdanets.ops.triton import norms

AUTOCAST = ("cuda", "cpu")  # where kernels may run; torch.compile cannot ask torch where there is autocast at all


@dataclass(frozen=True)
class Projection:
    """Linear maps of one input, one above the other, and for each the norm that could not become part of it."""

    weight: Tensor  # [sum of sizes, C]
    bias: Tensor | None
    sizes: tuple[int, ...]
    norms: tuple[nn.Module | None, ...]

    @classmethod
    def of(cls, linear: nn.Linear, norm: nn.Module | None = None) -> "Projection":
        """With running statistics batch norm is a linear map too, and is folded in: one pass less."""
        sizes = (linear.out_features,)
        if norm is None or isinstance(norm, nn.Identity):
            return cls(linear.weight, None, sizes, (None,))
        if not isinstance(norm, nn.modules.batchnorm._BatchNorm) or norm.training or not norm.affine:
            return cls(linear.weight, None, sizes, (norm,))
        if norm.running_var is None or norm.running_mean is None:
            return cls(linear.weight, None, sizes, (norm,))
        dtype = accumulation_dtype(norm.running_var)
        scale = norm.weight.to(dtype) * torch.rsqrt(norm.running_var.to(dtype) + norm.eps)
        shift = norm.bias.to(dtype) - norm.running_mean.to(dtype) * scale
        weight = (linear.weight * scale[:, None]).to(linear.weight.dtype)
        return cls(weight, shift.to(weight.dtype), sizes, (None,))

    def apply(self, function: Callable[[Tensor], Tensor]) -> "Projection":
        """The same maps with every tensor changed, as `nn.Module.to` does."""
        bias = None if self.bias is None else function(self.bias)
        return Projection(function(self.weight), bias, self.sizes, self.norms)


def merged(projections: list[Projection]) -> Projection:
    """Several projections of one input as one."""
    weight = torch.cat([p.weight for p in projections])
    bias = None
    if any(p.bias is not None for p in projections):
        bias = torch.cat([weight.new_zeros(len(p.weight)) if p.bias is None else p.bias for p in projections])
    sizes = tuple(size for p in projections for size in p.sizes)
    return Projection(weight, bias, sizes, tuple(norm for p in projections for norm in p.norms))


def is_plain(linear: nn.Module, norm: nn.Module | None) -> bool:
    """Whether reading the weight does what calling the module would do."""
    if type(linear) is not nn.Linear or linear.bias is not None:
        return False
    weight = linear.weight
    # a class that wraps other tensors need not know our operators; torch.compile sees the attribute on the type alone
    if not isinstance(weight, nn.Parameter) or hasattr(type(weight), "__tensor_flatten__"):
        return False
    return not norms.is_hooked(linear) and (norm is None or not norms.is_hooked(norm))


def project_by_calls(inputs: Tensor, linear: nn.Module, norm: nn.Module | None) -> Tensor:
    """[B, N, C] -> [B, N, size], calling every module."""
    part = linear(inputs)
    return part if norm is None or isinstance(norm, nn.Identity) else normed(norm, part)


def project(inputs: Tensor, projection: Projection, kernels: bool = False) -> list[Tensor]:
    """[B, N, C] -> [B, N, size] for each of the projection's sizes. `kernels`: the fused ones may norm the parts."""
    weight, sizes, dtype = projection.weight, projection.sizes, type_of_product(inputs, projection.weight)
    if kernels and dtype is not None and type(weight) is Tensor and norms.takes(inputs, dtype, projection.norms):
        return norms.normed_parts(nn.functional.linear(inputs, weight), projection.norms, sizes)
    parts = nn.functional.linear(inputs, weight, projection.bias).split(sizes, dim=-1)
    return [
        kept(part) if norm is None else normed(norm, part) for part, norm in zip(parts, projection.norms, strict=True)
    ]


def type_of_product(inputs: Tensor, weight: Tensor) -> torch.dtype | None:
    """What a linear map returns, autocast or not; None if it refuses the two types. float64 is not cast."""
    kind = inputs.device.type
    if kind in AUTOCAST and torch.is_autocast_enabled(kind) and torch.float64 not in (inputs.dtype, weight.dtype):
        return torch.get_autocast_dtype(kind)
    return inputs.dtype if inputs.dtype == weight.dtype else None


def kept(part_BNC: Tensor) -> Tensor:
    """A copy of a part that the backward pass keeps: the part itself would keep the whole product alive."""
    return part_BNC.contiguous() if torch.is_grad_enabled() and part_BNC.requires_grad else part_BNC


def normed(norm: nn.Module, part_BNC: Tensor) -> Tensor:
    """Batch norm of [B, N, C] as images [B * N, C] of one pixel: a layout that torch has fast kernels for.

    Only without gaps: batch norm of a slice of the whole projection takes a backward pass 50 times as long on a GPU.
    """
    B, N, C = part_BNC.shape
    if not torch.compiler.is_compiling():  # the compiler writes its own kernels, for any layout
        part_BNC = part_BNC.contiguous()
    return norm(part_BNC.reshape(B * N, C, 1, 1)).view(B, N, C)

"""Projections of a layer's input: linear maps followed by norms, several of them computed as one product.

Only plain `nn.Linear` modules are merged. A module with hooks, with a weight of another tensor class (torchao's
quantised weights), or of another class (an adapter) is called as a module.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lambdanets.ops.operation import accumulation_dtype
from lambdanets.ops.triton import norms

AUTOCAST = ("cuda", "cpu")  # the devices that kernels support; torch.compile cannot query which devices have autocast


@dataclass(frozen=True)
class Projection:
    """Stacked linear maps of one input, and for each the norm that could not be folded into it."""

    weight: Tensor  # [sum of sizes, C]
    bias: Tensor | None
    sizes: tuple[int, ...]
    norms: tuple[nn.Module | None, ...]

    @classmethod
    def of(cls, linear: nn.Linear, norm: nn.Module | None = None) -> "Projection":
        """Return the projection of a linear map and its norm. Batch norm with running statistics is folded in."""
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
        """Return the projection with a function applied to every tensor, as `nn.Module.to` does."""
        bias = None if self.bias is None else function(self.bias)
        return Projection(function(self.weight), bias, self.sizes, self.norms)


def merged(projections: list[Projection]) -> Projection:
    """Merge several projections of one input into one."""
    weight = torch.cat([p.weight for p in projections])
    bias = None
    if any(p.bias is not None for p in projections):
        bias = torch.cat([weight.new_zeros(len(p.weight)) if p.bias is None else p.bias for p in projections])
    sizes = tuple(size for p in projections for size in p.sizes)
    return Projection(weight, bias, sizes, tuple(norm for p in projections for norm in p.norms))


def is_plain(linear: nn.Module, norm: nn.Module | None) -> bool:
    """Return whether a product with the weight is equivalent to calling the module."""
    if type(linear) is not nn.Linear or linear.bias is not None:
        return False
    weight = linear.weight
    # A tensor subclass may not support our operators; torch.compile finds this attribute only on the type.
    if not isinstance(weight, nn.Parameter) or hasattr(type(weight), "__tensor_flatten__"):
        return False
    return not norms.is_hooked(linear) and (norm is None or not norms.is_hooked(norm))


def project_by_calls(inputs: Tensor, linear: nn.Module, norm: nn.Module | None) -> Tensor:
    """Project [B, N, C] to [B, N, size] by calling the modules."""
    part = linear(inputs)
    return part if norm is None or isinstance(norm, nn.Identity) else normed(norm, part)


def project(inputs: Tensor, projection: Projection, kernels: bool = False) -> list[Tensor]:
    """Project [B, N, C] to one [B, N, size] per size; with `kernels` the Triton kernels may normalise the parts."""
    weight, sizes, dtype = projection.weight, projection.sizes, type_of_product(inputs, projection.weight)
    if kernels and dtype is not None and type(weight) is Tensor and norms.takes(inputs, dtype, projection.norms):
        return norms.normed_parts(nn.functional.linear(inputs, weight), projection.norms, sizes)
    parts = nn.functional.linear(inputs, weight, projection.bias).split(sizes, dim=-1)
    return [
        kept(part) if norm is None else normed(norm, part) for part, norm in zip(parts, projection.norms, strict=True)
    ]


def type_of_product(inputs: Tensor, weight: Tensor) -> torch.dtype | None:
    """Return the dtype of the product, with autocast (which leaves float64 unchanged); None if torch rejects it."""
    kind = inputs.device.type
    if kind in AUTOCAST and torch.is_autocast_enabled(kind) and torch.float64 not in (inputs.dtype, weight.dtype):
        return torch.get_autocast_dtype(kind)
    return inputs.dtype if inputs.dtype == weight.dtype else None


def kept(part_BNC: Tensor) -> Tensor:
    """Copy a part that the backward pass needs: saving a view would keep the whole product in memory."""
    return part_BNC.contiguous() if torch.is_grad_enabled() and part_BNC.requires_grad else part_BNC


def normed(norm: nn.Module, part_BNC: Tensor) -> Tensor:
    """Apply batch norm to [B, N, C] in the layout [B * N, C, 1, 1], for which torch has fast kernels.

    The input must be contiguous: on a GPU the backward pass of a slice of the whole projection is 50 times slower.
    """
    B, N, C = part_BNC.shape
    if not torch.compiler.is_compiling():  # compiled kernels are fast for any layout
        part_BNC = part_BNC.contiguous()
    return norm(part_BNC.reshape(B * N, C, 1, 1)).view(B, N, C)

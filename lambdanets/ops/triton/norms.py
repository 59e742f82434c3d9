"""Training-mode batch norm of queries and values, read from the merged projection: conditions for the kernels, and the
call. norm_operators.py has launches, autograd and registration.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from . import constant_when_compiling, why_not


def takes(inputs_BNC: Tensor, dtype: torch.dtype, norms: Sequence[nn.Module | None]) -> bool:
    """Return whether the kernels can replace calls of the norms, for a projection of these inputs with this dtype."""
    if len(norms) not in (2, 3) or (len(norms) == 3 and norms[2] is not None):
        return False
    if norms[0] is norms[1]:  # a shared norm updates its running statistics twice, in sequence
        return False
    if type(inputs_BNC) is not Tensor or only_torch() or inputs_BNC.shape[0] * inputs_BNC.shape[1] < 2:
        return False
    if not all(map(is_plain, norms[:2])) or types_of(norms[0]) != types_of(norms[1]):
        return False
    return why_not(inputs_BNC.device, dtype, 1, 1, 1) is None


@constant_when_compiling  # in torch 2.11 is_exporting is also True when traced by torch.compile
def only_torch() -> bool:
    """Return whether only torch operators may be used: during export, tracing, and transforms other than autograd."""
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    traced = not torch.compiler.is_dynamo_compiling() and torch._C._get_tracing_state() is not None
    return transformed or traced or torch.compiler.is_exporting()


def is_plain(norm: nn.Module | None) -> bool:
    """Return whether a norm is batch norm in training mode with parameters and running averages of fixed momentum."""
    if type(norm) is not nn.BatchNorm2d or not norm.training or norm.momentum is None or is_hooked(norm):
        return False
    vectors = (norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked)
    return all(one is not None and one.is_contiguous() for one in vectors)  # functional_call may pass slices


def types_of(norm: nn.Module | None) -> list[torch.dtype]:
    """Return the dtypes of a norm's vectors, which must be the same for both norms of a kernel."""
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return [one.dtype for one in (norm.weight, norm.bias, norm.running_mean, norm.running_var)]


def is_hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks or an instance attribute `forward`."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def normed_parts(product_BNS: Tensor, norms: Sequence[nn.Module | None], sizes: Sequence[int]) -> list[Tensor]:
    """Return normalised queries and values, and keys if any, each contiguous; update the running statistics."""
    from . import norm_operators as operators

    first, second = norms[:2]
    assert isinstance(first, nn.BatchNorm2d)
    assert isinstance(second, nn.BatchNorm2d)
    # torch.compile needs the operator. Eager calls skip the dispatcher, which takes as long as a small kernel.
    call = operators.normed_parts if torch.compiler.is_dynamo_compiling() else operators.NormedParts.apply
    parts = call(
        product_BNS, first.weight, second.weight, first.bias, second.bias,
        first.running_mean, second.running_mean, first.running_var, second.running_var,
        first.num_batches_tracked, second.num_batches_tracked,
        [first.eps, second.eps], [first.momentum, second.momentum], [*sizes, 0][:3],
    )  # fmt: skip
    return list(parts[: len(sizes)])

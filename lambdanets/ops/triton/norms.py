"""Training batch norm of queries and values, read from the projection that holds both and the keys.

torch copies each part out of the projection, normalises it, and concatenates the gradients again: sixteen small kernels
and five more passes over memory. Here two kernels run forward and two backward. Sums are in float32, in a fixed order.
This file decides when the kernels may run and launches them; autograd and registration: norm_operators.py.

Letters: B batch, N positions, R = B * N rows, S channels of the projection, P shares of the rows.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from . import constant_when_compiling, why_not
from .problem import ceil_div, multiprocessors, on_device

ROWS, COLUMNS, STAGES = 128, 32, 4  # of a tile, and tiles on their way: README.md
WIDE = 64  # rows and columns where gradients are summed: their rows are read whole
SHARES = 64  # of the rows, at most: whoever norms reads the sums of all of them at once, before it begins
PROGRAMS = 2  # per multiprocessor, each with STAGES tiles on their way


def takes(inputs_BNC: Tensor, dtype: torch.dtype, norms: Sequence[nn.Module | None]) -> bool:
    """Whether kernels norm the projection of these inputs, which has this type, as calling the norms would."""
    if len(norms) not in (2, 3) or (len(norms) == 3 and norms[2] is not None):
        return False
    if norms[0] is norms[1]:  # it updates its running statistics twice, one after the other
        return False
    if type(inputs_BNC) is not Tensor or only_torch() or inputs_BNC.shape[0] * inputs_BNC.shape[1] < 2:
        return False
    if not all(map(is_plain, norms[:2])) or types_of(norms[0]) != types_of(norms[1]):
        return False
    return why_not(inputs_BNC.device, dtype, 1, 1, 1) is None


@constant_when_compiling  # in torch 2.11 is_exporting, traced by torch.compile, says yes there too
def only_torch() -> bool:
    """Whether this is for runtimes that know torch alone, or for transforms of which kernels have only gradients."""
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    traced = not torch.compiler.is_dynamo_compiling() and torch._C._get_tracing_state() is not None
    return transformed or traced or torch.compiler.is_exporting()


def is_plain(norm: nn.Module | None) -> bool:
    """A batch norm that takes this batch's statistics, learns, and keeps a running average with a fixed momentum."""
    if type(norm) is not nn.BatchNorm2d or not norm.training or norm.momentum is None or is_hooked(norm):
        return False
    vectors = (norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked)
    return all(one is not None and one.is_contiguous() for one in vectors)  # of functional_call they may be slices


def types_of(norm: nn.Module | None) -> list[torch.dtype]:
    """A kernel works on both norms, and takes the vectors of either for those of the other."""
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return [one.dtype for one in (norm.weight, norm.bias, norm.running_mean, norm.running_var)]


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody wants to know when this module is called, or has put a forward of their own on it."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def normed_parts(product_BNS: Tensor, norms: Sequence[nn.Module | None], sizes: Sequence[int]) -> list[Tensor]:
    """Queries and values after their norms, and keys if there are any, each contiguous; updates running statistics."""
    from . import norm_operators as operators

    first, second = norms[:2]
    assert isinstance(first, nn.BatchNorm2d)
    assert isinstance(second, nn.BatchNorm2d)
    # torch.compile traces the operator. Eager calls skip the dispatcher, which costs as much as a small kernel.
    call = operators.normed_parts if torch.compiler.is_dynamo_compiling() else operators.NormedParts.apply
    parts = call(
        product_BNS, first.weight, second.weight, first.bias, second.bias,
        first.running_mean, second.running_mean, first.running_var, second.running_var,
        first.num_batches_tracked, second.num_batches_tracked,
        [first.eps, second.eps], [first.momentum, second.momentum], [*sizes, 0][:3],
    )  # fmt: skip
    return list(parts[: len(sizes)])


def strips(sizes: Sequence[int], columns: int) -> int:
    """Tiles side by side that cover the channels of these parts, each part by its own."""
    return sum(ceil_div(size, columns) for size in sizes)


def shares_of(rows: int, sizes: Sequence[int], device: torch.device) -> tuple[int, int]:
    """Rows of a share, a multiple of the tile, and how many shares: as many as fill the chip, or SHARES."""
    programs = max(1, min(SHARES, multiprocessors(device) * PROGRAMS // strips(sizes[:2], COLUMNS)))
    tiles = ceil_div(rows, ROWS)
    share = ceil_div(tiles, min(programs, tiles)) * ROWS
    return share, ceil_div(rows, share)


def programs_of(rows: int, sizes: Sequence[int], device: torch.device) -> tuple[int, int]:
    """A grid for who norms: (strips, programs that share the rows)."""
    across = strips(sizes, COLUMNS)
    return across, max(1, min(ceil_div(rows, ROWS), multiprocessors(device) * PROGRAMS // across))


def tile_of(sizes: Sequence[int], wide: bool = False) -> dict[str, Any]:
    parts = dict(FIRST=sizes[0], NORMED=sizes[0] + sizes[1], S=sum(sizes))
    rows, columns = (WIDE, WIDE) if wide else (ROWS, COLUMNS)
    return parts | dict(ROWS=rows, COLS=columns, STAGES=STAGES, num_warps=4)


def forward(
    product: Tensor, weight_q: Tensor, weight_v: Tensor, bias_q: Tensor, bias_v: Tensor,
    mean_q: Tensor, mean_v: Tensor, var_q: Tensor, var_v: Tensor, count_q: Tensor, count_v: Tensor,
    eps: Sequence[float], momentum: Sequence[float], sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, values, keys, and the moments [2, normed]: mean and 1 / deviation. Running statistics move in place."""
    from . import norm_kernels as kernels

    product = product.contiguous()  # already so, unless somebody calls the operator with another layout
    (B, N, _), normed = product.shape, sizes[0] + sizes[1]
    rows, device = B * N, product.device
    share, shares = shares_of(rows, sizes, device)
    parts = [torch.empty(B, N, size, device=device, dtype=product.dtype) for size in sizes]
    sums = torch.empty(2, shares, normed, device=device, dtype=torch.float32).unbind()
    moments = torch.empty(2, normed, device=device, dtype=torch.float32)
    tile = tile_of(sizes)
    with on_device(product):
        kernels.batch_moments[(strips(sizes[:2], COLUMNS), shares)](product, sums[0], sums[1], rows, share, **tile)
        kernels.normalise_parts[programs_of(rows, sizes, device)](
            product, parts[0], parts[1], parts[2], sums[0], sums[1], moments, weight_q, weight_v, bias_q, bias_v,
            mean_q, mean_v, var_q, var_v, count_q, count_v,
            rows, share, shares, eps[0], eps[1], momentum[0], momentum[1],
            SHARES=cast(Any, SHARES), **tile,
        )  # fmt: skip
    return parts[0], parts[1], parts[2], moments


def backward(
    dq: Tensor, dv: Tensor, dk: Tensor,
    product: Tensor, weight_q: Tensor, weight_v: Tensor, bias_q: Tensor, bias_v: Tensor, moments: Tensor,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the projection, the weights and the biases."""
    from . import norm_kernels as kernels

    product = product.contiguous()  # already so, unless somebody calls the operator with another layout
    (B, N, _), normed = product.shape, sizes[0] + sizes[1]
    rows, device = B * N, product.device
    share, shares = shares_of(rows, sizes, device)
    gradients = [one.to(product.dtype).contiguous() for one in (dq, dv, dk)]
    sums = torch.empty(2, shares, normed, device=device, dtype=torch.float32).unbind()
    dx = torch.empty_like(product)
    dweight_q, dweight_v, dbias_q, dbias_v = map(torch.empty_like, (weight_q, weight_v, bias_q, bias_v))
    tile = tile_of(sizes)
    with on_device(product):
        kernels.gradient_moments[(strips(sizes[:2], WIDE), shares)](
            product, gradients[0], gradients[1], moments, sums[0], sums[1], rows, share,
            **tile_of(sizes, wide=True),
        )  # fmt: skip
        kernels.gradients_of_parts[programs_of(rows, sizes, device)](
            product, gradients[0], gradients[1], gradients[2], dx, moments, sums[0], sums[1],
            weight_q, weight_v, dweight_q, dweight_v, dbias_q, dbias_v, rows, shares,
            SHARES=cast(Any, SHARES), **tile,
        )  # fmt: skip
    return dx, dweight_q, dweight_v, dbias_q, dbias_v

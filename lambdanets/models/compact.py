"""Smaller files of weights: large tensors as 8-bit integers with scales, or in half precision.

In 8 bits, a tensor NAME is stored as integers from -127 to 127 together with float32 scales NAME.int8_scale, one for
each index of the first axis, the output channel of convolutions and linear layers. A weight is integer * scale. Small
tensors and those with one axis (norms, biases) stay in float32.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

Bits = Literal[8, 16, 32]
SCALE = ".int8_scale"
LARGEST_CODE = 127
LARGE = 4096  # smallest number of elements of a compressed tensor


def compress(state: Mapping[str, Tensor], bits: Bits) -> dict[str, Tensor]:
    """Return the tensors of a file in `bits` for a state dict of finite values; float64 becomes at least float32."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.is_floating_point():
            tensor = tensor.float()
            if tensor.ndim > 1 and tensor.numel() >= LARGE and bits < 32:
                if bits == 8:
                    tensor, found[name + SCALE] = quantize(tensor)
                elif tensor.abs().max() <= torch.finfo(torch.float16).max:
                    tensor = tensor.half()
        found[name] = tensor
    return found


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 integers [C, ...] and float32 scales [C] for a float32 tensor [C, ...]."""
    scales_C = weight.abs().flatten(1).amax(1) / LARGEST_CODE
    codes = weight / along_first(scales_C.where(scales_C > 0, 1.0), weight)
    return codes.round().clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.int8), scales_C


def along_first(scales_C: Tensor, weight: Tensor) -> Tensor:
    return scales_C.view(-1, *[1] * (weight.ndim - 1))


def expand(state: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file with 8-bit weights converted to float32.

    Raises:
        ValueError: if scales are missing, unused or do not match; the message names the file and the tensor.
    """
    eight = [name for name, tensor in state.items() if tensor.dtype == torch.int8]
    scales = {name for name in state if name.endswith(SCALE)}
    if not eight and not scales:
        return dict(state)
    found = {name: tensor for name, tensor in state.items() if name not in scales}
    for name in eight:
        if name + SCALE not in scales:
            raise ValueError(f"{path}: {name} is stored in 8 bits without its scales, {name}{SCALE}")
        scale = state[name + SCALE]
        check_scale(path, name, state[name], scale)
        found[name] = state[name].float() * along_first(scale, state[name])
    left = sorted(scales - {name + SCALE for name in eight})
    if left:
        raise ValueError(f"{path}: {left[0]} belongs to no tensor in 8 bits: the file is damaged")
    return found


def check_scale(path: Path, name: str, codes: Tensor, scale: Tensor) -> None:
    what = f"{path}: {name}{SCALE}"
    if scale.dtype != torch.float32:
        raise ValueError(f"{what} is {scale.dtype}, expected torch.float32")
    if codes.ndim < 2 or scale.shape != codes.shape[:1]:
        raise ValueError(
            f"{what} is {list(scale.shape)} and {name} is {list(codes.shape)}: expected one scale per channel"
        )
    if not bool((torch.isfinite(scale) & (scale >= 0)).all()):
        raise ValueError(f"{what} has a value that is negative or not finite")


def largest_error(before: Mapping[str, Tensor], after: Mapping[str, Tensor], names: Iterable[str]) -> tuple[float, str]:
    """Return the largest |after - before| / |before| of a tensor, in the Euclidean norm, and the tensor's name."""
    return max((relative_error(before[name].double(), after[name].double()), name) for name in names)


def relative_error(before: Tensor, after: Tensor) -> float:
    return float((after - before).norm() / before.norm().clamp(1e-300))

"""The cases to measure: feature maps, scopes and sizes of the layer."""

import re
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lambdanets.ops import Relative

DTYPES = {"float64", "float32", "bfloat16", "float16"}


@dataclass(frozen=True)
class Shape:
    """A feature map."""

    height: int
    width: int
    channels: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Parse HEIGHTxWIDTHxCHANNELS."""
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
        if match is None or "0" in match.groups():
            raise ValueError(f"shape must be HEIGHTxWIDTHxCHANNELS, such as 32x32x96, got {text!r}")
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return f"{self.height}x{self.width}x{self.channels}"


# The four stages of ResNet-50, and the first blocks of c3 to c5, which run at the resolution of the previous stage.
STAGES = (Shape(56, 56, 64), Shape(28, 28, 128), Shape(14, 14, 256), Shape(7, 7, 512))
DOWNSAMPLING = (Shape(56, 56, 128), Shape(28, 28, 256), Shape(14, 14, 512))
SCOPES = (7, 23, None)


def parse_scope(text: str) -> int | None:
    """Parse a scope, a number or `global` (None)."""
    if text == "global":
        return None
    if not text.isdigit() or int(text) == 0:
        raise ValueError(f"scope must be a positive number or 'global', got {text!r}")
    return int(text)


@dataclass(frozen=True)
class BenchCase:
    """One layer on one feature map."""

    shape: Shape
    scope: int | None  # None for a global scope
    batch: int
    dtype: str = "float32"
    heads: int = 4
    key_depth: int = 16
    pooled: bool = False  # followed by average pooling with stride 2; a convolution has stride 2 instead

    def __post_init__(self) -> None:
        if self.shape.channels % self.heads:
            raise ValueError(f"{self.shape} has channels that are not divisible by --heads {self.heads}: change one")
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}; choose one of {', '.join(sorted(DTYPES))}")

    @property
    def name(self) -> str:
        scope = "global" if self.scope is None else f"scope {self.scope}"
        return f"{self.shape} {scope}{', pooled' if self.pooled else ''}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def positions(self) -> int:
        return self.shape.height * self.shape.width

    @property
    def grid(self) -> tuple[int, int]:
        return self.shape.height, self.shape.width

    @property
    def scopes(self) -> tuple[int, int]:
        """The number of entries of the table along each axis."""
        if self.scope is not None:
            return self.scope, self.scope
        return 2 * self.shape.height - 1, 2 * self.shape.width - 1

    def fields(self) -> dict[str, Any]:
        """Return the fields of the case for a row of results."""
        return asdict(self) | {"shape": str(self.shape)}

    def image(self, device: torch.device, seed: int = 0) -> Tensor:
        """Return a random feature map [B, C, height, width]."""
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(self.batch, self.shape.channels, *self.grid, generator=generator, device=device)
        return x.to(self.torch_dtype)


@dataclass(frozen=True, eq=False)
class OpInputs:
    """Inputs of the operation, as leaves that require gradients."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    positions: Relative
    gradient: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.queries, self.keys, self.values, self.positions.table


def op_inputs(case: BenchCase, device: torch.device, dtype: torch.dtype | None = None) -> OpInputs:
    """Return random inputs of the operation for a case, scaled as in a layer at initialisation."""
    generator = torch.Generator(device).manual_seed(0)
    B, N, H, K, V = case.batch, case.positions, case.heads, case.key_depth, case.shape.channels // case.heads

    def tensor(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator, device=device)
        return x.to(case.torch_dtype).to(dtype or case.torch_dtype)  # the same numbers in every dtype

    leaves = [tensor(B, N, H, K), tensor(B, N, K), tensor(B, N, V), tensor(*case.scopes, K)]
    queries, keys, values, table = (leaf.requires_grad_() for leaf in leaves)
    return OpInputs(queries, keys, values, Relative(table, case.grid), tensor(B, N, H, V))


def make_cases(
    shapes: tuple[Shape, ...],
    scopes: tuple[int | None, ...],
    batch: int,
    dtype: str,
    heads: int,
    key_depth: int,
    pooled: bool = False,
) -> list[BenchCase]:
    """Return the cases of all combinations of shapes and scopes."""
    return [BenchCase(shape, scope, batch, dtype, heads, key_depth, pooled) for shape, scope in product(shapes, scopes)]

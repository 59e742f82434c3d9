"""What a query knows about the place of each context element: the position embeddings e_nm.

Letters: N queries, M context positions, H heads, K key depth, U intra-depth, R relations.
An embedding is [K], or [K, U] with intra-depth, with H in front of K where every head has its own (multi-head).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Dense:
    """One embedding for each pair of query and context position: `embeddings` [N, M, (H,) K(, U)]."""

    embeddings: Tensor


@dataclass(frozen=True, eq=False)
class Relation:
    """Embeddings by kind of relation (the edges of a graph): `table` [R, (H,) K(, U)], `index` [N, M].

    `index[n, m]` names the relation of context element m to query n; -1 means that there is none.
    """

    table: Tensor
    index: Tensor


class Kept:
    """What implementations made of a table that no longer changes, for their next call. A changed table forgets it."""

    most = 8  # sizes of maps

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.made: dict[Any, Any] = {}

    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        key = (*key, self.table._version)
        if key not in self.made:
            if len(self.made) >= self.most:
                self.made.clear()
            self.made[key] = make()
        return self.made[key]


@dataclass(frozen=True, eq=False)
class Relative:
    """Embeddings by relative position on a grid: `table` [*scope, (H,) K(, U)].

    `table[i]` belongs to m - n = (i - (scope - 1) // 2) * dilation along each axis (cross-correlation, as in
    torch's `padding="same"`: an even scope reaches one further forward). Context outside the grid contributes
    nothing. With a stride, query n sits at context position n * stride. Both grids share origin and unit.
    A table with (2h - 1) x (2w - 1) entries is global for maps up to h x w; smaller ones use its middle.
    """

    table: Tensor
    query_grid: tuple[int, ...]
    context_grid: tuple[int, ...]
    dilation: tuple[int, ...]
    stride: tuple[int, ...]
    kept: Kept | None

    def __init__(
        self,
        table: Tensor,
        query_grid: int | Sequence[int],
        context_grid: int | Sequence[int] | None = None,
        dilation: int | Sequence[int] = 1,
        stride: int | Sequence[int] = 1,
        *,
        kept: Kept | None = None,
    ) -> None:
        query_grid = (query_grid,) if isinstance(query_grid, int) else tuple(query_grid)
        dims = len(query_grid)
        dilation = per_axis(dilation, dims, "dilation")
        stride = per_axis(stride, dims, "stride")
        if context_grid is None:
            if any(s != 1 for s in stride):
                raise ValueError(
                    f"stride {stride} puts the queries on a coarser grid than the context: "
                    f"say what the context's grid is, context_grid=(...)"
                )
            context_grid = query_grid
        context_grid = per_axis(context_grid, dims, "context_grid")
        if not torch.compiler.is_compiling():  # sizes may be symbols there, and every one is positive
            for name, sizes in (("dilation", dilation), ("stride", stride), ("scope", table.shape[:dims])):
                if any(s < 1 for s in sizes):
                    raise ValueError(f"{name} must be positive along every axis, got {tuple(sizes)}")
        for name, value in (
            ("table", table),
            ("query_grid", query_grid),
            ("context_grid", context_grid),
            ("dilation", dilation),
            ("stride", stride),
            ("kept", kept),
        ):
            object.__setattr__(self, name, value)

    @property
    def dims(self) -> int:
        return len(self.query_grid)

    @property
    def scope(self) -> tuple[int, ...]:
        return tuple(self.table.shape[: self.dims])

    def axis(self, i: int) -> "Axis":
        return Axis(
            queries=self.query_grid[i],
            context=self.context_grid[i],
            scope=self.table.shape[i],
            first=-((self.table.shape[i] - 1) // 2) * self.dilation[i],
            dilation=self.dilation[i],
            stride=self.stride[i],
        )

    def axes(self) -> list["Axis"]:
        return [self.axis(i) for i in range(self.dims)]

    def clipped(self) -> tuple[Tensor, list["Axis"]]:
        """The part of the table that some query can reach on these grids, and the axes that go with it.

        A 23x23 table on a 7x7 map has only 13x13 entries at work; every fast implementation starts here.
        """
        table, axes = self.table, []
        for i, axis in enumerate(self.axes()):
            skip = max(0, -(((axis.queries - 1) * axis.stride + axis.first) // axis.dilation))
            last = min(axis.scope - 1, (axis.context - 1 - axis.first) // axis.dilation)
            table = table.narrow(i, skip, last - skip + 1)
            axes.append(
                Axis(
                    queries=axis.queries,
                    context=axis.context,
                    scope=last - skip + 1,
                    first=axis.first + skip * axis.dilation,
                    dilation=axis.dilation,
                    stride=axis.stride,
                )
            )
        return table, axes

    def causal(self, strict: bool) -> "Relative":
        """The same embeddings with zeros where m comes after n in row-major order (strict: not before n).

        m <= n in row-major order exactly when the first non-zero coordinate of m - n is negative, or all are
        zero: a property of the relative position alone, so the mask can live in the table.
        """
        centre = [(s - 1) // 2 for s in self.scope]
        index = torch.arange(prod(self.scope), device=self.table.device)
        middle = 0
        for c, s in zip(centre, self.scope, strict=True):
            middle = middle * s + c
        keep = index < middle if strict else index <= middle
        keep = keep.view(*self.scope, *[1] * (self.table.ndim - self.dims))
        return self.with_table(self.table * keep)

    def with_table(self, table: Tensor, kept: Kept | None = None) -> "Relative":
        return Relative(table, self.query_grid, self.context_grid, self.dilation, self.stride, kept=kept)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` makes of the table and the grids: from an earlier call, where such things are kept."""
        if self.kept is None:
            return make()
        placed = (self.query_grid, self.context_grid, self.dilation, self.stride)
        return self.kept.once((name, self.table.dtype, *placed), make)


Positions = Dense | Relative | Relation


@dataclass(frozen=True)
class Axis:
    """One axis of a relative table: entry i is the embedding of m - n * stride = first + i * dilation."""

    queries: int
    context: int
    scope: int
    first: int
    dilation: int
    stride: int

    @property
    def last(self) -> int:
        return self.first + (self.scope - 1) * self.dilation

    @property
    def unwrapped_length(self) -> int:
        """The shortest circle on which no query sees a context position from the other side."""
        return max(self.context - self.first, (self.queries - 1) * self.stride + self.last + 1)


def per_axis(value: int | Sequence[int], dims: int, name: str) -> tuple[int, ...]:
    """`value` once for each axis."""
    sizes = tuple(value) if isinstance(value, Sequence) else (value,) * dims
    if len(sizes) != dims:
        raise ValueError(f"{name} needs one size or {dims} (one per axis), got {value}")
    return sizes


def wrap(table: Tensor, axes: list[Axis], lengths: list[int]) -> Tensor:
    """The table on a circle: the embedding of relative position p at index p modulo the length."""
    for dim, (axis, length) in enumerate(zip(axes, lengths, strict=True)):
        sizes = list(table.shape)
        sizes[dim] = length
        index = (axis.first + torch.arange(axis.scope, device=table.device) * axis.dilation) % length
        table = table.new_zeros(sizes).index_copy(dim, index, table)
    return table


def toeplitz(table: Tensor, dim: int, axis: Axis, queries: int, start: int, context: int) -> Tensor:
    """Expands one axis of a table: out[..., n, ...] gains a last axis, the embedding of n with context position m.

    The window of context positions is start .. start + context - 1 relative to the first of `queries` queries, and
    it comes BACKWARDS: index j is m = start + context - 1 - j. That way the result is a view of the small table
    (flip it, pad it, `unfold`), with a gradient that is one fold; whoever multiplies flips the values instead.
    """
    if axis.dilation > 1:  # zeros between the entries: the dilated table as a dense one
        sizes = list(table.shape)
        sizes[dim] = (axis.scope - 1) * axis.dilation + 1
        spread = table.new_zeros(sizes)
        index = torch.arange(axis.scope, device=table.device) * axis.dilation
        table = spread.index_copy(dim, index, table)
    # Offsets m - n * stride run from start - (queries - 1) * stride (last query) to start + context - 1 (first).
    below = axis.first - (start - (queries - 1) * axis.stride)
    above = (start + context - 1) - axis.last
    table = F.pad(table.flip(dim), [0, 0] * (table.ndim - 1 - dim) + [above, below])
    return table.unfold(dim, context, axis.stride)


def expand_backwards(table: Tensor, axes: list[Axis]) -> Tensor:
    """Every embedding of a relative table [*scope, K, U] written out, context in reverse: [*N, K, U, *M].

    One axis at a time from the last, each result laid out so that the next one copies whole runs of context.
    """
    dims = len(axes)
    table = table.movedim((-2, -1), (0, 1))
    for axis in reversed(axes):
        # [*N done, K, U, *scope left, *M done]
        dim = dims + 1
        table = toeplitz(table, dim, axis, axis.queries, 0, axis.context)
        table = table.movedim((dim, -1), (0, dim + 1)).contiguous()
    return table


def gather_relations(positions: Relation) -> Tensor:
    """[N, M, ...] from a table of relations; pairs without a relation get zeros."""
    table, index = positions.table, positions.index
    known = (index >= 0).view(*index.shape, *[1] * (table.ndim - 1))
    rows = table.index_select(0, index.clamp(min=0).flatten().long())
    return rows.view(*index.shape, *table.shape[1:]) * known

"""Position embeddings e_nm of query n and context position m.

Letters: N queries, M context positions, H heads, K key depth, U intra-depth, R relations.
An embedding is [K], with intra-depth [K, U], and with separate embeddings per head [H, K] or [H, K, U].
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
    """A separate embedding for each pair of query and context position.

    Args:
        embeddings: the embeddings.

    Shape:
        embeddings: `[N, M, (H,) K(, U)]`; U with intra-depth, H with multi-head

    Example:
        >>> import torch
        >>> from lambdanets.ops import Dense, lambda_op
        >>> queries, keys, values = torch.randn(2, 5, 4, 16), torch.randn(2, 9, 16), torch.randn(2, 9, 32)
        >>> lambda_op(queries, keys, values, Dense(torch.randn(5, 9, 16))).shape
        torch.Size([2, 5, 4, 32])
    """

    embeddings: Tensor


@dataclass(frozen=True, eq=False)
class Relation:
    """Embeddings by kind of relation, for example the kinds of edges of a graph.

    Args:
        table: one embedding for each of R relations.
        index: integers; `index[n, m]` is the relation of context element m to query n, or -1 for none.

    Shape:
        table: `[R, (H,) K(, U)]`; U with intra-depth, H with multi-head
        index: `[N, M]`

    Example:
        >>> import torch
        >>> from lambdanets.ops import Relation, lambda_op
        >>> queries, keys, values = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 16), torch.randn(2, 3, 32)
        >>> index = torch.tensor([[0, 1, -1], [1, 0, 1], [-1, 1, 0]])  # a path: itself, neighbour, no edge
        >>> lambda_op(queries, keys, values, Relation(torch.randn(2, 16), index)).shape
        torch.Size([2, 3, 4, 32])
    """

    table: Tensor
    index: Tensor


class Kept:
    """A cache of tensors computed from a table, for inference. In-place changes of the table invalidate it."""

    most = 8  # entries

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.made: dict[Any, Any] = {}

    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return the cached result for `key`; compute it with `make` if there is none."""
        key = (*key, self.table._version)
        if key not in self.made:
            if len(self.made) >= self.most:
                self.made.clear()
            self.made[key] = make()
        return self.made[key]


@dataclass(frozen=True, eq=False)
class Relative:
    """Embeddings by relative position on a grid of one, two or more axes.

    Along each axis, `table[i]` is the embedding of m - n = (i - (scope - 1) // 2) * dilation (cross-correlation, as in
    torch's `padding="same"`: an even scope reaches one position further forward). Context outside the grid contributes
    nothing. With a stride, query n is at context position n * stride. Both grids have the same origin and unit. A table
    of (2h - 1) x (2w - 1) entries is global for maps up to h x w; smaller maps use its middle.

    Args:
        table: the embeddings.
        query_grid: number of queries along each axis, row-major.
        context_grid: number of context positions along each axis; `query_grid` if None. Required with a stride.
        dilation: distance between neighbouring entries of the table, in positions; an int or one per axis.
        stride: distance between neighbouring queries, in context positions; an int or one per axis.
        kept: cache of tensors computed from the table (see `LambdaLayer.fuse`).

    Shape:
        table: `[*scope, (H,) K(, U)]`; U with intra-depth, H with multi-head

    Example:
        >>> import torch
        >>> from lambdanets.ops import Relative, lambda_op
        >>> queries, keys, values = torch.randn(2, 20, 4, 16), torch.randn(2, 80, 16), torch.randn(2, 80, 32)
        >>> positions = Relative(torch.randn(3, 7, 16), (4, 5), context_grid=(8, 10), stride=2)
        >>> positions.scope
        (3, 7)
        >>> lambda_op(queries, keys, values, positions).shape
        torch.Size([2, 20, 4, 32])
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
                    f"stride {stride} needs a context_grid, because the queries are on a coarser grid than the "
                    f"context: pass context_grid=(...)"
                )
            context_grid = query_grid
        context_grid = per_axis(context_grid, dims, "context_grid")
        if not torch.compiler.is_compiling():  # sizes may be symbols, which are positive
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
        """The number of axes."""
        return len(self.query_grid)

    @property
    def scope(self) -> tuple[int, ...]:
        """The number of entries along each axis."""
        return tuple(self.table.shape[: self.dims])

    def axis(self, i: int) -> "Axis":
        """Return the geometry of axis i."""
        return Axis(
            queries=self.query_grid[i],
            context=self.context_grid[i],
            scope=self.table.shape[i],
            first=-((self.table.shape[i] - 1) // 2) * self.dilation[i],
            dilation=self.dilation[i],
            stride=self.stride[i],
        )

    def axes(self) -> list["Axis"]:
        """Return the geometry of every axis."""
        return [self.axis(i) for i in range(self.dims)]

    def clipped(self) -> tuple[Tensor, list["Axis"]]:
        """Return the part of the table that some query reaches on these grids, and its axes.

        On a 7x7 map only 13x13 entries of a 23x23 table are used.
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
        """Return the embeddings with zeros where m comes after n in row-major order (strict: not before n).

        m <= n in row-major order if and only if the first non-zero coordinate of m - n is negative, or all are zero.
        This depends on the relative position only, so the table can be masked.
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
        """Return the same positions with another table."""
        return Relative(table, self.query_grid, self.context_grid, self.dilation, self.stride, kept=kept)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, which depends on the table and the grids; cached if there is a cache."""
        if self.kept is None:
            return make()
        placed = (self.query_grid, self.context_grid, self.dilation, self.stride)
        return self.kept.once((name, self.table.dtype, *placed), make)


Positions = Dense | Relative | Relation


@dataclass(frozen=True)
class Axis:
    """One axis of a relative table: entry i is the embedding of m - n * stride = first + i * dilation.

    Attributes:
        queries: number of queries.
        context: number of context positions.
        scope: number of entries.
        first: relative position of the first entry.
        dilation: distance between neighbouring entries.
        stride: distance between neighbouring queries.
    """

    queries: int
    context: int
    scope: int
    first: int
    dilation: int
    stride: int

    @property
    def last(self) -> int:
        """The relative position of the last entry."""
        return self.first + (self.scope - 1) * self.dilation

    @property
    def unwrapped_length(self) -> int:
        """The length of the shortest circle on which no query reaches a context position by wrapping around."""
        return max(self.context - self.first, (self.queries - 1) * self.stride + self.last + 1)


def per_axis(value: int | Sequence[int], dims: int, name: str) -> tuple[int, ...]:
    """Return one size for each axis, given one size or one for each axis."""
    sizes = tuple(value) if isinstance(value, Sequence) else (value,) * dims
    if len(sizes) != dims:
        raise ValueError(f"{name} must be one size or {dims} sizes (one per axis), got {value}")
    return sizes


def wrap(table: Tensor, axes: list[Axis], lengths: list[int]) -> Tensor:
    """Wrap the axes of a table to circles: the embedding of relative position p gets the index p modulo the length."""
    for dim, (axis, length) in enumerate(zip(axes, lengths, strict=True)):
        sizes = list(table.shape)
        sizes[dim] = length
        index = (axis.first + torch.arange(axis.scope, device=table.device) * axis.dilation) % length
        table = table.new_zeros(sizes).index_copy(dim, index, table)
    return table


def toeplitz(table: Tensor, dim: int, axis: Axis, queries: int, start: int, context: int) -> Tensor:
    """Expand one axis of a table: out[..., n, ...] gets a new last axis, the context positions m.

    The context positions are start .. start + context - 1 relative to the first of `queries` queries, in REVERSE order:
    index j is m = start + context - 1 - j. So the result is a view of the small table (flip, pad, `unfold`), whose
    gradient is one fold; callers flip the values instead.
    """
    if axis.dilation > 1:  # write the dilated table as a dense one, with zeros between the entries
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
    """Expand a relative table [*scope, K, U] to all pairs, with the context in reverse order: [*N, K, U, *M].

    The axes are expanded from the last to the first; each result is laid out so that the next step copies contiguous
    runs of context.
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
    """Look up the embedding of every pair in a table of relations, zeros for pairs without a relation: [N, M, ...]."""
    table, index = positions.table, positions.index
    known = (index >= 0).view(*index.shape, *[1] * (table.ndim - 1))
    rows = table.index_select(0, index.clamp(min=0).flatten().long())
    return rows.view(*index.shape, *table.shape[1:]) * known

"""The checked inputs of a lambda operation, in the single form that all implementations receive.

Letters: B batch, N queries, M context positions, H heads, K key depth, V value depth, U intra-depth, R relations.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from lambdanets.ops.positions import Dense, Kept, Positions, Relation, Relative

KEY_NORMS = ("softmax", "l2", None)
CAUSAL = (False, True, "strict")


@dataclass(frozen=True, eq=False)
class Options:
    """The keyword arguments of `lambda_op`."""

    content: bool = True
    key_norm: str | None = "softmax"
    query_softmax: bool = False
    multi_head: bool = False
    mask: Tensor | None = None
    context_mask: Tensor | None = None
    causal: bool | str = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        if self.key_norm not in KEY_NORMS:
            raise ValueError(f"unknown key_norm {self.key_norm!r}; choose one of 'softmax', 'l2', None")
        if self.causal not in CAUSAL:
            raise ValueError(f"unknown causal {self.causal!r}; choose one of False, True (m <= n), 'strict' (m < n)")


@dataclass(frozen=True, eq=False)
class Problem:
    """A multi-query lambda operation with an explicit intra-depth axis (U = 1 if there is none).

    The embeddings in `positions` are [..., K, U]. A multi-head operation becomes H problems with one head each.
    """

    queries_BNHK: Tensor
    keys_BMKU: Tensor | None  # raw; None for no content lambda
    values_BMVU: Tensor
    positions: Positions | None
    key_norm: str | None
    mask_NM: Tensor | None
    context_mask_BM: Tensor | None
    causal: bool | str

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """B, N, M, H, K, V, U."""
        B, N, H, K = self.queries_BNHK.shape
        _, M, V, U = self.values_BMVU.shape
        return B, N, M, H, K, V, U

    @property
    def device(self) -> torch.device:
        return self.queries_BNHK.device

    @property
    def strict(self) -> bool:
        return self.causal == "strict"

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """The differentiable inputs: queries, keys, values, embeddings."""
        return self.queries_BNHK, self.keys_BMKU, self.values_BMVU, embeddings_of(self.positions)

    def to(self, dtype: torch.dtype) -> "Problem":
        """Return the problem in another dtype."""
        queries, keys, values, embeddings = (None if t is None else t.to(dtype) for t in self.tensors)
        assert queries is not None
        assert values is not None
        positions = with_embeddings(self.positions, embeddings, kept_of(self.positions))
        return replace(self, queries_BNHK=queries, keys_BMKU=keys, values_BMVU=values, positions=positions)

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in self.tensors)

    @property
    def may_overwrite(self) -> bool:
        """Whether buffers may be reused with `out=`: no autograd, forward-mode AD or torch.func transform is active."""
        functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
        transformed = functorch.peek_interpreter_stack() is not None  # torch.func: vmap, jvp, grad
        return not self.needs_grad and not transformed and torch.autograd.forward_ad._current_level < 0


def embeddings_of(positions: Positions | None) -> Tensor | None:
    """Return the tensor of embeddings in `positions`."""
    if positions is None:
        return None
    return positions.embeddings if isinstance(positions, Dense) else positions.table


def kept_of(positions: Positions | None) -> Kept | None:
    return positions.kept if isinstance(positions, Relative) else None


def with_embeddings(
    positions: Positions | None, embeddings: Tensor | None, kept: Kept | None = None
) -> Positions | None:
    """Return the positions with other embeddings; `kept` is a cache for the same values."""
    if positions is None or embeddings is None:
        return positions
    if isinstance(positions, Dense):
        return Dense(embeddings)
    if isinstance(positions, Relation):
        return Relation(embeddings, positions.index)
    return positions.with_table(embeddings, kept)


def check(queries: Tensor, keys: Tensor | None, values: Tensor, positions: Positions | None, options: Options) -> None:
    """Raise TypeError or ValueError for inputs of wrong types, or whose shapes and options do not match."""
    multi_head = options.multi_head
    masks = (("mask", options.mask), ("context_mask", options.context_mask))
    for name, tensor in (("queries", queries), ("keys", keys), ("values", values), *masks):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}: use torch.as_tensor({name})")
    if positions is not None and not isinstance(positions, Dense | Relative | Relation):
        raise TypeError(f"positions must be Dense, Relative or Relation embeddings, got {type(positions).__name__}")
    embeddings = embeddings_of(positions)
    if embeddings is not None and not isinstance(embeddings, Tensor):
        raise TypeError(
            f"embeddings of {type(positions).__name__} must be a torch.Tensor, got {type(embeddings).__name__}: "
            f"use torch.as_tensor(...)"
        )
    if queries.ndim != 4:
        raise ValueError(f"queries must be [B, N, H, K], got {list(queries.shape)}")
    for name, tensor in (("queries", queries), ("keys", keys), ("values", values)):
        if tensor is not None and not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating-point, got {tensor.dtype}; use {name}.float()")
    B, N, H, K = queries.shape
    heads = [H] if multi_head else []
    plain = 4 if multi_head else 3
    if values.ndim not in (plain, plain + 1):
        raise ValueError(
            f"values must be [B, M, {'H, ' if multi_head else ''}V] or with a last axis U, got {list(values.shape)}"
        )
    M, U = values.shape[1], [values.shape[-1]] if values.ndim == plain + 1 else []
    if values.shape[0] != B or (multi_head and values.shape[2] != H):
        raise ValueError(
            f"values {list(values.shape)} must have the same B{' and H' if multi_head else ''} as queries "
            f"{list(queries.shape)}"
        )
    if not torch.compiler.is_compiling() and (N == 0 or M == 0):
        raise ValueError(f"at least one query and one context position are required, got N={N} and M={M}")
    if not options.content and positions is None:
        raise ValueError("content=False without positions leaves no interaction: use content=True or pass positions")
    if options.content:
        if keys is None:
            raise ValueError("content=True needs keys: pass keys, or content=False for position interactions only")
        wanted = [B, M, *heads, K, *U]
        if list(keys.shape) != wanted:
            raise ValueError(f"keys must be {wanted} to match queries and values, got {list(keys.shape)}")
    check_positions(positions, N, M, [*heads, K, *U])
    if options.causal and not isinstance(positions, Relative) and N != M:
        raise ValueError(f"causal={options.causal!r} needs a query for every context position, got N={N} and M={M}")
    check_mask(options.mask, [N, M], "mask", "one entry for each query and context position, shared by the batch")
    check_mask(options.context_mask, [B, M], "context_mask", "one entry for each example and context position")


def check_positions(positions: Positions | None, N: int, M: int, depth: list[int]) -> None:
    """Raise an error if positions do not match N queries, M context positions and the depth [(H,) K(, U)]."""
    if positions is None:
        return
    if not isinstance(positions, (Dense, Relative, Relation)):
        raise TypeError(f"positions must be None, Dense, Relative or Relation, got {type(positions).__name__}")
    if isinstance(positions, Dense):
        wanted = [N, M, *depth]
        if list(positions.embeddings.shape) != wanted:
            raise ValueError(f"Dense embeddings must be {wanted}, got {list(positions.embeddings.shape)}")
        return
    leading = positions.dims if isinstance(positions, Relative) else 1
    if list(positions.table.shape[leading:]) != depth:
        raise ValueError(
            f"each embedding in the table must be {depth} to match queries and values, "
            f"got {list(positions.table.shape[leading:])} (table {list(positions.table.shape)})"
        )
    if isinstance(positions, Relation):
        index = positions.index
        if list(index.shape) != [N, M] or index.is_floating_point() or index.dtype == torch.bool:
            raise ValueError(f"Relation index must be integers [{N}, {M}], got {index.dtype} {list(index.shape)}")
        if index.device.type == "cpu" and not torch.compiler.is_compiling() and index.numel():  # no sync with a GPU
            lowest, highest = map(int, index.aminmax())
            if lowest < -1 or highest >= len(positions.table):
                raise ValueError(
                    f"Relation index must be from 0 to {len(positions.table) - 1} for this table, or -1 for no "
                    f"relation, got {lowest if lowest < -1 else highest}"
                )
        return
    for name, grid, count in (("query_grid", positions.query_grid, N), ("context_grid", positions.context_grid, M)):
        if prod(grid) != count:
            raise ValueError(f"{name} {tuple(grid)} has {prod(grid)} positions, but the input has {count}")


def check_mask(mask: Tensor | None, shape: list[int], name: str, meaning: str) -> None:
    """Raise an error unless the mask is boolean and has the given shape."""
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} must be boolean (True: may be used), got {mask.dtype}; use {name}.bool()")
    if list(mask.shape) != shape:
        raise ValueError(f"{name} must be {shape} ({meaning}), got {list(mask.shape)}")


def problems(
    queries: Tensor, keys: Tensor | None, values: Tensor, positions: Positions | None, options: Options
) -> list[Problem]:
    """Return the operation as multi-query problems: one, or with `multi_head` one per head."""
    multi_head, context_mask = options.multi_head, options.context_mask
    embeddings = embeddings_of(positions)
    intra_depth = values.ndim == (5 if multi_head else 4)
    if not options.content:
        keys = None
    if not intra_depth:
        values = values.unsqueeze(-1)
        keys = None if keys is None else keys.unsqueeze(-1)
        embeddings = None if embeddings is None else embeddings.unsqueeze(-1)
    if context_mask is not None:  # padding may contain NaN, which must not reach a sum
        padding = ~context_mask.view(*context_mask.shape, *[1] * (values.ndim - 2))
        values = values.masked_fill(padding, 0)
        keys = None if keys is None else keys.masked_fill(padding, 0)

    def problem(queries: Tensor, keys: Tensor | None, values: Tensor, embeddings: Tensor | None) -> Problem:
        placed = with_embeddings(positions, embeddings, None if multi_head else kept_of(positions))
        return Problem(queries, keys, values, placed, options.key_norm, options.mask, context_mask, options.causal)

    if not multi_head:
        return [problem(queries, keys, values, embeddings)]
    return [
        problem(
            queries[:, :, head : head + 1],
            None if keys is None else keys[:, :, head],
            values[:, :, head],
            None if embeddings is None else embeddings.select(-3, head),
        )
        for head in range(queries.shape[2])
    ]

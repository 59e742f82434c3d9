"""Random lambda operations, each determined by (seed, number): drawn as plain data, then built as tensors.

Letters: B batch, N queries, M context positions, H heads, K key depth, V value depth, U intra-depth, R relations.
"""

from dataclasses import dataclass, fields, replace
from math import prod
from random import Random

import torch
from torch import Tensor

from lambdanets.ops import Dense, Positions, Relation, Relative
from lambdanets.ops.problem import KEY_NORMS, embeddings_of, with_embeddings

DTYPES = ("float64", "float32", "bfloat16", "float16")
SIDES = {1: 40, 2: 9, 3: 4}  # the longest side by number of axes


@dataclass(frozen=True)
class Compiled:
    """The sizes for which kernels are compiled. All other sizes can be drawn freely without recompiling.

    Sides of maps are from `low` to `high`. They determine which kernels run, and so does `scope` (maximum; 0 for the
    whole map).
    """

    dtype: str
    heads: int
    key_depth: int
    value_depth: int
    intra_depth: int
    dims: int
    low: int
    high: int
    scope: int
    content: bool = True
    wide_embeddings: bool = False


# Every dtype and every mode of the kernels; few entries, so that few kernels compile
KERNEL_GRID = (
    Compiled("bfloat16", 4, 16, 32, 1, 2, 17, 24, 15, wide_embeddings=True),  # larger maps: windows
    Compiled("bfloat16", 2, 8, 24, 2, 2, 1, 4, 9, content=False),  # also strides and dense embeddings
    Compiled("float16", 4, 16, 16, 1, 2, 12, 14, 29),
    Compiled("bfloat16", 4, 16, 16, 1, 2, 17, 19, 0, content=False),  # larger maps, whole scope
    Compiled("float32", 2, 16, 16, 1, 1, 70, 250, 40),
)


@dataclass(frozen=True)
class SelftestCase:
    """The description of one lambda operation."""

    seed: int
    number: int
    kernel_sizes: bool  # depths and dtype from KERNEL_GRID
    dtype: str
    batch: int
    heads: int
    key_depth: int
    value_depth: int
    intra_depth: int  # 0 for tensors without this axis
    multi_head: bool = False
    positions: str = "none"  # none, dense, relation, relative
    query_grid: tuple[int, ...] = ()
    context_grid: tuple[int, ...] = ()
    scope: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    content: bool = True
    key_norm: str | None = "softmax"
    query_softmax: bool = False
    mask: bool = False
    context_mask: bool = False
    causal: bool | str = False
    sliced: bool = False  # inputs are slices of larger tensors
    wide_embeddings: bool = False  # float32 embeddings with half-precision activations, as under autocast
    frozen: str = ""  # an input that requires no gradient
    small_workspace: bool = False  # tiny chunks
    poisoned: bool = False  # new memory is filled with NaN, and algorithms are deterministic

    @property
    def masked(self) -> bool:
        return self.mask or self.context_mask or bool(self.causal)

    def words(self) -> str:
        """Return the settings of the case that differ from the defaults, on one line."""
        shown = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("seed", "number") and value != field.default and value != ():
                shown.append(f"{field.name}={'x'.join(map(str, value)) if isinstance(value, tuple) else value}")
        return " ".join(shown)


def draw(seed: int, number: int) -> SelftestCase:
    """Draw case `number` of `seed`, independently of the machine and of other cases."""
    rng = Random(f"lambdanets {seed} {number}")

    def chance(probability: float) -> bool:
        return rng.random() < probability

    kernel_sizes = number % 2 == 0
    case = SelftestCase(
        seed,
        number,
        kernel_sizes,
        dtype=rng.choice(DTYPES),
        batch=rng.choice((1, 1, 2, 3)),
        heads=rng.choice((1, 2, 3, 4)),
        key_depth=rng.randint(1, 9),
        value_depth=rng.randint(1, 9),
        intra_depth=rng.choice((0, 0, 0, 1, 2, 3)),
        multi_head=chance(0.2),
        content=chance(0.85),
        key_norm=rng.choice(("softmax", *KEY_NORMS)),
        query_softmax=chance(0.15),
        mask=chance(0.12),
        context_mask=chance(0.2),
        causal=rng.choice((False, False, False, False, True, "strict")),
        sliced=chance(0.3),
        frozen=rng.choice(("", "", "", "queries", "keys", "values", "embeddings")),
        small_workspace=chance(0.4),
        poisoned=chance(0.5),
    )
    if not kernel_sizes:
        case = replace(case, wide_embeddings=case.dtype in ("bfloat16", "float16") and chance(0.3))
        case = place(case, rng)
    else:  # mostly cases that kernels can run, with larger batches
        sizes = rng.choice(KERNEL_GRID)
        named = ("dtype", "heads", "key_depth", "value_depth", "content", "wide_embeddings")
        case = replace(
            case,
            **{name: getattr(sizes, name) for name in named},
            intra_depth=sizes.intra_depth if sizes.intra_depth > 1 else rng.choice((0, 1)),
            multi_head=False,
            sliced=False,  # other alignments would recompile
            batch=rng.randint(1, 5),
            mask=case.mask and chance(0.1),
            context_mask=case.context_mask and chance(0.3),
            causal=case.causal if chance(0.1) else False,
            frozen=rng.choice(("", "", "queries", "embeddings")),
        )
        case = place_for_kernels(case, sizes, rng)
    if case.positions == "none":
        case = replace(case, content=True)
    if case.frozen == "keys" and not case.content:
        case = replace(case, frozen="")
    return case


def place_for_kernels(case: SelftestCase, sizes: Compiled, rng: Random) -> SelftestCase:
    """Return the case with positions for kernels: relative with one stride, rarely with a dilation, and some dense."""
    query_grid = tuple(rng.randint(sizes.low, sizes.high) for _ in range(sizes.dims))
    if sizes.high <= 4 and rng.random() < 0.2:
        M = prod(query_grid) if case.causal else rng.randint(1, sizes.high**sizes.dims)
        return replace(case, positions="dense", query_grid=(prod(query_grid),), context_grid=(M,))
    context_grid, stride = query_grid, 1
    kind = rng.choice(("same", "same", "strided", "other"))
    if kind == "strided" and sizes.high <= 4:
        stride = rng.randint(1, 3)
        query_grid = tuple(-(-side // stride) for side in context_grid)
    elif kind == "other" and not case.causal:
        context_grid = tuple(rng.randint(sizes.low, sizes.high) for _ in range(sizes.dims))
    whole = tuple(2 * max(q, m) - 1 for q, m in zip(query_grid, context_grid, strict=True))
    return replace(
        case,
        positions="relative",
        query_grid=query_grid,
        context_grid=context_grid,
        scope=tuple(rng.randint(1, sizes.scope) for _ in whole) if sizes.scope else whole,
        dilation=(2 if rng.random() < 0.03 else 1,) * sizes.dims,
        stride=(stride,) * sizes.dims,
    )


def place(case: SelftestCase, rng: Random) -> SelftestCase:
    """Return the case with grids and positions."""
    positions = rng.choice(("relative", "relative", "relative", "relative", "dense", "relation", "none"))
    dims = rng.choice((1, 2, 2, 2, 3))
    longest = SIDES[dims]
    query_grid = tuple(rng.randint(1, longest) for _ in range(dims))
    if positions != "relative":
        M = prod(query_grid) if case.causal or rng.random() < 0.5 else rng.randint(1, SIDES[1])
        return replace(case, positions=positions, query_grid=(prod(query_grid),), context_grid=(M,))
    stride, dilation, context_grid = (1,) * dims, (1,) * dims, query_grid
    kind = rng.choice(("same", "same", "strided", "other"))
    if kind == "strided":  # as in a layer with a stride
        stride = tuple(rng.randint(1, 3) for _ in range(dims))
        context_grid = query_grid
        query_grid = tuple(-(-side // step) for side, step in zip(context_grid, stride, strict=True))
    elif kind == "other":
        context_grid = tuple(rng.randint(1, longest) for _ in range(dims))
    if rng.random() < 0.3:
        dilation = tuple(rng.randint(1, 3) for _ in range(dims))
    whole = tuple(2 * max(q, m) - 1 for q, m in zip(query_grid, context_grid, strict=True))
    scope = whole if rng.random() < 0.25 else tuple(rng.randint(1, max(3, size + 2)) for size in whole)
    return replace(
        case,
        positions=positions,
        query_grid=query_grid,
        context_grid=context_grid,
        scope=scope,
        dilation=dilation,
        stride=stride,
    )


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of an operation. `tensors` has the differentiable inputs by name, None for those that are absent."""

    tensors: dict[str, Tensor | None]
    positions: Positions | None
    mask: Tensor | None
    context_mask: Tensor | None
    gradient: Tensor  # of the output, [B, N, H, V]

    def leaves(self, dtype: torch.dtype | None, frozen: str) -> dict[str, Tensor | None]:
        """Return copies of the tensors that require gradients, in `dtype`, or in their own dtype if it is None."""
        found: dict[str, Tensor | None] = {}
        for name, tensor in self.tensors.items():
            if tensor is not None:
                tensor = (tensor if dtype is None else tensor.to(dtype)).detach()
                tensor = tensor.requires_grad_(name != frozen)
            found[name] = tensor
        return found

    def placed(self, embeddings: Tensor | None) -> Positions | None:
        """Return the positions with other embeddings."""
        return with_embeddings(self.positions, embeddings)


def build(case: SelftestCase, device: torch.device) -> Inputs:
    """Build the tensors of a case. They are drawn on the CPU, so that all devices get the same numbers."""
    generator = torch.Generator().manual_seed(case.seed * 1_000_003 + case.number)
    dtype = getattr(torch, case.dtype)
    B, H, K, V = case.batch, case.heads, case.key_depth, case.value_depth
    N, M = prod(case.query_grid), prod(case.context_grid)
    U = [case.intra_depth] if case.intra_depth else []
    heads = [H] if case.multi_head else []

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        if case.sliced:
            wide = torch.randn(*shape[:-1], shape[-1] + 3, generator=generator, dtype=torch.float64)
            return wide.to(dtype).to(device)[..., 2:-1]
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    def allowed(*shape: int) -> Tensor:
        return (torch.rand(*shape, generator=generator) < 0.7).to(device)

    queries, keys, values = tensor(B, N, H, K), tensor(B, M, *heads, K, *U), tensor(B, M, *heads, V, *U)
    mask = allowed(N, M) if case.mask else None
    context_mask = allowed(B, M) if case.context_mask else None
    if context_mask is not None:  # padding may contain anything
        keys[~context_mask], values[~context_mask] = torch.nan, torch.inf
    wide = torch.float32 if case.wide_embeddings else dtype
    depth = [*heads, K, *U]
    positions: Positions | None = None
    if case.positions == "dense":
        positions = Dense(tensor(N, M, *depth, dtype=wide))
    elif case.positions == "relation":
        index = torch.randint(-1, 5, (N, M), generator=generator).to(device)
        positions = Relation(tensor(5, *depth, dtype=wide), index)
    elif case.positions == "relative":
        table = tensor(*case.scope, *depth, dtype=wide)
        positions = Relative(table, case.query_grid, case.context_grid, case.dilation, case.stride)
    tensors = {
        "queries": queries,
        "keys": keys if case.content else None,
        "values": values,
        "embeddings": embeddings_of(positions),
    }
    return Inputs(tensors, positions, mask, context_mask, tensor(B, N, H, V))

"""Position output by matrix products with expanded embeddings, for any kind of positions and any mask.

Letters: B batch, N queries, M context positions, H heads, K key depth, V value depth, U intra-depth, C = U M,
X = B H, Y = N H.

Without a softmax over the context the two orders of the product are equivalent, and the cheaper one runs:
    depth first    (q . e_nm) v_m      b n m h (k + v) multiply-adds, intermediate maps    [n, B H, C]
    context first  q (e_nm v_m^T)      b n m k v       multiply-adds, intermediate lambdas [n, K, B V]
If the context is not longer than the value depth, transposing the maps of an example is cheaper than transposing its
output; the content part is then added to the maps, (q . e_nm + q . key_m) v_m, at almost no cost.

Memory: queries are processed in chunks, so that the expanded embeddings [n, C, K] and the intermediate have at most
WORKSPACE elements (or those of a single row of queries). The backward pass computes a chunk again, so that a training
step needs O(inputs + WORKSPACE) memory and nothing of size n m or b n k v. A relative table is expanded only for the
context rows that a chunk can reach.
"""

import torch
from torch import Tensor

from lambdanets.ops.content import normalised_keys
from lambdanets.ops.positions import Axis, Dense, Relation, Relative, expand_backwards, gather_relations
from lambdanets.ops.problem import Problem
from lambdanets.ops.recompute import recomputed
from lambdanets.ops.reference import causal_mask

WORKSPACE = 2**22  # elements: 16 MiB in float32
PART = 2**18  # elements of the maps per part without gradients: small enough for the cache


def why_not(problem: Problem) -> str | None:
    """Return None: this backend can always run."""
    return None


def position_output(problem: Problem) -> Tensor:
    """Return the position output, [B, N, H, V]."""
    B, N, M, H, K, V, U = problem.sizes
    values_BCV = depth_in_context(problem.values_BMVU)
    depth_first = contracts_depth_first(H, K, V)
    intermediate = B * H * M * U if depth_first else B * K * V
    chunk = max(1, WORKSPACE // max(1, M * U * K + intermediate))
    if chunk >= N:
        return expanded_output(problem, problem.queries_BNHK, values_BCV, depth_first)
    if isinstance(problem.positions, Relative) and problem.mask_NM is None:
        return by_rows(problem, problem.positions, depth_first, chunk)
    outputs = []
    for start in range(0, N, chunk):
        part = queries_part(problem, start, min(N, start + chunk))
        outputs.append(recomputed(expanded_output, part, part.queries_BNHK, values_BCV, depth_first))
    return torch.cat(outputs, dim=1)


def whole_output(problem: Problem, dtype: torch.dtype) -> Tensor | None:
    """Return the sum of position and content output by the same maps, [B, N, H, V], or None where not faster."""
    B, N, M, H, K, V, U = problem.sizes
    if problem.keys_BMKU is None or problem.mask_NM is not None or problem.causal or torch.compiler.is_exporting():
        return None
    if M * U > V or not contracts_depth_first(H, K, V) or N * (M * U * K + B * H * M * U) > WORKSPACE:
        return None
    problem = problem.to(dtype)
    values_BCV = depth_in_context(problem.values_BMVU)
    return expanded_output(problem, problem.queries_BNHK, values_BCV, True, normalised_keys(problem))


def work(problem: Problem) -> tuple[float, float]:
    """Return the numbers of multiply-adds and of intermediate elements for the cost model."""
    B, N, M, H, K, V, U = problem.sizes
    pairs = N * M * U
    if isinstance(problem.positions, Relative):  # rows out of reach are never expanded
        _, axes = problem.positions.clipped()
        pairs = pairs * min(1.0, (axes[0].last - axes[0].first + 1 + axes[0].context // 8) / axes[0].context)
    if contracts_depth_first(H, K, V):
        return B * pairs * H * (K + V), pairs * (B * H + K)
    return B * pairs * K * V, B * N * K * V * 2 + pairs * K


def contracts_depth_first(H: int, K: int, V: int) -> bool:
    """Return whether "depth first" needs fewer multiply-adds for each (query, context) pair."""
    return H * (K + V) <= K * V + H


def expanded_output(
    problem: Problem, queries_BNHK: Tensor, values_BCV: Tensor, depth_first: bool, keys_BMKU: Tensor | None = None
) -> Tensor:
    """Return the output of one chunk from expanded, masked embeddings; with normalised keys including the content."""
    positions, mask_NM = problem.positions, problem.mask_NM
    N, M = queries_BNHK.shape[1], problem.values_BMVU.shape[1]
    if isinstance(positions, Relative):
        if problem.causal:
            positions = positions.causal(problem.strict)
        embeddings = positions.once("gemm", lambda: expand_backwards(*positions.clipped()))
        return backwards_output(
            queries_BNHK, problem.values_BMVU, embeddings, depth_first, mask_NM, keys_BMKU, problem.may_overwrite
        )
    if problem.causal:
        causal_NM = causal_mask(N, M, positions, problem.strict, problem.device)
        mask_NM = causal_NM if mask_NM is None else mask_NM & causal_NM
    assert isinstance(positions, (Dense, Relation))
    embeddings_NMKU = positions.embeddings if isinstance(positions, Dense) else gather_relations(positions)
    if mask_NM is not None:
        embeddings_NMKU = embeddings_NMKU * mask_NM[:, :, None, None]
    embeddings_NKC = embeddings_NMKU.permute(0, 2, 3, 1).flatten(2)
    keys_BCK = None if keys_BMKU is None else depth_in_context(keys_BMKU)
    return product(queries_BNHK, embeddings_NKC, values_BCV, depth_first, keys_BCK, problem.may_overwrite)


def row_output(queries_BNHK: Tensor, values_BMVU: Tensor, table: Tensor, axes: list[Axis], depth_first: bool) -> Tensor:
    """Return the output of `expanded_output` for a part of a relative table."""
    return backwards_output(queries_BNHK, values_BMVU, expand_backwards(table, axes), depth_first)


def backwards_output(
    queries_BNHK: Tensor,
    values_BMVU: Tensor,
    embeddings: Tensor,
    depth_first: bool,
    mask_NM: Tensor | None = None,
    keys_BMKU: Tensor | None = None,
    may_overwrite: bool = False,
) -> Tensor:
    """Return the output for embeddings [*N, K, U, *M] with the context in reverse order along every axis."""
    _, N, _, K = queries_BNHK.shape
    embeddings = embeddings.view(N, K, -1, values_BMVU.shape[1])
    if mask_NM is not None:
        embeddings = embeddings * mask_NM.flip(1)[:, None, None]
    values_BCV = depth_in_context(values_BMVU.flip(1))
    keys_BCK = None if keys_BMKU is None else depth_in_context(keys_BMKU.flip(1))
    return product(queries_BNHK, embeddings.flatten(2), values_BCV, depth_first, keys_BCK, may_overwrite)


def depth_in_context(values_BMVU: Tensor) -> Tensor:
    """Merge intra-depth into the context: [B, (U M), V]. With expanded embeddings it is only a longer context."""
    return values_BMVU.permute(0, 3, 1, 2).flatten(1, 2)


def product(
    queries_BNHK: Tensor,
    embeddings_NKC: Tensor,
    values_BCV: Tensor,
    depth_first: bool,
    keys_BCK: Tensor | None = None,
    may_overwrite: bool = False,
) -> Tensor:
    """Compute the two matrix products in either order: [B, N, H, V]. Only `whole_output` passes keys."""
    B, N, H, K = queries_BNHK.shape
    _, C, V = values_BCV.shape
    if not depth_first:
        lambdas = embeddings_NKC.reshape(N * K, C) @ values_BCV.transpose(0, 1).reshape(C, B * V)
        lambdas_NBKV = lambdas.view(N, K, B, V).transpose(1, 2)
        return torch.matmul(queries_BNHK.transpose(0, 1), lambdas_NBKV).transpose(0, 1)
    queries_NXK = queries_BNHK.transpose(0, 1).reshape(N, B * H, K)
    if may_overwrite and keys_BCK is None and gains_by_parts(queries_BNHK):
        return product_in_parts(queries_NXK, embeddings_NKC, values_BCV, H)
    maps_NXC = torch.bmm(queries_NXK, embeddings_NKC)
    if keys_BCK is not None:
        maps_BYC = maps_NXC.view(N, B, H, C).transpose(0, 1).reshape(B, N * H, C)
        maps_BYC = torch.baddbmm(maps_BYC, queries_BNHK.reshape(B, N * H, K), keys_BCK.transpose(1, 2))
        return torch.bmm(maps_BYC, values_BCV).view(B, N, H, V)
    values_XCV = for_heads(values_BCV, H)
    return torch.bmm(maps_NXC.transpose(0, 1), values_XCV).view(B, H, N, V).transpose(1, 2)


def for_heads(values_BCV: Tensor, heads: int) -> Tensor:
    """Repeat the values for every head: [X, C, V]."""
    return values_BCV[:, None].expand(-1, heads, -1, -1).flatten(0, 1)


def gains_by_parts(tensor: Tensor) -> bool:
    """Return whether computing in parts is faster: on a CPU, because of its cache.

    On a GPU parts add launch overhead, and a loop would fix the length in an exported program.
    """
    return tensor.device.type == "cpu" and not torch.compiler.is_exporting()


def product_in_parts(queries_NXK: Tensor, embeddings_NKC: Tensor, values_BCV: Tensor, H: int) -> Tensor:
    """Compute "depth first" for a few queries at a time, reusing the memory of their maps."""
    N, X, _ = queries_NXK.shape
    B, C, V = values_BCV.shape
    values_XCV = for_heads(values_BCV, H)
    parts = -(-N * X * C // PART)
    size = -(-N // max(1, min(N, parts)))
    maps, found = values_BCV.new_empty(size, X, C), values_BCV.new_empty(X, size, V)
    result = values_BCV.new_empty(B, N, H, V)
    for first in range(0, N, size):
        rows = slice(first, min(first + size, N))
        count = rows.stop - rows.start
        if count < size:
            maps, found = maps[:count], values_BCV.new_empty(X, count, V)
        torch.bmm(queries_NXK[rows], embeddings_NKC[rows], out=maps)
        torch.bmm(maps.transpose(0, 1), values_XCV, out=found)
        result[:, rows] = found.view(B, H, count, V).transpose(1, 2)
    return result


def queries_part(problem: Problem, start: int, stop: int) -> Problem:
    """Return queries start..stop of a problem, with a relative table converted to relations by index."""
    positions, mask_NM = problem.positions, problem.mask_NM
    N, M = problem.queries_BNHK.shape[1], problem.values_BMVU.shape[1]
    if problem.causal:
        causal_NM = causal_mask(N, M, positions, problem.strict, problem.device)
        mask_NM = causal_NM if mask_NM is None else mask_NM & causal_NM
    if isinstance(positions, Relative):
        rows = torch.arange(start, stop, device=problem.device)
        positions = relation_rows(positions, rows)
    elif isinstance(positions, Relation):
        positions = Relation(positions.table, positions.index[start:stop])
    else:
        assert isinstance(positions, Dense)
        positions = Dense(positions.embeddings[start:stop])
    return Problem(
        queries_BNHK=problem.queries_BNHK[:, start:stop],
        keys_BMKU=None,
        values_BMVU=problem.values_BMVU,
        positions=positions,
        key_norm=problem.key_norm,
        mask_NM=None if mask_NM is None else mask_NM[start:stop],
        context_mask_BM=None,  # values are zero there
        causal=False,
    )


def relation_rows(positions: Relative, queries: Tensor) -> Relation:
    """Convert a relative table to relations by index for some queries."""
    entry = torch.zeros(len(queries), 1, dtype=torch.long, device=queries.device)
    known = torch.ones_like(entry, dtype=torch.bool)
    rest = queries
    coordinates: list[Tensor] = []
    for size in reversed(positions.query_grid):
        coordinates.insert(0, rest % size)
        rest = rest // size
    for coordinate, axis in zip(coordinates, positions.axes(), strict=True):
        context = torch.arange(axis.context, device=queries.device)
        relative = context[None] - coordinate[:, None] * axis.stride - axis.first  # [n, this axis]
        index = relative // axis.dilation
        inside = (relative % axis.dilation == 0) & (index >= 0) & (index < axis.scope)
        entry = (entry[:, :, None] * axis.scope + index.clamp(0, axis.scope - 1)[:, None]).flatten(1)
        known = (known[:, :, None] & inside[:, None]).flatten(1)
    return Relation(positions.table.flatten(0, positions.dims - 1), entry.masked_fill(~known, -1))


def by_rows(problem: Problem, positions: Relative, depth_first: bool, chunk: int) -> Tensor:
    """Return the position output by chunks of whole rows of queries, each with the context rows that it reaches."""
    if problem.causal:
        positions = positions.causal(problem.strict)
    table, axes = positions.clipped()
    B, _, _, H, _, V, _ = problem.sizes
    first, inner = axes[0], axes[1:]
    queries = problem.queries_BNHK.unflatten(1, (first.queries, -1))
    values = problem.values_BMVU.unflatten(1, (first.context, -1))
    rows = max(1, chunk // max(1, queries.shape[2]))
    outputs = []
    for start in range(0, first.queries, rows):
        stop = min(first.queries, start + rows)
        low = max(0, start * first.stride + first.first)
        high = min(first.context, (stop - 1) * first.stride + first.last + 1)
        if high <= low:  # no context in reach
            outputs.append(queries.new_zeros(B, (stop - start) * queries.shape[2], H, V))
            continue
        near = Axis(
            queries=stop - start,
            context=high - low,
            scope=first.scope,
            first=first.first + start * first.stride - low,  # positions counted from `low`
            dilation=first.dilation,
            stride=first.stride,
        )
        outputs.append(
            recomputed(
                row_output,
                queries[:, start:stop].flatten(1, 2),
                values[:, low:high].flatten(1, 2),
                table,
                [near, *inner],
                depth_first,
            )
        )
    return torch.cat(outputs, dim=1)

"""Records the inputs of every lambda layer for an image, and computes the interactions from them.

Letters: n some queries, N queries, M context positions, H heads, K key depth, V value depth, U intra-depth.

Without a softmax after it, a lambda layer is a sum over the context: its output for a query is

    sum_m (q . normalised key_m  +  q . embedding_nm) value_m

The two terms in brackets are the effective interactions: the weights of value m by content and by position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lambdanets.layers import LambdaLayer2d
from lambdanets.models.trace import evaluating
from lambdanets.ops.gemm import relation_rows
from lambdanets.ops.positions import gather_relations
from lambdanets.ops.reference import causal_mask, normalise, normalise_masked


@dataclass(frozen=True, eq=False)
class Captured:
    """One call of a layer on one image: queries, keys and values, with intra-depth and groups of heads written out."""

    name: str
    layer: LambdaLayer2d
    query_grid: tuple[int, int]
    context_grid: tuple[int, int]
    queries_NHK: Tensor
    keys_GMKU: Tensor | None  # before normalisation; G is 1, or the number of heads of a multi-head layer
    values_GMVU: Tensor
    output_NHV: Tensor  # before pooling
    allowed_NM: Tensor | None = None  # None without a mask

    @property
    def stage(self) -> str:
        """c2 to c5 in ResNets; in other networks the top-level module of the layer."""
        parts = self.name.split(".")
        stages = [part for part in parts if part.startswith("layer") and part[5:].isdigit()]
        return f"c{int(stages[0][5:]) + 1}" if stages else parts[0]

    def normalised_keys(self) -> Tensor | None:
        """Return the normalised keys [G, M, K, U] of a layer without a mask, where all queries share them."""
        if self.keys_GMKU is None:
            return None
        return normalise(self.keys_GMKU.transpose(0, 1)[None], self.layer.key_norm)[0].transpose(0, 1)

    def content(self, rows: Tensor) -> Tensor | None:
        """Return q . normalised key, [n, H, U, M], for the queries `rows`; None without a content part."""
        if self.keys_GMKU is None:
            return None
        queries, heads = self.queries_NHK[rows], self.layer.heads
        if self.allowed_NM is None:
            keys = self.normalised_keys()
            assert keys is not None
            return torch.einsum("nhk,hmku->nhum", queries, keys.expand(heads, -1, -1, -1))
        keys = normalise_masked(self.keys_GMKU.transpose(0, 1)[None], self.allowed_NM[None, rows], self.layer.key_norm)
        return torch.einsum("nhk,nmhku->nhum", queries, keys[0].expand(-1, -1, heads, -1, -1))

    def position(self, rows: Tensor) -> Tensor | None:
        """Return q . embedding, [n, H, U, M], for the queries `rows`; 0 beyond the scope, None without positions."""
        layer = self.layer
        if layer.positions is None:
            return None
        placed = layer.positions(self.query_grid, self.context_grid, layer.stride)
        embeddings = gather_relations(relation_rows(placed, rows)).to(self.queries_NHK.dtype)  # [n, M, (H,) K(, U)]
        embeddings = embeddings if layer.intra_depth > 1 else embeddings[..., None]
        embeddings = embeddings if layer.multi_head else embeddings[:, :, None]
        maps = torch.einsum("nhk,nmhku->nhum", self.queries_NHK[rows], embeddings.expand(-1, -1, layer.heads, -1, -1))
        return maps if self.allowed_NM is None else maps * self.allowed_NM[rows][:, None, None]

    def constant(self, rows: Tensor) -> Tensor | None:
        """Return what `position_bias` adds to every value channel, [n, H]; None without it."""
        bias = self.layer.position_bias
        return None if bias is None else (self.queries_NHK[rows] * bias.to(self.queries_NHK.dtype)).sum(-1)

    def apply(self, maps_nHUM: Tensor) -> Tensor:
        """Return the output for interactions, [n, H, V]."""
        values = self.values_GMVU.expand(self.layer.heads, -1, -1, -1)
        return torch.einsum("nhum,hmvu->nhv", maps_nHUM, values)

    def row_of(self, pixel: Sequence[int], image: Sequence[int]) -> int:
        """Return the index of the query whose cell contains a pixel of the image."""
        at = [min(int(p * side / size), side - 1) for p, size, side in zip(pixel, image, self.query_grid, strict=True)]
        return at[0] * self.query_grid[1] + at[1]


@torch.no_grad()
def capture(model: nn.Module, image: Tensor, layers: Sequence[str] = ()) -> list[Captured]:
    """Return every lambda layer that `model` calls on an image [C, height, width] (or a batch of one), in order.

    Args:
        layers: only layers whose name contains one of these words; all if empty.
    """
    image = image[None] if image.ndim == 3 else image
    if image.ndim != 4 or len(image) != 1:
        raise ValueError(f"image must be one image [channels, height, width], got the shape {list(image.shape)}")
    named = {name: module for name, module in model.named_modules() if isinstance(module, LambdaLayer2d)}
    if not named:
        raise ValueError(f"{type(model).__name__} has no LambdaLayer2d, so there are no interactions to show")
    wanted = {n: m for n, m in named.items() if not layers or any(word in n for word in layers)}
    if not wanted:
        raise ValueError(f"no lambda layer has {' or '.join(layers)} in its name; the layers are {', '.join(named)}")
    found: list[Captured] = []
    like = next(model.parameters())

    def record(
        name: str, layer: LambdaLayer2d, given: tuple[Any, ...], options: dict[str, Any], output: Tensor
    ) -> None:
        found.append(captured(name or "layer", layer, output, *given, **options))

    hooks = [m.register_forward_hook(partial(record, name), with_kwargs=True) for name, m in wanted.items()]
    try:
        with evaluating(model):
            model(image.to(like.device, like.dtype))
    finally:
        for hook in hooks:
            hook.remove()
    broken = [one.name for one in found if not one.output_NHV.isfinite().all()]
    if broken:
        raise ValueError(f"the output of {broken[0]} is not finite for this image, so its interactions cannot be shown")
    return found


def captured(
    name: str,
    layer: LambdaLayer2d,
    output: Tensor,
    x: Tensor,
    context: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    context_mask: Tensor | None = None,
) -> Captured:
    """Return the record of one call, `layer(x, context, mask=..., context_mask=...)`."""
    queries, keys, values, query_grid, context_grid = layer.project(x, context)
    if layer.downsample is not None:
        inside_BM = None if context_mask is None else context_mask.flatten(1)
        whole_BNHV = layer.interact(queries, keys, values, query_grid, context_grid, mask, inside_BM)
        output = whole_BNHV.flatten(2).mT
    queries_NHK = accumulated(queries[0])
    if layer.query_softmax:
        queries_NHK = queries_NHK.softmax(dim=-1)
    allowed = mask
    if layer.causal:
        placed = layer._place(query_grid, context_grid)
        before = causal_mask(queries.shape[1], values.shape[1], placed, layer.causal == "strict", x.device)
        allowed = before if allowed is None else allowed & before
    values_GMVU = grouped(values[0], layer)
    if context_mask is not None:
        inside = context_mask[0].flatten()
        allowed = (inside if allowed is None else allowed & inside).expand(queries.shape[1], -1)
        values_GMVU = values_GMVU.masked_fill(~inside[None, :, None, None], 0)
    return Captured(
        name,
        layer,
        (query_grid[0], query_grid[1]),
        (context_grid[0], context_grid[1]),
        queries_NHK,
        None if keys is None else grouped(keys[0], layer),
        values_GMVU,
        output[0].flatten(1).T.unflatten(-1, (layer.heads, layer.value_depth)),
        allowed,
    )


def grouped(tensor: Tensor, layer: LambdaLayer2d) -> Tensor:
    """Reshape [M, (H,) depth(, U)] to [G, M, depth, U]."""
    tensor = accumulated(tensor if layer.intra_depth > 1 else tensor[..., None])
    return (tensor if layer.multi_head else tensor[:, None]).transpose(0, 1)


def accumulated(tensor: Tensor) -> Tensor:
    """Convert half precision to float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))

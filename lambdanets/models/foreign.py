"""Conversion of weights between our lambda layer and those of other implementations.

Letters: K key depth, V value depth, H heads, U intra-depth, C channels.
Other implementations order channels as [U, K] and [U, V] where ours has [K, U] and [V, U]. Their position convolutions
have a bias, which is `position_bias` in our layer.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lambdanets.layers import LambdaLayer2d
from lambdanets.models.keys import COUNTER, State, check_names, load

NORM = ("weight", "bias", "running_mean", "running_var")
# Names in timm's ByobNet, the class of its lambda networks, and in our ResNet
BYOBNET = (
    (r"^stem\.conv1\.conv\.", "conv1.0."),
    (r"^stem\.conv1\.bn\.", "conv1.1."),
    (r"^stem\.conv2\.conv\.", "conv1.3."),
    (r"^stem\.conv2\.bn\.", "conv1.4."),
    (r"^stem\.conv3\.conv\.", "conv1.6."),
    (r"^stem\.conv3\.bn\.", "bn1."),
    (r"\.shortcut\.conv\.", ".downsample.0."),
    (r"\.shortcut\.bn\.", ".downsample.1."),
    (r"\.conv([123])_\w+\.conv\.", r".conv\1."),
    (r"\.conv([123])_\w+\.bn\.", r".bn\1."),
    (r"\.self_attn\.", ".conv2."),
    (r"\.post_attn\.", ".bn2."),
    (r"^head\.fc\.", "fc."),
)
BYOBNET_MARK = "stages.0.0.conv1_1x1.conv.weight"


@dataclass(frozen=True)
class LayerNames:
    """The names of parameters in another implementation's lambda layer.

    Attributes:
        what: the layer, for messages.
        projections: convolutions that compute queries, keys and values in this order: one or three.
        convolution: convolution of position lambdas, [K, U, r, r] with an additional axis of size 1.
        axis: index of that axis.
        table: table of a global scope, [2h - 1, 2w - 1, K] or [2h - 1, 2w - 1, K, U]; None if there is none.
        table_ndim: number of axes of the table; 4 if it has the axis U even for U = 1.
    """

    what: str
    projections: tuple[str, ...]
    convolution: str
    axis: int
    table: str | None = None
    table_ndim: int = 3


LUCIDRAINS = LayerNames("lucidrains' LambdaLayer", ("to_q", "to_k", "to_v"), "pos_conv", 2, "rel_pos_emb", 4)
TIMM = LayerNames("timm's LambdaLayer", ("qkv",), "conv_lambda", 4, "pos_emb")
D_LI14 = LayerNames("d-li14's LambdaLayer", ("conv_qkv",), "lambda_conv", 2)


@dataclass(frozen=True)
class LayerWeights:
    """The weights of another implementation's layer for ours.

    Attributes:
        arguments: arguments of `LambdaLayer2d`.
        state: its state dict without the position bias.
        bias_K: position bias, which may be zero.
    """

    arguments: dict[str, Any]
    state: State
    bias_K: Tensor

    def with_bias(self) -> State:
        """Return the state dict with the position bias."""
        return {**self.state, "position_bias": self.bias_K}


def read_layer(names: LayerNames, state: Mapping[str, Tensor]) -> LayerWeights:
    """Convert the state dict of a layer; raises a ValueError if names are missing or shapes do not match."""
    is_global = names.table is not None and names.table in state
    check_names(state, expected_names(names, state, is_global), names.what)
    table = global_table(state[str(names.table)]) if is_global else local_table(state[f"{names.convolution}.weight"])
    K, U = table.shape[-2:]
    weight = torch.cat([state[f"{name}.weight"].flatten(1) for name in names.projections])
    rows = [len(state["norm_q.weight"]), K * U, len(state["norm_v.weight"])]
    if sum(rows) != len(weight) or rows[0] % K or rows[2] % U:
        raise ValueError(
            f"this is not {names.what}: with key depth {K} and intra-depth {U} the projections must have "
            f"{rows[0]} + {rows[1]} + {rows[2]} channels (queries, keys, values), got {len(weight)}"
        )
    H, V = rows[0] // K, rows[2] // U
    queries, keys, values = weight.split(rows)
    found = {
        "to_queries.weight": queries,
        "to_keys.weight": ours(keys, U),
        "to_values.weight": ours(values, U),
        **{f"norm_queries.{name}": state[f"norm_q.{name}"] for name in NORM},
        **{f"norm_values.{name}": ours(state[f"norm_v.{name}"], U) for name in NORM},
        "positions.table": table.squeeze(-1) if U == 1 else table,
    }
    for ours_name, theirs_name in (("norm_queries", "norm_q"), ("norm_values", "norm_v")):
        if f"{theirs_name}.{COUNTER}" in state:
            found[f"{ours_name}.{COUNTER}"] = state[f"{theirs_name}.{COUNTER}"]
    absorb_biases(found, state, names, rows, U)
    arguments = {
        "channels": weight.shape[1],
        "out_channels": H * V,
        "heads": H,
        "key_depth": K,
        "intra_depth": U,
        "scope": None if is_global else list(table.shape[:2]),
    }
    if is_global:
        arguments["input_size"] = [(size + 1) // 2 for size in table.shape[:2]]
    bias = table.new_zeros(K) if is_global else state[f"{names.convolution}.bias"]
    return LayerWeights(arguments, {name: tensor.contiguous() for name, tensor in found.items()}, bias)


def is_byobnet(state: Mapping[str, Tensor]) -> bool:
    return BYOBNET_MARK in state


def from_byobnet(state: Mapping[str, Tensor]) -> State:
    """Convert the state dict of one of timm's lambda networks to our names."""
    found: State = {}
    for name, tensor in state.items():
        new = re.sub(r"^stages\.(\d+)\.", lambda match: f"layer{int(match[1]) + 1}.", name)
        for pattern, ours_name in BYOBNET:
            new = re.sub(pattern, ours_name, new)
        found[new] = tensor
    for prefix in sorted({name.removesuffix("qkv.weight") for name in found if name.endswith(".qkv.weight")}):
        own = {name.removeprefix(prefix): found.pop(name) for name in list(found) if name.startswith(prefix)}
        try:
            layer = read_layer(TIMM, own)
        except ValueError as error:
            raise ValueError(f"{prefix.rstrip('.')}: {error}") from error
        local = "input_size" not in layer.arguments
        found.update({prefix + name: t for name, t in (layer.with_bias() if local else layer.state).items()})
    return found


def write_layer(names: LayerNames, layer: LambdaLayer2d, projection_bias: bool = False) -> State:
    """Return the state dict of the other implementation's layer with the weights of ours; inverts `read_layer`.

    Args:
        names: parameter names of the other implementation.
        layer: our layer.
        projection_bias: add projection biases, which are zero.
    """
    assert layer.to_keys is not None
    assert layer.positions is not None
    U, found = layer.intra_depth, layer.state_dict()
    parts = [
        found["to_queries.weight"],
        theirs(found["to_keys.weight"], U),
        theirs(found["to_values.weight"], U),
    ]
    if len(names.projections) == 1:
        parts = [torch.cat(parts)]
    state: State = {}
    for name, weight in zip(names.projections, parts, strict=True):
        state[f"{name}.weight"] = weight[:, :, None, None]
        if projection_bias:
            state[f"{name}.bias"] = weight.new_zeros(len(weight))
    for name in (*NORM, COUNTER):
        state[f"norm_q.{name}"] = found[f"norm_queries.{name}"]
        values = found[f"norm_values.{name}"]
        state[f"norm_v.{name}"] = values if name == COUNTER else theirs(values, U)
    table = found["positions.table"]
    table = table if U > 1 else table.unsqueeze(-1)  # [h, w, K, U]
    if layer.positions.is_global:
        state[str(names.table)] = table if names.table_ndim == 4 else table.squeeze(-1)
    else:
        state[f"{names.convolution}.weight"] = table.permute(2, 3, 0, 1).unsqueeze(names.axis)
        bias = found.get("position_bias")
        state[f"{names.convolution}.bias"] = table.new_zeros(layer.key_depth) if bias is None else bias
    return {name: tensor.contiguous() for name, tensor in state.items()}


def expected_names(names: LayerNames, state: Mapping[str, Tensor], is_global: bool) -> list[str]:
    expected = [f"{name}.weight" for name in names.projections]
    expected += [f"{name}.bias" for name in names.projections if f"{name}.bias" in state]
    expected += [f"{norm}.{name}" for norm in ("norm_q", "norm_v") for name in NORM]
    if is_global:
        return [*expected, str(names.table)]
    return [*expected, f"{names.convolution}.weight", f"{names.convolution}.bias"]


def ours(tensor: Tensor, U: int) -> Tensor:
    """Reorder channels [U * depth, ...] -> [depth * U, ...]."""
    return tensor.unflatten(0, (U, -1)).transpose(0, 1).flatten(0, 1)


def theirs(tensor: Tensor, U: int) -> Tensor:
    """Reorder channels [depth * U, ...] -> [U * depth, ...], the inverse of `ours`."""
    return tensor.unflatten(0, (-1, U)).transpose(0, 1).flatten(0, 1)


def global_table(table: Tensor) -> Tensor:
    if table.ndim not in (3, 4):
        raise ValueError(
            f"a table of position embeddings must be [height, width, K] or [height, width, K, U], got "
            f"{list(table.shape)}"
        )
    return table if table.ndim == 4 else table.unsqueeze(-1)


def local_table(weight: Tensor) -> Tensor:
    """Convert a convolution kernel [K, U, r, r] with an additional axis of size 1 to a table [r, r, K, U]."""
    if weight.ndim != 5 or 1 not in (weight.shape[2], weight.shape[4]):
        raise ValueError(f"a position convolution must be [K, U, 1, r, r] or [K, U, r, r, 1], got {list(weight.shape)}")
    axis = 2 if weight.shape[2] == 1 else 4
    return weight.squeeze(axis).permute(2, 3, 0, 1)


def absorb_biases(
    found: State, state: Mapping[str, Tensor], names: LayerNames, rows: list[int], intra_depth: int
) -> None:
    """Fold projection biases (timm's `qkv_bias`) into the running means of the norms of queries and values.

    Batch norm cancels the biases of queries and values, and the softmax over positions those of keys.
    """
    biases = [state.get(f"{name}.bias") for name in names.projections]
    present = [bias for bias in biases if bias is not None]
    if not present:
        return
    if len(present) != len(biases) or sum(map(len, present)) != sum(rows):
        raise ValueError(f"this is not {names.what}: projection biases must have {sum(rows)} channels")
    queries, _, values = torch.cat(present).split(rows)
    found["norm_queries.running_mean"] = found["norm_queries.running_mean"] - queries
    found["norm_values.running_mean"] = found["norm_values.running_mean"] - ours(values, intra_depth)


def build_layer(weights: LayerWeights, what: str) -> LambdaLayer2d:
    """Build our layer with these weights, and with a position bias if it is not zero."""
    has_bias = bool(weights.bias_K.any())
    dtype = weights.bias_K.dtype
    layer = LambdaLayer2d(**weights.arguments, position_bias=has_bias, dtype=dtype)
    load(layer, weights.with_bias() if has_bias else weights.state, what)
    return layer

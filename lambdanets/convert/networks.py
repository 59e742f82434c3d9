"""Conversion of networks of other implementations, recognised by the names and shapes of their weights."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from lambdanets.data.preprocessing import Preprocessing
from lambdanets.models import ROWS, Card, Network, ResNetConfig, create_model
from lambdanets.models.foreign import D_LI14, LayerWeights, from_byobnet, read_layer
from lambdanets.models.keys import State, load
from lambdanets.models.registry import changes
from lambdanets.models.resnet import EXPANSION, STAGES
from lambdanets.models.zoo import TIMM_NETWORKS

WHAT = "a ResNet with bottleneck blocks"
KERAS = "Keras' ResNet"
KERAS_MEAN = (123.68, 116.779, 103.939)  # red, green, blue, of pixels from 0 to 255
LAMBDA_SUFFIX = "to_queries.weight"


def resnet(state: Mapping[str, Tensor]) -> Network:
    """Convert ResNet, ResNet-D and ResNet-RS of torchvision and timm, whose parameters have our names."""
    return build(dict(state), {}, WHAT)


def keras_resnet(state: Mapping[str, Tensor]) -> Network:
    """Convert Keras' ResNet-50, -101 and -152 with torchvision's names, which take images in BGR order.

    The first 1x1 convolution of a block has the stride, and batch norm an eps of 1e-3. The input channels of the first
    convolution are reversed, so that the network takes RGB images: (x - mean) / std with std 1 / 255.
    """
    if "conv1.weight" not in state:
        raise ValueError(f"this is not {KERAS}: missing conv1.weight")
    first = state["conv1.weight"]
    if first.ndim != 4 or first.shape[1] != 3:
        raise ValueError(f"this is not {KERAS}: conv1.weight is {list(first.shape)}, expected 3 channels of images")
    network = build({**state, "conv1.weight": first.flip(1)}, {"stride_in": "1x1", "norm_eps": 1e-3}, KERAS)
    mean = (KERAS_MEAN[0] / 255, KERAS_MEAN[1] / 255, KERAS_MEAN[2] / 255)
    network.card = Card(Preprocessing(mean=mean, std=(1 / 255, 1 / 255, 1 / 255)))
    return network


def lambda_resnet(state: Mapping[str, Tensor]) -> Network:
    """Convert d-li14's LambdaResNet."""
    prefixes = sorted({m[1] for name in state if (m := re.match(r"(layer\d\.\d+\.conv2\.)\w+\.\w+$", name))})
    if not prefixes:
        raise ValueError("this is not d-li14's LambdaResNet: missing layer1.0.conv2.conv_qkv.weight")
    layers: dict[str, LayerWeights] = {}
    for prefix in prefixes:
        own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        try:
            layers[prefix] = read_layer(D_LI14, own)
        except ValueError as error:
            raise ValueError(f"{prefix.rstrip('.')}: {error}") from error
    has_bias = any(bool(layer.bias_K.any()) for layer in layers.values())
    found: State = {name: tensor for name, tensor in state.items() if not name.startswith(tuple(prefixes))}
    for prefix, layer in layers.items():
        own = layer.with_bias() if has_bias else layer.state
        found.update({prefix + name: tensor for name, tensor in own.items()})
    first = next(iter(layers.values())).arguments
    options = {name: first[name] for name in ("heads", "key_depth", "intra_depth")}
    scope = tuple(first["scope"])
    options["scope"] = scope[0] if scope[0] == scope[1] else scope
    return build(found, {**options, "position_bias": has_bias}, "d-li14's LambdaResNet")


def timm_lambda_resnet(state: Mapping[str, Tensor]) -> Network:
    """Convert timm's lambda networks. The activation is that of the named network with the same depths."""
    what = "one of timm's lambda networks"
    found = from_byobnet(state)
    tables = sorted(name for name in found if name.endswith(".conv2.positions.table"))
    if not tables:
        raise ValueError(f"this is not {what}: missing a lambda layer, such as stages.3.1.self_attn.qkv.weight")
    table = found[tables[0]]
    queries = found[tables[0].replace("positions.table", "norm_queries.weight")]
    options: dict[str, Any] = {"heads": len(queries) // table.shape[2], "key_depth": table.shape[2]}
    depths = resnet_fields(found, what)["depths"]
    options["activation"] = next((row.activation for row in TIMM_NETWORKS.values() if row.depths == depths), "relu")
    options |= {"block_pool": "2x2", "position_bias": tables[0].replace("positions.table", "position_bias") in found}
    if options["position_bias"]:
        options["scope"] = table.shape[0] if table.shape[0] == table.shape[1] else tuple(table.shape[:2])
    else:  # for one image size: the size of the layer's input times its reduction
        stage, block = map(int, re.findall(r"\d+", tables[0])[:2])
        reduction = 2 ** (stage if block == 0 and stage > 1 else stage + 1)
        sides = tuple((side + 1) // 2 * reduction for side in table.shape[:2])
        options |= {"scope": None, "image_size": sides[0] if sides[0] == sides[1] else sides}
    return build(found, options, what)


def build(state: State, options: dict[str, Any], what: str) -> Network:
    """Build the network of a state dict with our names; `options` are those of its lambda layers."""
    inferred = {**resnet_fields(state, what), **options}
    name, arguments = nearest_row(inferred)
    network = create_model(name, **arguments).to(state["conv1.weight" if is_plain(state) else "conv1.0.weight"].dtype)
    load(network, state, f"{what}, read as {name} {arguments or ''}".rstrip())
    return network


def is_plain(state: Mapping[str, Tensor]) -> bool:
    return "conv1.weight" in state


def resnet_fields(state: Mapping[str, Tensor], what: str) -> dict[str, Any]:
    """Return the fields of ResNetConfig that follow from the weights."""

    def tensor(name: str) -> Tensor:
        if name not in state:
            raise ValueError(f"this is not {what}: missing {name}")
        return state[name]

    plain = is_plain(state)
    first = tensor("conv1.weight" if plain else "conv1.0.weight")
    stem = ("vanilla" if first.shape[-1] == 7 else "small") if plain else "deep"
    if not plain and len(first) == 3 * len(tensor("bn1.weight")) // 8:
        stem = "tiered"
    if "maxpool.0.weight" in state:
        stem = "strided"
    if "layer1.0.conv1.weight" in state and "layer1.0.conv3.weight" not in state:
        raise ValueError(
            f"this is not {what}: its blocks have two convolutions (ResNet-18 or -34) instead of three, "
            "which is not supported"
        )
    depths, widths, placement, se = [], [], [], []
    for i in range(1, STAGES + 1):
        blocks = {int(m[1]) for name in state if (m := re.match(rf"layer{i}\.(\d+)\.", name))}
        depths.append(max(blocks, default=-1) + 1)
        widths.append(len(tensor(f"layer{i}.0.conv1.weight")))
        lambdas = tuple(j + 1 for j in sorted(blocks) if f"layer{i}.{j}.conv2.{LAMBDA_SUFFIX}" in state)
        placement.append("C" if not lambdas else "L" if len(lambdas) == len(blocks) else lambdas)
        se.append(f"layer{i}.0.se.fc1.weight" in state)
    fields: dict[str, Any] = {
        "activation": "relu",  # the first four fields cannot be inferred from weights
        "block_pool": "3x3",
        "stride_in": "3x3",
        "norm_eps": 1e-5,
        "depths": tuple(depths),
        "widths": tuple(widths),
        "stem": stem,
        "shortcut": "pool" if tensor("layer1.0.downsample.1.weight").ndim == 4 else "conv",
        "se": se[0] if len(set(se)) == 1 else tuple(se),
        "placement": "".join(placement) if all(isinstance(p, str) for p in placement) else tuple(placement),
        "in_chans": first.shape[1],
        "num_classes": len(state["fc.weight"]) if "fc.weight" in state else 0,
    }
    if any(se):
        stage = se.index(True)
        fields["se_reduction"] = widths[stage] * EXPANSION // len(tensor(f"layer{stage + 1}.0.se.fc1.weight"))
    return fields


def nearest_row(fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the named network with the fewest different fields, and these differences."""
    options = {
        name: changes(name, replace(row, **fields))
        for name, row in ROWS.items()
        if isinstance(row, ResNetConfig) and (name in TIMM_NETWORKS) == (fields["stem"] == "tiered")
    }
    name = min(options, key=lambda name: len(options[name]))
    return name, options[name]


def mobilenet(state: Mapping[str, Tensor]) -> Network:
    """Convert torchvision's MobileNet-v2, in which one name differs."""
    found = {re.sub(r"^classifier\.1\.", "classifier.", name): tensor for name, tensor in state.items()}
    what = "torchvision's MobileNet-v2"
    for name in ("features.0.0.weight", "classifier.weight"):
        if name not in found:
            raise ValueError(f"this is not {what}: missing {name}")
    first, head = found["features.0.0.weight"], found["classifier.weight"]
    network = create_model("mobilenet_v2", num_classes=len(head), in_chans=first.shape[1]).to(first.dtype)
    load(network, found, what)
    return network

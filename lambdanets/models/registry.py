"""Creation of networks by name."""

import warnings
from collections.abc import Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, overload

from lambdanets.models.attention_network import AttentionNetwork
from lambdanets.models.config import (
    AttentionNetworkConfig,
    MobileNetConfig,
    NetworkConfig,
    PatchConfig,
    ResNetConfig,
    SpatialOptions,
)
from lambdanets.models.mobilenet import MobileNetV2
from lambdanets.models.network import FeatureNetwork, Network
from lambdanets.models.packaged import PACKAGED, packaged_card, packaged_weights
from lambdanets.models.patch import PatchNetwork
from lambdanets.models.pretrained import WEIGHTS, Card, from_pretrained, load_weights, locate
from lambdanets.models.resnet import ResNet
from lambdanets.models.spatial import check_options
from lambdanets.models.zoo import PUBLISHED, ROWS, Published
from lambdanets.typed import shown, unknown_arguments

FAMILIES: dict[type[NetworkConfig], type[Network]] = {
    ResNetConfig: ResNet,
    MobileNetConfig: MobileNetV2,
    PatchConfig: PatchNetwork,
    AttentionNetworkConfig: AttentionNetwork,
}
WEIGHTS_FROM = ("packaged", "hub")
SPATIAL = frozenset(f.name for f in fields(SpatialOptions))
# Arguments of timm's and torchvision's networks
REMEDIES = {
    "act_layer": "ResNets have activation='relu', 'silu', 'mish' or 'gelu'; other families have a fixed activation",
    "drop": "use drop_rate",
    "drop_block_rate": "use drop_path_rate",
    "dropout": "use drop_rate",
    "img_size": "use image_size",
    "in_channels": "use in_chans",
    "kernel_size": "use scope",
    "layers": "use depths",
    "n_classes": "use num_classes",
    "norm_layer": "all norms are batch norms: create the network and replace its modules",
    "num_channels": "use in_chans",
    "num_heads": "use heads",
    "weights": "use pretrained",
}
NO_WEIGHTS = (
    "no weights are published for {name!r}, nor do any come with lambdanets: pass pretrained='weights.safetensors', a "
    "folder that save_pretrained wrote, or the id of a model on the Hugging Face hub; `lambdanets train` makes weights"
)


def load_published(network: Network, published: Published) -> None:
    """Load published weights, which huggingface_hub downloads or takes from its cache."""
    hub_id = published.hub_id
    try:
        path = locate(hub_id, WEIGHTS)
    except ValueError as error:
        raise ValueError(
            f"the weights of {network.name} could not be downloaded: {' '.join(str(error.__cause__ or error).split())} "
            f"Without access to the hub, download {WEIGHTS} from https://huggingface.co/{hub_id} elsewhere and pass "
            f"pretrained='{WEIGHTS}'"
        ) from error
    load_weights(network, path)
    network.card = Card(published.preprocessing, recipe={"source": hub_id})


def list_models(pattern: str = "*", pretrained: bool | Literal["packaged", "hub"] = False) -> list[str]:
    """List the names of all networks, sorted.

    Args:
        pattern: return only names that match this pattern with the wildcards of file names.
        pretrained: True: only networks with weights for `create_model(name, pretrained=True)`. "packaged": only those
            whose weights are included in this package. "hub": only those whose weights are downloaded from the Hugging
            Face hub. `weights_of` returns the kind of weights of a network.

    >>> from lambdanets import list_models
    >>> list_models("lambda_patch_*")
    ['lambda_patch_base', 'lambda_patch_small', 'lambda_patch_tiny']
    >>> "lambda_resnet26t" in list_models(pretrained=True)
    True
    """
    if pretrained not in (False, True, *WEIGHTS_FROM):
        raise ValueError(f"pretrained must be True, False, 'packaged' or 'hub', got {shown(pretrained)}")
    names = sorted(name for name in ROWS if fnmatch(name, pattern))
    if not pretrained:
        return names
    accepted = WEIGHTS_FROM if pretrained is True else (pretrained,)
    return [name for name in names if weights_of(name) in accepted]


def weights_of(name: str) -> Literal["packaged", "hub"] | None:
    """Return where `create_model(name, pretrained=True)` finds weights.

    Args:
        name: one of `list_models()`.

    Returns:
        "packaged" for weights in this package, "hub" for weights on the Hugging Face hub, None if there are none.

    >>> from lambdanets.models import weights_of
    >>> weights_of("lambda_resnet26t")
    'hub'
    """
    if packaged_weights(name) is not None:
        return "packaged"
    return "hub" if name in PUBLISHED else None


def load_packaged(name: str, arguments: dict[str, Any]) -> Network:
    """Build a network with packaged weights; `arguments` override those that it was trained with."""
    packaged_card(name)  # raises an error if there are none
    path = packaged_weights(name)
    assert path is not None
    network = from_pretrained(path, **arguments)
    if network.name != name:
        raise ValueError(f"{path} has the weights of {network.name}, not of {name}")
    return network


def configure(name: str, /, **arguments: Any) -> NetworkConfig:
    """Return the configuration of a network with some fields changed.

    Args:
        name: one of `list_models()`.
        arguments: new values of fields, checked against their types.

    Raises:
        ValueError: if the name is unknown or a value is not allowed.
        TypeError: if the configuration has no such field.

    >>> from lambdanets.models import configure
    >>> configure("resnet50", placement="CCLL", num_classes=10).placement
    'CCLL'
    """
    if not isinstance(name, str) or name not in ROWS:
        close = get_close_matches(str(name), ROWS, 3)
        hint = f"did you mean {' or '.join(close)}?" if close else "list_models() returns all names"
        raise ValueError(f"unknown model {shown(name)}; {hint}")
    row = ROWS[name]
    known = {f.name for f in fields(row)}
    unknown = arguments.keys() - known
    if unknown:
        raise unknown_arguments(name, unknown, known, {n: r for n, r in REMEDIES.items() if n not in known})
    config = replace(row, **arguments)
    check_options(config.layer, list(arguments))
    unused = [argument for argument in arguments if argument in SPATIAL]
    if unused and "placement" not in arguments and has_only_convolutions(row):
        warnings.warn(
            f"{name} has only convolutions, so {', '.join(unused)} has no effect: also pass a placement",
            stacklevel=3,
        )
    return config


def build(name: str, config: NetworkConfig) -> Network:
    """Build the network of a configuration and set its name."""
    network = FAMILIES[type(config)](config)
    network.name = name
    return network


def changes(name: str, config: NetworkConfig) -> dict[str, Any]:
    """Return the arguments of `configure` that give `config` for the network of this name."""
    row = ROWS[name]
    found = {f.name: getattr(config, f.name) for f in fields(row) if getattr(config, f.name) != getattr(row, f.name)}
    return with_placement(name, found)


def with_placement(name: str, saved: dict[str, Any]) -> dict[str, Any]:
    """Return saved arguments with a placement, so that `configure` does not warn about options without effect."""
    row = ROWS.get(name)
    plain = row is not None and has_only_convolutions(row) and bool(SPATIAL & saved.keys())
    return {"placement": getattr(row, "placement", None), **saved} if plain else saved


def has_only_convolutions(row: NetworkConfig) -> bool:
    return getattr(row, "placement", "L") in ("CCCC", ())


@overload
def create_model(
    name: str,
    pretrained: bool | str | Path = False,
    *,
    features_only: Literal[False] = False,
    **arguments: Any,
) -> Network: ...


@overload
def create_model(
    name: str,
    pretrained: bool | str | Path = False,
    *,
    features_only: Literal[True],
    out_indices: Sequence[int] | int | None = None,
    **arguments: Any,
) -> FeatureNetwork: ...


def create_model(
    name: str,
    pretrained: bool | str | Path = False,
    *,
    features_only: bool = False,
    out_indices: Sequence[int] | int | None = None,
    **arguments: Any,
) -> Network | FeatureNetwork:
    """Create a network by name.

    Args:
        name: one of `list_models()`.
        pretrained: weights to load: a file (.safetensors, or a file of tensors from `torch.save`), a folder written by
            `save_pretrained`, or an id on the Hugging Face hub. True loads weights that are included in this package
            or published for timm's lambda networks (see `list_models(pretrained=True)`), "packaged" only included
            ones. The classifier stays random if the number of classes differs, and the first convolution is adapted to
            other numbers of channels.
        features_only: return a backbone whose output is a list of the stages' maps, see `FeatureNetwork`.
        out_indices: indices of the stages that `features_only` returns; an int means the last n, None all stages.
        arguments: fields of the network's configuration: num_classes, in_chans, image_size, drop_rate, drop_path_rate,
            global_pool, placement, layer, key_depth, heads, intra_depth, scope, content, position, key_norm,
            query_softmax, batch_norm, multi_head, share_positions, and others; see `NetworkConfig` and `ResNetConfig`.

    Raises:
        ValueError: if the name is unknown, a value is not allowed, or the weights do not match.
        TypeError: if the network has no such argument.

    >>> import torch
    >>> from lambdanets import create_model
    >>> model = create_model("lambda_resnet50", num_classes=10)
    >>> model(torch.randn(2, 3, 64, 64)).shape
    torch.Size([2, 10])
    >>> hybrid = create_model("resnet50", placement="CCLL", scope=7)
    """
    if out_indices is not None and not features_only:
        raise ValueError("out_indices needs features_only=True")
    if features_only:
        arguments.setdefault("num_classes", 0)
    if pretrained is True and name in ROWS and weights_of(name) is None:
        raise ValueError(NO_WEIGHTS.format(name=name))
    if pretrained == PACKAGED or (pretrained is True and weights_of(name) == PACKAGED):
        network = load_packaged(name, arguments)
    else:
        network = build(name, configure(name, **arguments))
        if pretrained is True:
            load_published(network, PUBLISHED[name])
        elif pretrained:
            load_weights(network, pretrained)
    return FeatureNetwork(network, out_indices) if features_only else network

"""Reading other people's files, where nothing can run code, and writing ours."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lambdanets.convert.formats import Converted
from lambdanets.data.class_names import listed_names
from lambdanets.files import as_object, whole_path
from lambdanets.layers import LambdaLayer2d
from lambdanets.models import Network
from lambdanets.models.pretrained import KEY, WEIGHTS, default_card, save_weights
from lambdanets.models.stored import check_finite, load_exactly, read_description_of, read_state, within_size_of

LAYER = "layer"  # in the place where networks say their name
LAYER_ARGUMENTS = frozenset(
    {"channels", "out_channels", "heads", "key_depth", "intra_depth", "scope", "input_size", "position_bias"}
)


def read_source(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a .pt, .pth, .bin or .tar file that torch.save wrote."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    state = read_state(path)
    check_finite(path, state)
    return state


def chosen_names(names: str | None) -> tuple[str, ...]:
    """The names that --class-names lists; none without it."""
    if names is None:
        return ()
    found = listed_names(names)
    if found is None:
        raise ValueError(
            f"--class-names {names}: give a .txt file with a name on each line, imagenet or imagenet-words"
        )
    return found


def save_converted(converted: Converted, target: Path, source: Path, class_names: tuple[str, ...] = ()) -> Path:
    """Write safetensors with what they are in their header; for a network also a folder, if `target` is no file.

    Args:
        converted: the module.
        target: a .safetensors file, or a folder.
        source: the file that it came from.
        class_names: of a network, to be stored.

    Returns:
        The file of weights.
    """
    recipe = {"source_format": converted.source_format, "source": source.name}
    module = converted.module
    is_file = target.suffix == ".safetensors"
    if is_file and target.resolve() == source.resolve():
        raise ValueError(f"{target} is the source itself: give another name")
    if isinstance(module, Network):
        card = replace(module.card or default_card(module), recipe=recipe, class_names=class_names)
        if not is_file:
            return module.save_pretrained(target, card) / WEIGHTS
        return save_weights(module, target, card)
    if class_names:
        raise ValueError("--class-names is for networks, and this is a layer")
    if not is_file:
        raise ValueError(f"{target}: a layer becomes one file, give a name that ends in .safetensors")
    return save_layer(module, target, recipe)


def save_layer(layer: LambdaLayer2d, target: Path, recipe: dict[str, str]) -> Path:
    from safetensors.torch import save_file

    from lambdanets import __version__

    header = {"version": __version__, LAYER: "LambdaLayer2d", "arguments": layer_arguments(layer), "recipe": recipe}
    with whole_path(target) as part:
        save_file(dict(layer.state_dict()), str(part), metadata={"format": "pt", KEY: json.dumps(header)})
    return target


def layer_arguments(layer: LambdaLayer2d) -> dict[str, Any]:
    """What a converted layer was built with."""
    assert layer.positions is not None
    return {
        "channels": layer.channels,
        "out_channels": layer.out_channels,
        "heads": layer.heads,
        "key_depth": layer.key_depth,
        "intra_depth": layer.intra_depth,
        "scope": None if layer.positions.is_global else layer.positions.scope,
        "input_size": layer.positions.input_size,
        "position_bias": layer.position_bias is not None,
    }


def load_layer(path: str | Path) -> LambdaLayer2d:
    """The layer of a file that `lambdanets convert` wrote."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    header = read_description_of(path, KEY) or {}
    if LAYER not in header:
        raise ValueError(f"{path} does not hold a converted layer; for networks use lambdanets.models.from_pretrained")
    arguments = as_object(header.get("arguments"), f"the arguments in the header of {path}")
    unknown = arguments.keys() - LAYER_ARGUMENTS
    if unknown:
        raise ValueError(f"{path} has arguments of a layer that it cannot have: {', '.join(sorted(unknown))}")
    state = read_state(path)
    like = state.get("to_queries.weight")
    try:
        with within_size_of(path):
            layer = LambdaLayer2d(**arguments, dtype=None if like is None else like.dtype)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    load_exactly(layer, path, state)
    return layer

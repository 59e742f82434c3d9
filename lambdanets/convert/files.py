"""Safe reading of weights of other implementations, and writing of converted weights."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lambdanets.convert.formats import Converted
from lambdanets.data.class_names import listed_names
from lambdanets.files import as_object, read_object, whole_path
from lambdanets.layers import LambdaLayer2d
from lambdanets.models import Card, Network
from lambdanets.models.compact import Bits
from lambdanets.models.pretrained import KEY, WEIGHTS, default_card, from_pretrained, save_weights
from lambdanets.models.stored import (
    check_finite,
    load_exactly,
    only_finite_weights,
    read_description_of,
    read_state,
    within_size_of,
)
from lambdanets.typed import from_json

LAYER = "layer"  # key of the class name in the header, where networks have their name
LAYER_ARGUMENTS = frozenset(
    {"channels", "out_channels", "heads", "key_depth", "intra_depth", "scope", "input_size", "position_bias"}
)


def read_own(path: Path) -> Network | None:
    """The network of a file that lambdanets wrote, None for other files."""
    if path.suffix != ".safetensors" or not path.is_file() or "name" not in (read_description_of(path, KEY) or {}):
        return None
    with only_finite_weights():
        return from_pretrained(path)


def read_source(path: Path) -> dict[str, Tensor]:
    """Read a state dict without running code from the file.

    Args:
        path: a .safetensors file, or a .pt, .pth, .bin or .tar file written by `torch.save`.

    Raises:
        ValueError: if the file has other objects than tensors, or NaN or infinite values.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from lambdanets.convert import read_source
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"weight": torch.zeros(2, 3)}, Path(folder) / "weights.pt")
    ...     read_source(Path(folder) / "weights.pt")["weight"].shape
    torch.Size([2, 3])
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    state = read_state(path)
    check_finite(path, state)
    return state


def chosen_names(names: str | None) -> tuple[str, ...]:
    """Return the class names that --class-names lists; none without it."""
    if names is None:
        return ()
    found = listed_names(names)
    if found is None:
        raise ValueError(
            f"--class-names {names}: give a .txt file with a name on each line, imagenet or imagenet-words"
        )
    return found


def read_card_file(path: Path | None) -> dict[str, Any]:
    """Return the fields of a `Card` that a JSON file gives; none without a file."""
    if path is None:
        return {}
    given = read_object(path)
    try:
        card = from_json(Card, given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return {name: getattr(card, name) for name in given}


def save_converted(
    converted: Converted,
    target: Path,
    source: Path,
    changes: Mapping[str, Any] | None = None,
    bits: Bits | None = None,
) -> Path:
    """Write converted weights as a safetensors file with a description in its header, and return the file.

    Args:
        converted: the result of `convert_state`.
        target: a name that ends in .safetensors; for a network also a folder, written like `save_pretrained` does.
        source: the file that the weights come from; its name is stored in the header.
        changes: fields of the `Card` of a network that are set, for example its class_names.
        bits: 8 or 16 for a smaller file of a network (see `lambdanets.models.compact`); None keeps the dtype.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from timm.layers.lambda_layer import LambdaLayer
    >>> from lambdanets.convert import convert_state, load_layer, save_converted
    >>> converted = convert_state(LambdaLayer(64, r=9).state_dict())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_converted(converted, Path(folder) / "layer.safetensors", Path("timm.pt"))
    ...     layer = load_layer(path)
    >>> layer.channels
    64
    """
    recipe = {"source_format": converted.source_format, "source": source.name}
    module = converted.module
    is_file = target.suffix == ".safetensors"
    if is_file and target.resolve() == source.resolve():
        raise ValueError(f"{target} is the source file itself: choose another name")
    if isinstance(module, Network):
        card = module.card or default_card(module)
        card = replace(card, recipe=card.recipe or recipe)
        card = replace(card, **changes or {})
        if not is_file and bits is not None:
            raise ValueError(f"{target}: --bits needs one file as the target, with a name that ends in .safetensors")
        if not is_file:
            return module.save_pretrained(target, card) / WEIGHTS
        return save_weights(module, target, card, bits)
    if changes or bits is not None:
        raise ValueError("--class-names, --card and --bits are for networks, and this is a layer")
    if not is_file:
        raise ValueError(f"cannot write a layer to {target}: choose a file name that ends in .safetensors")
    return save_layer(module, target, recipe)


def save_layer(layer: LambdaLayer2d, target: Path, recipe: dict[str, str]) -> Path:
    from safetensors.torch import save_file

    from lambdanets import __version__

    header = {"version": __version__, LAYER: "LambdaLayer2d", "arguments": layer_arguments(layer), "recipe": recipe}
    with whole_path(target) as part:
        save_file(dict(layer.state_dict()), str(part), metadata={"format": "pt", KEY: json.dumps(header)})
    return target


def layer_arguments(layer: LambdaLayer2d) -> dict[str, Any]:
    """Return the constructor arguments of a converted layer."""
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
    """Load a layer from a file that `lambdanets convert` or `save_converted` wrote.

    Args:
        path: a .safetensors file with one layer.

    Raises:
        ValueError: if the file has no converted layer, or its description is damaged.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from timm.layers.lambda_layer import LambdaLayer
    >>> from lambdanets.convert import convert_state, load_layer, save_converted
    >>> converted = convert_state(LambdaLayer(64, r=9).state_dict())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     layer = load_layer(save_converted(converted, Path(folder) / "layer.safetensors", Path("timm.pt")))
    >>> layer(torch.randn(1, 64, 8, 8)).shape
    torch.Size([1, 64, 8, 8])
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    header = read_description_of(path, KEY) or {}
    if LAYER not in header:
        raise ValueError(f"{path} has no converted layer; load networks with lambdanets.models.from_pretrained")
    arguments = as_object(header.get("arguments"), f"the arguments in the header of {path}")
    unknown = arguments.keys() - LAYER_ARGUMENTS
    if unknown:
        raise ValueError(f"{path} has unknown arguments of a layer: {', '.join(sorted(unknown))}")
    state = read_state(path)
    like = state.get("to_queries.weight")
    try:
        with within_size_of(path):
            layer = LambdaLayer2d(**arguments, dtype=None if like is None else like.dtype)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    load_exactly(layer, path, state)
    return layer

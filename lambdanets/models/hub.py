"""Weights in files and on the Hugging Face hub: safetensors that say what they are.

A folder holds `config.json` and `model.safetensors`, which is the layout of huggingface_hub's PyTorchModelHubMixin and
of timm ("local-dir:" and "hf-hub:" names work after `import lambdanets.timm`). The header of the weights repeats our
part of the configuration, so that the file alone is enough.
"""

import json
import re
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lambdanets.files import whole_path
from lambdanets.models.config import as_tuples
from lambdanets.models.shared import complete_shared

if TYPE_CHECKING:
    from lambdanets.models.network import Network

CONFIG, WEIGHTS, KEY = "config.json", "model.safetensors", "lambdanets"
HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
DETECTOR_KEY, LANGUAGE_KEY = "lambdanets_detector", "lambdanets_language"  # of weights that other commands wrote
OTHERS = {DETECTOR_KEY: "detect", LANGUAGE_KEY: "language"}
TIMM_HAS = frozenset({"resnet26", "resnet50", "resnet101", "resnet152"})  # names that are somebody else's there


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes an input: turn it as its EXIF orientation says, resize the short side to size / crop, crop
    the centre, (x - mean) / std."""

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    size: int | tuple[int, int] = 224
    crop: float = 0.875
    interpolation: str = "bicubic"
    exif_orientation: bool = True

    # Weights from before this field were trained and used without it.
    WHEN_ABSENT: ClassVar[dict[str, Any]] = {"exif_orientation": False}

    def __post_init__(self) -> None:
        if any(not std > 0 for std in self.std):
            raise ValueError(f"std is above 0 in every channel, not {self.std}")


@dataclass(frozen=True)
class Card:
    """What weights say about themselves."""

    preprocessing: Preprocessing = Preprocessing()
    class_names: tuple[str, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)  # for example {"top1": 78.4}
    recipe: dict[str, Any] = field(default_factory=dict)  # what made them, as JSON

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Card":
        given = {k: as_tuples(v) for k, v in data.get("preprocessing", {}).items()}
        preprocessing = Preprocessing(**(Preprocessing.WHEN_ABSENT | given))
        names = tuple(data.get("class_names", ()))
        return Card(preprocessing, names, data.get("metrics", {}), data.get("recipe", {}))


def timm_name(name: str) -> str:
    """The name in timm's registry, after `import lambdanets.timm`."""
    return f"lambdanets_{name}" if name in TIMM_HAS else name


def timm_configuration(network: "Network", card: Card) -> dict[str, Any]:
    """Fields of timm's PretrainedCfg."""
    size = card.preprocessing.size
    return {
        "input_size": (network.config.in_chans, *((size, size) if isinstance(size, int) else size)),
        "mean": card.preprocessing.mean,
        "std": card.preprocessing.std,
        "crop_pct": card.preprocessing.crop,
        "interpolation": card.preprocessing.interpolation,
        "num_classes": network.num_classes,
        "classifier": network.classifier_name,
        "first_conv": network.first_conv,
    }


def default_card(network: "Network") -> Card:
    return Card(Preprocessing(size=network.config.image_size))


def describe_network(network: "Network", card: Card) -> dict[str, Any]:
    """Name, arguments and card: what weights have to say so that they can be used."""
    from lambdanets import __version__
    from lambdanets.models.registry import changes

    if card.class_names and len(card.class_names) != network.num_classes:
        raise ValueError(f"{len(card.class_names)} class names for {network.num_classes} classes")
    if network.name is None:
        raise ValueError("only networks that create_model made can be saved with their configuration")
    arguments = changes(network.name, network.config)
    if callable(arguments.get("layer")):
        raise ValueError("a layer given as a function cannot be written down: save network.state_dict() instead")
    return {"version": __version__, "name": network.name, "arguments": arguments, **asdict(card)}


def save_weights(network: "Network", path: str | Path, card: Card | None = None) -> Path:
    """One safetensors file that says what it is; under its name only when it is complete."""
    from safetensors.torch import save_model

    ours = describe_network(network, card or network.card or default_card(network))
    path = Path(path)
    with whole_path(path) as part:
        save_model(network, str(part), metadata={"format": "pt", KEY: json.dumps(ours)})
    return path


def save_pretrained(network: "Network", folder: str | Path, card: Card | None = None) -> Path:
    """Writes `folder`/config.json and `folder`/model.safetensors; the weights last."""
    card = card or network.card or default_card(network)
    ours = describe_network(network, card)
    config = {
        "architecture": timm_name(ours["name"]),
        "num_classes": network.num_classes,
        "num_features": network.num_features,
        "model_args": ours["arguments"],
        "pretrained_cfg": timm_configuration(network, card),
        KEY: ours,
    }
    if card.class_names:
        config["label_names"] = card.class_names
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_weights(network, folder / WEIGHTS, card)
    return folder


def push_to_hub(network: "Network", repo_id: str, card: Card | None = None, **options: Any) -> str:
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repo_id, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(network, folder, card)
        return str(api.upload_folder(repo_id=repo_id, folder_path=folder, **options))


def locate(source: str | Path, filename: str, **hub_options: Any) -> Path:
    """A file of a folder, or of a hub id (downloaded, with `hub_options`); `source` itself if it is a file."""
    path = Path(source)
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / filename).is_file():
            raise FileNotFoundError(f"{path} has no {filename}: is it a folder that save_pretrained wrote?")
        return path / filename
    if isinstance(source, Path) or not may_be_on_hub(source):
        raise FileNotFoundError(f"{source} is no file or folder, and not an id on the hub (owner/name) either")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source, filename, **hub_options))
    except Exception as error:  # of many classes
        raise ValueError(f"{source} is no file or folder, and the hub said: {error}") from error


def may_be_on_hub(source: str) -> bool:
    """owner/name, and not below a folder that is here: that is a path with a slip in it."""
    return source.count("/") == 1 and not source.startswith((".", "/", "~")) and not Path(source).parent.is_dir()


def read_object(path: Path) -> dict[str, Any]:
    """A file of JSON with names and values; the ValueError names it."""
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no names and values, but {str(data)[:40]!r}")
    return data


def read_description(source: str | Path, **hub_options: Any) -> dict[str, Any]:
    """Name, arguments and card, from config.json or from the header of a safetensors file."""
    path = locate(source, CONFIG, **hub_options)
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
        for command in (OTHERS[key] for key in metadata if key in OTHERS):
            raise ValueError(f"{path} is no classifier: `lambdanets {command} --help` says what it is for")
        data = json.loads(metadata[KEY]) if KEY in metadata else None
    else:
        data = read_object(path).get(KEY)
    if not isinstance(data, dict) or "name" not in data:
        raise ValueError(
            f"{path} does not say which network it is: build one, create_model(name, pretrained={str(source)!r})"
        )
    return data


def read_card(source: str | Path) -> Card:
    """What the weights in a file, folder or hub id say about themselves."""
    return Card.from_json(read_description(source))


def from_pretrained(source: str | Path, **arguments: Any) -> "Network":
    """The network of a file, folder or hub id, with its weights.

    `arguments` change it, or are those of the hub's own `from_pretrained`: HUB_OPTIONS.
    """
    from lambdanets.models.registry import create_model, with_placement

    hub_options = {name: arguments.pop(name) for name in HUB_OPTIONS if name in arguments}
    data = read_description(source, **hub_options)
    network = create_model(data["name"], **{**with_placement(data["name"], data["arguments"]), **arguments})
    load_weights(network, source, **hub_options)
    network.card = Card.from_json(data)
    return network


def load_weights(network: "Network", source: str | Path, **hub_options: Any) -> None:
    """Weights from a file, folder or hub id.

    A classifier for another number of classes is left out, and a convolution for images with other channels is made
    to fit, as timm does.
    """
    path = locate(source, WEIGHTS, **hub_options)
    state = read_state(path)
    wanted = network.state_dict()
    head, first = network.classifier_name, f"{network.first_conv}.weight"
    classes = len(state.get(f"{head}.bias", ()))
    if classes != network.num_classes:
        if classes and network.num_classes:
            warnings.warn(f"{path} has {classes} classes, not {network.num_classes}: new {head}", stacklevel=3)
        for name in (f"{head}.weight", f"{head}.bias"):
            state.pop(name, None)
            if name in wanted:
                state[name] = wanted[name]
    channels = network.config.in_chans
    if first in state and state[first].ndim == 4 and state[first].shape[1] != channels:
        warnings.warn(f"{path} is for {state[first].shape[1]} channels, not {channels}: fitted {first}", stacklevel=3)
        state[first] = for_channels(state[first], channels)
    wrong = [
        f"{name} is {list(state[name].shape)}, expected {list(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in state and state[name].shape != tensor.shape
    ]
    if wrong:
        raise ValueError(f"{path} does not fit {network.name}: {shorten(wrong)}")
    complete_shared(network, state)
    result = network.load_state_dict(state, strict=False)
    if result.missing_keys or result.unexpected_keys:
        raise ValueError(
            f"{path} does not fit {network.name}: missing {shorten(result.missing_keys)}; "
            f"not expected {shorten(result.unexpected_keys)}"
        )


def for_channels(weight_OCHW: Tensor, channels: int) -> Tensor:
    """A first convolution for images with other channels: the sum for one, else the same ones in turn, made smaller
    or larger so that sums over the channels stay of their size."""
    present = weight_OCHW.shape[1]
    if channels == 1:
        return weight_OCHW.sum(1, keepdim=True)
    repeated = weight_OCHW.repeat(1, -(-channels // present), 1, 1)[:, :channels]
    return repeated * (present / channels)


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a file. Nothing in it can run code."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(str(path))
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    try:
        with torch.serialization.safe_globals([Namespace]):  # timm's checkpoints have one beside the tensors
            state = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise ValueError(
            f"{path} is refused: it is no torch file, or holds more than tensors, and loading that could run code. "
            f"Save its state_dict alone"
        ) from error
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # a file that is cut off fails in many ways
        why = f": {str(error).partition('.')[0]}" if isinstance(error, RuntimeError) else ", or none at all"
        raise ValueError(f"{path} is not a whole torch file{why}") from error
    for key in ("state_dict", "model"):  # as timm and torchvision wrap them
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{path} is not a dictionary of tensors")
    return unwrapped(state)


def unwrapped(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names without what DataParallel and torch.compile put before them."""
    return {re.sub(r"^(module\.|_orig_mod\.)+", "", name): tensor for name, tensor in state.items()}


def shorten(names: list[str], limit: int = 4) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest if names else "nothing"

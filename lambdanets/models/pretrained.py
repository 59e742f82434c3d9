"""Weights in files and on the Hugging Face hub: safetensors that say what they are.

A folder holds `config.json`, `model.safetensors` and a model card, `README.md`: the layout of huggingface_hub's
PyTorchModelHubMixin, of timm ("local-dir:" and "hf-hub:" names) and of transformers, both after
`import lambdanets.timm`. The header of the weights repeats our part of the configuration, so that the file alone is
enough.
"""

import json
import tempfile
import warnings
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from torch import Tensor

from lambdanets.data.preprocessing import Preprocessing
from lambdanets.files import read_object, whole_path, write_json
from lambdanets.models.compact import Bits, compress
from lambdanets.models.config import NetworkConfig
from lambdanets.models.foreign import from_byobnet, is_byobnet
from lambdanets.models.model_card import README, write_model_card
from lambdanets.models.shared import complete_shared, names_of_parameters
from lambdanets.models.stored import (
    NonFiniteWeightsWarning,
    check_finite,
    misfits,
    non_finite,
    non_finite_message,
    read_description_of,
    read_metadata,
    read_state,
    shorten,
    within_size_of,
)
from lambdanets.models.zoo import PUBLISHED, ROWS, TIMM_NETWORKS
from lambdanets.typed import Bounds, from_json

if TYPE_CHECKING:
    from lambdanets.models.network import Network

CONFIG, WEIGHTS, KEY = "config.json", "model.safetensors", "lambdanets"
HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
Examples = Annotated[int, Bounds(0, 2**40)]
WIDEST = 2**13  # channels before a classifier, at most
# Names that are somebody else's there
TIMM_HAS = frozenset({"resnet26", "resnet50", "resnet101", "resnet152", *TIMM_NETWORKS})


@dataclass(frozen=True)
class Card:
    """Metadata of weights, stored with them.

    Attributes:
        preprocessing: how an image becomes an input.
        class_names: in the order of the outputs; empty if they are not known.
        metrics: results by name, for example {"top1": 0.784}.
        recipe: the settings that the weights were made with, as JSON.
        examples: number of images that the metrics were measured on; 0 if it is not known.
        evaluated_on: which images these are.
        training_data: which images the network was trained on.
        teacher: the network whose labels it was trained on, if there was one.
        license: licence of the weights.
    """

    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    class_names: tuple[str, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    examples: Examples = 0
    evaluated_on: str = ""
    training_data: str = ""
    teacher: str = ""
    license: str = ""

    # Files without them are as they were before these fields.
    LEFT_OUT_IF_EMPTY: ClassVar = ("examples", "evaluated_on", "training_data", "teacher", "license")
    WHEN_ABSENT: ClassVar[dict[str, Any]] = {"preprocessing": Preprocessing(**Preprocessing.WHEN_ABSENT)}


@dataclass(frozen=True, kw_only=True)
class Description(Card):
    """A card, and the network: what config.json and the header of the weights hold under our key."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    version: str = ""

    @property
    def card(self) -> Card:
        return Card(**{f.name: getattr(self, f.name) for f in fields(Card)})


def timm_name(name: str) -> str:
    """The name in timm's registry, after `import lambdanets.timm`."""
    return f"lambdanets_{name}" if name in TIMM_HAS else name


def timm_configuration(config: NetworkConfig, card: Card) -> dict[str, Any]:
    """Fields of timm's PretrainedCfg."""
    from lambdanets.models.registry import FAMILIES

    family, size = FAMILIES[type(config)], card.preprocessing.size
    height, width = (size, size) if isinstance(size, int) else size
    reduction = family.reduction_of(config)
    return {
        "input_size": (config.in_chans, height, width),
        "pool_size": (-(-height // reduction), -(-width // reduction)),
        "mean": card.preprocessing.mean,
        "std": card.preprocessing.std,
        "crop_pct": card.preprocessing.crop,
        "interpolation": card.preprocessing.interpolation,
        "num_classes": config.num_classes,
        "classifier": family.classifier_name,
        "first_conv": family.first_conv_of(config),
    }


def default_card(network: "Network") -> Card:
    published = PUBLISHED.get(network.name or "")
    preprocessing = Preprocessing() if published is None else published.preprocessing
    return Card(replace(preprocessing, size=network.config.image_size))


def default_configuration(name: str) -> dict[str, Any]:
    """Fields of timm's PretrainedCfg for a network as `create_model(name)` builds it."""
    config, published = ROWS[name], PUBLISHED.get(name)
    if published is None:
        return timm_configuration(config, Card(Preprocessing(size=config.image_size)))
    return {**timm_configuration(config, Card(published.preprocessing)), "hf_hub_id": published.hub_id}


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
    said = {key: value for key, value in asdict(card).items() if value or key not in Card.LEFT_OUT_IF_EMPTY}
    return {"version": __version__, "name": network.name, "arguments": arguments, **said}


def save_weights(network: "Network", path: str | Path, card: Card | None = None, bits: Bits | None = None) -> Path:
    """Write one safetensors file that holds its own description.

    Args:
        network: whose weights.
        path: of the file, which has this name only when it is complete.
        card: what is stored about the weights; by default the network's own.
        bits: 8 or 16 for a smaller file (`lambdanets.models.compact`), 32 for float32; None keeps the dtype.
    """
    from safetensors.torch import save_file, save_model

    metadata = {
        "format": "pt",
        KEY: json.dumps(describe_network(network, card or network.card or default_card(network))),
    }
    path = Path(path)
    state = {} if bits is None else stored_state(network)
    check_finite(path, state)
    with whole_path(path) as part:
        if bits is None:
            save_model(network, str(part), metadata=metadata)
        else:
            save_file(compress(state, bits), str(part), metadata=metadata)
    return path


def stored_state(network: "Network") -> dict[str, Tensor]:
    """The state dict with each shared parameter once."""
    repeated = {name for names in names_of_parameters(network).values() for name in sorted(names)[1:]}
    return {name: tensor for name, tensor in network.state_dict().items() if name not in repeated}


def save_pretrained(
    network: "Network", folder: str | Path, card: Card | None = None, repo_id: str | None = None
) -> Path:
    """Writes config.json, README.md (unless one is there that was changed) and model.safetensors; the weights last."""
    card = card or network.card or default_card(network)
    ours = describe_network(network, card)
    config = {
        "architecture": timm_name(ours["name"]),
        "num_classes": network.num_classes,
        "num_features": network.num_features,
        # transformers passes the classes itself; timm finds them above
        "model_args": {name: value for name, value in ours["arguments"].items() if name != "num_classes"},
        "pretrained_cfg": timm_configuration(network.config, card),
        KEY: ours,
    }
    if card.class_names:
        config["label_names"] = card.class_names
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, config, indent=2)
    write_model_card(network, folder, card, repo_id)
    save_weights(network, folder / WEIGHTS, card)
    return folder


def push_to_hub(network: "Network", repo_id: str, card: Card | None = None, **options: Any) -> str:
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repo_id, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(network, folder, card, repo_id)
        if api.file_exists(repo_id, README, revision=options.get("revision")):
            (Path(folder) / README).unlink()  # it may have been written by hand
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


def read_description(source: str | Path, **hub_options: Any) -> Description:
    """Name, arguments and card, from config.json or from the header of a safetensors file."""
    path = locate(source, CONFIG, **hub_options)
    if path.suffix == ".safetensors":
        for key in read_metadata(path):
            if key.startswith(f"{KEY}_"):  # of another task, for example lambdanets_detector
                kind = key.removeprefix(f"{KEY}_")[:40]
                raise ValueError(f"{path} is no classifier: it holds the weights of another task, {kind}")
        data = read_description_of(path, KEY)
    else:
        data = read_object(path, constants=True).get(KEY)  # metrics may be NaN
    if not isinstance(data, dict) or "name" not in data:
        raise ValueError(
            f"{path} does not say which network it is: build one, create_model(name, pretrained={str(source)!r})"
        )
    try:
        return from_json(Description, data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_card(source: str | Path) -> Card:
    """What the weights in a file, folder or hub id say about themselves."""
    return read_description(source).card


def from_pretrained(source: str | Path, **arguments: Any) -> "Network":
    """The network of a file, folder or hub id, with its weights.

    `arguments` change it, or are those of the hub's own `from_pretrained`: HUB_OPTIONS. What the file says can only
    change fields of the network, and not ask for much more memory than the weights have.
    """
    from lambdanets.models.registry import build, configure, with_placement

    hub_options = {name: arguments.pop(name) for name in HUB_OPTIONS if name in arguments}
    found = read_description(source, **hub_options)
    try:
        said = with_placement(found.name, found.arguments)
        config = configure(found.name, **said)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source} describes no network of ours: {error}") from error
    if found.class_names and len(found.class_names) != config.num_classes:
        raise ValueError(f"{source} has {len(found.class_names)} class names for {config.num_classes} classes")
    card, classes = found.card, config.num_classes
    if arguments:
        config = configure(found.name, **{**said, **arguments})
        if config.num_classes != classes:  # a new classifier, of which nothing was measured
            card = replace(card, class_names=(), metrics={}, examples=0, evaluated_on="")
    path = locate(source, WEIGHTS, **hub_options)
    with within_size_of(path, config.num_classes * WIDEST if "num_classes" in arguments else 0):
        network = build(found.name, config)
    load_weights(network, path)
    network.card = card
    return network


def load_weights(network: "Network", source: str | Path, **hub_options: Any) -> None:
    """Weights from a file, folder or hub id.

    timm's lambda networks may have timm's names. A classifier for another number of classes is left out, and a
    convolution for images with other channels is made to fit, as timm does.
    """
    path = locate(source, WEIGHTS, **hub_options)
    state = read_state(path)
    if is_byobnet(state):
        try:
            state = from_byobnet(state)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    spoilt = non_finite(state)
    if spoilt:
        warnings.warn(non_finite_message(path, spoilt, len(state)), NonFiniteWeightsWarning, stacklevel=3)
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
    if wrong := misfits(state, wanted):
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

"""Saving and loading of weights with a description, in files, folders and on the Hugging Face hub.

A folder contains `config.json`, `model.safetensors` and a model card, `README.md`. This is the layout of
huggingface_hub's PyTorchModelHubMixin and, after `import lambdanets.timm`, of timm ("local-dir:" and "hf-hub:" names)
and transformers. The header of the weights repeats our part of the configuration, so the file is sufficient.
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
    NewClassifierWarning,
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
from lambdanets.runs import RUNS
from lambdanets.typed import Bounds, from_json

if TYPE_CHECKING:
    from lambdanets.models.network import Network

CONFIG, WEIGHTS, KEY = "config.json", "model.safetensors", "lambdanets"
HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
Examples = Annotated[int, Bounds(0, 2**40)]
WIDEST = 2**13  # largest number of channels before a classifier
# Names of other networks in timm's registry
TIMM_HAS = frozenset({"resnet26", "resnet50", "resnet101", "resnet152", *TIMM_NETWORKS})


@dataclass(frozen=True)
class Card:
    """Metadata of weights, stored with them.

    Attributes:
        preprocessing: preprocessing of images.
        class_names: class names in the order of the outputs; empty if unknown.
        metrics: results by name, for example {"top1": 0.784}.
        recipe: settings of the training, as JSON.
        examples: number of images on which the metrics were measured; 0 if unknown.
        evaluated_on: description of these images.
        training_data: description of the training images.
        teacher: the network that labelled the training images, if any.
        license: licence of the weights.

    >>> from lambdanets.models import Card, Preprocessing
    >>> Card(Preprocessing(size=32), class_names=("cat", "dog")).preprocessing.size
    32
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

    # Omitted if empty, so that such files equal those written before these fields were added.
    LEFT_OUT_IF_EMPTY: ClassVar = ("examples", "evaluated_on", "training_data", "teacher", "license")
    WHEN_ABSENT: ClassVar[dict[str, Any]] = {"preprocessing": Preprocessing(**Preprocessing.WHEN_ABSENT)}


@dataclass(frozen=True, kw_only=True)
class Description(Card):
    """A card with the network's name and arguments, as stored in config.json and in the header of the weights."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    version: str = ""

    @property
    def card(self) -> Card:
        return Card(**{f.name: getattr(self, f.name) for f in fields(Card)})


def timm_name(name: str) -> str:
    """Return the name of a network in timm's registry, after `import lambdanets.timm`."""
    return f"lambdanets_{name}" if name in TIMM_HAS else name


def timm_configuration(config: NetworkConfig, card: Card) -> dict[str, Any]:
    """Return the fields of timm's PretrainedCfg."""
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
    """Return the fields of timm's PretrainedCfg for the network of `create_model(name)`."""
    config, published = ROWS[name], PUBLISHED.get(name)
    if published is None:
        return timm_configuration(config, Card(Preprocessing(size=config.image_size)))
    return {**timm_configuration(config, Card(published.preprocessing)), "hf_hub_id": published.hub_id}


def describe_network(network: "Network", card: Card) -> dict[str, Any]:
    """Return the description that is stored with weights: version, name, arguments and card."""
    from lambdanets import __version__
    from lambdanets.models.registry import changes

    if card.class_names and len(card.class_names) != network.num_classes:
        raise ValueError(f"{len(card.class_names)} class names for {network.num_classes} classes")
    if network.name is None:
        raise ValueError("only networks from create_model can be saved with their configuration")
    arguments = changes(network.name, network.config)
    if callable(arguments.get("layer")):
        raise ValueError("a layer given as a function cannot be saved: save network.state_dict() instead")
    said = {key: value for key, value in asdict(card).items() if value or key not in Card.LEFT_OUT_IF_EMPTY}
    return {"version": __version__, "name": network.name, "arguments": arguments, **said}


def save_weights(network: "Network", path: str | Path, card: Card | None = None, bits: Bits | None = None) -> Path:
    """Write the weights of a network and their description to one safetensors file, and return its path.

    The file is written atomically.

    Args:
        network: a network from `create_model` or `from_pretrained`.
        path: the file.
        card: metadata of the weights; default: the network's card.
        bits: 8 or 16 for a smaller file (`lambdanets.models.compact`), 32 for float32; None keeps the dtype.

    >>> import tempfile
    >>> from lambdanets import create_model
    >>> from lambdanets.models import from_pretrained, save_weights
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_weights(create_model("lambda_resnet_tiny", num_classes=5), f"{folder}/tiny.safetensors")
    ...     network = from_pretrained(path)
    >>> network.name, network.num_classes
    ('lambda_resnet_tiny', 5)
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
    """Return the state dict with each shared parameter under one name."""
    repeated = {name for names in names_of_parameters(network).values() for name in sorted(names)[1:]}
    return {name: tensor for name, tensor in network.state_dict().items() if name not in repeated}


def save_pretrained(
    network: "Network", folder: str | Path, card: Card | None = None, repo_id: str | None = None
) -> Path:
    """Write config.json, README.md (unless an edited one exists) and finally model.safetensors; return the folder."""
    card = card or network.card or default_card(network)
    ours = describe_network(network, card)
    config = {
        "architecture": timm_name(ours["name"]),
        "num_classes": network.num_classes,
        "num_features": network.num_features,
        # transformers passes the number of classes itself, and timm reads it above
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
            (Path(folder) / README).unlink()  # the one on the hub may have been edited
        return str(api.upload_folder(repo_id=repo_id, folder_path=folder, **options))


def locate(source: str | Path, filename: str, **hub_options: Any) -> Path:
    """Return the path of a file: `source` if it is a file, otherwise in this folder, or downloaded from this hub id."""
    path = Path(source)
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / filename).is_file():
            raise FileNotFoundError(f"{path} has no {filename}: pass a folder that save_pretrained wrote")
        return path / filename
    if isinstance(source, Path) or not may_be_on_hub(source):
        raise FileNotFoundError(f"{source} is neither a file or folder nor an id on the hub (owner/name)")
    from huggingface_hub import hf_hub_download

    try:
        check_reachable(source, filename, **hub_options)
        return Path(hf_hub_download(source, filename, **hub_options))
    except Exception as error:  # huggingface_hub raises many classes of errors
        raise ValueError(f"{source} is not a file or folder, and loading it from the hub failed: {error}") from error


def may_be_on_hub(source: str) -> bool:
    """Return whether `source` has the form owner/name and is not a mistyped path in an existing folder or runs/."""
    return source.count("/") == 1 and not source.startswith((".", "/", "~", RUNS)) and not Path(source).parent.is_dir()


def check_reachable(source: str, filename: str, **hub_options: Any) -> None:
    """Raise the error of huggingface_hub if a file is neither in its cache nor on the hub.

    `hf_hub_download` would repeat a failed request for 20 seconds.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_OFFLINE

    revision, cache = hub_options.get("revision"), hub_options.get("cache_dir")
    if HF_HUB_OFFLINE or hub_options.get("local_files_only"):
        return
    if not isinstance(try_to_load_from_cache(source, filename, cache_dir=cache, revision=revision), str):
        get_hf_file_metadata(hf_hub_url(source, filename, revision=revision), token=hub_options.get("token"))


def read_description(source: str | Path, **hub_options: Any) -> Description:
    """Read name, arguments and card from config.json or from the header of a safetensors file."""
    path = locate(source, CONFIG, **hub_options)
    if path.suffix == ".safetensors":
        for key in read_metadata(path):
            if key.startswith(f"{KEY}_"):  # weights of another task, for example lambdanets_detector
                kind = key.removeprefix(f"{KEY}_")[:40]
                raise ValueError(f"{path} is not a classifier: it has the weights of another task, {kind}")
        data = read_description_of(path, KEY)
    else:
        data = read_object(path, constants=True).get(KEY)  # metrics may be NaN
    if not isinstance(data, dict) or "name" not in data:
        raise ValueError(f"{path} does not name its network: use create_model(name, pretrained={str(source)!r})")
    try:
        return from_json(Description, data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_card(source: str | Path) -> Card:
    """Read the metadata of weights without loading them.

    Args:
        source: a .safetensors file, a folder written by `save_pretrained`, or an id on the Hugging Face hub.

    >>> import tempfile
    >>> from lambdanets import create_model
    >>> from lambdanets.models import read_card, save_weights
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     card = read_card(save_weights(create_model("lambda_resnet_tiny"), f"{folder}/tiny.safetensors"))
    >>> card.preprocessing.size
    32
    """
    return read_description(source).card


def from_pretrained(source: str | Path, **arguments: Any) -> "Network":
    """Create the network that weights describe, and load them.

    The description can only set fields of the network's configuration, and the memory that it can request is limited
    by the size of the weights.

    Args:
        source: a .safetensors file, a folder written by `save_pretrained`, or an id on the Hugging Face hub.
        arguments: fields of the configuration to change, such as num_classes, and options of the hub: revision, token,
            cache_dir, local_files_only, force_download.

    Raises:
        ValueError: if the weights or their description are damaged or do not match.

    >>> import tempfile
    >>> from lambdanets import create_model
    >>> from lambdanets.models import from_pretrained
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = create_model("lambda_resnet_tiny", num_classes=5).save_pretrained(folder)
    ...     network = from_pretrained(folder, drop_rate=0.1)
    >>> network.config.num_classes, network.config.drop_rate
    (5, 0.1)
    """
    from lambdanets.models.registry import build, configure, with_placement

    hub_options = {name: arguments.pop(name) for name in HUB_OPTIONS if name in arguments}
    found = read_description(source, **hub_options)
    try:
        said = with_placement(found.name, found.arguments)
        config = configure(found.name, **said)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source} does not describe a network of lambdanets: {error}") from error
    if found.class_names and len(found.class_names) != config.num_classes:
        raise ValueError(f"{source} has {len(found.class_names)} class names for {config.num_classes} classes")
    card, classes = found.card, config.num_classes
    if arguments:
        config = configure(found.name, **{**said, **arguments})
        if config.num_classes != classes:  # the metrics are not those of the new classifier
            card = replace(card, class_names=(), metrics={}, examples=0, evaluated_on="")
    path = locate(source, WEIGHTS, **hub_options)
    with within_size_of(path, config.num_classes * WIDEST if "num_classes" in arguments else 0):
        network = build(found.name, config)
    load_weights(network, path)
    network.card = card
    return network


def load_weights(network: "Network", source: str | Path, **hub_options: Any) -> None:
    """Load weights into a network.

    Weights of timm's lambda networks may have timm's names. A classifier for another number of classes is not loaded,
    and the first convolution is adapted to another number of image channels, as in timm; both give a warning.

    Args:
        network: the network.
        source: a file (.safetensors, or a file of tensors from `torch.save`), a folder written by `save_pretrained`,
            or an id on the Hugging Face hub.
        hub_options: arguments of `huggingface_hub.hf_hub_download`.

    Raises:
        ValueError: if names or shapes do not match.

    >>> import tempfile, torch
    >>> from lambdanets import create_model
    >>> from lambdanets.models import load_weights, save_weights
    >>> first, second = (create_model("lambda_resnet_tiny") for _ in range(2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     load_weights(second, save_weights(first, f"{folder}/tiny.safetensors"))
    >>> torch.equal(first.fc.weight, second.fc.weight)
    True
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
            text = f"{path} has {classes} classes instead of {network.num_classes}: {head} keeps its initial weights"
            warnings.warn(NewClassifierWarning(text, classes), stacklevel=3)
        for name in (f"{head}.weight", f"{head}.bias"):
            state.pop(name, None)
            if name in wanted:
                state[name] = wanted[name]
    channels = network.config.in_chans
    if first in state and state[first].ndim == 4 and state[first].shape[1] != channels:
        warnings.warn(
            f"{path} is for images with {state[first].shape[1]} channels instead of {channels}: adapted {first}",
            stacklevel=3,
        )
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
    """Adapt the weight of the first convolution to another number of channels.

    One channel gets the sum over channels. Otherwise the channels are repeated, and scaled so that the sum over
    channels keeps its size.
    """
    present = weight_OCHW.shape[1]
    if channels == 1:
        return weight_OCHW.sum(1, keepdim=True)
    repeated = weight_OCHW.repeat(1, -(-channels // present), 1, 1)[:, :channels]
    return repeated * (present / channels)

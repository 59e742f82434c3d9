"""Loading of trained networks for `evaluate` and `predict`."""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lambdanets.data.loader import Batch, Loader
from lambdanets.data.transforms import normalize
from lambdanets.files import read_object
from lambdanets.models.network import Network
from lambdanets.models.packaged import NONE_PACKAGED, PACKAGED, default_network, packaged_weights
from lambdanets.models.pretrained import (
    CONFIG,
    KEY,
    WEIGHTS,
    Card,
    default_card,
    from_pretrained,
    locate,
    may_be_on_hub,
    read_card,
)
from lambdanets.models.registry import FAMILIES, configure, create_model
from lambdanets.models.stored import only_finite_weights, read_state
from lambdanets.models.zoo import ROWS
from lambdanets.options import chosen_device
from lambdanets.runs import LOG, RUN_WEIGHTS, RUNS, runs_here
from lambdanets.train.config import parse_option
from lambdanets.train.inference.command import Using
from lambdanets.train.precision import autocast


@dataclass(frozen=True)
class Trained:
    """A network in eval mode on its device, with the metadata of its weights. `open_trained` returns it.

    Attributes:
        network: the network.
        card: metadata of the weights: preprocessing, class names, metrics.
        using: how the network runs.
        device: device of the network.
    """

    network: Network
    card: Card
    using: Using
    device: torch.device

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.card.class_names or tuple(map(str, range(self.network.num_classes)))

    @property
    def channels(self) -> int:
        return self.network.config.in_chans

    @torch.inference_mode()
    def answers(self, loader: Loader) -> Iterator[tuple[Batch, Tensor, float]]:
        """Yield batches, their logits [B, C] in float32 on the CPU, and the seconds that the network took."""
        dtype = torch.float64 if self.using.precision == "float64" else torch.float32
        for batch in loader.epoch(0):
            if not len(batch):  # all of its images are unreadable
                yield batch, torch.empty(0, self.network.num_classes), 0.0
                continue
            start = time.perf_counter()
            images = normalize(batch.images.to(self.device, non_blocking=True), self.card.preprocessing, dtype)
            with autocast(self.using.precision, self.device):
                logits = self.network(images.contiguous(memory_format=torch.channels_last))
            scores = logits.float().cpu()  # synchronises with the device
            yield batch, scores, time.perf_counter() - start


def open_trained(what: str, using: Using | None = None) -> Trained:
    """Load a trained network.

    Args:
        what: folder of a run, .safetensors file, folder that `save_pretrained` wrote, id on the Hugging Face hub, or
            name of a network with `using.pretrained` weights.
        using: which weights, and how the network runs; by default averaged weights in float32.

    Returns a `Trained`. Raises ValueError or OSError if there are no usable weights.

    Example:
        >>> from lambdanets import create_model
        >>> from lambdanets.train.inference.command import Using
        >>> from lambdanets.train.inference.trained import open_trained
        >>> network = create_model("lambda_resnet_tiny", image_size=28, num_classes=10, depths=(1, 1, 1, 1))
        >>> folder = str(network.save_pretrained("digits"))
        >>> trained = open_trained(folder, Using(device="cpu"))
        >>> trained.card.preprocessing.size, len(trained.class_names)
        (28, 10)
    """
    using = using or Using()
    device = chosen_device(using.device)
    with only_finite_weights():
        network = find_network(what, using)
    if not network.num_classes:
        raise ValueError(f"{what} has no classifier")
    card = network.card or default_card(network)
    if using.image_size is not None:
        card = replace(card, preprocessing=replace(card.preprocessing, size=using.image_size))
    dtype = torch.float64 if using.precision == "float64" else torch.float32
    network = network.eval().to(device, dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Trained(network, card, using, device)


def find_network(what: str, using: Using) -> Network:
    """Load the network of `open_trained` on the CPU."""
    path = Path(what).expanduser()
    if what in ROWS and not path.exists():
        return named_network(what, using)
    if using.pretrained or using.options:
        raise ValueError(f"--pretrained and --options need the name of a network, got {what!r}")
    if path.is_dir():
        return from_pretrained(weights_in(path, using.weights))
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ValueError(
                f"{what} is not a .safetensors file: convert it with `lambdanets convert`, or pass the name of the "
                f"network and --pretrained {what}"
            )
        return from_pretrained(path)
    if may_be_on_hub(what):
        return from_pretrained(what)
    if what.startswith(RUNS):
        raise FileNotFoundError(f"{what}: no such run here. {runs_here()}")
    raise FileNotFoundError(
        f"{what} is not the folder of a run, a .safetensors file, a model folder or the name of a network (`lambdanets "
        f"models` lists them). {runs_here()}"
    )


def packaged_default() -> str:
    """Return the name of the network that is used where none is named."""
    name = default_network()
    if name is None:
        raise ValueError(
            f"no weights are named, and {NONE_PACKAGED}: `lambdanets predict WEIGHTS IMAGES`, where WEIGHTS is the "
            f"folder of a run, a .safetensors file, a model folder or an id on the Hugging Face hub"
        )
    return name


def named_network(name: str, using: Using) -> Network:
    packaged = packaged_weights(name) if using.pretrained in (None, PACKAGED) else None
    if packaged is not None and not using.options:
        return from_pretrained(packaged)
    if using.pretrained is None:
        raise ValueError(f"{name} needs weights: pass --pretrained WEIGHTS (a file, a folder or an id on the hub)")
    source = locate(packaged or using.pretrained, WEIGHTS)
    arguments: dict[str, Any] = dict(parse_option(word) for word in using.options)
    head = FAMILIES[type(ROWS[name])].classifier_name
    bias = read_state(source).get(f"{head}.bias")
    if bias is not None and bias.ndim == 1:
        arguments.setdefault("num_classes", len(bias))
    try:
        configure(name, **arguments)
    except TypeError as error:  # unknown argument
        raise ValueError(f"--options: {error}") from error
    network = create_model(name, source, **arguments)
    with suppress(ValueError):  # weights from other libraries have no card
        network.card = read_card(using.pretrained)
    return network


def weights_in(folder: Path, weights: str) -> Path:
    """Return the weight file of a run, or the folder itself if `save_pretrained` wrote it."""
    wanted = folder / RUN_WEIGHTS[weights]
    if wanted.is_file():
        return wanted
    if (folder / WEIGHTS).is_file():
        if weights != "ema":
            raise FileNotFoundError(
                f"{folder} is a model folder with one set of weights; --weights {weights} needs the folder of a run"
            )
        return folder
    there = [name for name, file in RUN_WEIGHTS.items() if (folder / file).is_file()]
    if there:
        raise FileNotFoundError(f"{folder} has no {wanted.name}: choose --weights {' or '.join(there)}")
    if (folder / LOG).is_file():
        raise FileNotFoundError(
            f"{folder} has no weights yet: they are written after each evaluation (--evaluate-every) and at the end; "
            f"`lambdanets train resume {folder}` resumes the run"
        )
    described = (folder / CONFIG).is_file() and KEY in read_object(folder / CONFIG)
    missing = WEIGHTS if described else f"{wanted.name} (a run) or {WEIGHTS} (a model folder)"
    raise FileNotFoundError(f"{folder} has no {missing}")

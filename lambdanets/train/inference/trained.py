"""A trained network, wherever it is: what `evaluate` and `predict` share."""

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
from lambdanets.runs import LOG, RUN_WEIGHTS
from lambdanets.train.config import parse_option
from lambdanets.train.inference.command import Using
from lambdanets.train.precision import autocast


@dataclass(frozen=True)
class Trained:
    """A network in eval mode on its device, with what its weights say about themselves."""

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
        """Batches, their scores [B, C] in float32 on the CPU, and the seconds that the network took."""
        dtype = torch.float64 if self.using.precision == "float64" else torch.float32
        for batch in loader.epoch(0):
            if not len(batch):  # none of its images could be read
                yield batch, torch.empty(0, self.network.num_classes), 0.0
                continue
            start = time.perf_counter()
            images = normalize(batch.images.to(self.device, non_blocking=True), self.card.preprocessing, dtype)
            with autocast(self.using.precision, self.device):
                logits = self.network(images.contiguous(memory_format=torch.channels_last))
            scores = logits.float().cpu()  # waits for the device
            yield batch, scores, time.perf_counter() - start


def open_trained(what: str, using: Using | None = None) -> Trained:
    """The network of a run folder, a safetensors file, a model folder, a hub id, or a name with `pretrained` weights.

    A ValueError or OSError says what is missing and what to do.
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
    """The network that `open_trained` is asked for, on the CPU."""
    path = Path(what).expanduser()
    if what in ROWS and not path.exists():
        return named_network(what, using)
    if using.pretrained or using.options:
        raise ValueError(f"--pretrained and --options are for the name of a network, and {what!r} is none")
    if path.is_dir():
        return from_pretrained(weights_in(path, using.weights))
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ValueError(
                f"{what} is no .safetensors file: `lambdanets convert` makes one, or name the network and pass "
                f"--pretrained {what}"
            )
        return from_pretrained(path)
    if may_be_on_hub(what):
        return from_pretrained(what)
    raise FileNotFoundError(
        f"{what} is no run folder, .safetensors file or model folder, nor a network's name (`lambdanets models`)"
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
        raise ValueError(f"{name} has no weights of its own: --pretrained WEIGHTS (a file, a folder, or a hub id)")
    source = locate(packaged or using.pretrained, WEIGHTS)
    arguments: dict[str, Any] = dict(parse_option(word) for word in using.options)
    head = FAMILIES[type(ROWS[name])].classifier_name
    bias = read_state(source).get(f"{head}.bias")
    if bias is not None and bias.ndim == 1:
        arguments.setdefault("num_classes", len(bias))
    try:
        configure(name, **arguments)
    except TypeError as error:  # an argument that it does not have
        raise ValueError(f"--options: {error}") from error
    network = create_model(name, source, **arguments)
    with suppress(ValueError):  # weights of others say nothing about themselves
        network.card = read_card(using.pretrained)
    return network


def weights_in(folder: Path, weights: str) -> Path:
    """The file of a run, or the folder itself if save_pretrained wrote it."""
    wanted = folder / RUN_WEIGHTS[weights]
    if wanted.is_file():
        return wanted
    if (folder / WEIGHTS).is_file():
        if weights != "ema":
            raise FileNotFoundError(
                f"{folder} is a model folder with one kind of weights: --weights {weights} is for runs"
            )
        return folder
    there = [name for name, file in RUN_WEIGHTS.items() if (folder / file).is_file()]
    if there:
        raise FileNotFoundError(f"{folder} has no {wanted.name}: choose --weights {' or '.join(there)}")
    if (folder / LOG).is_file():
        raise FileNotFoundError(
            f"{folder} has no weights yet: they are written after each evaluation (--evaluate-every) and at the end; "
            f"`lambdanets train resume {folder}` goes on with the run"
        )
    described = (folder / CONFIG).is_file() and KEY in read_object(folder / CONFIG)
    missing = WEIGHTS if described else f"{wanted.name} (a run) or {WEIGHTS} (a model folder)"
    raise FileNotFoundError(f"{folder} has no {missing}")

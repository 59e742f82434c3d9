"""The command `lambdanets models`."""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro

from lambdanets.models import Card, list_models
from lambdanets.models.counts import count_parameters, meta_network
from lambdanets.models.flops import paper_flops
from lambdanets.models.packaged import PACKAGED, packaged_card
from lambdanets.models.registry import weights_of
from lambdanets.models.zoo import PAPER_TOP1
from lambdanets.tables import Format, print_table


@dataclass(frozen=True)
class Models:
    """List all networks of `create_model` with parameters, FLOPs at their image size, and accuracy in the paper.

    Weights: "packaged" weights are included in lambdanets; "hub" weights are downloaded from the Hugging Face hub.
    """

    pattern: Annotated[str, tyro.conf.Positional] = "*"
    """Pattern of network names, for example "lambda_*"."""
    format: Format = "table"
    """Output format: table, markdown or json."""

    def run(self) -> int:
        names = list_models(self.pattern)
        if not names:
            raise ValueError(f"no model matches {self.pattern!r}; `lambdanets models` lists all")
        found = [describe_model(name) for name in names]
        if self.format == "json":
            print(json.dumps([asdict(one) for one in found], indent=1))
            return 0
        titles = ("model", "image", "params (M)", "GFLOPs", "ImageNet top-1 in the paper", "weights")
        lines = [
            (
                one.name,
                f"{one.image_size}",
                f"{one.parameters / 1e6:.2f}",
                f"{one.flops / 1e9:.2f}",
                accuracy(one),
                weights(one),
            )
            for one in found
        ]
        print_table(titles, lines, self.format, numbers=(1, 2, 3))
        return 0


@dataclass(frozen=True)
class PaperAccuracy:
    """A top-1 accuracy in a table of the paper."""

    top1: str
    image_size: int
    table: str


@dataclass(frozen=True)
class Model:
    """A line of `lambdanets models`."""

    name: str
    image_size: int | tuple[int, int]
    parameters: int
    flops: int
    paper: tuple[PaperAccuracy, ...]  # supervised, without pseudo-labels
    weights: str | None = None  # "packaged" or "hub"
    top1: float | None = None  # of packaged weights, from their card
    examples: int = 0  # number of images on which it was measured


def describe_model(name: str) -> Model:
    network = meta_network(name)
    shape = (1, network.config.in_chans, *network.config.image_grid)
    accuracies = tuple(PaperAccuracy(*printed) for printed in PAPER_TOP1.get(name, ()))
    total = count_parameters(network).total
    flops, where = paper_flops(network, shape).total, weights_of(name)
    card = Card()
    if where == PACKAGED:
        with suppress(ImportError):  # the list needs no safetensors
            card = packaged_card(name)
    top1 = card.metrics.get("top1")
    return Model(name, network.config.image_size, total, flops, accuracies, where, top1, card.examples)


def weights(model: Model) -> str:
    """Format the source of a network's weights, and the accuracy of packaged ones."""
    if model.top1 is None:
        return model.weights or ""
    images = f" ({model.examples:,} images)" if model.examples else ""
    return f"{model.weights}: top-1 {100 * model.top1:.1f}%{images}"


def accuracy(model: Model) -> str:
    """Format the accuracies of a network, each with the first table that prints it."""
    first = {(a.image_size, a.top1): a.table.removeprefix("tab:") for a in reversed(model.paper)}
    return ", ".join(f"{top1} at {size} ({table})" for (size, top1), table in sorted(first.items()))

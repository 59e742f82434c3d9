"""Parameters, and networks without memory to count them."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lambdanets.layers import RelativePositions
from lambdanets.models import Network, create_model


@dataclass(frozen=True)
class Parameters:
    """How many numbers a network learns; a table that layers share counts once."""

    total: int
    positions: int  # in tables of position embeddings


def count_parameters(network: nn.Module) -> Parameters:
    tables = {id(m.table): m.table.numel() for m in network.modules() if isinstance(m, RelativePositions)}
    return Parameters(sum(p.numel() for p in network.parameters()), sum(tables.values()))


def meta_network(name: str, **arguments: Any) -> Network:
    """A network of shapes only, in eval mode: any size costs nothing."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it does not initialise what has no memory
        return create_model(name, **arguments).eval()

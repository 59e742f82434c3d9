"""Counts of parameters, and networks on the meta device for counting."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lambdanets.layers import RelativePositions
from lambdanets.models import Network, create_model


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters; a table that several layers share counts once.

    Attributes:
        total: all parameters.
        positions: parameters in tables of position embeddings.
    """

    total: int
    positions: int


def count_parameters(network: nn.Module) -> Parameters:
    """Count the parameters of a network.

    >>> from lambdanets.models.counts import count_parameters, meta_network
    >>> count_parameters(meta_network("lambda_resnet50")).total
    18963272
    """
    tables = {id(m.table): m.table.numel() for m in network.modules() if isinstance(m, RelativePositions)}
    return Parameters(sum(p.numel() for p in network.parameters()), sum(tables.values()))


def meta_network(name: str, **arguments: Any) -> Network:
    """Create a network on the meta device in eval mode, which takes no memory for parameters.

    Args:
        name: one of `list_models()`.
        arguments: arguments of `create_model`.

    >>> from lambdanets.models.counts import meta_network
    >>> next(meta_network("lambda_resnet420").parameters()).device
    device(type='meta')
    """
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not initialise meta tensors
        return create_model(name, **arguments).eval()

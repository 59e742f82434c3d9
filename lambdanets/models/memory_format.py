"""The channels-last memory format for any network."""

from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def to_channels_last(network: M) -> M:
    """Convert the 4-dimensional weights of a network to the channels-last memory format.

    `network.to(memory_format=torch.channels_last)` raises an error for networks with 5-dimensional weights, such as
    the position convolutions of timm's lambda layers.
    """
    # `contiguous` would keep the strides of 1x1 convolutions, whose outputs would then not be channels-last.
    return network._apply(lambda tensor: tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor)

"""The channels-last memory format for any network."""

from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def to_channels_last(network: M) -> M:
    """As `network.to(memory_format=torch.channels_last)`, which refuses networks with weights of five axes.

    Those, for example the position convolutions of timm's lambda layers, stay as they are.
    """
    # Not `contiguous`, which leaves the strides of 1x1 convolutions as they are: their outputs would be contiguous.
    return network._apply(lambda tensor: tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor)

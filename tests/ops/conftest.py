"""What several tests of the operation share: a form of the lambda convolution, memory that shows what nobody wrote."""

import pytest
import torch

from lambdanets.ops import conv


@pytest.fixture
def prepare(monkeypatch):
    """Turns "depthwise" into the backend that has it, with that form in place of the other."""

    def prepared(name: str) -> str:
        if name != "depthwise":
            return name
        monkeypatch.setattr(conv, "extra_axis", conv.depthwise)
        return "conv"

    return prepared


@pytest.fixture
def poisoned_memory(monkeypatch):
    """What torch.empty returns is full of NaN, so an element nobody writes is noticed."""
    plain = torch.empty

    def poisoned(*args, **kwargs):
        tensor = plain(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)

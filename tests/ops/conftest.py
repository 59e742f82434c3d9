"""What several tests of the operation share: memory that shows what nobody wrote, kernels for small cases."""

import pytest
import torch

from lambdanets.ops.triton import streams


@pytest.fixture
def poisoned_memory(monkeypatch):
    """What torch.empty and empty_like return is full of NaN, so an element nobody writes is noticed."""

    def poisoning(plain):
        def poisoned(*args, **kwargs):
            tensor = plain(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return poisoned

    monkeypatch.setattr(torch, "empty", poisoning(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoning(torch.empty_like))


@pytest.fixture
def side_by_side():
    """Small cases, too, run kernels beside each other, where there is a GPU."""
    with streams.from_work(0):
        yield

"""What all tests share: the same numbers on every run, one thread a worker."""

import logging

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "lambdanets",
    derandomize=True,
    deadline=None,
    max_examples=40,
    # Fixtures only patch constants: nothing that an example would have to undo.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("lambdanets")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def forget_compiled_code(monkeypatch):
    """For tests that compile: each begins and ends without what others compiled."""
    # Dynamo traces itself in thousands of debug records; pytest would keep them all.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    torch.compiler.reset()
    yield
    torch.compiler.reset()

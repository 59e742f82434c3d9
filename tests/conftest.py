"""What all tests share: the same numbers on every run, one thread a worker."""

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

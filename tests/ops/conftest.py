"""How a test asks for one of the two forms of the lambda convolution."""

import pytest

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

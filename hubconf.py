"""Entry points for torch.hub: `torch.hub.load(REPOSITORY, "lambda_resnet50", num_classes=10)`."""

from collections.abc import Callable
from typing import Any

from torch import nn

from lambdanets import create_model, list_models

dependencies = ["numpy", "rich", "torch", "tyro"]


def _entrypoint(name: str) -> Callable[..., nn.Module]:
    def build(pretrained: bool | str = False, **arguments: Any) -> nn.Module:
        return create_model(name, pretrained, **arguments)

    build.__name__ = name
    build.__doc__ = (
        f"Create `{name}`, like `lambdanets.create_model({name!r}, ...)`.\n\n"
        "`pretrained` is a file, a folder or a hub id of weights; the other arguments are those of `create_model`."
    )
    return build


globals().update({name: _entrypoint(name) for name in list_models()})

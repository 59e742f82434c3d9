"""Parameters with several names: position embeddings that the layers of a stage share. Files store them once."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lambdanets.layers.arguments import NotScriptable


class SharesParameters(NotScriptable):
    """A base class of networks whose parameters may have several names, which loads a parameter stored under one."""

    @property
    def all_tied_weights_keys(self) -> dict[str, str]:
        """The first name of each shared parameter, by its other names; transformers ties them after loading."""
        return {name: first for first, *others in map(sorted, names_of_parameters(self).values()) for name in others}

    @property
    def _tied_weights_keys(self) -> dict[str, str]:
        """The same mapping under the name that transformers reads before saving."""
        return self.all_tied_weights_keys

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict like `torch.nn.Module.load_state_dict`; a shared table needs only one of its names.

        With `strict=False`, its other names are reported as missing, which `safetensors.torch.load_model` relies on.
        """
        found = super().load_state_dict(state_dict, strict, assign)
        if not strict:
            completed = dict(state_dict)
            complete_shared(self, completed)
            found.missing_keys.extend(name for name in completed if name not in state_dict)
        return found


def complete_shared(network: nn.Module, state: dict[str, Any], prefix: str = "", *_: Any) -> None:
    """Add a shared table, which safetensors stores once, under all of its names; a ValueError if these differ."""
    for names in names_of_parameters(network, prefix).values():
        found = [name for name in names if name in state]
        other = next((name for name in found[1:] if not are_equal(state[name], state[found[0]])), None)
        if other is not None:
            raise ValueError(
                f"{found[0]} and {other} differ in the weights, but this network shares one table for both: build it "
                f"with share_positions=False"
            )
        for name in names if found else []:
            state.setdefault(name, state[found[0]])


def names_of_parameters(network: nn.Module, prefix: str = "") -> dict[int, list[str]]:
    """Return all names of each parameter, by its id."""
    names: dict[int, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(prefix + name)
    return names


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, where NaN equals NaN and meta tensors equal everything."""
    return a is b or a.is_meta or torch.equal(a.nan_to_num(), b.nan_to_num())

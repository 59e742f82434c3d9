"""Parameters with several names: position embeddings that the layers of a stage share. Files hold them once."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lambdanets.layers.arguments import NotScriptable


class SharesParameters(NotScriptable):
    """Loads what was stored under one of a parameter's names."""

    @property
    def all_tied_weights_keys(self) -> dict[str, str]:
        """The further names of each shared parameter, and its first: transformers ties them after loading."""
        return {name: first for first, *others in map(sorted, names_of_parameters(self).values()) for name in others}

    @property
    def _tied_weights_keys(self) -> dict[str, str]:
        """The same, where transformers reads it before saving."""
        return self.all_tied_weights_keys

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's. With strict=False, names whose parameter came under another one are missing, as they are for any
        module: `safetensors.torch.load_model` counts on it."""
        found = super().load_state_dict(state_dict, strict, assign)
        if not strict:
            completed = dict(state_dict)
            complete_shared(self, completed)
            found.missing_keys.extend(name for name in completed if name not in state_dict)
        return found


def complete_shared(network: nn.Module, state: dict[str, Any], prefix: str = "", *_: Any) -> None:
    """safetensors stores a shared table once: gives it back under each of its names. Several ones are refused."""
    for names in names_of_parameters(network, prefix).values():
        found = [name for name in names if name in state]
        other = next((name for name in found[1:] if not are_equal(state[name], state[found[0]])), None)
        if other is not None:
            raise ValueError(
                f"{found[0]} and {other} differ in the weights, and this network shares one table in their place: "
                f"build it with share_positions=False"
            )
        for name in names if found else []:
            state.setdefault(name, state[found[0]])


def names_of_parameters(network: nn.Module, prefix: str = "") -> dict[int, list[str]]:
    """Every name of each parameter, by its id."""
    names: dict[int, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(prefix + name)
    return names


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Whether they are one tensor as far as anyone can tell: NaN equals NaN, and meta tensors say nothing."""
    return a is b or a.is_meta or torch.equal(a.nan_to_num(), b.nan_to_num())

"""Checks of the names and shapes of a state dict; errors use the names of the file."""

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from lambdanets.models.stored import misfits, shorten

State = dict[str, Tensor]
COUNTER = "num_batches_tracked"  # of batch norm; older files and some exports do not have it


def check_names(state: Mapping[str, Tensor], expected: Collection[str], what: str) -> None:
    """Raise a ValueError if names are missing or unexpected."""
    missing = [name for name in expected if name not in state and not name.endswith(COUNTER)]
    unexpected = [name for name in state if name not in expected and not name.endswith(COUNTER)]
    if missing or unexpected:
        raise ValueError(f"this is not {what}: missing {shorten(missing)}; not expected {shorten(unexpected)}")


def load(module: nn.Module, state: State, what: str) -> None:
    """Load a state dict whose names and shapes must match exactly."""
    wanted = module.state_dict()
    check_names(state, wanted.keys(), what)
    if wrong := misfits(state, wanted):
        raise ValueError(f"this is not {what}: {shorten(wrong)}")
    counters = {name: tensor for name, tensor in wanted.items() if name.endswith(COUNTER)}
    module.load_state_dict({**counters, **{name: state[name] for name in wanted if name in state}})

"""Selection of the checkpoint to resume from, and the check that it belongs to the same run."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from lambdanets.data.order import Epochs, Remainder
from lambdanets.files import RESTART_WAIT, locked, parse_json, read_object
from lambdanets.runs import CHECKPOINTS, CONFIG, LOG, RUN, as_stored
from lambdanets.train import checkpoint
from lambdanets.train.checkpoint import ForeignError
from lambdanets.train.config import RunConfig
from lambdanets.train.distributed import World
from lambdanets.train.identity import data_change, flat, read_identity
from lambdanets.train.task import Task
from lambdanets.typed import absent, to_json

FORMAT = 1  # of checkpoints
FIRST_LINE = 2**20  # largest size of the first line of the log in bytes


@contextmanager
def own_folder(folder: Path, world: World) -> Iterator[None]:
    """Lock the folder of a run on the main process. Raises FolderInUseError if another process holds the lock."""
    (restarting,) = world.any(world.restarts > 0 or world.launch is not None)
    with ExitStack() as stack:
        lock = locked(folder, wait=RESTART_WAIT if restarting else 0.0)
        world.on_main(lambda: stack.enter_context(lock))
        yield


def find_checkpoint(config: RunConfig, task: Task, world: World, resume: bool, epochs: Epochs) -> dict[str, Any] | None:
    """Load the checkpoint in the folder of the run on the main process and return it on all; None for a new run."""
    (resume,) = world.any(resume or world.restarts > 0)
    return world.on_main(lambda: read_checkpoint(config, task, resume or restarted(config.out, world), epochs))


def read_checkpoint(config: RunConfig, task: Task, resume: bool, epochs: Epochs) -> dict[str, Any] | None:
    folder = config.out
    if not resume:
        if (folder / LOG).exists() or checkpoint.complete(folder / CHECKPOINTS):
            raise ValueError(f"{folder} already holds a run: resume it with --resume, or choose another --out")
        return None
    if not checkpoint.complete(folder / CHECKPOINTS):
        return None
    identity = read_identity(folder)

    def check(state: Any) -> None:
        check_state(state)
        if identity is not None and state.get("run") != identity["id"]:
            raise ForeignError(f"belongs to another run: its id is {state.get('run')}, {RUN} has {identity['id']}")

    loaded = checkpoint.load_newest(folder / CHECKPOINTS, check)
    assert loaded is not None
    check_config(config)
    if identity is not None:
        change = data_change(identity["data"], to_json(task.identity()))
        if change is not None:
            raise ValueError(f"{folder} cannot be resumed, because {change}: undo this, or start a new run")
    state = loaded.state
    state = {"remainder": "drop"} | state  # older runs have no such setting
    epochs = replace(epochs, remainder=state["remainder"])
    steps, epoch_steps = epochs.run(config.epochs), epochs.steps
    if (state["steps"], state["epoch_steps"]) != (steps, epoch_steps):
        raise ValueError(
            f"the run in {folder} has {state['steps']} steps, {state['epoch_steps']:g} per epoch, but with the current "
            f"data and settings it would have {steps} and {epoch_steps:g}: restore the training images and settings"
        )
    return state | {"path": loaded.path.name, "damaged": loaded.damaged}


def check_state(state: Any) -> None:
    """Raise ValueError if a state is not a checkpoint of a run. `Engine.load` checks the tensors."""
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"it is not a checkpoint of a run in format {FORMAT}")
    for key, least in (("step", 0), ("steps", 1), ("micro_batch", 1), ("since_best", 0)):
        if type(state.get(key)) is not int or state[key] < least:
            raise ValueError(f"{key} must be a whole number of at least {least}, got {str(state.get(key))[:40]}")
    for key in ("seconds", "epoch_steps"):
        if type(state.get(key)) not in (int, float) or not 0 <= state[key] < math.inf:
            raise ValueError(f"{key} must be a number of at least 0, got {str(state.get(key))[:40]}")
    if state["step"] > state["steps"]:
        raise ValueError(f"step {state['step']} is beyond the last step {state['steps']}")
    if state.get("remainder", "drop") not in get_args(Remainder):
        raise ValueError(f"remainder must be one of {get_args(Remainder)}, got {str(state['remainder'])[:40]}")
    best = state.get("best")
    if best is not None and not (
        isinstance(best, dict) and type(best.get("score")) in (int, float) and type(best.get("step")) is int
    ):
        raise ValueError(f"best must be a score with its step and weights, got {str(best)[:40]}")
    if not isinstance(state.get("engine"), dict):
        raise ValueError("it has no weights")


def check_config(config: RunConfig) -> None:
    """Raise ValueError that names changed settings, if they affect the training."""
    path = config.out / CONFIG
    if not path.is_file():
        raise ValueError(f"{config.out} has checkpoints but no {CONFIG}: restore it, or start a new run elsewhere")
    stored, now = read_object(path), flat(as_stored(config))
    newer = flat(absent(config, stored))  # settings that are newer than the run
    newer.pop("remainder", None)  # the checkpoint says which one the run has, and it stays
    before = flat(stored) | newer
    changed = [key for key in before if before[key] != now.get(key) and key not in config.RESUMABLE]
    if changed:
        there = ", ".join(f"{key} was {before[key]!r} and is {now.get(key)!r}" for key in changed)
        raise ValueError(
            f"{config.out} cannot be resumed, because {there}: resume with the old settings, or start a new run"
        )


def restarted(folder: Path, world: World) -> bool:
    """Return whether the run in the folder was started by the same elastic launch, before a restart."""
    path = folder / LOG
    if world.launch is None or not path.exists():
        return False
    with path.open("rb") as file:
        first = file.readline(FIRST_LINE)
    try:
        return parse_json(first, str(path))["launch"] == world.launch
    except (ValueError, KeyError, TypeError):  # truncated by a crash
        return False

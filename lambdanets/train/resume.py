"""Where a run goes on: which checkpoint, and whether it is the same run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lambdanets.data.order import Epochs
from lambdanets.models.hub import read_object
from lambdanets.train import checkpoint
from lambdanets.train.config import RunConfig
from lambdanets.train.distributed import World
from lambdanets.train.jsonable import to_json
from lambdanets.train.log import CHECKPOINTS, CONFIG, LOG

# What may differ when a run resumes: where things are, and how they are computed or shown.
CHANGEABLE = (
    *("out", "micro_batch", "device", "compile", "channels_last", "evaluate_every", "log_every", "checkpoint_minutes"),
    *("keep", "max_skipped", "data.path", "data.validation", "data.workers", "data.cache", "data.max_broken"),
    *("pseudo.images", "pseudo.epoch"),  # the number of steps says whether epochs are the same
)


def find_checkpoint(config: RunConfig, world: World, resume: bool, epochs: Epochs) -> dict[str, Any] | None:
    """What the main process finds in the run's folder, on all processes; None for a new run."""
    (resume,) = world.any(resume or world.restarts > 0)
    found: dict[str, Any] | None = None
    error: str | None = None
    if world.main:
        try:
            found = read_checkpoint(config, resume or restarted(config.out, world), epochs)
        except (ValueError, OSError) as refused:
            error = str(refused)
    found, error = world.share((found, error))
    if error is not None:
        raise ValueError(error)
    return found


def read_checkpoint(config: RunConfig, resume: bool, epochs: Epochs) -> dict[str, Any] | None:
    folder = config.out
    if not resume:
        if (folder / LOG).exists():
            raise ValueError(f"{folder} already holds a run: --resume goes on with it, or choose another --out")
        return None
    loaded = checkpoint.load_newest(folder / CHECKPOINTS)
    if loaded is None:
        return None
    check_config(config)
    state = loaded.state
    state = {"remainder": "drop"} | state  # as runs did that began before there was a choice
    epochs = replace(epochs, remainder=state["remainder"])
    steps, epoch_steps = epochs.run(config.epochs), epochs.steps
    if (state["steps"], state["epoch_steps"]) != (steps, epoch_steps):
        raise ValueError(
            f"the run in {folder} has {state['steps']} steps, {state['epoch_steps']:g} an epoch, and this one would "
            f"have {steps} and {epoch_steps:g}: the training images have changed, or what an epoch is"
        )
    return state | {"path": loaded.path.name, "damaged": loaded.damaged}


def check_config(config: RunConfig) -> None:
    """The curve can only go on if nothing that shapes it has changed."""
    before = flat(read_object(config.out / CONFIG))
    now = flat(to_json(config))
    changed = [key for key in before if before[key] != now.get(key) and key not in CHANGEABLE]
    if changed:
        there = ", ".join(f"{key} was {before[key]!r} and is {now.get(key)!r}" for key in changed)
        raise ValueError(f"{config.out} cannot go on, because {there}: resume it as it was, or start another")


def restarted(folder: Path, world: World) -> bool:
    """Whether the run in the folder was started by the same elastic launch, which has now lost a machine."""
    path = folder / LOG
    if world.launch is None or not path.exists():
        return False
    with path.open(encoding="utf-8") as file:
        first = file.readline()
    try:
        return json.loads(first)["launch"] == world.launch
    except (ValueError, KeyError, TypeError):  # a line that a crash has torn
        return False


def flat(data: dict[str, Any], before: str = "") -> dict[str, Any]:
    """{"model": {"name": 1}} as {"model.name": 1}."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found

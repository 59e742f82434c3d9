"""Rounds: a teacher labels, a student learns, and is the next teacher.

Every stage leaves files, and a round that is interrupted goes on from them; under torchrun all processes take part.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lambdanets.data.source import splits_of
from lambdanets.pseudo.config import CoTrainConfig
from lambdanets.pseudo.cotrain import CoTrain
from lambdanets.pseudo.files import finished, read_manifest
from lambdanets.pseudo.label import LabelOptions, Progress, label
from lambdanets.pseudo.page import write_page
from lambdanets.pseudo.select import Selection, select
from lambdanets.pseudo.teacher import open_teachers
from lambdanets.pseudo.units import STRETCH, open_place
from lambdanets.runs import WEIGHTS
from lambdanets.train.classify import PREDICTIONS
from lambdanets.train.inference.command import Using
from lambdanets.train.loop import Result, Watch, fit

POLL = 1.0  # seconds between looks for the other processes' labels


@dataclass(frozen=True)
class Round:
    """What a round left."""

    number: int
    teacher: str
    labels: Path
    student: Path
    result: Result | None  # None if it was finished before


def run_rounds(
    teacher: str,
    images: str,
    out: Path,
    config: CoTrainConfig,
    *,
    rounds: int = 1,
    options: LabelOptions | None = None,
    selection: Selection | None = None,
    using: Using | None = None,
    class_names: str | None = None,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
    stretch: int = STRETCH,
    progress: Progress = lambda images, units: None,
    watch: Watch | None = None,
    tell: Callable[[str], Any] = lambda sentence: None,
) -> list[Round]:
    """Goes on where it was interrupted. Stops early, with what there is, if a signal stops a student."""
    if rounds < 1:
        raise ValueError(f"at least one round, not {rounds}")
    options, selection, using = options or LabelOptions(), selection or Selection(), using or Using()
    if not options.guard:
        options = replace(options, guard=guarded(config))
    found: list[Round] = []
    for number in range(1, rounds + 1):
        folder = out / f"round-{number}"
        labels, student = folder / "labels", folder / "student"
        result: Result | None = None
        if not all((student / name).is_file() for name in (WEIGHTS, PREDICTIONS)):  # written last: predictions
            tell(f"round {number}: {teacher} labels {images}")
            ensemble = open_teachers(teacher, using, class_names if number == 1 else None)
            done = label(
                ensemble,
                open_place(images, options.split, stretch),
                labels,
                options,
                workers=workers,
                rank=rank,
                world=world,
                progress=progress,
            )
            if done.failed:
                raise ValueError(
                    f"{len(done.failed)} units could not be labelled; {'; '.join(map(': '.join, done.failed[:3]))}"
                )
            del ensemble
            wait_for_all(labels)
            select(labels, selection)  # every process writes the same
            if rank == 0:
                tell(f"round {number}: {write_page(labels)}")
            mine = replace(config, out=student, pseudo=replace(config.pseudo, path=labels))
            result = fit(CoTrain(mine), mine, resume=True, watch=watch)
        found.append(Round(number, teacher, labels, student, result))
        if result is not None and not result.finished:
            break
        teacher = str(student)
    return found


def guarded(config: CoTrainConfig) -> tuple[str, ...]:
    """The images that the students are evaluated on."""
    data = config.data
    if data.validation:
        return (data.validation,)
    return (data.path,) if "validation" in splits_of(data.path) else ()


def wait_for_all(folder: Path) -> None:
    """Other processes label too; if one of them fails, torchrun ends all."""
    while not all(finished(folder, read_manifest(folder))):
        time.sleep(POLL)

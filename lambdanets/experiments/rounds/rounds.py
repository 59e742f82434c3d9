"""Iterated self-training: a teacher labels images, a student trains on them and becomes the next teacher.

Every stage writes files, from which an interrupted round resumes. Under torchrun all processes take part.
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

POLL = 1.0  # seconds between checks for the labels of other processes


@dataclass(frozen=True)
class Round:
    """The result of a round.

    Attributes:
        number: from 1.
        teacher: the teacher, as for `open_teachers`.
        labels: the folder of the labels.
        student: the run folder of the student.
        result: the result of training; None if the student was finished before.
    """

    number: int
    teacher: str
    labels: Path
    student: Path
    result: Result | None


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
    """Run rounds of labelling and co-training, and resume interrupted ones.

    Returns one `Round` per round, fewer if a signal stops a student.

    Args:
        teacher: the teacher of the first round, as for `open_teachers`.
        images: the images to label, as for `open_place`.
        out: folder for all rounds.
        config: configuration of the students; `out` and `pseudo.path` are replaced.
        rounds: number of rounds.
        options: settings of labelling. Without `guard`, copies of the students' validation images are dropped.
        selection: rules of the selection.
        using: device, precision and image size of the teachers.
        class_names: class names of the first teacher, for weights without them.
        workers: processes that read images for labelling.
        rank: index of this process.
        world: number of processes.
        stretch: images per unit of work, unless they are in shards.
        progress: called with the number of images and units labelled so far.
        watch: called with each record of the training log.
        tell: called with a sentence at the start of each stage.

    >>> from pathlib import Path
    >>> from PIL import Image
    >>> from lambdanets import create_model
    >>> from lambdanets.experiments.rounds.rounds import run_rounds
    >>> from lambdanets.models import Card, Preprocessing, save_weights
    >>> from lambdanets.pseudo.config import CoTrainConfig
    >>> from lambdanets.pseudo.label import LabelOptions
    >>> from lambdanets.train.config import DataConfig, ModelConfig
    >>> from lambdanets.train.inference.command import Using
    >>> network = create_model("lambda_resnet_tiny", num_classes=2, image_size=32)
    >>> weights = save_weights(network, Path("teacher.safetensors"), Card(Preprocessing(size=32), ("cat", "dog")))
    >>> for folder in ("data/train/cat", "data/train/dog", "data/val/cat", "data/val/dog", "images/all"):
    ...     Path(folder).mkdir(parents=True)
    ...     for number in range(8):
    ...         Image.new("RGB", (32, 32), (16 * number, len(folder), 0)).save(f"{folder}/{number}.png")
    >>> config = CoTrainConfig(
    ...     model=ModelConfig(name="lambda_resnet_tiny", image_size=32),
    ...     data=DataConfig(path="data", workers=0),
    ...     batch_size=8,
    ...     epochs=1.0,
    ...     device="cpu",
    ...     logger="none",
    ... )
    >>> options, using = LabelOptions(guard_distance=-1), Using(device="cpu")
    >>> rounds = run_rounds("teacher.safetensors", "images", Path("rounds"), config, options=options, using=using)
    >>> rounds[0].student.as_posix(), rounds[0].result.finished
    ('rounds/round-1/student', True)
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    options, selection, using = options or LabelOptions(), selection or Selection(), using or Using()
    if not options.guard:
        options = replace(options, guard=guarded(config))
    found: list[Round] = []
    for number in range(1, rounds + 1):
        folder = out / f"round-{number}"
        labels, student = folder / "labels", folder / "student"
        result: Result | None = None
        if not all((student / name).is_file() for name in (WEIGHTS, PREDICTIONS)):  # predictions are written last
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
    """Return the dataset that the students are evaluated on, whose images must not be trained on."""
    data = config.data
    if data.validation:
        return (data.validation,)
    return (data.path,) if "validation" in splits_of(data.path) else ()


def wait_for_all(folder: Path) -> None:
    """Wait until all processes have labelled their units; if one fails, torchrun stops all."""
    while not all(finished(folder, read_manifest(folder))):
        time.sleep(POLL)

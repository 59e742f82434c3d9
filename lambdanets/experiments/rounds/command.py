"""The command `lambdanets experiments rounds`: iterated self-training."""

import functools
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from lambdanets.pseudo.command import CONFIDENT, Labelling, own_gpu, own_labels, progress_bar
from lambdanets.pseudo.config import CoTrainConfig
from lambdanets.pseudo.select import Selection
from lambdanets.train.command import RECIPES
from lambdanets.train.inference.command import Using
from lambdanets.train.signals import SIGNAL_STATUS


@dataclass(frozen=True)
class PseudoRounds:
    """Label images with a teacher, train a student on them, and repeat with the student as the teacher.

    `lambdanets experiments rounds TEACHER IMAGES OUT --rounds 3 cotrain --data.path LABELLED`, then any setting of the
    recipe. Each round is a folder OUT/round-1, ...; run the same command again to resume. Copies of validation images
    among IMAGES are dropped. On several GPUs use torchrun, as for `lambdanets train`.
    """

    teacher: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TEACHER")]
    """Teacher of the first round, as for `lambdanets pseudo label`."""
    images: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES")]
    """Images to label: a folder, tar shards, or a .csv list."""
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder for all rounds."""
    recipe: Any
    rounds: int = 1
    """Number of rounds; each trains one student."""
    labelling: Annotated[Labelling, tyro.conf.arg(name="label")] = field(default_factory=Labelling)
    choosing: Annotated[Selection, tyro.conf.arg(name="choose")] = CONFIDENT
    using: Annotated[Using, tyro.conf.arg(name="teacher-using")] = field(default_factory=Using)

    def run(self) -> int:
        from lambdanets.experiments.rounds.rounds import run_rounds
        from lambdanets.pseudo.label import who
        from lambdanets.train.progress import Watcher

        rank, world = who()
        using = own_gpu(self.using)
        console = Console(highlight=False)
        bar = progress_bar(Console(stderr=True), 0)
        with own_labels(self.folder, rank), Watcher(console) as watcher, bar as progress:
            found = run_rounds(
                self.teacher,
                self.images,
                self.folder,
                self.recipe,
                rounds=self.rounds,
                options=self.labelling.options(using.batch_size),
                selection=self.choosing,
                using=using,
                class_names=self.labelling.class_names,
                workers=using.loader_workers(sys.maxsize),
                rank=rank,
                world=world,
                stretch=self.labelling.unit,
                progress=progress,
                watch=watcher,
                tell=lambda sentence: console.print(sentence, soft_wrap=True) if rank == 0 else None,
            )
        last = found[-1]
        if last.result is not None and not last.result.finished:
            console.print(f"round {last.number} was stopped: run the same command again to resume", soft_wrap=True)
            return SIGNAL_STATUS.get(last.result.stopped_by or "", 1)
        if rank == 0:
            console.print(f"the student of round {last.number}: {last.student}", soft_wrap=True)
        return 0


def rounds_command(arguments: Sequence[str] = ()) -> type[PseudoRounds]:
    """Return the command with the co-training recipes as subcommands."""
    kinds: list[Any] = []
    for name, recipe in RECIPES.items():
        default = recipe.make()
        if isinstance(default, CoTrainConfig):
            text = recipe.document if name in arguments else recipe.title
            kinds.append(Annotated[CoTrainConfig, tyro.conf.subcommand(name, default=default, description=text)])
    chosen: Any = functools.reduce(operator.or_, kinds)

    @dataclass(frozen=True)
    class Rounds(PseudoRounds):
        recipe: Annotated[chosen, tyro.conf.arg(name="")]  # pyright: ignore[reportInvalidTypeForm]
        """Recipe of the students."""

    Rounds.__doc__ = PseudoRounds.__doc__
    return Rounds

"""`lambdanets report`: the page of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Report:
    """Write report.html into the folder of a run: curves, confusion matrix, hardest mistakes, every class.

    Training writes it at its end. Run this for a run that still goes on, or to set several side by side.
    """

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of a run."""
    beside: tuple[Path, ...] = ()
    """Other runs to compare it with."""
    pictures: int = 24
    """How many of the hardest mistakes to show."""

    def run(self) -> int:
        from lambdanets.report.page import write_report

        if self.pictures < 0:
            raise ValueError(f"--pictures {self.pictures}: 0 or more")
        print(write_report(self.run_folder, beside=self.beside, pictures=self.pictures))
        return 0

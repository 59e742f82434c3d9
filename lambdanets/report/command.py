"""`lambdanets report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Report:
    """Write report.html into the folder of a run: curves, confusion matrix, mistakes, results per class.

    Training writes this page when it ends. Use the command for a run that is still in progress, or to compare runs.
    """

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of a run."""
    beside: tuple[Path, ...] = ()
    """Folders of other runs to compare with."""
    pictures: int = 24
    """Maximum number of mistakes to show as images."""

    def run(self) -> int:
        from lambdanets.report.page import write_report

        if self.pictures < 0:
            raise ValueError(f"--pictures {self.pictures} is negative: use 0 or more")
        print(write_report(self.run_folder, beside=self.beside, pictures=self.pictures))
        return 0

"""A training run as a program of its own, for tests that kill it or start several: python -m tests.train.program"""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch

from lambdanets.train.config import Ema
from lambdanets.train.loop import fit
from tests.train.tasks import Numbers, config


class Slow(Numbers):
    """Sends itself a signal in one epoch, once: `crash` is a file that says it has happened."""

    crash: Path | None = None
    signal = signal.SIGKILL

    def batches(self, epoch, first_step, share):
        for number, batch in enumerate(super().batches(epoch, first_step, share)):
            if self.crash is not None and share.rank == 1 and epoch == 2 and number == 3 and not self.crash.exists():
                self.crash.touch()
                os.kill(os.getpid(), self.signal)
            yield batch


def main(out: str, settings: str) -> int:
    torch.set_num_threads(1)
    given = json.loads(settings)
    options = {name: given.pop(name) for name in ("norm", "dropout", "spoilt", "spoilt_rank") if name in given}
    task = Slow(**options)
    if "crash" in given:
        task.crash = Path(given.pop("crash"))
    task.signal = getattr(signal, given.pop("signal", "SIGKILL"))
    given |= given.pop("of_ranks", {}).get(os.environ.get("RANK"), {})
    resume = given.pop("resume", False)
    if "ema" in given:
        given["ema"] = Ema(decay=given["ema"])
    try:
        result = fit(task, replace(config(out), **given), resume=resume)
    except (ValueError, OSError) as error:  # as the command line does
        print(error, file=sys.stderr)
        return 2
    return 0 if result.finished else 143


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

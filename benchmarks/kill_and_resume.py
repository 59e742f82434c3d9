"""Kill a training run with SIGKILL at random moments, resume it each time, and compare its final weights with those of
an uninterrupted run.

python benchmarks/kill_and_resume.py --output benchmarks/results/kill-and-resume.json
"""

import hashlib
import json
import multiprocessing
import random
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import tyro
from safetensors.torch import load_file

from lambdanets.data.augment import Augment
from lambdanets.files import write_text
from lambdanets.machine import describe
from lambdanets.options import check_positive
from lambdanets.runs import CHECKPOINTS, LOG, RAW_WEIGHTS, WEIGHTS
from lambdanets.train import checkpoint
from lambdanets.train.classify import Classify
from lambdanets.train.config import DataConfig, Ema, ModelConfig, Schedule, TrainConfig
from lambdanets.train.loop import fit

POLL = 0.001  # seconds
NARROW = ("widths=(4,4,8,8)", "depths=(1,1,1,1)", "scope=3", "heads=2", "key_depth=4")
MOMENTS = ("checkpoint", "end", "random")  # while a checkpoint is written, after the last step, and at any time


def settings(out: Path, epochs: float, workers: int) -> TrainConfig:
    """Return a run on digits with every kind of state: batch norm, dropout, augmentation, averaged weights."""
    return TrainConfig(
        out=out,
        epochs=epochs,
        batch_size=32,
        device="cpu",
        log_every=2,
        checkpoint_minutes=0.0,  # after every step
        model=ModelConfig(name="lambda_resnet_tiny", image_size=16, drop_rate=0.1, drop_path_rate=0.1, options=NARROW),
        data=DataConfig(path="mnist", workers=workers),
        augment=Augment(crop_scale=(0.5, 1.0), randaugment_layers=1, randaugment_magnitude=5),
        schedule=Schedule(rate=0.05, per_batch=0, warmup_epochs=0.1),
        ema=Ema(decay=0.9),
    )


@dataclass(frozen=True)
class Part:
    """Start or resume the run, in a process of its own."""

    out: Path
    epochs: float
    workers: int

    def train(self) -> None:
        torch.set_num_threads(1)
        config = settings(self.out, self.epochs, self.workers)
        sys.exit(0 if fit(Classify(config), config, resume=True).finished else 1)

    def start(self) -> BaseProcess:
        """Return a forked process, which need not import everything again."""
        process = multiprocessing.get_context("fork").Process(target=self.train)
        process.start()
        return process

    def finish(self) -> None:
        process = self.start()
        process.join()
        if process.exitcode:
            raise ChildProcessError(f"the uninterrupted run ended with status {process.exitcode}")


@dataclass(frozen=True)
class KillAndResume:
    """Kill and resume a run, then let it end and compare its weights with those of an uninterrupted run."""

    output: Path
    kills: int = 40
    """Number of kills."""
    epochs: float = 1.0
    """Epochs over 4,000 digits, in batches of 32."""
    workers: int = 1
    """Worker processes that read images."""
    seed: int = 0
    """Random seed of the times at which the run is killed."""

    def run(self) -> int:
        check_positive(kills=self.kills, workers=self.workers)
        with tempfile.TemporaryDirectory() as folder:
            whole = Part(Path(folder, "whole"), self.epochs, self.workers)
            killed = Path(folder, "killed")
            whole.finish()
            steps = steps_of(whole.out)
            part = replace(whole, out=killed)
            moments = self.interrupt(part, steps)
            part.finish()
            resumed = [record for record in records(killed) if record["event"] == "resumed"]
            digests = [digest_of(one) for one in (whole.out, killed)]
        summary: dict[str, Any] = {
            "kills": len(moments),
            "moments": {name: moments.count(name) for name in MOMENTS},
            "resumed": len(resumed),
            "damaged": sum(bool(record["note"]) for record in resumed),
            "steps": steps,
            "workers": self.workers,
            "digests": digests,
            "identical": digests[0] == digests[1],
        }
        result = {"name": "kill-and-resume", **describe(torch.device("cpu")), **summary}
        write_text(self.output, json.dumps(result, indent=1) + "\n")
        print(json.dumps(summary))
        return 0 if summary["identical"] and summary["kills"] == self.kills else 1

    def interrupt(self, part: Part, steps: int) -> list[str]:
        """Kill the run repeatedly, evenly over its steps; return the moment of each kill."""
        generator = random.Random(self.seed)
        moments: list[str] = []
        while len(moments) < self.kills:
            kill = len(moments)
            process = part.start()
            late = kill >= self.kills - self.kills // 8  # the last kills come after the last step
            wait_for_step(process, part.out, steps if late else (kill + 1) * steps // (self.kills + 1))
            if kill % 2 == 0 and newest(part.out) < steps:
                wait_for_part(process, part.out)
            else:
                time.sleep(generator.random() * 0.2)
            if process.exitcode is not None:
                if process.exitcode:
                    raise ChildProcessError(f"the run ended with status {process.exitcode} before kill {kill + 1}")
                continue  # the run ended first; resuming it evaluates and writes its weights again
            writing = parts(part.out)
            process.kill()
            process.join()
            last = newest(part.out)
            moments.append("checkpoint" if writing else "end" if last == steps else "random")
            print(f"kill {kill + 1} of {self.kills} at step {last}: {moments[-1]}", file=sys.stderr, flush=True)
        return moments


def newest(folder: Path) -> int:
    """Return the step of the newest checkpoint, or 0 without one."""
    names = [path.name for path in (folder / CHECKPOINTS).glob("*.pt")]  # not opened: they may disappear at any time
    return max((int(found[1]) for name in names if (found := checkpoint.NAME.fullmatch(name))), default=0)


def wait_for_step(process: BaseProcess, folder: Path, step: int) -> None:
    """Wait until the process has written a record and a checkpoint of this step or a later one exists."""
    log = folder / LOG
    size = log.stat().st_size if log.exists() else 0
    while process.exitcode is None and (newest(folder) < step or log.stat().st_size == size):
        time.sleep(POLL)


def wait_for_part(process: BaseProcess, folder: Path) -> None:
    while process.exitcode is None and not parts(folder):
        pass


def parts(folder: Path) -> bool:
    """Return whether a checkpoint is being written."""
    return any((folder / CHECKPOINTS).glob(f"*{checkpoint.PART}"))


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the log without lines that a kill has cut off."""
    found = []
    for line in (folder / LOG).read_text(errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def steps_of(folder: Path) -> int:
    return next(record["steps"] for record in records(folder) if record["event"] == "start")


def digest_of(folder: Path) -> str:
    """Return the SHA-256 of all weights, averaged and raw."""
    found = hashlib.sha256()
    for name in (WEIGHTS, RAW_WEIGHTS):
        for key, tensor in sorted(load_file(str(folder / name)).items()):
            found.update(f"{name} {key} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    sys.exit(tyro.cli(KillAndResume).run())

"""The training loop of all tasks: steps, evaluations, checkpoints and log."""

import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lambdanets.data.broken import TooManyBrokenError
from lambdanets.data.order import Epochs
from lambdanets.machine import describe
from lambdanets.runs import BEST_WEIGHTS, CHECKPOINTS, WEIGHTS, as_stored, write_config
from lambdanets.train import checkpoint
from lambdanets.train.config import RunConfig
from lambdanets.train.distributed import World, join
from lambdanets.train.engine import Engine, check_tensors, seed_all
from lambdanets.train.fixed import FixedSteps, wanted, why_not
from lambdanets.train.identity import check_processes, write_identity
from lambdanets.train.log import RunLog
from lambdanets.train.lost import LostProcessError, lost_process
from lambdanets.train.memory import fitting_share, make_share
from lambdanets.train.nonfinite import NotFiniteError, diagnose
from lambdanets.train.precision import autocast
from lambdanets.train.prefetch import moved, on_device
from lambdanets.train.result import Result, Scores, save_at_end
from lambdanets.train.resume import FORMAT, find_checkpoint, own_folder
from lambdanets.train.schedule import learning_rate
from lambdanets.train.signals import WATCHED, StopRequests
from lambdanets.train.startup_warnings import notes
from lambdanets.train.task import Task

AGREE_EVERY = 4  # steps between decisions of several processes whether to stop or to save
Watch = Callable[[dict[str, Any]], None]


def fit(
    task: Task, config: RunConfig, *, resume: bool = False, watch: Watch | None = None, listen: bool = True
) -> Result:
    """Train until the end of the run, or until a signal requests a stop.

    The folder `config.out` is locked during training; a second run in it raises FolderInUseError.

    Args:
        task: the training problem, for example `config.make_task()`.
        config: the settings.
        resume: resume from the newest valid checkpoint in `config.out`, if there is one. Elastic restarts always do.
        watch: called on the main process with every record of the log; also with "tick" after every step and
            "evaluating" before an evaluation, which contain only the step and do not wait for the GPU.
        listen: handle SIGINT, SIGTERM and SIGUSR1 by writing a checkpoint and stopping. Otherwise these signals keep
            their usual effect.

    Returns a `Result`. Raises ValueError for invalid settings or data.

    Example:
        >>> from dataclasses import replace
        >>> from pathlib import Path
        >>> from lambdanets.recipes import debug
        >>> from lambdanets.train.loop import fit
        >>> config = replace(debug(), epochs=0.05, out=Path("example"), device="cpu")
        >>> result = fit(config.make_task(), config)
        >>> result.finished, result.steps, list(result.scores)
        (True, 3, ['ema', 'raw'])
    """
    with StopRequests(WATCHED if listen else ()) as stop, join(config.device, config.timeout_minutes) as world:
        try:
            check_processes(world, task, config)  # first, so that every process reports the reason
            run = TrainingRun(task, config, world, stop, watch)
            with own_folder(config.out, world):
                return run.go(resume)
        except RuntimeError as error:
            if reason := lost_process(error, config):
                raise LostProcessError(reason) from error
            raise
        finally:
            task.close()


class TrainingRun:
    """State of a run in one process."""

    def __init__(self, task: Task, config: RunConfig, world: World, stop: StopRequests, watch: Watch | None) -> None:
        self.task, self.config, self.world, self.stop, self.watch = task, config, world, stop, watch
        if task.examples < config.batch_size:
            least = f"use --batch-size {task.examples} or less"
            raise ValueError(f"{task.examples} training images are too few for batch size {config.batch_size}: {least}")
        self.step = 0  # steps done
        self.best: dict[str, Any] | None = None
        self.since_best = 0
        self.waited = 0.0  # seconds of waiting for data since the last log record
        self.saved: int | None = None  # step of the last checkpoint
        self.id: str | None = None  # id of the run, in its folder and its checkpoints

    def go(self, resume: bool) -> Result:
        epochs = Epochs(self.task.examples, self.config.batch_size, self.config.remainder)
        loaded = find_checkpoint(self.config, self.task, self.world, resume, epochs)
        self.epochs = replace(epochs, remainder=loaded["remainder"]) if loaded else epochs
        self.steps = self.epochs.run(self.config.epochs)
        if self.world.device.type == "cuda":
            torch.backends.cudnn.benchmark = True
        elif self.config.sync_batch_norm:
            raise ValueError("sync_batch_norm needs GPUs: torch supports it on no other device")
        self.engine = Engine(self.task, self.config, self.world, self.steps)
        if loaded is not None:
            self.restore(loaded)
        elif self.config.micro_batch:
            self.share = make_share(self.world, self.config.batch_size, self.config.micro_batch, self.epochs.remainder)
        else:
            self.share = fitting_share(self.engine, self.config.batch_size, self.epochs.remainder)
        capture = self.choose_steps()
        folder = self.config.out if self.world.main else None
        began = loaded["seconds"] if loaded else 0.0
        with RunLog(folder, began, self.step, self.warn, self.config.logger) as self.log:
            self.report_start(loaded, capture)
            self.clock = self.saved_at = time.monotonic()
            try:
                while self.step < self.steps and not self.stopped_early:
                    if self.run_epoch():
                        return self.stopped_result()
                return self.finish()
            except TooManyBrokenError as error:
                self.give_up(str(error))
                raise
            except (RuntimeError, OSError) as error:  # possibly in the middle of a step, so no checkpoint
                if reason := lost_process(error, self.config):
                    self.write("end", step=self.step, reason=reason)
                raise

    # Start

    def restore(self, state: dict[str, Any]) -> None:
        try:
            self.engine.load(state["engine"])
            if state["best"] is not None:
                check_tensors(state["best"].get("model"), self.engine.model.state_dict(), "best")
        except ValueError as error:
            path = self.config.out / CHECKPOINTS / state["path"]
            raise ValueError(f"{path} does not belong to this run: {error}. Remove it and resume again") from error
        self.step, self.best, self.since_best = state["step"], state["best"], state["since_best"]
        self.id = state.get("run")
        self.saved = self.step
        micro = state["micro_batch"]  # keep the micro-batch size if possible, because batch norm depends on it
        if (self.config.batch_size // self.world.size) % micro:
            micro = self.config.micro_batch
        self.share = make_share(self.world, self.config.batch_size, micro, self.epochs.remainder)

    def choose_steps(self) -> list[str]:
        """Decide whether steps are captured as a CUDA graph; return notes for the log."""
        if not wanted(self.config):
            return []
        reason = why_not(self.task, self.config, self.world, self.share, self.engine)
        if reason is None:
            self.engine.fixed = FixedSteps(self.engine)
            return ["Steps are captured as a CUDA graph"]
        if self.config.capture == "on":
            raise ValueError(f"--capture on is not possible: {reason}. Use --capture off")
        return [f"Steps are not captured as a CUDA graph: {reason}"]

    def report_start(self, loaded: dict[str, Any] | None, capture: list[str]) -> None:
        config, share = self.config, self.share
        if loaded is None:
            models = self.models()
            self.world.on_main(lambda: self.write_start(models))
        if loaded is not None:
            note = "; ".join([*loaded["damaged"], *capture])
            self.write(
                "resumed",
                step=self.step,
                steps=self.steps,
                path=loaded["path"],
                note=note,
                processes=self.world.size,
            )
            return
        self.write(
            "start",
            config=as_stored(config),
            parameters=sum(p.numel() for p in self.engine.model.parameters()),
            examples=self.task.examples,
            steps=self.steps,
            steps_per_epoch=self.epochs.steps,
            peak_rate=config.schedule.peak(config.batch_size),
            processes=self.world.size,
            launch=self.world.launch,
            micro_batch=share.micro_batch,
            accumulation=share.parts,
            note=". ".join(
                notes(self.engine.model, config, share, self.steps, self.epochs) + capture + self.task.notes()
            ),
            **self.task.describe(),
            **describe(self.world.device),
        )

    def write_start(self, models: dict[str, nn.Module]) -> None:
        folder = self.config.out
        self.id = write_identity(folder, self.task)
        write_config(self.config)
        self.task.save(folder, "start", models, {})

    # Training

    def run_epoch(self) -> bool:
        """Train until the end of the epoch; return whether a signal requested a stop."""
        epoch = self.epochs.epoch(self.step)
        first_step = self.step - self.epochs.first(epoch)
        batches = self.timed(on_device(self.task.batches(epoch, first_step, self.share), self.world.device))
        try:
            for step in range(self.step, min(self.epochs.first(epoch + 1), self.steps)):
                batch = self.engine.step(step, batches, self.share, self.rate(step))
                self.step = step + 1
                self.show("tick")
                if self.step % self.config.log_every == 0 or self.step == self.steps:
                    self.report_step(batch)
                if self.evaluation_due():
                    self.evaluate()
                if self.save_or_stop():
                    return True
                if self.stopped_early:
                    break
        finally:
            batches.close()
        return False

    def rate(self, step: int) -> float:
        config = self.config
        return learning_rate(
            config.schedule, config.batch_size, step, steps=self.steps, steps_per_epoch=self.epochs.steps
        )

    def timed(self, batches: Iterator[Any]) -> Any:
        """Yield the batches and record how long the host waited for them."""
        while True:
            began = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.waited += time.monotonic() - began
            yield batch

    def report_step(self, batch: Any) -> None:
        steps = (self.step - 1) % self.config.log_every + 1  # since the last log record
        means = self.engine.metrics.means()  # synchronises with the device, so the time below is that of whole steps
        seconds = max(time.monotonic() - self.clock, 1e-9)
        begin = self.step - steps
        for position in self.engine.metrics.positions():
            self.write("skipped_step", step=begin + position, reason="non-finite gradient")
        self.report_events()
        self.write(
            "step",
            step=self.step,
            epoch=self.step / self.epochs.steps,
            lr=self.rate(self.step - 1),
            examples_per_second=steps * self.config.batch_size / seconds,
            data_wait=min(1.0, self.waited / seconds),
            **means,
        )
        in_a_row = self.engine.metrics.in_a_row
        if in_a_row >= self.config.max_skipped:
            why = diagnose(
                self.engine.model,
                batch,
                step=self.step,
                in_a_row=in_a_row,
                rate=self.rate(self.step - 1),
                precision=self.config.precision,
            )
            self.write("end", step=self.step, reason=why)
            raise NotFiniteError(why)
        self.restart_clock()

    def report_events(self) -> None:
        """Log the events of the tasks of all processes."""
        for events in self.world.gather(self.task.events()):
            for event in events:
                self.write(**{"step": self.step, **event})

    def restart_clock(self) -> None:
        self.clock, self.waited = time.monotonic(), 0.0

    # Evaluation

    def evaluation_due(self) -> bool:
        """Return whether this step ended an epoch after which an evaluation is due."""
        every = self.config.evaluate_every
        ended = [self.epochs.epoch(step) // every for step in (self.step - 1, self.step)]
        return self.step < self.steps and ended[0] != ended[1]

    def models(self) -> dict[str, nn.Module]:
        """Return the networks to evaluate, the one that defines the score first."""
        self.engine.statistics.release()
        average = {} if self.engine.average is None else {"ema": self.engine.average.network()}
        return average | {"raw": self.engine.model}

    def recalibrate(self) -> None:
        """Recompute the batch norm statistics of the averaged weights, if ema.recalibrate is set, on the first batches
        of the last epoch."""
        average, count, device = self.engine.average, self.config.ema.recalibrate, self.world.device
        if average is None or not count or average.fixed:
            return
        self.engine.statistics.release()
        seed_all(self.config.seed, self.steps, self.world.rank, device=device)
        batches = itertools.islice(self.task.batches(self.epochs.epoch(self.steps - 1), 0, self.share), count)
        with autocast(self.config.precision, device):
            average.recalibrate((moved(batch, device) for batch in batches), self.task.loss, self.world)

    def evaluate(self, final: bool = False) -> Scores:
        """Evaluate the averaged weights (at the end also the raw weights), and record the best score."""
        paused = time.monotonic()
        self.show("evaluating")
        self.recalibrate()
        scores: Scores = {}
        for name, model in self.models().items():
            if not scores or final:
                scores[name] = self.score(model, final)
                for split, numbers in scores[name].items():
                    self.write(
                        "evaluation",
                        step=self.step,
                        epoch=self.step / self.epochs.steps,
                        weights=name,
                        split=split,
                        **numbers,
                    )
        self.report_events()
        if not final:
            name = next(iter(scores))
            self.save_weights(WEIGHTS, scores[name])
            if self.config.early_stopping or self.config.keep_best:
                self.note_best(scores[name])
        self.clock += time.monotonic() - paused
        return scores

    def score(self, model: nn.Module, final: bool) -> dict[str, dict[str, float]]:
        model.eval()
        with torch.no_grad(), autocast(self.config.precision, self.world.device):
            return self.task.evaluate(model, self.world, final)

    def note_best(self, scores: dict[str, dict[str, float]]) -> None:
        score = next(iter(scores.values()))[self.task.score]
        if self.best is None or score > self.best["score"]:
            model = next(iter(self.models().values()))
            state = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
            self.best, self.since_best = {"score": score, "step": self.step, "model": state}, 0
            self.save_weights(BEST_WEIGHTS, scores)
        else:
            self.since_best += 1

    def save_weights(self, file: str, scores: dict[str, dict[str, float]]) -> None:
        """Write the evaluated weights, so that they can be used before the run ends."""
        model = next(iter(self.models().values()))
        if self.world.main:
            try:
                self.task.save_weights(model, self.config.out / file, scores)
            except OSError as error:  # the weights are also in checkpoints and written at the end of the run
                self.warn(f"cannot write {self.config.out / file}: {error}")

    @property
    def stopped_early(self) -> bool:
        return 0 < self.config.early_stopping <= self.since_best

    # Checkpoints and the end

    def save_or_stop(self) -> bool:
        """Write a checkpoint if one is due, and return whether to stop. Several processes decide together, every few
        steps."""
        if self.world.size > 1 and self.step % AGREE_EVERY and self.step != self.steps:
            return False
        late = time.monotonic() - self.saved_at >= 60 * self.config.checkpoint_minutes
        stop, due = self.world.any(self.stop.name is not None, late)
        if stop or due:
            self.save_checkpoint()
        return stop

    def save_checkpoint(self) -> None:
        if self.saved == self.step:
            return
        paused = time.monotonic()
        self.log.check()
        state = {
            "format": FORMAT,
            "run": self.id,
            "step": self.step,
            "steps": self.steps,
            "epoch_steps": self.epochs.steps,
            "remainder": self.epochs.remainder,
            "micro_batch": self.share.micro_batch,
            "seconds": self.log.seconds,
            "best": self.best,
            "since_best": self.since_best,
            "engine": self.engine.state(),
        }
        if self.world.main:
            folder = self.config.out / CHECKPOINTS
            try:
                path = checkpoint.save(state, folder, self.step, keep=self.config.keep)
                self.write("checkpoint", step=self.step, path=f"{CHECKPOINTS}/{path.name}")
            except OSError as error:  # on a full disk the run continues; the previous checkpoint is kept
                self.write("checkpoint_failed", step=self.step, reason=str(error))
        self.saved, self.saved_at = self.step, time.monotonic()
        self.clock += self.saved_at - paused

    def stopped_result(self) -> Result:
        signal = self.stop.name or "another process was asked to stop"
        self.write("end", step=self.step, reason=f"stopped by {signal}; resume with --resume")
        return self.result(signal, {})

    def give_up(self, reason: str) -> None:
        """Stop the run because of its data, with a checkpoint to resume from after the data was repaired."""
        if self.world.size == 1:  # a checkpoint needs all processes, and others may be in a step
            self.report_events()
            if self.step:
                self.save_checkpoint()
        self.write("end", step=self.step, reason=reason)

    def finish(self) -> Result:
        self.save_checkpoint()
        if self.config.early_stopping:
            self.recalibrate()
            self.note_best(self.score(next(iter(self.models().values())), final=False))
            assert self.best is not None
            next(iter(self.models().values())).load_state_dict(self.best["model"])
            if self.engine.average is not None:
                self.engine.average.fixed = True
        scores = self.evaluate(final=True)
        models = self.models()
        if self.config.keep_best and not self.config.early_stopping:
            self.note_best(next(iter(scores.values())))
        self.world.on_main(lambda: save_at_end(self.task, self.config.out, models, scores))
        result = self.result(None, scores)
        reason = "finished"
        if self.config.early_stopping and self.best is not None:
            reason = f"early stopping: the weights are those of step {self.best['step']}"
        self.write(
            "end", step=self.step, reason=reason, scores=scores, skipped_steps=result.skipped, seconds=result.seconds
        )
        self.world.wait()
        return result

    def result(self, signal: str | None, scores: Scores) -> Result:
        metrics = self.engine.metrics
        metrics.read()
        return Result(
            self.config.out, self.step, self.steps, signal, scores, metrics.total, self.log.seconds, self.world.main
        )

    def show(self, event: str) -> None:
        """Send an event to `watch` but not to the log."""
        if self.watch is not None and self.world.main:
            self.watch({"event": event, "step": self.step})

    def warn(self, sentence: str) -> None:
        """Send a warning to `watch` but not to the log."""
        if self.watch is None:
            warnings.warn(sentence, stacklevel=2)
        else:
            self.watch({"event": "warning", "step": self.step, "reason": sentence})

    def write(self, event: str, **values: Any) -> None:
        record = self.log.write(event, **values)
        if self.watch is not None and self.world.main:
            self.watch(record)

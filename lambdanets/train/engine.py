"""One step: micro-batches, gradients, guard, update, average. The host never waits for the device in here."""

import inspect
import random
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lambdanets.data.order import mix
from lambdanets.train import foreach, optim
from lambdanets.train.config import RunConfig
from lambdanets.train.distributed import CPU, World
from lambdanets.train.ema import MovingAverage, decay_of_step
from lambdanets.train.fixed import FixedSteps
from lambdanets.train.precision import LossScale, autocast
from lambdanets.train.statistics import RunningStatistics
from lambdanets.train.step_metrics import StepMetrics
from lambdanets.train.task import Outcome, Share, Task

AHEAD = 2  # steps that the host may be ahead of the device


def seed_all(*numbers: int, device: torch.device = CPU) -> None:
    """Every generator of random numbers, from these: what a step draws depends on its number and on nothing else.

    torch.manual_seed also looks for kinds of devices that are not there, which takes it longer than all of this.
    """
    seed = mix(*numbers)
    torch.default_generator.manual_seed(seed & (2**63 - 1))
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed & (2**63 - 1))
    random.seed(seed)
    np.random.seed(seed & (2**32 - 1))


def check_tensors(found: Any, wanted: dict[str, Any], what: str) -> None:
    """Raise a ValueError if the names and shapes of tensors are not the wanted ones."""
    if not isinstance(found, dict):
        raise ValueError(f"{what} must be tensors by name, got {str(found)[:40]}")
    if found.keys() != wanted.keys():
        raise ValueError(
            f"{what} has other tensors than this network: {sorted(map(str, found.keys() ^ wanted.keys()))[:3]}"
        )
    for name, tensor in wanted.items():
        if not isinstance(tensor, Tensor):  # extra state of a module
            continue
        theirs = found[name]
        usable = isinstance(theirs, Tensor) and theirs.layout == tensor.layout
        if not usable or theirs.is_floating_point() != tensor.is_floating_point():
            raise ValueError(f"{what} has no tensor of {tensor.dtype} named {name}")
        if theirs.shape != tensor.shape:
            shapes = f"{tuple(theirs.shape)} where this network has {tuple(tensor.shape)}"
            raise ValueError(f"{what} has {name} of shape {shapes}")


class Engine:
    """All that a step changes."""

    def __init__(self, task: Task, config: RunConfig, world: World, steps: int) -> None:
        self.task, self.config, self.world, self.steps = task, config, world, steps
        device = world.device
        seed_all(config.seed, device=device)
        model = task.model().to(device, torch.float64 if config.precision == "float64" else None)
        if config.channels_last:
            model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        if config.sync_batch_norm and world.size > 1:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self.model: nn.Module = model
        self.average = MovingAverage(model) if config.ema.decay else None
        self.wrapped = self.wrap(model)
        self.optimizer = optim.make_optimizer(model, config.optimizer)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.statistics = RunningStatistics(model, world)
        self.scale = LossScale(config.precision, device)
        self.metrics = StepMetrics(config.log_every, world)
        self.flying: deque[Any] = deque()
        self.fixed: FixedSteps | None = None  # steps in fixed memory, as a CUDA graph needs them

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.config.compile:
            model.compile()
        if self.world.size == 1:
            return model
        ids = [self.world.device.index] if self.world.device.type == "cuda" else None
        known = inspect.signature(DistributedDataParallel).parameters
        old = "broadcast_buffers"  # its name before torch 2.15; our running statistics are equal at any time
        options: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in known else old: False}
        return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, **options)

    # One step

    def step(self, step: int, batches: Iterator[Any], share: Share, rate: float) -> Any:
        """Takes the micro-batches of a step and moves the weights; returns the last micro-batch."""
        if not self.model.training:
            self.model.train()
        self.statistics.begin()
        batch = None
        if self.fixed is not None:
            batch = next(batches)
            self.fixed.step(step, batch, share, rate)
        else:
            for part in range(share.parts):
                batch = next(batches)
                self.metrics.note(self.backward(step, batch, part, share))
                self.statistics.collect(last=part == share.parts - 1)
            self.update(step, rate)
        self.keep_pace()
        return batch

    def backward(self, step: int, batch: Any, part: int, share: Share) -> Outcome:
        self.seed(step, part, share)
        with nullcontext() if part == share.parts - 1 else self.without_sync():
            return self.gradients(batch, share.parts)

    def seed(self, step: int, part: int, share: Share) -> None:
        seed_all(self.config.seed, step, part * share.world + share.rank, device=self.world.device)

    def gradients(self, batch: Any, parts: int) -> Outcome:
        """Forward and backward pass of one of the `parts` of a step."""
        with autocast(self.config.precision, self.world.device):
            outcome = self.task.loss(self.wrapped, batch)
        self.scale.scaled(outcome.loss, parts).backward()
        return outcome

    def without_sync(self) -> AbstractContextManager:
        return self.wrapped.no_sync() if isinstance(self.wrapped, DistributedDataParallel) else nullcontext()

    def update(self, step: int, rate: float) -> None:
        finite, norm = self.move(rate, self.average_weight(step), self.norm_is_due(step))
        self.metrics.end_step(step, finite, norm)
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def move(self, rate: float | Tensor, weight: float | Tensor, with_norm: bool) -> tuple[Tensor, Tensor | None]:
        """The update on the device, a function of its arguments and of what is on the device: weights, statistics and
        averages move, if the gradients are finite. Returns whether they are, and their norm."""
        gradients = [gradient for p in self.parameters if (gradient := p.grad) is not None]
        finite = self.statistics.merged(foreach.unscaled_(gradients, 1 / self.scale.scale))
        norm = foreach.total_norm(gradients) if with_norm else None
        if norm is not None and self.config.clip_norm:
            foreach.mul_(gradients, (self.config.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        skip = (~finite).to(torch.float32)
        optim.step(self.optimizer, rate, skip)
        self.statistics.commit(finite)
        self.scale.update(finite)
        if self.average is not None:
            self.average.update(weight, skip)
        return finite, norm

    def average_weight(self, step: int) -> float:
        """How far the average moves towards the weights in a step."""
        return 1 - decay_of_step(self.config.ema, step, self.steps) if self.average is not None else 0.0

    def norm_is_due(self, step: int) -> bool:
        """Where gradients are clipped; else once for each line of the log, since the host has much to do for it."""
        return self.config.clip_norm > 0 or (step + 1) % self.config.log_every == 0 or step + 1 == self.steps

    def keep_pace(self) -> None:
        """Waits until the device is at most some steps behind: no queue of batches piles up in its memory."""
        if self.world.device.type == "cuda":
            self.flying.append(torch.cuda.current_stream().record_event())
            if len(self.flying) > AHEAD:
                self.flying.popleft().synchronize()

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """Everything, the same on all processes; all of them have to ask."""
        return {
            "model": self.model.state_dict(),
            "ema": None if self.average is None else self.average.network().state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scale": self.scale.state(),
            **self.metrics.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned; a ValueError if it is not that of this network and optimizer."""
        missing = {"model", "ema", "optimizer", "scale", "names", "sums", "skipped"} - state.keys()
        if missing:
            raise ValueError(f"it has no {', '.join(sorted(missing))}")
        self.statistics.release()
        check_tensors(state["model"], self.model.state_dict(), "model")
        self.model.load_state_dict(state["model"])
        if self.average is not None and state["ema"] is not None:
            check_tensors(state["ema"], self.average.module.state_dict(), "ema")
            self.average.module.load_state_dict(state["ema"])
        optim.load(self.optimizer, state["optimizer"])
        check_tensors(state["scale"], self.scale.state(), "scale")
        self.scale.load(state["scale"])
        self.metrics.load(state)

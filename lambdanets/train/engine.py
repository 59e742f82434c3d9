"""A training step: micro-batches, gradients, check for non-finite values, update, EMA. Nothing here synchronises with
the device."""

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
    """Seed all random generators, so that the random numbers of a step depend only on its number.

    This is faster than torch.manual_seed, which also searches for absent device types.
    """
    seed = mix(*numbers)
    torch.default_generator.manual_seed(seed & (2**63 - 1))
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed & (2**63 - 1))
    random.seed(seed)
    np.random.seed(seed & (2**32 - 1))


def check_tensors(found: Any, wanted: dict[str, Any], what: str) -> None:
    """Raise ValueError if names or shapes of tensors differ from the expected ones."""
    if not isinstance(found, dict):
        raise ValueError(f"{what} must be tensors by name, got {str(found)[:40]}")
    if found.keys() != wanted.keys():
        raise ValueError(
            f"{what} and this network have different tensors: {sorted(map(str, found.keys() ^ wanted.keys()))[:3]}"
        )
    for name, tensor in wanted.items():
        if not isinstance(tensor, Tensor):  # extra state of a module
            continue
        theirs = found[name]
        usable = isinstance(theirs, Tensor) and theirs.layout == tensor.layout
        if not usable or theirs.is_floating_point() != tensor.is_floating_point():
            raise ValueError(f"{what} has no tensor of {tensor.dtype} named {name}")
        if theirs.shape != tensor.shape:
            shapes = f"{tuple(theirs.shape)}, but this network has {tuple(tensor.shape)}"
            raise ValueError(f"{what} has {name} of shape {shapes}")


class Engine:
    """The state that training steps change: network, optimiser, EMA, loss scale, running statistics and metrics."""

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
        self.fixed: FixedSteps | None = None  # steps with static memory, for CUDA graphs

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.config.compile:
            model.compile()
        if self.world.size == 1:
            return model
        ids = [self.world.device.index] if self.world.device.type == "cuda" else None
        known = inspect.signature(DistributedDataParallel).parameters
        old = "broadcast_buffers"  # name before torch 2.15; running statistics are equal on all processes anyway
        options: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in known else old: False}
        return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, **options)

    # One step

    def step(self, step: int, batches: Iterator[Any], share: Share, rate: float) -> Any:
        """Run a training step on its micro-batches; return the last micro-batch."""
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
        """Run the forward and backward pass of one of the `parts` of a step."""
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
        """Update weights, running statistics and EMA on the device if the gradients are finite. Return whether they
        are, and their norm."""
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
        """Return 1 - decay of the EMA at a step."""
        return 1 - decay_of_step(self.config.ema, step, self.steps) if self.average is not None else 0.0

    def norm_is_due(self, step: int) -> bool:
        """Return whether a step computes the gradient norm: always with clipping, otherwise once per log record,
        because it has a high launch overhead."""
        return self.config.clip_norm > 0 or (step + 1) % self.config.log_every == 0 or step + 1 == self.steps

    def keep_pace(self) -> None:
        """Wait until the device is at most AHEAD steps behind, so that queued batches do not fill its memory."""
        if self.world.device.type == "cuda":
            self.flying.append(torch.cuda.current_stream().record_event())
            if len(self.flying) > AHEAD:
                self.flying.popleft().synchronize()

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """Return the complete state, equal on all processes. All processes must call it."""
        return {
            "model": self.model.state_dict(),
            "ema": None if self.average is None else self.average.network().state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scale": self.scale.state(),
            **self.metrics.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load what `state` returned. Raises ValueError if it does not fit this network and optimiser."""
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

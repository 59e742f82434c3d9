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
from torch.nn.utils import get_total_norm

from lambdanets.data.order import mix
from lambdanets.train import foreach, optim
from lambdanets.train.config import RunConfig
from lambdanets.train.distributed import World
from lambdanets.train.ema import MovingAverage, decay_of_step
from lambdanets.train.guard import SkippedSteps
from lambdanets.train.precision import LossScale, autocast
from lambdanets.train.statistics import RunningStatistics
from lambdanets.train.task import Outcome, Share, Task

AHEAD = 2  # steps that the host may be ahead of the device


def seed_all(*numbers: int) -> None:
    """Every generator of random numbers, from these: what a step draws depends on its number and on nothing else."""
    seed = mix(*numbers)
    torch.manual_seed(seed & (2**63 - 1))
    random.seed(seed)
    np.random.seed(seed & (2**32 - 1))


class Engine:
    """All that a step changes."""

    def __init__(self, task: Task, config: RunConfig, world: World, steps: int) -> None:
        self.task, self.config, self.world, self.steps = task, config, world, steps
        device = world.device
        seed_all(config.seed)
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
        self.skipped = SkippedSteps(config.log_every, device)
        self.names: list[str] = []  # of the sums, once a batch has been seen
        self.sums: Tensor | None = None  # of the log's window
        self.flying: deque[Any] = deque()

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
        values, batch = None, None
        for part in range(share.parts):
            batch = next(batches)
            outcome = self.backward(step, batch, part, share)
            now = self.row(outcome)
            values = now if values is None else values + now
            self.statistics.collect(last=part == share.parts - 1)
        assert values is not None
        self.update(step, values, rate)
        self.keep_pace()
        return batch

    def backward(self, step: int, batch: Any, part: int, share: Share) -> Outcome:
        seed_all(self.config.seed, step, part * share.world + share.rank)
        last = part == share.parts - 1
        with nullcontext() if last else self.without_sync():
            with autocast(self.config.precision, self.world.device):
                outcome = self.task.loss(self.wrapped, batch)
            (outcome.loss * (self.scale.scale / share.parts)).backward()
        return outcome

    def without_sync(self) -> AbstractContextManager:
        return self.wrapped.no_sync() if isinstance(self.wrapped, DistributedDataParallel) else nullcontext()

    def row(self, outcome: Outcome) -> Tensor:
        """What is summed up for the log: [micro-batches, examples, loss, the task's sums]."""
        if not self.names:
            self.names = ["parts", "examples", "loss", *outcome.sums]
        like = outcome.loss.detach().to(torch.float64)
        counts = [torch.full_like(like, 1.0), torch.full_like(like, outcome.examples), like]
        return torch.stack([*counts, *(outcome.sums[name].detach().to(like) for name in self.names[3:])])

    @torch.no_grad()
    def update(self, step: int, values: Tensor, rate: float) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if self.scale.used:
            foreach.mul_(gradients, 1 / self.scale.scale)
        norm = get_total_norm(gradients)
        finite = norm.isfinite() & self.statistics.merged()
        if self.config.clip_norm:
            foreach.mul_(gradients, (self.config.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        optim.step(self.optimizer, rate, finite)
        self.statistics.commit(finite)
        self.scale.update(finite)
        if self.average is not None:
            moved = 1 - decay_of_step(self.config.ema, step, self.steps)
            self.average.update((finite * moved).to(self.parameters[0].dtype))
        self.skipped.add(step % self.config.log_every, finite)
        row = torch.cat([values, torch.stack([norm.to(values), torch.ones_like(values[0])])])
        row = torch.where(finite, row, 0.0)
        self.sums = row if self.sums is None else self.sums + row
        self.optimizer.zero_grad(set_to_none=True)

    def keep_pace(self) -> None:
        """Waits until the device is at most some steps behind: no queue of batches piles up in its memory."""
        if self.world.device.type == "cuda":
            self.flying.append(torch.cuda.current_stream().record_event())
            if len(self.flying) > AHEAD:
                self.flying.popleft().synchronize()

    # What the log asks

    def read_sums(self) -> dict[str, float]:
        """Means over the window, over all processes; the window starts anew. The host waits for the device."""
        if self.sums is None:
            return {}
        total = self.world.sum_(self.sums.clone()).tolist()
        self.sums = None
        named = dict(zip([*self.names, "grad_norm", "steps"], total, strict=True))
        parts, examples, steps = named.pop("parts"), named.pop("examples"), named.pop("steps")
        means = {"loss": named.pop("loss") / parts if parts else float("nan")}
        means["grad_norm"] = named.pop("grad_norm") / steps if steps else float("nan")
        return means | {name: value / examples if examples else float("nan") for name, value in named.items()}

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """Everything, the same on all processes; all of them have to ask."""
        sums = None if self.sums is None else self.world.sum_(self.sums.clone())
        return {
            "model": self.model.state_dict(),
            "ema": None if self.average is None else self.average.network().state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scale": self.scale.state(),
            "skipped": self.skipped.state(),
            "sums": sums,
            "names": self.names,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        if self.average is not None and state["ema"] is not None:
            self.average.module.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scale.load(state["scale"])
        self.skipped.load(state["skipped"])
        self.names = list(state["names"])
        self.sums = None
        if state["sums"] is not None:  # of all processes: one goes on with them
            self.sums = state["sums"].to(self.world.device) * float(self.world.main)
        self.statistics.read()

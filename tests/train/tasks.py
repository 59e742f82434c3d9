"""A small task for tests of the loop: made-up numbers, a network that can have batch norm and dropout."""

import json
import signal
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from lambdanets.train.config import Ema, Optimizer, RunConfig, Schedule
from lambdanets.train.task import Outcome, Task

EXAMPLES, FEATURES, CLASSES = 96, 6, 3


class Numbers(Task):
    """Points into classes. `spoilt` steps have a batch with a NaN; more than `room` examples at once do not fit."""

    examples = EXAMPLES
    score = "top1"

    def __init__(self, *, norm=True, dropout=0.3, spoilt=(), room=None, spoilt_rank=0, log=None):
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(EXAMPLES, FEATURES, generator=generator, dtype=torch.float64)
        self.labels = (self.inputs @ torch.randn(FEATURES, CLASSES, generator=generator, dtype=torch.float64)).argmax(1)
        self.norm, self.dropout, self.spoilt, self.room, self.spoilt_rank = norm, dropout, spoilt, room, spoilt_rank
        self.seen = []

    def model(self):
        layers = [nn.Linear(FEATURES, 16)]
        layers += [nn.BatchNorm1d(16)] if self.norm else []
        return nn.Sequential(*layers, nn.ReLU(), nn.Dropout(self.dropout), nn.Linear(16, CLASSES))

    def batches(self, epoch, first_step, share):
        epochs = share.epochs(EXAMPLES)
        first, end = epochs.first(epoch) + first_step, epochs.first(epoch + 1)
        batches = epochs.tickets(0, first * share.parts, share.micro_batch, share.rank, share.world)
        for number in range(first * share.parts, end * share.parts):
            step, chosen = number // share.parts, [example for _, _, example in next(batches)]
            inputs = self.inputs[chosen].clone()
            if step in self.spoilt and share.rank == self.spoilt_rank:
                inputs[0, 0] = float("nan")
            self.seen.append((step, tuple(chosen)))
            yield inputs, self.labels[chosen]

    def loss(self, model, batch):
        inputs, labels = batch
        if self.room is not None and len(labels) > self.room:
            raise torch.OutOfMemoryError("no room")
        logits = model(inputs.to(next(model.parameters())))
        right = (logits.argmax(1) == labels).sum()
        return Outcome(F.cross_entropy(logits, labels), {"top1": right}, len(labels))

    def evaluate(self, model, world, final):
        logits = model(self.inputs.to(next(model.parameters())))
        right = (logits.argmax(1) == self.labels).double().mean()
        return {"held_out": {"loss": float(F.cross_entropy(logits, self.labels)), "top1": float(right)}}

    def save(self, folder: Path, moment, models, scores):
        if moment == "end":
            state = {f"{name}.{key}": t for name, model in models.items() for key, t in model.state_dict().items()}
            torch.save(state, folder / "final.pt")


def config(out, **changes) -> RunConfig:
    settings = dict(
        out=Path(out),
        epochs=4.0,
        batch_size=16,
        precision="float64",
        device="cpu",
        log_every=5,
        schedule=Schedule(rate=0.2, per_batch=0, warmup_epochs=1.0),
        optimizer=Optimizer(weight_decay=1e-3),
        ema=Ema(decay=0.9),
    )
    return RunConfig(**(settings | changes))


def final(folder) -> dict[str, torch.Tensor]:
    return torch.load(Path(folder) / "final.pt", weights_only=True)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def records(folder, event=None):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if event in (None, line["event"])]


class StopAt:
    """Sends this process a signal when the log reaches a step."""

    def __init__(self, step, number=signal.SIGTERM, event="step"):
        self.step, self.number, self.event = step, number, event

    def __call__(self, record):
        if record["event"] == self.event and record["step"] == self.step:
            signal.raise_signal(self.number)

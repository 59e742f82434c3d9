"""Learning-rate schedules as pure functions of the step, without state in checkpoints."""

import math

from lambdanets.train.config import Schedule


def learning_rate(schedule: Schedule, batch_size: int, step: int, *, steps: int, steps_per_epoch: float) -> float:
    """Return the learning rate at a step (counted from 0) of a run with `steps` steps."""
    peak = schedule.peak(batch_size)
    warmup = schedule.warmup_epochs * steps_per_epoch
    if step < warmup:
        return peak * step / warmup
    if schedule.kind == "constant":
        return peak
    if schedule.kind in ("cosine", "flat_cosine"):
        start = warmup if schedule.kind == "cosine" else max(warmup, schedule.flat * steps)
        return peak * 0.5 * (1 + math.cos(math.pi * max(step - start, 0) / max(steps - start, 1)))
    if schedule.kind == "drops":
        return peak * schedule.factor ** sum(step >= at * steps for at in schedule.drops)
    return peak * schedule.factor ** ((step - warmup) // (schedule.every * steps_per_epoch))

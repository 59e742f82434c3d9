"""Reads log.jsonl: damaged lines are left out, and steps that were repeated after a resume count once."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lambdanets.files import parse_json

Record = dict[str, Any]

KEPT_ALWAYS = (
    "broken_image",
    "checkpoint",
    "checkpoint_failed",
    "resumed",
)  # facts about the machine, which stay true after a resume


@dataclass(frozen=True)
class Log:
    """The records of `log.jsonl` by event, in order.

    Attributes:
        start: the first `start` record, with configuration, machine and versions.
        steps, evaluations, skipped: the history of the current weights. Records of steps after the checkpoint from
            which the run was resumed are dropped, because those steps ran again.
        broken, checkpoints, failed, resumed, end: unreadable images, checkpoints, checkpoints that could not be
            written, resumes, and the last `end` record, which is empty while the run is in progress.
        seconds: total training time without steps that ran again.
        unreadable: number of lines that are not JSON records, for example after a crash.
    """

    start: Record = field(default_factory=dict)
    steps: tuple[Record, ...] = ()
    evaluations: tuple[Record, ...] = ()
    skipped: tuple[Record, ...] = ()
    broken: tuple[Record, ...] = ()
    checkpoints: tuple[Record, ...] = ()
    failed: tuple[Record, ...] = ()
    resumed: tuple[Record, ...] = ()
    end: Record = field(default_factory=dict)
    seconds: float = 0.0
    unreadable: int = 0

    def curve(self, name: str, records: Iterable[Record] | None = None) -> list[tuple[float, float]]:
        """Return (step, value) of every record in which both are finite numbers; `records` defaults to the steps."""
        points = []
        for record in self.steps if records is None else records:
            step, value = number(record.get("step")), number(record.get(name))
            if step is not None and value is not None:
                points.append((step, value))
        return points

    def evaluated(self, weights: str) -> tuple[Record, ...]:
        """Return the evaluations of "ema" or "raw" weights."""
        return tuple(record for record in self.evaluations if record.get("weights", "ema") == weights)


def number(value: object) -> float | None:
    """Return a finite number as float, and None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def read_log(path: Path) -> Log:
    """Read log.jsonl; raise FileNotFoundError if there is none."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}: is it the folder of a run (`lambdanets train`)?")
    records, unreadable = [], 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = parse_json(line, path.name)
            except ValueError:
                record = None
            if isinstance(record, dict) and isinstance(record.get("event"), str):
                records.append(record)
            elif line.strip():
                unreadable += 1
    return from_records(records, unreadable)


def from_records(records: list[Record], unreadable: int = 0) -> Log:
    """Return the log of records in the order in which they were written."""
    kept: dict[str, list[Record]] = {}
    seconds = 0.0
    for record in records:
        event, now = record["event"], number(record.get("time"))
        if now is not None:
            seconds = now  # after a resume the clock continues from the checkpoint, so repeated steps count once
        if event == "resumed":
            step = number(record.get("step"))
            for name, list_ in kept.items():
                if name not in KEPT_ALWAYS and step is not None:
                    kept[name] = [one for one in list_ if (number(one.get("step")) or 0) <= step]
        kept.setdefault(event, []).append(record)
    return Log(
        start=next(iter(kept.get("start", ())), {}),
        steps=tuple(kept.get("step", ())),
        evaluations=tuple(kept.get("evaluation", ())),
        skipped=tuple(kept.get("skipped_step", ())),
        broken=tuple(kept.get("broken_image", ())),
        checkpoints=tuple(kept.get("checkpoint", ())),
        failed=tuple(kept.get("checkpoint_failed", ())),
        resumed=tuple(kept.get("resumed", ())),
        end=next(reversed(kept.get("end", ())), {}),
        seconds=seconds,
        unreadable=unreadable,
    )

"""Metrics of the steps since the last log record, accumulated on the device without cost per step.

Reading them synchronises with the device, so it happens only for log records and checkpoints.
"""

from typing import Any

import torch
from torch import Tensor

from lambdanets.train.distributed import World
from lambdanets.train.task import Outcome

MOST_WAITING = 1000  # steps whose numbers stay on the device; each takes a block of memory


class StepMetrics:
    """Sums over the steps since the last log record, and the skipped steps. Norms are computed for some steps only.

    Attributes:
        names: names of the sums, after the first batch.
        sums: sums of this process; None right after a log record.
        total, in_a_row: skipped steps in the whole run, and consecutive ones up to now.
    """

    def __init__(self, length: int, world: World) -> None:
        self.length, self.world = length, world
        self.names: list[str] = []
        self.sums: list[float] | None = None
        self.skipped: list[int] = []  # positions among the steps since the last log record
        self.total = self.in_a_row = 0
        self.no_norm = torch.zeros((), device=world.device)  # for steps without a norm
        # position, micro-batches, examples, whether there is a norm, numbers
        self.waiting: list[tuple[int, int, int, bool, list[Tensor]]] = []
        self.start_step()

    def start_step(self) -> None:
        self.parts = self.examples = 0
        self.numbers: list[Tensor] = []  # loss, and the sums of the task

    def name(self, outcome: Outcome) -> None:
        if not self.names:
            self.names = ["parts", "examples", "loss", *outcome.sums]

    def note(self, outcome: Outcome) -> None:
        """Add the numbers of a micro-batch."""
        self.name(outcome)
        now = [outcome.loss.detach(), *(outcome.sums[name].detach() for name in self.names[3:])]
        self.numbers = [a.double() + b for a, b in zip(self.numbers, now, strict=True)] if self.parts else now
        self.parts += 1
        self.examples += outcome.examples

    def end_step(self, step: int, finite: Tensor, norm: Tensor | None) -> None:
        numbers = [finite, self.no_norm if norm is None else norm, *self.numbers]
        self.add(step, self.parts, self.examples, norm is not None, numbers)
        self.start_step()

    def add(self, step: int, parts: int, examples: int, with_norm: bool, numbers: list[Tensor]) -> None:
        """Add a step: whether it is finite, the norm (used only `with_norm`), the loss and the sums of the task."""
        self.waiting.append((step % self.length, parts, examples, with_norm, numbers))
        if len(self.waiting) == MOST_WAITING:
            self.read()

    def read(self) -> None:
        """Copy all numbers from the device; this synchronises with it."""
        if not self.waiting:
            return
        positions, parts, examples, with_norm, rows = zip(*self.waiting, strict=True)
        self.waiting = []
        columns = [torch.stack(column).to(self.world.device, torch.float64) for column in zip(*rows, strict=True)]
        values = torch.stack(columns, 1).tolist()
        for position, *counts, has_norm, (finite, norm, *numbers) in zip(
            positions, parts, examples, with_norm, values, strict=True
        ):
            row = [*map(float, counts), *numbers, norm if has_norm else 0.0, float(has_norm)]
            if finite:
                self.in_a_row = 0
            else:
                row = [0.0] * len(row)
                self.skipped.append(position)
                self.total += 1
                self.in_a_row += 1
            self.sums = row if self.sums is None else [a + b for a, b in zip(self.sums, row, strict=True)]

    # For the log

    def means(self) -> dict[str, float]:
        """Return the means over the steps since the last log record and over all processes, and reset the sums."""
        total = self.total_sums()
        self.sums = None
        if total is None:
            return {}
        named = dict(zip([*self.names, "grad_norm", "norms"], total.tolist(), strict=True))
        parts, examples, norms = named.pop("parts"), named.pop("examples"), named.pop("norms")
        loss, norm = named.pop("loss"), named.pop("grad_norm")
        means = {"loss": loss / parts if parts else float("nan"), "grad_norm": norm / norms if norms else float("nan")}
        return means | {name: value / examples if examples else float("nan") for name, value in named.items()}

    def total_sums(self) -> Tensor | None:
        """Return the sums over all processes."""
        self.read()
        if self.sums is None:
            return None
        return self.world.sum_(torch.tensor(self.sums, dtype=torch.float64, device=self.world.device))

    def positions(self) -> list[int]:
        """Return the positions of skipped steps since the last log record, and forget them."""
        self.read()
        found, self.skipped = self.skipped, []
        return found

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """Return the state, equal on all processes. All processes must call it."""
        sums = self.total_sums()
        flags = torch.zeros(self.length, dtype=torch.bool)
        flags[self.skipped] = True
        counts = {"total": torch.tensor(self.total), "in_a_row": torch.tensor(self.in_a_row)}
        return {"names": self.names, "sums": sums, "skipped": {"flags": flags, **counts}}

    def load(self, state: dict[str, Any]) -> None:
        self.names, self.waiting, sums, skipped = list(state["names"]), [], state["sums"], state["skipped"]
        counts = ("total", "in_a_row")
        if not all(isinstance(name, str) for name in self.names):
            raise ValueError(f"the names of its sums must be strings, got {str(self.names)[:40]}")
        if sums is not None and not (isinstance(sums, Tensor) and sums.shape == (len(self.names) + 2,)):
            raise ValueError(f"it must have one sum for each of {', '.join(map(str, self.names))}")
        if not (
            isinstance(skipped, dict)
            and all(isinstance(skipped.get(name), Tensor) for name in ("flags", *counts))
            and skipped["flags"].ndim == 1
            and all(skipped[name].numel() == 1 for name in counts)
        ):
            raise ValueError("it has no list of skipped steps")
        # The sums are those of all processes, so only one process continues with them.
        self.sums = None if sums is None else (sums * float(self.world.main)).tolist()
        fits = len(skipped["flags"]) == self.length
        self.skipped = skipped["flags"].nonzero().flatten().tolist() if fits else []
        self.total, self.in_a_row = int(skipped["total"]), int(skipped["in_a_row"])

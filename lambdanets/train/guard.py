"""Steps whose gradient is not finite: counted on the device, named when the log looks, and a diagnosis if they stay."""

from typing import Any

import torch
from torch import Tensor, nn


class NotFiniteError(ValueError):
    """Too many steps in a row were skipped."""


class SkippedSteps:
    """Counts on the device. Reading them makes the host wait, so it happens with the log."""

    def __init__(self, window: int, device: torch.device) -> None:
        self.flags = torch.zeros(window, dtype=torch.bool, device=device)  # of the steps since the log was written
        self.total = torch.zeros((), dtype=torch.int64, device=device)
        self.in_a_row = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, position: int, finite: Tensor) -> None:
        """Step `position` of the log's window."""
        self.flags[position] = ~finite
        self.total += ~finite
        self.in_a_row = torch.where(finite, 0, self.in_a_row + 1)

    def positions(self) -> list[int]:
        """Which steps of the window were skipped; the window starts anew."""
        found = self.flags.nonzero().flatten().tolist()
        self.flags.zero_()
        return found

    def state(self) -> dict[str, Tensor]:
        return {"flags": self.flags, "total": self.total, "in_a_row": self.in_a_row}

    def load(self, state: dict[str, Tensor]) -> None:
        if len(state["flags"]) == len(self.flags):
            self.flags.copy_(state["flags"])
        self.total.copy_(state["total"])
        self.in_a_row.copy_(state["in_a_row"])


def diagnose(model: nn.Module, batch: Any, *, step: int, in_a_row: int, rate: float, precision: str) -> str:
    """Why steps are not finite, as far as weights, inputs and settings tell."""
    sentences = [f"{in_a_row} steps in a row up to step {step} had a gradient that is not finite"]
    broken = [name for name, p in model.named_parameters() if not bool(p.isfinite().all())]
    if broken:
        sentences.append(f"weights are not finite either, first {broken[0]}")
    else:
        sentences.append("the weights are finite, as they were before these steps")
    inputs = [t for t in tensors_in(batch) if t.is_floating_point()]
    if any(not bool(t.isfinite().all()) for t in inputs):
        sentences.append("the last batch holds values that are not finite: look at the data")
    else:
        sentences.append(f"the last batch is finite. Try a lower schedule.rate (it is {rate:.4g} now), a longer warmup")
        sentences[-1] += ", clip_norm 1" + (", or precision bfloat16 or float32" if precision == "float16" else "")
    return ". ".join(s[0].upper() + s[1:] for s in sentences) + "."


def tensors_in(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, dict):
        batch = list(batch.values())
    return [t for part in batch for t in tensors_in(part)] if isinstance(batch, list | tuple) else []

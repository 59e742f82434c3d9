"""Steps whose gradient is not finite: a diagnosis if they stay."""

from typing import Any

from torch import Tensor, nn


class NotFiniteError(ValueError):
    """Too many steps in a row were skipped."""


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

"""Diagnosis of repeated steps with non-finite gradients."""

from typing import Any

from torch import Tensor, nn


class NotFiniteError(ValueError):
    """Too many consecutive steps were skipped."""


def diagnose(model: nn.Module, batch: Any, *, step: int, in_a_row: int, rate: float, precision: str) -> str:
    """Describe possible reasons for non-finite steps, from weights, inputs and settings."""
    sentences = [f"{in_a_row} consecutive steps up to step {step} had a non-finite gradient"]
    broken = [name for name, p in model.named_parameters() if not bool(p.isfinite().all())]
    if broken:
        sentences.append(f"some weights are not finite, the first is {broken[0]}")
    else:
        sentences.append("all weights are finite")
    inputs = [t for t in tensors_in(batch) if t.is_floating_point()]
    if any(not bool(t.isfinite().all()) for t in inputs):
        sentences.append("the last batch contains non-finite values: check the data")
    else:
        sentences.append(f"the last batch is finite. Try a lower schedule.rate (currently {rate:.4g}), a longer warmup")
        sentences[-1] += ", clip_norm 1" + (", or precision bfloat16 or float32" if precision == "float16" else "")
    return ". ".join(s[0].upper() + s[1:] for s in sentences) + "."


def tensors_in(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, dict):
        batch = list(batch.values())
    return [t for part in batch for t in tensors_in(part)] if isinstance(batch, list | tuple) else []

"""Half precision: autocast and loss scaling for float16."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lambdanets.train.config import Precision

START, SMALLEST, LARGEST = 2.0**16, 2.0**-14, 2.0**24
GROWTH_INTERVAL = 2000  # steps


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager:
    if precision not in ("bfloat16", "float16"):
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, precision))


class LossScale:
    """Loss scaling like torch's GradScaler, without synchronisation with the device; the scale is 1 except for
    float16."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.used = precision == "float16"
        self.scale = torch.tensor(START if self.used else 1.0, device=device)
        self.good = torch.zeros((), device=device)  # steps since the scale changed

    def scaled(self, loss: Tensor, parts: int) -> Tensor:
        """Return the scaled loss of one of the `parts` of a step."""
        if self.used:
            return loss * (self.scale / parts)
        return loss / parts if parts > 1 else loss

    def update(self, finite: Tensor) -> None:
        if self.used:
            good = torch.where(finite, self.good + 1, 0.0)
            grown = good >= GROWTH_INTERVAL
            factor = torch.where(finite, torch.where(grown, 2.0, 1.0), 0.5)
            self.scale.mul_(factor).clamp_(SMALLEST, LARGEST)
            self.good.copy_(torch.where(grown, 0.0, good))

    def state(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good": self.good}

    def load(self, state: dict[str, Tensor]) -> None:
        if self.used:
            self.scale.copy_(state["scale"])
            self.good.copy_(state["good"])

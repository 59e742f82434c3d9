"""Change of the position embeddings during training."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lambdanets.models.stored import read_state


@dataclass(frozen=True)
class Movement:
    """Change of one table.

    `cosine` is the cosine similarity between all entries before and after training, `before` and `after` are the root
    mean squares, and `change_HW` is the norm of the change of each relative position, if the table has two axes.
    """

    name: str
    shape: tuple[int, ...]
    cosine: float
    before: float
    after: float
    change_HW: Tensor | None


def movements(start: Path, end: Path) -> list[Movement]:
    """Compare the tables that both files have; return an empty list if a file does not exist."""
    if not (start.is_file() and end.is_file()):
        return []
    then, now = read_state(start), read_state(end)
    return [
        compare(name, then[name], now[name]) for name in then if name in now and now[name].shape == then[name].shape
    ]


def compare(name: str, then: Tensor, now: Tensor) -> Movement:
    then, now = then.double(), now.double()
    sizes = then.norm() * now.norm()
    change = (now - then).flatten(2).norm(dim=2) if then.ndim >= 3 else None
    return Movement(
        name=name,
        shape=tuple(then.shape),
        cosine=float((then * now).sum() / sizes) if sizes > 0 else 0.0,
        before=float(then.square().mean().sqrt()),
        after=float(now.square().mean().sqrt()),
        change_HW=change,
    )

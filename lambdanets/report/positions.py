"""How far the tables of position embeddings moved from their random start."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lambdanets.models.stored import read_state


@dataclass(frozen=True)
class Movement:
    """One table: the cosine between start and end over all its entries, its sizes (root mean square), and the change
    of each relative position [height, width], where the table has two axes."""

    name: str
    shape: tuple[int, ...]
    cosine: float
    before: float
    after: float
    change_HW: Tensor | None


def movements(start: Path, end: Path) -> list[Movement]:
    """The tables that both files have. A file that is not there has none."""
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

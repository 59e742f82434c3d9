"""Images that cannot be read: how many are too many."""

from dataclasses import dataclass

SHOWN = 20  # names in the message; the error holds all of them
ADVICE = (
    "Mend or remove them (`lambdanets data check` lists them all, for detection `lambdanets detect check`), or allow "
    "more (a run's --data.max-broken)"
)


@dataclass(frozen=True)
class BrokenImages:
    """A broken image is replaced, named and counted; too many stop the run."""

    max_fraction: float = 0.05
    """The largest part of the images seen so far that may be broken."""
    at_least: int = 10
    """So many broken ones before the first epoch is over, so that one among the first few is no alarm."""
    others: int = 0
    """Images of the same run that were read elsewhere: a small validation set is judged together with them."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_fraction <= 1:
            raise ValueError(f"max_fraction is between 0 and 1, not {self.max_fraction}")


@dataclass(frozen=True)
class Broken:
    """One image that could not be read."""

    index: int
    name: str
    reason: str


class TooManyBrokenError(ValueError):
    """The list is in `broken`."""

    def __init__(
        self,
        broken: list[Broken],
        seen: int,
        policy: BrokenImages,
        advice: str = ADVICE,
    ) -> None:
        self.broken = broken
        some = "; ".join(f"{one.name}: {one.reason}" for one in broken[:SHOWN])
        more = f"; and {len(broken) - SHOWN} more" if len(broken) > SHOWN else ""
        super().__init__(
            f"{len(broken)} of the {seen} images read so far are broken, more than {policy.max_fraction:.1%} of them. "
            f"{advice}: {some}{more}"
        )


class BrokenCount:
    """What one loader met so far."""

    def __init__(self, policy: BrokenImages, length: int) -> None:
        self.policy, self.length = policy, length
        self.drawn = 0
        self.found: dict[int, Broken] = {}

    def add(self, drawn: int, broken: tuple[Broken, ...], gave_up: bool) -> tuple[Broken, ...]:
        """Counts a batch and returns the broken images that were not known before."""
        self.drawn += drawn + len(broken)
        new = tuple({one.index: one for one in broken if one.index not in self.found}.values())
        self.found |= {one.index: one for one in new}
        seen = min(self.drawn, self.length) + self.policy.others
        enough = len(self.found) >= self.policy.at_least or self.drawn >= self.length
        if gave_up or (enough and len(self.found) > self.policy.max_fraction * seen):
            raise TooManyBrokenError(list(self.found.values()), seen, self.policy)
        return new

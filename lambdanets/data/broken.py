"""Unreadable images: how many a run tolerates."""

from dataclasses import dataclass

SHOWN = 20  # names in the message; the exception holds all
ADVICE = (
    "Repair or remove them (`lambdanets data check` or, for detection, `lambdanets detect check` lists all), or allow "
    "more with --data.max-broken"
)


@dataclass(frozen=True)
class BrokenImages:
    """When unreadable images stop a run. Up to this limit they are replaced and logged.

    Example:
        >>> from lambdanets.data.broken import BrokenImages
        >>> from lambdanets.data.loader import LoaderOptions
        >>> options = LoaderOptions(batch_size=64, broken=BrokenImages(max_fraction=0.01))
    """

    max_fraction: float = 0.05
    """Largest allowed fraction of unreadable images among the images read so far."""
    at_least: int = 10
    """During the first epoch, never stop with fewer unreadable images than this."""
    others: int = 0
    """Number of images of the same run that another loader reads; they count as read, so that one unreadable image in a
    small validation set does not stop the run."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_fraction <= 1:
            raise ValueError(f"max_fraction must be between 0 and 1, got {self.max_fraction}")


@dataclass(frozen=True)
class Broken:
    """An unreadable image: its index in the source, its name, and the reason."""

    index: int
    name: str
    reason: str


class TooManyBrokenError(ValueError):
    """Too many images are unreadable. The attribute `broken` lists them as `Broken`."""

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
            f"{len(broken)} of {seen} images read so far cannot be read, more than the limit of "
            f"{policy.max_fraction:.1%}. {advice}: {some}{more}"
        )


class BrokenCount:
    """The unreadable images that a loader has found so far."""

    def __init__(self, policy: BrokenImages, length: int) -> None:
        self.policy, self.length = policy, length
        self.drawn = 0
        self.found: dict[int, Broken] = {}

    def add(self, drawn: int, broken: tuple[Broken, ...], gave_up: bool) -> tuple[Broken, ...]:
        """Count a batch and return its newly found unreadable images."""
        self.drawn += drawn + len(broken)
        new = tuple({one.index: one for one in broken if one.index not in self.found}.values())
        self.found |= {one.index: one for one in new}
        seen = min(self.drawn, self.length) + self.policy.others
        enough = len(self.found) >= self.policy.at_least or self.drawn >= self.length
        if gave_up or (enough and len(self.found) > self.policy.max_fraction * seen):
            raise TooManyBrokenError(list(self.found.values()), seen, self.policy)
        return new

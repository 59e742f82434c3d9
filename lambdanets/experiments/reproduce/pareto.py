"""Speed-ups at matched accuracy: the published accuracies of published.json on one axis, time on the other."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import exp, log
from pathlib import Path
from statistics import geometric_mean

from lambdanets.files import read_object

DATA = Path(__file__).parent / "published.json"
OURS = "LambdaResNet"
OTHERS = ("EfficientNet", "ResNet-RS w/ SE", "ResNet-RS wo/ SE")


@dataclass(frozen=True)
class Published:
    """A network with the accuracy that its authors report.

    Attributes:
        family, label: which curve, and what it is called on it.
        network: as `lambdanets bench network` takes it.
        image_size: pixels.
        top1: in percent.
        tpu_seconds: of a training step for 1024 images on 8 TPUv3 cores, where it is published.
        source: of the numbers, in words.
    """

    family: str
    label: str
    network: str
    image_size: int
    top1: float
    tpu_seconds: float | None
    source: str

    @property
    def title(self) -> str:
        return f"{self.label}, {self.image_size} px"


@cache
def published() -> tuple[Published, ...]:
    """All networks of the figure, family by family, from small to large."""
    data = read_object(DATA)
    return tuple(
        Published(family["name"], **{**point, "source": data["sources"][point["source"]]})
        for family in data["families"]
        for point in family["points"]
    )


def claims() -> dict[str, str]:
    """What the paper says about each other family, by its name."""
    found = read_object(DATA)["claims"]
    return {key.removeprefix(f"{OURS} over "): text for key, text in found.items()}


@dataclass(frozen=True)
class Point:
    """Accuracy (percent) and time (seconds, for any fixed number of images)."""

    top1: float
    seconds: float


@dataclass(frozen=True)
class Match:
    """How many times faster at one accuracy."""

    top1: float
    speedup: float


def frontier(points: Iterable[Point]) -> list[Point]:
    """The networks that one would choose: none is both faster and at least as accurate. By rising accuracy."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.top1, p.seconds)):
        if not kept or point.seconds < kept[-1].seconds:
            kept.append(point)
    return kept[::-1]


@dataclass(frozen=True)
class Curve:
    """The networks of a family. `unknown`: accuracies of those that are still to be measured."""

    points: Sequence[Point]
    unknown: Sequence[float] = ()

    def seconds_at(self, top1: float) -> float | None:
        """Time for an accuracy, between two neighbours on a logarithmic axis.

        None outside, where nothing is extrapolated, and where a network between the two is not measured yet.
        """
        curve = frontier(self.points)
        for point in curve:
            if point.top1 == top1:
                return point.seconds
        for low, high in pairwise(curve):
            if low.top1 < top1 < high.top1 and not any(low.top1 < one < high.top1 for one in self.unknown):
                part = (top1 - low.top1) / (high.top1 - low.top1)
                return exp((1 - part) * log(low.seconds) + part * log(high.seconds))
        return None


def speedups(ours: Curve, others: Curve) -> list[Match]:
    """At the accuracy of every network of either curve where both have one: seconds of the others / ours."""
    found = []
    for top1 in sorted({point.top1 for curve in (ours, others) for point in frontier(curve.points)}):
        fast, slow = ours.seconds_at(top1), others.seconds_at(top1)
        if fast is not None and slow is not None:
            found.append(Match(top1, slow / fast))
    return found


@dataclass(frozen=True)
class Headline:
    """Speed-ups over one family, in one sentence."""

    other: str
    mode: str
    matches: tuple[Match, ...]

    def text(self) -> str:
        if not self.matches:
            return f"{self.mode}: no accuracy that both {OURS} and {self.other} were measured at"
        low, high = self.matches[0].top1, self.matches[-1].top1
        parts = [f"{OURS} over {self.other}, {self.mode}: {spread(self.matches)} at {low:g} to {high:g}% top-1"]
        for name, chosen in (
            ("at or below 82%", [m for m in self.matches if m.top1 <= 82]),
            ("at or above 83%", [m for m in self.matches if m.top1 >= 83]),
        ):
            if chosen and len(chosen) < len(self.matches):
                parts.append(f"{spread(chosen)} {name}")
        return "; ".join(parts)


def spread(matches: Sequence[Match]) -> str:
    values = [match.speedup for match in matches]
    if len(values) == 1:
        return f"{values[0]:.2f}x"
    return f"{min(values):.2f} to {max(values):.2f}x (mean {geometric_mean(values):.2f})"


def headlines(
    seconds: Mapping[tuple[str, int], float], mode: str, unknown: Collection[tuple[str, int]] = ()
) -> list[Headline]:
    """One for each other family, from seconds by (network, image size). `unknown`: those still to be measured."""

    def curve(family: str) -> Curve:
        mine = {(one.network, one.image_size): one.top1 for one in published() if one.family == family}
        points = [Point(top1, seconds[key]) for key, top1 in mine.items() if key in seconds]
        return Curve(points, [top1 for key, top1 in mine.items() if key in unknown])

    ours, others = curve(OURS), {other: curve(other) for other in OTHERS}
    return [Headline(other, mode, tuple(speedups(ours, one))) for other, one in others.items() if one.points]


def published_headlines() -> list[Headline]:
    """The same from published TPU times, where both families have them: a check of the method on the paper's claim."""
    known = {(one.network, one.image_size): one.tpu_seconds for one in published() if one.tpu_seconds is not None}
    return headlines(known, "training on TPUv3 as published")

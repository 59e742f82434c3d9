"""Speed-ups at matched accuracy: the published accuracies of published.json on one axis, time on the other."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import exp, log
from pathlib import Path
from statistics import geometric_mean

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
    data = json.loads(DATA.read_text(encoding="utf-8"))
    return tuple(
        Published(family["name"], **{**point, "source": data["sources"][point["source"]]})
        for family in data["families"]
        for point in family["points"]
    )


def claims() -> dict[str, str]:
    """What the paper says about each other family, by its name."""
    found = json.loads(DATA.read_text(encoding="utf-8"))["claims"]
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


def seconds_at(curve: Sequence[Point], top1: float) -> float | None:
    """Time for an accuracy, between the two neighbours on a logarithmic axis; None outside: nothing is extrapolated."""
    if not curve or not curve[0].top1 <= top1 <= curve[-1].top1:
        return None
    for low, high in pairwise(curve):
        if low.top1 <= top1 <= high.top1:
            part = (top1 - low.top1) / (high.top1 - low.top1)
            return exp((1 - part) * log(low.seconds) + part * log(high.seconds))
    return curve[0].seconds


def speedups(ours: Iterable[Point], others: Iterable[Point]) -> list[Match]:
    """At the accuracy of every network of either curve where both have one: seconds of the others / ours."""
    mine, theirs = frontier(ours), frontier(others)
    found = []
    for top1 in sorted({point.top1 for point in (*mine, *theirs)}):
        fast, slow = seconds_at(mine, top1), seconds_at(theirs, top1)
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


def headlines(seconds: dict[tuple[str, int], float], mode: str) -> list[Headline]:
    """One for each other family, from seconds by (network, image size); what is missing is left out of its curve."""

    def curve(family: str) -> list[Point]:
        return [
            Point(one.top1, seconds[one.network, one.image_size])
            for one in published()
            if one.family == family and (one.network, one.image_size) in seconds
        ]

    ours = curve(OURS)
    return [Headline(other, mode, tuple(speedups(ours, points))) for other in OTHERS if (points := curve(other))]


def published_headlines() -> list[Headline]:
    """The same from published TPU times, where both families have them: a check of the method on the paper's claim."""
    known = {(one.network, one.image_size): one.tpu_seconds for one in published() if one.tpu_seconds is not None}
    return headlines(known, "training on TPUv3 as published")

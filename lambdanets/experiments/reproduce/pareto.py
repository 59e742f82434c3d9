"""Speed-ups between families of networks at matched accuracy: published accuracies (published.json) and our times."""

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
        family, label: name of the curve, and name of the network on it.
        network: the network in the form that `lambdanets bench network` accepts.
        image_size: height and width of the images in pixels.
        top1: ImageNet top-1 accuracy in percent.
        tpu_seconds: published seconds of a training step for 1024 images on 8 TPUv3 cores, or None.
        source: the publication of these numbers.
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
        """The label with the image size."""
        return f"{self.label}, {self.image_size} px"


@cache
def published() -> tuple[Published, ...]:
    """Return all networks of the figure by family, from small to large.

    >>> from lambdanets.experiments.reproduce.pareto import published
    >>> one = published()[0]
    >>> one.title, one.top1, one.tpu_seconds
    ('LambdaResNet-50, 128 px', 77.4, 0.058)
    """
    data = read_object(DATA)
    return tuple(
        Published(family["name"], **{**point, "source": data["sources"][point["source"]]})
        for family in data["families"]
        for point in family["points"]
    )


def claims() -> dict[str, str]:
    """Return the paper's claim about each other family, by family."""
    found = read_object(DATA)["claims"]
    return {key.removeprefix(f"{OURS} over "): text for key, text in found.items()}


@dataclass(frozen=True)
class Point:
    """The accuracy of a network in percent, and its time in seconds for a fixed number of images."""

    top1: float
    seconds: float


@dataclass(frozen=True)
class Match:
    """The speed-up at one accuracy (in percent)."""

    top1: float
    speedup: float


def frontier(points: Iterable[Point]) -> list[Point]:
    """Return the Pareto-optimal points by increasing accuracy: no other is both faster and at least as accurate."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.top1, p.seconds)):
        if not kept or point.seconds < kept[-1].seconds:
            kept.append(point)
    return kept[::-1]


@dataclass(frozen=True)
class Curve:
    """The networks of a family.

    Attributes:
        points: measured networks.
        unknown: accuracies of networks that are not measured yet.

    >>> from lambdanets.experiments.reproduce.pareto import Curve, Point
    >>> Curve([Point(80.0, 1.0), Point(82.0, 4.0)]).seconds_at(81.0)
    2.0
    """

    points: Sequence[Point]
    unknown: Sequence[float] = ()

    def seconds_at(self, top1: float) -> float | None:
        """Return the time for an accuracy, interpolated between two Pareto-optimal networks on a logarithmic axis.

        Returns None outside the measured range, and if a network between the two is not measured yet.
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
    """Return the speed-ups of one family over another at the accuracy of every Pareto-optimal network of either.

    Args:
        ours: the family whose speed-up is computed.
        others: the family that it is compared with.

    >>> from lambdanets.experiments.reproduce.pareto import Curve, Point, speedups
    >>> speedups(Curve([Point(80.0, 1.0)]), Curve([Point(79.0, 1.0), Point(81.0, 4.0)]))
    [Match(top1=80.0, speedup=2.0)]
    """
    found = []
    for top1 in sorted({point.top1 for curve in (ours, others) for point in frontier(curve.points)}):
        fast, slow = ours.seconds_at(top1), others.seconds_at(top1)
        if fast is not None and slow is not None:
            found.append(Match(top1, slow / fast))
    return found


@dataclass(frozen=True)
class Headline:
    """The speed-ups of LambdaResNets over one family.

    Attributes:
        other: name of the other family.
        mode: the kind of measurement, such as "training, eager".
        matches: the speed-ups, by increasing accuracy.
    """

    other: str
    mode: str
    matches: tuple[Match, ...]

    def text(self) -> str:
        """Return the smallest, largest and mean speed-up in one sentence."""
        if not self.matches:
            return f"{self.mode}: no accuracy at which both {OURS} and {self.other} are measured"
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
    """Return the speed-ups over every other family that has measurements.

    Args:
        seconds: measured seconds by (network, image size).
        mode: the kind of measurement, such as "training, eager".
        unknown: the (network, image size) that are not measured yet.

    >>> from lambdanets.experiments.reproduce.pareto import headlines
    >>> times = {("lambda_resnet152", 288): 0.6, ("timm:efficientnet_b4", 380): 1.2}
    >>> [one.other for one in headlines(times, "training, eager")]
    ['EfficientNet']
    """

    def curve(family: str) -> Curve:
        mine = {(one.network, one.image_size): one.top1 for one in published() if one.family == family}
        points = [Point(top1, seconds[key]) for key, top1 in mine.items() if key in seconds]
        return Curve(points, [top1 for key, top1 in mine.items() if key in unknown])

    ours, others = curve(OURS), {other: curve(other) for other in OTHERS}
    return [Headline(other, mode, tuple(speedups(ours, one))) for other, one in others.items() if one.points]


def published_headlines() -> list[Headline]:
    """Return the speed-ups computed from published TPU times, to check the method against the paper's claim.

    >>> from lambdanets.experiments.reproduce.pareto import published_headlines
    >>> published_headlines()[0].text()
    'LambdaResNet over ResNet-RS w/ SE, training on TPUv3 as published: 0.87 to 1.80x ...'
    """
    known = {(one.network, one.image_size): one.tpu_seconds for one in published() if one.tpu_seconds is not None}
    return headlines(known, "training on TPUv3 as published")

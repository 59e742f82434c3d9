"""A picture that somebody uploads to what a network finds in it. Whatever is wrong with it is one sentence."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from lambdanets.data.decode import BrokenImageError, Limits, decoded, load, open_image, upright
from lambdanets.data.source import read_file
from lambdanets.data.transforms import normalize
from lambdanets.detect import use as detect
from lambdanets.detect.draw import colour_of, draw
from lambdanets.detect.weights import find_weights, read_about
from lambdanets.layers import LambdaLayer2d
from lambdanets.report.show import count, shortened, some
from lambdanets.train.inference import trained as train
from lambdanets.train.inference.command import Using
from lambdanets.view.command import as_input, likeliest
from lambdanets.view.page import Page, interactive

SHOWN_SIDE = 640  # pixels of the longer side of the picture on the page
MOST_ANSWERS = 5
MOST_OBJECTS = 20
MOST_NAMES = 12
LONGEST_NAME = 40


@dataclass(frozen=True)
class Answer:
    """A class or an object, and how sure the network is."""

    name: str
    share: float  # 0 .. 1
    colour: tuple[int, int, int] | None = None  # of its box


@dataclass(frozen=True, eq=False)
class Answers:
    """What a network says about a picture."""

    picture: Image.Image  # as the page shows it, with boxes and masks
    found: tuple[Answer, ...]
    more: int = 0  # objects that are drawn but not listed


@dataclass(frozen=True, eq=False)
class Classifier:
    """A network with one answer for the whole picture."""

    trained: train.Trained
    least_share: None = None  # where a slider starts, if what is less sure can be left out

    @property
    def exif_orientation(self) -> bool:
        """Whether pictures are turned as their EXIF orientation says."""
        return self.trained.card.preprocessing.exif_orientation

    @property
    def about(self) -> str:
        """A sentence on what it is."""
        network = self.trained.network
        return describe(network.name or "a network", network, "class", "classes", self.trained.class_names)

    @property
    def looks(self) -> bool:
        """Whether it has lambda layers at all."""
        return has_lambdas(self.trained.network)

    def answer(self, image: Image.Image, least_share: float = 0.0) -> Answers:
        _, given = as_input(self.trained, image)
        found = likeliest(self.trained, given, MOST_ANSWERS)
        return Answers(shown(image), tuple(Answer(name, p) for name, p in found if p >= least_share))

    def look(self, image: Image.Image, layers: Sequence[str] = ()) -> Page:
        """Where its lambda layers look; a ValueError says why it cannot be shown."""
        picture, given = as_input(self.trained, image)
        return interactive(self.trained.network, given, layers=layers, picture=picture)


@dataclass(frozen=True, eq=False)
class Finder:
    """A network that finds objects: boxes, and masks if it learned them. It answers as `Classifier` does."""

    trained: detect.Trained
    least_share: float = 0.5
    exif_orientation: bool = True

    @property
    def about(self) -> str:
        kind = "Mask R-CNN" if self.trained.about.masks else "Faster R-CNN"
        name = f"{kind} on {self.trained.about.model.name}"
        return describe(name, self.trained.detector, "kind of object", "kinds of objects", self.trained.class_names)

    @property
    def looks(self) -> bool:
        return has_lambdas(self.trained.detector)

    def answer(self, image: Image.Image, least_share: float = 0.0) -> Answers:
        image = load(image)
        names = self.trained.class_names
        found = [one for one in self.trained.look(image) if one.score >= least_share]
        found.sort(key=lambda one: -one.score)
        listed = (Answer(names[one.label - 1], one.score, colour_of(one.label)) for one in found[:MOST_OBJECTS])
        return Answers(draw(image, found, names, side=SHOWN_SIDE), tuple(listed), max(0, len(found) - MOST_OBJECTS))

    def look(self, image: Image.Image, layers: Sequence[str] = ()) -> Page:
        pixels = self.trained.pixels(load(image))
        detector, device = self.trained.detector, self.trained.device
        given = normalize(pixels[None].to(device), self.trained.about.preprocessing)[0]
        # The stages alone: what follows has no lambda layers. A picture fills its canvas, so nothing is masked.
        return interactive(detector.backbone.body, given, layers=layers, picture=pixels.permute(1, 2, 0))


Model = Classifier | Finder


def open_model(what: str, *, weights: str = "ema", device: str | None = None) -> Model:
    """The detector or the classifier in a run folder, a .safetensors file or a model folder."""
    if holds_detector(what, weights):
        return Finder(detect.open_detector(what, weights=weights, device=device))
    return Classifier(train.open_trained(what, Using(weights="raw" if weights == "raw" else "ema", device=device)))


def holds_detector(what: str, weights: str = "ema") -> bool:
    try:
        read_about(find_weights(what, weights))
    except (ValueError, OSError):  # what opens a classifier says what is wrong
        return False
    return True


def read_picture(path: str | Path, limits: Limits, exif_orientation: bool = True) -> Image.Image:
    """The decoded picture of a file; a BrokenImageError is a sentence for who uploaded it.

    It is upright, unless the network is one that sees pictures as they are stored.
    """
    try:
        image = open_image(read_file(path, limits), limits)
        return upright(image) if exif_orientation else decoded(image)
    except OSError as error:
        raise BrokenImageError("This picture is not here any more: upload it again.") from error
    except BrokenImageError as error:
        raise BrokenImageError(
            f"This picture cannot be used: {error}. Try another one, or save it again as a smaller JPEG."
        ) from error


def shown(image: Image.Image, side: int = SHOWN_SIDE) -> Image.Image:
    """As large as the page shows it; a tiny one has its pixels as squares."""
    return draw(load(image), (), (), side=side)


def has_lambdas(network: train.Network | detect.Detector) -> bool:
    return any(isinstance(module, LambdaLayer2d) for module in network.modules())


def describe(name: str, network: train.Network | detect.Detector, one: str, more: str, names: Sequence[str]) -> str:
    parameters = count(sum(parameter.numel() for parameter in network.parameters()))
    listed = ", ".join(shortened(n, LONGEST_NAME) for n in names[:MOST_NAMES])
    rest = ", …" if len(names) > MOST_NAMES else ""
    return f"{name}, {parameters} parameters. It knows {some(len(names), one, more)}: {listed}{rest}."

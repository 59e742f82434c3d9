"""Runs a network on an uploaded image. Every problem with the image is reported as one sentence."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from lambdanets.data.decode import BrokenImageError, Limits, decoded, load, open_image, upright
from lambdanets.data.source import read_file
from lambdanets.data.transforms import evaluation, normalize
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
Window = tuple[float, float, float, float]  # top, left, height, width as fractions of the picture
MOST_ANSWERS = 5
MOST_OBJECTS = 20
MOST_NAMES = 12
LONGEST_NAME = 40


@dataclass(frozen=True)
class Answer:
    """A predicted class or a detected object."""

    name: str
    share: float  # probability or score, 0 to 1
    colour: tuple[int, int, int] | None = None  # of its box


@dataclass(frozen=True, eq=False)
class Answers:
    """The predictions of a network for an image."""

    picture: Image.Image  # as the page shows it, with boxes and masks
    found: tuple[Answer, ...]
    more: int = 0  # number of objects that are drawn but not listed


@dataclass(frozen=True, eq=False)
class Classifier:
    """A classifier."""

    trained: train.Trained
    least_share: None = None  # initial value of the slider; None: no slider

    @property
    def exif_orientation(self) -> bool:
        """Whether images are rotated by their EXIF orientation."""
        return self.trained.card.preprocessing.exif_orientation

    @property
    def about(self) -> str:
        """One sentence that describes the network."""
        network = self.trained.network
        return describe(network.name or "a network", network, "class", "classes", self.trained.class_names)

    @property
    def looks(self) -> bool:
        """Whether the network has lambda layers."""
        return has_lambdas(self.trained.network)

    def answer(self, image: Image.Image, least_share: float = 0.0) -> Answers:
        """Return the classes with the highest probabilities."""
        _, given = as_input(self.trained, image)
        found = likeliest(self.trained, given, MOST_ANSWERS)
        return Answers(shown(image), tuple(Answer(name, p) for name, p in found if p >= least_share))

    def look(self, image: Image.Image, layers: Sequence[str] = ()) -> Page:
        """Return the page of `lambdanets view`. Raise ValueError if it cannot be shown."""
        picture, given = as_input(self.trained, image)
        return interactive(self.trained.network, given, layers=layers, picture=picture)

    def window(self, image: Image.Image) -> Window:
        """Return the part of an image that the network sees after resizing and cropping."""
        transform = evaluation(self.trained.card.preprocessing, self.trained.channels)
        (height, width), top, left = transform.place(*image.size)
        return top / height, left / width, transform.size[0] / height, transform.size[1] / width


@dataclass(frozen=True, eq=False)
class Finder:
    """A detector: boxes, and masks if it was trained with them. It has the methods of `Classifier`."""

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
        """Return the objects with at least this score, drawn onto the picture."""
        image = load(image)
        names = self.trained.class_names
        found = [one for one in self.trained.look(image) if one.score >= least_share]
        found.sort(key=lambda one: -one.score)
        listed = (Answer(names[one.label - 1], one.score, colour_of(one.label)) for one in found[:MOST_OBJECTS])
        return Answers(draw(image, found, names, side=SHOWN_SIDE), tuple(listed), max(0, len(found) - MOST_OBJECTS))

    def look(self, image: Image.Image, layers: Sequence[str] = ()) -> Page:
        """Return the page of `lambdanets view` for the backbone. Raise ValueError if it cannot be shown."""
        pixels = self.trained.pixels(load(image))
        detector, device = self.trained.detector, self.trained.device
        given = normalize(pixels[None].to(device), self.trained.about.preprocessing)[0]
        # Only the backbone has lambda layers. The image fills the canvas, so no mask is needed.
        return interactive(detector.backbone.body, given, layers=layers, picture=pixels.permute(1, 2, 0))

    def window(self, image: Image.Image) -> Window:
        """Return the part of an image that the network sees: all of it."""
        return 0.0, 0.0, 1.0, 1.0


Model = Classifier | Finder


def open_model(what: str, *, weights: str = "ema", device: str | None = None) -> Model:
    """Open the detector or the classifier in a run folder, a .safetensors file or a model folder."""
    if holds_detector(what, weights):
        return Finder(detect.open_detector(what, weights=weights, device=device))
    return Classifier(train.open_trained(what, Using(weights="raw" if weights == "raw" else "ema", device=device)))


def holds_detector(what: str, weights: str = "ema") -> bool:
    """Return whether the weights are those of a detector."""
    try:
        read_about(find_weights(what, weights))
    except (ValueError, OSError):  # `open_trained` reports what is wrong
        return False
    return True


def read_picture(path: str | Path, limits: Limits, exif_orientation: bool = True) -> Image.Image:
    """Return the decoded image of a file, rotated by its EXIF orientation if the network was trained that way.

    A BrokenImageError has a sentence for the user of the page.
    """
    try:
        image = open_image(read_file(path, limits), limits)
        return upright(image) if exif_orientation else decoded(image)
    except OSError as error:
        raise BrokenImageError("This image has been deleted: upload it again.") from error
    except BrokenImageError as error:
        raise BrokenImageError(
            f"This image cannot be used: {error}. Try another one, or save it as a smaller JPEG."
        ) from error


def shown(image: Image.Image, side: int = SHOWN_SIDE) -> Image.Image:
    """Return an image resized for the page; the pixels of a tiny image become squares."""
    return draw(load(image), (), (), side=side)


def has_lambdas(network: train.Network | detect.Detector) -> bool:
    """Return whether a network has lambda layers."""
    return any(isinstance(module, LambdaLayer2d) for module in network.modules())


def describe(name: str, network: train.Network | detect.Detector, one: str, more: str, names: Sequence[str]) -> str:
    """Return a sentence with the size of a network and its classes; `one` and `more` are the noun for a class."""
    parameters = count(sum(parameter.numel() for parameter in network.parameters()))
    listed = ", ".join(shortened(n, LONGEST_NAME) for n in names[:MOST_NAMES])
    rest = ", …" if len(names) > MOST_NAMES else ""
    return f"{name}, {parameters} parameters. It predicts {some(len(names), one, more)}: {listed}{rest}."

"""Prediction of the classes of images with trained weights."""

import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from rich.markup import escape
from rich.table import Table

from lambdanets.data.broken import BrokenImages
from lambdanets.data.decode import EXTENSIONS, LIMITS, BrokenImageError
from lambdanets.data.folders import Walked, images_below, is_image
from lambdanets.data.loader import Loader, LoaderOptions
from lambdanets.data.source import read_file
from lambdanets.data.strings import printable
from lambdanets.data.transforms import evaluation
from lambdanets.models.pretrained import CONFIG, WEIGHTS
from lambdanets.report.show import probability
from lambdanets.runs import LOG, RUN_WEIGHTS
from lambdanets.train.inference.command import STDIN
from lambdanets.train.inference.trained import Trained

MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"GIF87a", b"GIF89a")  # first bytes of JPEG, PNG, WebP and GIF
NOT_FINITE = "the scores are not finite (NaN): the weights are damaged, or --precision is too low for them"


@dataclass(frozen=True)
class Given:
    """An input image: a file, bytes from stdin, or the reason why there is none.

    Attributes:
        name: name in the output.
        path: path of the file.
        data: bytes of an encoded image, instead of a path.
        error: reason why there is no image.
    """

    name: str
    path: str = ""
    data: bytes | None = None
    error: str = ""


@dataclass(frozen=True)
class Prediction:
    """Result of `predict` for one image.

    Attributes:
        image: name of the image.
        classes: (class name, probability) of the most likely classes, most likely first.
        error: reason why the image could not be read or scored; empty on success.
    """

    image: str
    classes: tuple[tuple[str, float], ...] = ()
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        if self.error:
            return {"image": self.image, "error": self.error}
        return {"image": self.image, "classes": [{"class": name, "probability": p} for name, p in self.classes]}


class GivenImages:
    """A `Source` of input images without labels."""

    def __init__(self, given: list[Given], class_names: tuple[str, ...] = ()) -> None:
        self.given, self.class_names = given, class_names
        self.labels = np.full(len(given), -1, np.int64)

    def __len__(self) -> int:
        return len(self.given)

    def name(self, index: int) -> str:
        return self.given[index].name

    def read(self, index: int) -> bytes:
        one = self.given[index]
        if one.error:
            raise BrokenImageError(one.error)
        return one.data if one.data is not None else read_file(one.path)


def names_images(word: str) -> bool:
    """Return whether a word in the place of the weights is an image, "-", or a folder of images without weights."""
    if word == STDIN or is_image(os.path.basename(word)):
        return True
    folder = Path(word).expanduser()
    if not folder.is_dir() or any((folder / name).exists() for name in (*RUN_WEIGHTS.values(), WEIGHTS, CONFIG, LOG)):
        return False
    return bool(images_below(folder))


def gather(words: Iterable[str], stdin: BinaryIO | None = None, notes: list[str] | None = None) -> list[Given]:
    """Collect input images from files, folders and stdin.

    Args:
        words: files; folders, whose images are found recursively; or "-" for stdin.
        stdin: binary stream for "-": one image, or a list of files and folders, one per line.
        notes: list to which sentences about files that were left out are appended.

    Example:
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> from lambdanets.train.inference.predict import gather
        >>> Path("photos").mkdir()
        >>> Image.new("RGB", (32, 32)).save("photos/black.png")
        >>> [one.name for one in gather(["photos"])]
        ['photos/black.png']
    """
    found: list[Given] = []
    for word in words:
        if word == STDIN:
            found += from_stdin(stdin, notes)
        elif os.path.isdir(word):
            walked = Walked(Path(word))
            inside = images_below(Path(word), walked)
            if notes is not None:
                notes += walked.notes()
            found += [Given(printable(path), path) for path in (os.path.join(word, name) for name in inside)]
            if not inside:
                found.append(Given(printable(word), error=f"a folder without images ({', '.join(EXTENSIONS)})"))
        else:
            found.append(Given(printable(word), os.path.expanduser(word)))
    return found


def from_stdin(stdin: BinaryIO | None, notes: list[str] | None = None) -> list[Given]:
    data = b"" if stdin is None else stdin.read(LIMITS.bytes + 1)
    if len(data) > LIMITS.bytes:
        return [Given("stdin", error=f"more than {LIMITS.bytes:,} bytes")]
    if data.startswith(MAGIC) or (
        data.startswith(b"BM") and b"\0" in data[:64]
    ):  # BMP: a file name may start with BM, too
        return [Given("stdin", data=data)]
    if b"\0" in data[:1024]:
        return [Given("stdin", error="neither an image (JPEG, PNG, WebP, GIF, BMP) nor a list of files")]
    lines = (os.fsdecode(line.strip()) for line in data.splitlines())
    return gather((line for line in lines if line and line != STDIN), notes=notes)


def predict(trained: Trained, given: list[Given], top: int = 5) -> Iterator[Prediction]:
    """Predict the most likely classes of images, in the given order. Unreadable images have an error instead of
    classes.

    Args:
        trained: the network, from `open_trained`.
        given: the images, from `gather`.
        top: number of classes per image.

    Example:
        >>> from PIL import Image
        >>> from lambdanets import create_model
        >>> from lambdanets.train.inference.predict import gather, predict
        >>> from lambdanets.train.inference.trained import open_trained
        >>> network = create_model("lambda_resnet_tiny", image_size=28, num_classes=10, depths=(1, 1, 1, 1))
        >>> folder = str(network.save_pretrained("digits"))
        >>> Image.new("RGB", (32, 32)).save("black.png")
        >>> for prediction in predict(open_trained(folder), gather(["black.png"]), top=3):
        ...     print(prediction.image, len(prediction.classes))
        black.png 3
    """
    if not given:
        return
    using, names = trained.using, trained.class_names
    loader = Loader(
        GivenImages(given, names),
        evaluation(trained.card.preprocessing, trained.channels),
        LoaderOptions(using.batch_size, using.loader_workers(len(given)), broken=BrokenImages(max_fraction=1.0)),
        training=False,
    )
    for batch, logits_BC, _ in trained.answers(loader):
        found: dict[int, Prediction] = {}
        for one in batch.broken:
            found[one.index] = Prediction(one.name, error=one.reason)
        best = logits_BC.double().softmax(1).topk(min(top, logits_BC.shape[1]), dim=1)
        for index, values, places in zip(batch.indices.tolist(), best.values, best.indices, strict=True):
            classes = tuple((names[i], p) for i, p in zip(places.tolist(), values.tolist(), strict=True))
            if values.isfinite().all():
                found[index] = Prediction(given[index].name, classes)
            else:
                found[index] = Prediction(given[index].name, error=NOT_FINITE)
        yield from (found[index] for index in sorted(found))


def answer_table(top: int) -> Table:
    table = Table()
    table.add_column("image", overflow="fold")
    table.add_column("class", style="bold", overflow="fold")
    table.add_column("probability", justify="right")
    if top > 1:
        table.add_column("other classes", overflow="fold")
    return table


def explained(error: str) -> str:
    """Return the reason why an image could not be read, for a line after its name."""
    return "no such file" if error == os.strerror(errno.ENOENT) else error


def row(one: Prediction) -> list[str]:
    (name, p), *rest = one.classes
    others = ", ".join(f"{printable(other)} {probability(q)}" for other, q in rest)
    return [escape(cell) for cell in (one.image, printable(name), probability(p), *([others] if rest else []))]

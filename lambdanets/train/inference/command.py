"""Options of the commands `evaluate` and `predict`. Their implementations are imported when they run, since they need
the dependencies of `pip install 'lambdanets[train]'`."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from lambdanets.files import write_json
from lambdanets.options import check_image_size, check_numbers, chosen_device, optional
from lambdanets.runs import RunWeights
from lambdanets.train.config import LARGEST_BATCH, Precision, parse_option

SHOWN_CLASSES = 10
STDIN = "-"
Split = Literal["auto", "train", "validation", "test", "held_out"]


@dataclass(frozen=True)
class Weights:
    """Which weights to load."""

    weights: RunWeights = "ema"
    """Weights of a run: ema (averaged), raw (last step) or best (best evaluation; needs early stopping or
    --keep-best)."""
    pretrained: Annotated[str | None, optional("WEIGHTS")] = None
    """If WHAT is the name of a network: its weights, as a file, a folder or an id on the Hugging Face hub."""
    options: tuple[str, ...] = ()
    """If WHAT is the name of a network: its arguments as name=value, for example placement=CCLL scope=7."""
    image_size: Annotated[int | None, optional("PIXELS")] = None
    """Input size in pixels; by default the size stored with the weights."""


@dataclass(frozen=True)
class Using(Weights):
    """Which weights to load, and how to run the network. `open_trained` takes it.

    Example:
        >>> from lambdanets.train.inference.command import Using
        >>> using = Using(weights="raw", device="cpu", batch_size=64)
        >>> using.precision
        'float32'
    """

    batch_size: int = 128
    """Images per batch. It affects only speed and memory."""
    precision: Precision = "float32"
    """Data type of the computation."""
    device: Annotated[str | None, optional("DEVICE")] = None
    """Device: cpu or cuda; by default a GPU if there is one."""
    workers: Annotated[int | None, optional("N")] = None
    """Worker processes that read images; by default one per CPU core (at most 16) with a GPU, otherwise one per four
    cores."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"--batch-size must be at least 1, got {self.batch_size}")
        check_image_size(self.image_size, "--image-size")
        check_numbers(self, "--", batch_size=(1, LARGEST_BATCH), workers=(0, 1024))
        for word in self.options:
            parse_option(word)

    def loader_workers(self, images: int) -> int:
        if self.workers is not None:
            return self.workers
        cores = os.cpu_count() or 1
        most = min(cores, 16) if chosen_device(self.device).type == "cuda" else cores // 4
        return most if images > 2 * self.batch_size else 0


@dataclass(frozen=True)
class Evaluate:
    """Evaluate trained weights on labelled images: top-1, top-5, loss, recall and precision per class, throughput."""

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WHAT")]
    """Folder of a run, .safetensors file, model folder, id on the Hugging Face hub, or name of a network (with
    --pretrained)."""
    data: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[DATA]", help_behavior_hint="")] = None
    """Dataset in any format of `lambdanets train`; by default the images that the run was evaluated on."""
    split: Split = "auto"
    """Split of the dataset. auto: validation if it exists, otherwise all images; held_out: the images that the run held
    out from its training images."""
    using: Annotated[Using, tyro.conf.arg(name="")] = field(default_factory=Using)
    json: bool = False
    """Print JSON instead of tables."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Also write the JSON to this file."""
    classes: int = SHOWN_CLASSES
    """Number of classes in the table, those with the lowest recall first; JSON contains all classes."""

    def run(self) -> int:
        from lambdanets.train.inference.evaluate import evaluate, find_images, show
        from lambdanets.train.inference.trained import open_trained
        from lambdanets.train.progress import FEW_CLASSES

        trained = open_trained(self.what, self.using)
        images = find_images(self.what, self.data, self.split)
        found = evaluate(trained, images, progress=Console(file=sys.stderr))
        result = {"what": self.what, "weights": self.using.weights, **asdict(found)}
        if self.output is not None:
            write_json(self.output, result, indent=2)
        if self.json:
            print(json.dumps(result, indent=2))
        else:
            show(found, Console(), self.classes, top5=len(trained.class_names) > FEW_CLASSES)
        return 0


@dataclass(frozen=True)
class Predict:
    """Predict the most likely classes of images: files, folders, or stdin. Exit status 1 if an image is unreadable.

    `find . -name '*.jpg' | lambdanets predict RUN -` reads a list of files, `lambdanets predict RUN - < cat.jpg` reads
    one image. Unreadable images get a line on stderr, with --json an error in their object, and do not stop the others.
    """

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WHAT")]
    """Folder of a run, .safetensors file, model folder, id on the Hugging Face hub, or name of a network (with
    --pretrained)."""
    images: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES", help_behavior_hint="")
    ] = ()
    """Image files (.jpg, .png, .webp, .gif, .bmp) and folders; "-" or no argument reads an image or a list of paths
    from stdin."""
    using: Annotated[Using, tyro.conf.arg(name="")] = field(default_factory=Using)
    top: int = 5
    """Number of classes per image."""
    json: bool = False
    """Print one JSON object per line for each image as soon as it is ready."""

    def run(self) -> int:
        from lambdanets.train.inference.predict import answer_table, explained, gather, names_images, predict, row
        from lambdanets.train.inference.trained import open_trained, packaged_default

        if self.top < 1:
            raise ValueError(f"--top must be at least 1, got {self.top}")
        what, words = self.what, self.images or (STDIN,)
        if names_images(what):  # no weights are named: those that come with the package
            what, words = packaged_default(), (self.what, *self.images)
            print(f"lambdanets: the network is {what}, which comes with lambdanets.", file=sys.stderr)
        if STDIN in words and sys.stdin.isatty():
            raise ValueError("no images given: pass files or folders, or pipe a list of files to stdin")
        trained = open_trained(what, self.using)
        notes: list[str] = []
        given = gather(words, getattr(sys.stdin, "buffer", None), notes)
        for note in notes:
            print(f"lambdanets: {note}.", file=sys.stderr)
        if not given:
            raise ValueError("no images given: stdin was empty")
        failed = 0
        table = answer_table(min(self.top, len(trained.class_names)))
        for one in predict(trained, given, self.top):
            failed += bool(one.error)
            if self.json:
                print(json.dumps(one.as_json()), flush=True)
            elif one.error:
                print(f"{one.image}: {explained(one.error)}", file=sys.stderr)
            else:
                table.add_row(*row(one))
        if table.row_count:
            Console().print(table)
        return 1 if failed else 0


def predict_command(arguments: Sequence[str] = ()) -> type[Predict]:
    """Return the command `lambdanets predict`; its help depends on the weights that come with the package."""
    from lambdanets.models.packaged import default_network

    name, (first, *others) = default_network(), (Predict.__doc__ or "").split("\n\n")
    packaged = [f"`lambdanets predict photo.jpg` uses {name}, which comes with lambdanets."] if name else []
    text = "\n\n".join([first, *packaged, *others])
    return make_dataclass("Predict", [], bases=(Predict,), frozen=True, namespace={"__doc__": text})

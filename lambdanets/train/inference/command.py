"""The commands that use trained weights, `evaluate` and `predict`: their options. The work is in files of those names,
which need what `pip install 'lambdanets[train]'` brings."""

import json
import os
import sys
from dataclasses import asdict, dataclass, field
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
    """Which weights."""

    weights: RunWeights = "ema"
    """Of a run: the average of the weights, those of the last step, or those of the best evaluation (early stopping or
    --keep-best)."""
    pretrained: Annotated[str | None, optional("WEIGHTS")] = None
    """Where WHAT is the name of a network: its weights, a file, a folder or an id on the Hugging Face hub."""
    options: tuple[str, ...] = ()
    """Where WHAT is the name of a network: its arguments, as name=value: placement=CCLL scope=7 ..."""
    image_size: Annotated[int | None, optional("PIXELS")] = None
    """Any size; by default the one that the weights were trained with."""


@dataclass(frozen=True)
class Using(Weights):
    """Which weights, and how they run."""

    batch_size: int = 128
    """Images at once; it changes nothing but speed and memory."""
    precision: Precision = "float32"
    """Of the arithmetic."""
    device: Annotated[str | None, optional("DEVICE")] = None
    """cpu or cuda; by default a GPU if there is one."""
    workers: Annotated[int | None, optional("N")] = None
    """Processes that read images; by default the cores where a GPU computes, and a quarter of them where they do."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"--batch-size {self.batch_size}: at least 1")
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
    """Top-1 and top-5 of trained weights on labelled images, class by class, and images per second."""

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WHAT")]
    """The folder of a run, a .safetensors file, a model folder, or the name of a network (with --pretrained)."""
    data: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[DATA]", help_behavior_hint="")] = None
    """Images, as `lambdanets train` takes them; for a run by default those that it was evaluated on."""
    split: Split = "auto"
    """Which part: auto is validation if there is such, else all. held_out is what a run kept of its training images."""
    using: Annotated[Using, tyro.conf.arg(name="")] = field(default_factory=Using)
    json: bool = False
    """Print JSON instead of tables."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Write the JSON to a file, too."""
    classes: int = SHOWN_CLASSES
    """How many of the hardest classes the table shows; JSON has them all."""

    def run(self) -> int:
        from lambdanets.train.inference.evaluate import evaluate, find_images, show
        from lambdanets.train.inference.trained import open_trained

        trained = open_trained(self.what, self.using)
        images = find_images(self.what, self.data, self.split)
        found = evaluate(trained, images, progress=Console(file=sys.stderr))
        result = {"what": self.what, "weights": self.using.weights, **asdict(found)}
        if self.output is not None:
            write_json(self.output, result, indent=2)
        if self.json:
            print(json.dumps(result, indent=2))
        else:
            show(found, Console(), self.classes)
        return 0


@dataclass(frozen=True)
class Predict:
    """The likeliest classes of images: files, folders, or through a pipe. One that cannot be read stops no other.

    `find . -name '*.jpg' | lambdanets predict RUN -` reads a list, `lambdanets predict RUN - < cat.jpg` an image.
    The exit status is 1 if some image could not be read.
    """

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WHAT")]
    """The folder of a run, a .safetensors file, a model folder, or the name of a network (with --pretrained)."""
    images: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES", help_behavior_hint="")
    ] = ()
    """Files and folders (.jpg, .png, .webp, .gif, .bmp); "-", or nothing, reads stdin."""
    using: Annotated[Using, tyro.conf.arg(name="")] = field(default_factory=Using)
    top: int = 5
    """How many classes for each image."""
    json: bool = False
    """One JSON object a line, for each image, as soon as it is known."""

    def run(self) -> int:
        from lambdanets.train.inference.predict import answer_table, gather, predict, row
        from lambdanets.train.inference.trained import open_trained

        if self.top < 1:
            raise ValueError(f"--top {self.top}: at least 1")
        words = self.images or (STDIN,)
        if STDIN in words and sys.stdin.isatty():
            raise ValueError("which images? Give files or folders, or pipe a list of them in")
        trained = open_trained(self.what, self.using)
        notes: list[str] = []
        given = gather(words, getattr(sys.stdin, "buffer", None), notes)
        for note in notes:
            print(f"lambdanets: {note}.", file=sys.stderr)
        if not given:
            raise ValueError("no images: stdin was empty")
        failed = 0
        table = answer_table(min(self.top, len(trained.class_names)))
        for one in predict(trained, given, self.top):
            failed += bool(one.error)
            if self.json:
                print(json.dumps(one.as_json()), flush=True)
            else:
                table.add_row(*row(one))
        if not self.json:
            Console().print(table)
        return 1 if failed else 0

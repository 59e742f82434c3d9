"""`lambdanets export`."""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from lambdanets.options import check_numbers, optional
from lambdanets.train.inference.command import Split, Using, Weights

if TYPE_CHECKING:
    from lambdanets.export.formats import Export as Done
    from lambdanets.models.network import Network


@dataclass(frozen=True)
class Export:
    """A trained network for other runtimes: ONNX, OpenVINO, torch.export, AOTInductor, or a folder for the hub.

    Each is loaded again and compared with the original in float32 on batches (and, with --size dynamic, image sizes)
    of its own before it gets its name. Then all are timed beside eager PyTorch, on the CPU, and evaluated with --data.
    """

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WHAT")]
    """The folder of a run, a .safetensors file, a model folder, or the name of a network (with --pretrained)."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Where the files go; made if it is not there."""
    formats: tuple[Literal["onnx", "onnx-int8", "openvino", "program", "aoti", "safetensors"], ...] = (
        "onnx",
        "program",
        "safetensors",
    )
    """onnx: model.onnx. onnx-int8: int8 convolutions and projections, calibrated with --data, model_int8.onnx.
    openvino: model.xml and model.bin. program: torch.export, model.pt2. aoti: compiled for this machine's kind of
    processor, in minutes, model_aoti.pt2. safetensors: config.json, README.md and model.safetensors."""
    size: Literal["fixed", "dynamic"] = "fixed"
    """fixed: images of one size, faster. dynamic: any size; lambda layers with a global scope have none to offer."""
    using: Annotated[Weights, tyro.conf.arg(name="")] = field(default_factory=Weights)
    """--image-size is the fixed size, and the one that is timed."""
    untrained: bool = False
    """Where WHAT is the name of a network: new weights, to see sizes and times before there are trained ones."""
    threads: int = 1
    """Of every runtime, where they are timed."""
    rounds: int = 10
    """How often each is timed; the median is shown."""
    data: Annotated[str | None, optional("DATA")] = None
    """Labelled images, as `lambdanets evaluate` takes them: top-1 of each format is measured on them."""
    split: Split = "auto"
    """Of --data: auto is validation if there is such, else all."""
    images: int = 1000
    """Use at most this many of --data, evenly spaced."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        import torch

        from lambdanets.export.formats import export
        from lambdanets.machine import describe, threads

        if self.rounds < 1:
            raise ValueError(f"--rounds {self.rounds}: at least 1")
        check_numbers(self, "--", images=(1, 10**9))
        images = None
        if self.data is not None:
            from lambdanets.train.inference.evaluate import find_images

            images = find_images(self.what, self.data, self.split)
        network = new_network(self.what, self.using) if self.untrained else self.trained_network()
        with threads(self.threads), Console(file=sys.stderr).status("exporting and comparing"):
            done = export(
                network,
                self.output,
                formats=self.formats,
                size=self.size,
                rounds=self.rounds,
                images=images,
                most_images=self.images,
            )
        if self.json:
            about = {"what": self.what, "options": self.using.options}
            found = {
                **about,
                "untrained": self.untrained,
                "threads": self.threads,
                **asdict(done),
                **describe(torch.device("cpu")),
            }
            print(json.dumps(found, indent=2, default=str))
        else:
            show(done, self.threads, Console())
        return 0

    def trained_network(self) -> "Network":
        from lambdanets.train.inference.trained import open_trained

        trained = open_trained(self.what, Using(**vars(self.using), device="cpu"))
        trained.network.card = trained.card
        return trained.network


def new_network(name: str, using: Weights) -> "Network":
    """Random weights whose norms fit, so that scores are numbers of a usual size."""
    import torch

    from lambdanets.models.registry import create_model
    from lambdanets.models.untrained import settle
    from lambdanets.train.config import parse_option

    arguments = dict(parse_option(word) for word in using.options)
    if using.image_size is not None:
        arguments["image_size"] = using.image_size
    torch.manual_seed(0)
    try:
        network = create_model(name, **arguments)
    except TypeError as error:  # an argument that it does not have
        raise ValueError(f"--options: {error}") from error
    height, width = network.config.image_grid
    settle(network, (16, network.config.in_chans, height, width))
    return network


def show(done: "Done", threads: int, console: Console) -> None:
    from lambdanets.export.formats import FORMATS
    from lambdanets.models.pretrained import WEIGHTS
    from lambdanets.report.show import percent, some

    measured, eager = done.top1 is not None, done.eager  # with top-1, the files' names would not fit into 80 columns
    table = Table("format")
    if not measured:
        table.add_column("file", no_wrap=True)
    for column in ("MB", "off by", "ms", "CPU ms", "speed-up", *(["top-1"] if measured else [])):
        table.add_column(column, justify="right")
    last = [percent(done.top1)] if measured else []
    table.add_row("eager", *([] if measured else [""]), "", "", f"{eager.wall:.1f}", f"{eager.cpu:.1f}", "1.00", *last)
    for one in done.files:
        found = one.latency
        table.add_row(
            one.format,
            *([] if measured else [WEIGHTS if one.path.is_dir() else one.path.name]),
            f"{one.bytes / 1e6:.1f}",
            f"{one.difference:.1e}",
            f"{found.wall:.1f}",
            f"{found.cpu:.1f}",
            f"{eager.cpu / found.cpu:.2f}",
            *([percent(one.top1)] if measured else []),
        )
    console.print(table)
    sides = sorted({shape[2:] for shape in done.shapes})
    rounded = [one.format for one in done.files if FORMATS[one.format].rounds]
    others = f"Each but {', '.join(rounded)} (rounded on purpose)" if rounded else "Each"
    console.print(
        f"{others} was loaded again and is equal to the original within {done.tolerance:.0e} of its largest score, on "
        f"{len(done.shapes)} batches of noise ({', '.join(f'{down}x{across}' for down, across in sides)} pixels); "
        f"float32 itself changes the original by {done.rounding:.0e}.\n"
        f"Times: one image, {some(threads, 'CPU thread', 'CPU threads')}, medians. The speed-up is over eager PyTorch "
        f"and of the CPU time, which other work on the machine disturbs less.\n{done.folder}",
        highlight=False,
    )
    if measured:
        console.print(f"Top-1: on {done.images:,} labelled images.", highlight=False)
    elif rounded:
        console.print("int8 activations were calibrated with noise: pass --data to use images.", highlight=False)
    if done.left:
        console.print(
            f"Not written now, but there from before: {', '.join(done.left)}. If that was another network, remove "
            f"{'it' if len(done.left) == 1 else 'them'} or export these formats too.",
            highlight=False,
        )

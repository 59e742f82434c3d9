"""The command `lambdanets export`."""

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
    """Export a trained network to ONNX, OpenVINO, torch.export, AOTInductor, or a folder for the hub.

    Each exported file is loaded again and compared with the original in float32 on several batches (and, with --size
    dynamic, image sizes). Then the latency of all formats and of eager PyTorch is measured on the CPU, and with --data
    their top-1 accuracy.
    """

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WHAT")]
    """Folder of a run, .safetensors file, model folder, or network name (with --pretrained or --untrained)."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Output folder; created if it does not exist."""
    formats: tuple[Literal["onnx", "onnx-int8", "openvino", "program", "aoti", "safetensors"], ...] = (
        "onnx",
        "program",
        "safetensors",
    )
    """onnx: model.onnx. onnx-int8: int8 convolutions and projections, calibrated with --data, model_int8.onnx.
    openvino: model.xml and model.bin. program: torch.export, model.pt2. aoti: model_aoti.pt2, compiled for this type of
    CPU, which takes minutes. safetensors: config.json, README.md and model.safetensors."""
    size: Literal["fixed", "dynamic"] = "fixed"
    """fixed: one image size, faster. dynamic: any image size; not available for lambda layers with a global scope."""
    using: Annotated[Weights, tyro.conf.arg(name="")] = field(default_factory=Weights)
    """--image-size is the fixed size, which is also timed."""
    untrained: bool = False
    """Export the network named by WHAT with random weights, to see file sizes and latency before training."""
    threads: int = 1
    """Number of CPU threads of each runtime."""
    rounds: int = 10
    """Number of timed runs of each format; the median is printed."""
    data: Annotated[str | None, optional("DATA")] = None
    """Labelled images in a form that `lambdanets evaluate` accepts, to measure top-1 accuracy of each format."""
    split: Split = "auto"
    """Split of --data to use; auto means validation if there is such a split, otherwise all images."""
    images: int = 1000
    """Maximum number of images of --data, evenly spaced."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        import torch

        from lambdanets.export.formats import export
        from lambdanets.machine import describe, threads

        if self.rounds < 1:
            raise ValueError(f"--rounds must be at least 1, got {self.rounds}")
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
    """Create a network with random weights and matching norm statistics, so that its scores have a usual size."""
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
    except TypeError as error:  # unknown arguments
        raise ValueError(f"--options: {error}") from error
    height, width = network.config.image_grid
    settle(network, (16, network.config.in_chans, height, width))
    return network


def show(done: "Done", threads: int, console: Console) -> None:
    from lambdanets.export.formats import FORMATS
    from lambdanets.models.pretrained import WEIGHTS
    from lambdanets.report.show import percent, some

    measured, eager = done.top1 is not None, done.eager  # 80 columns have room for either top-1 or file names
    table = Table("format")
    if not measured:
        table.add_column("file", no_wrap=True)
    for column in ("MB", "difference", "ms", "CPU ms", "speed-up", *(["top-1"] if measured else [])):
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
    others = f"All formats except {', '.join(rounded)} (quantised)" if rounded else "All formats"
    console.print(
        f"{others} equal the original within {done.tolerance:.0e} of its largest score, on {len(done.shapes)} batches "
        f"of noise ({', '.join(f'{down}x{across}' for down, across in sides)} pixels). The original itself changes by "
        f"{done.rounding:.0e} between float32 and float64.\n"
        f"Latency: one image, {some(threads, 'CPU thread', 'CPU threads')}, medians. The speed-up compares CPU time "
        f"with eager PyTorch, since other load on the machine affects CPU time less.\n"
        f"Written to {done.folder}",
        highlight=False,
    )
    if measured:
        console.print(f"Top-1: on {done.images:,} labelled images.", highlight=False)
    elif rounded:
        console.print("int8 activations were calibrated with noise: pass --data to use images.", highlight=False)
    if done.left:
        console.print(
            f"Files of earlier exports in this folder: {', '.join(done.left)}. If they are of another network, remove "
            f"{'it' if len(done.left) == 1 else 'them'} or export these formats again.",
            highlight=False,
        )

"""Writes a network in a format, reads it again, compares it with the original, and only then gives it its name."""

import copy
import importlib.util
import io
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lambdanets.export.check import ROUNDINGS, TOLERANCE, Latency, compare, latencies, shapes_to_compare
from lambdanets.export.plain import plain_network
from lambdanets.layers import AugmentedConvolution2d, AxialAttention2d, GlobalAttention2d
from lambdanets.layers.lambda_layer import LambdaLayer
from lambdanets.models.model_card import README, may_replace
from lambdanets.models.network import Network
from lambdanets.models.pretrained import (
    CONFIG,
    KEY,
    WEIGHTS,
    default_card,
    describe_network,
    from_pretrained,
    save_pretrained,
)

MOST_IMAGES, MOST_PIXELS = 1024, 4096  # of an open batch, and of an open side
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
Runner = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Exported:
    """One file or folder, and what was seen when it was loaded again."""

    format: str
    path: Path
    bytes: int
    difference: float  # the largest, relative to the largest score of the original
    latency: Latency


@dataclass(frozen=True)
class Export:
    """What an export made, beside the network that it was made from."""

    files: tuple[Exported, ...]
    eager: Latency
    size: str
    shapes: tuple[tuple[int, ...], ...]  # of the images that all were compared on
    folder: Path
    rounding: float  # how far the original in float32 is from itself in float64, relative too
    tolerance: float  # TOLERANCE, or ROUNDINGS * rounding where that is larger
    left: tuple[str, ...] = ()  # files of other formats that were there before, maybe of another network


def export(
    network: Network,
    folder: str | Path,
    *,
    formats: Sequence[str] = ("onnx", "program", "safetensors"),
    size: str = "fixed",
    image_size: int | tuple[int, int] | None = None,
    rounds: int = 10,
) -> Export:
    """Writes `network` into `folder` for inference on the CPU in float32; the batch is always open.

    Args:
        network: what `create_model` or `from_pretrained` made.
        folder: made if it is not there. Files of earlier exports are replaced, but for those of other formats, which
            stay and are named in the result's `left`.
        formats: of FORMATS: "onnx" (model.onnx), "program" (torch.export, model.pt2), "aoti" (compiled by AOTInductor,
            model_aoti.pt2) and "safetensors" (config.json, README.md and model.safetensors, for the hub).
        size: "fixed" for images of one size, which is faster, or "dynamic" for any.
        image_size: the fixed size, and the one that is timed; by default what the weights were trained with.
        rounds: how often each is timed.

    Raises a ValueError where a result differs by more than the tolerance, and leaves no such file behind: TOLERANCE, or
    where the network makes much of rounding (untrained ones do) ROUNDINGS times what float32 does to the original.
    """
    folder = Path(folder)
    check_request(network, formats, size, folder)
    card = network.card or default_card(network)
    height, width = as_pair(card.preprocessing.size if image_size is None else image_size)
    original = network.eval().to("cpu", torch.float32)
    smallest = original.feature_info[-1]["reduction"] + 1  # the last map has more than one position
    if size == "dynamic" and min(height, width) < smallest:
        raise ValueError(f"--size dynamic takes images from {smallest} pixels on, and {height} x {width} is smaller")
    shape = (1, original.config.in_chans, height, width)
    shapes = shapes_to_compare(shape, size == "dynamic", smallest)
    request = Request(original, shape, size == "dynamic", smallest)
    exact = copy.deepcopy(original).double()
    rounding = compare(lambda images: exact(images.double()), original, shapes)
    tolerance = max(TOLERANCE, ROUNDINGS * rounding)
    folder.mkdir(parents=True, exist_ok=True)
    made: list[tuple[str, Path, int, float]] = []
    runners: dict[str, Runner] = {"eager": original}
    for name in formats:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as part:
            with quiet():
                path = FORMATS[name].write(request, Path(part))
                runner = FORMATS[name].read(path)
            difference = compare(original, runner, shapes)
            if not difference <= tolerance:
                raise ValueError(
                    f"{name} differs from the original by {difference:.1e} of its largest score, more than "
                    f"{tolerance:.0e}: nothing was kept of it"
                )
            written = sorted(Path(part).iterdir(), key=lambda file: file.suffix == ".safetensors")
            for file in written:  # weights last
                if file.name != README or may_replace(folder):
                    os.replace(file, folder / file.name)
            final = folder if path == Path(part) else folder / path.name
            made.append((name, final, sum((folder / file.name).stat().st_size for file in written), difference))
            runners[name] = runner
    found = latencies(runners, shape, rounds)
    files = tuple(Exported(name, path, size_of, difference, found[name]) for name, path, size_of, difference in made)
    left = tuple(
        file for name in FORMATS if name not in formats for file in FORMATS[name].files if (folder / file).exists()
    )
    return Export(files, found["eager"], size, tuple(shapes), folder, rounding, tolerance, left)


@dataclass(frozen=True)
class Request:
    """A network to export, and for which images."""

    network: Network
    shape: tuple[int, int, int, int]
    dynamic: bool
    smallest: int

    def program(self) -> torch.export.ExportedProgram:
        """The network in plain torch operators, with norms folded, its batch open."""
        copied = plain_network(self.network, self.shape, fixed=not self.dynamic)
        example = torch.zeros(2, *self.shape[1:])  # a batch of one would be taken for a constant
        with torch.no_grad():
            return torch.export.export(copied, (example,), dynamic_shapes=(self.open_sizes(),))

    def open_sizes(self) -> dict[int, Any]:
        sizes = {0: torch.export.Dim("batch", min=1, max=MOST_IMAGES)}
        if self.dynamic:
            sizes[2] = torch.export.Dim("height", min=self.smallest, max=MOST_PIXELS)
            sizes[3] = torch.export.Dim("width", min=self.smallest, max=MOST_PIXELS)
        return sizes


def check_request(network: nn.Module, formats: Sequence[str], size: str, folder: Path) -> None:
    """Refuses what cannot work, before anything takes time."""
    if not isinstance(network, Network):
        raise ValueError(f"export takes a network of create_model or from_pretrained, got {type(network).__name__}")
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        said = f"unknown format {', '.join(unknown)}" if unknown else "no format"
        raise ValueError(f"{said}; choose from {', '.join(FORMATS)}")
    if size not in ("fixed", "dynamic"):
        raise ValueError(f"unknown size {size!r}; choose fixed or dynamic")
    there = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    if there.exists() and not there.is_dir():
        raise ValueError(f"{there} is a file: exports go into a folder, give the name of one or of a new one")
    missing = [package for package in ONNX_PACKAGES if importlib.util.find_spec(package) is None]
    if "onnx" in formats and missing:
        raise ValueError(f"ONNX needs {', '.join(missing)}: pip install 'lambdanets[export]', or leave onnx out")
    if size != "dynamic":
        return
    for name, module in network.named_modules():
        bound = None
        if isinstance(module, LambdaLayer) and module.positions is not None and module.positions.is_global:
            bound = f"a global scope, a table for maps up to {' x '.join(map(str, module.positions.input_size or ()))}"
        elif isinstance(module, (GlobalAttention2d, AxialAttention2d, AugmentedConvolution2d)):
            bound = f"a {type(module).__name__}, which is built for one size"
        if bound:
            raise ValueError(
                f"{name} has {bound}: export it with --size fixed, or train with a local scope for any image size"
            )


@dataclass(frozen=True)
class Format:
    """How to write one, and how to read it again as a function of images."""

    write: Callable[[Request, Path], Path]
    read: Callable[[Path], Runner]
    files: tuple[str, ...]  # that it may write


def write_onnx(request: Request, folder: Path) -> Path:
    program = torch.onnx.export(
        request.program(),
        input_names=["images"],
        output_names=["scores"],
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    name_sizes(program.model, request.open_sizes())
    network = request.network
    if network.name is not None:  # preprocessing and class names travel with the file
        ours = describe_network(network, network.card or default_card(network))
        program.model.metadata_props[KEY] = json.dumps(ours)
    path = folder / "model.onnx"
    program.save(str(path))
    return path


def name_sizes(model: Any, sizes: dict[int, Any]) -> None:
    """Open sizes by what they are ("batch"), where the exporter has letters and numbers of its own."""
    import onnx_ir

    letters = {str(model.graph.inputs[0].shape[axis]): dim.__name__ for axis, dim in sizes.items()}
    for value in (*model.graph.inputs, *model.graph.outputs):
        named = [letters.get(str(size), size) for size in value.shape]
        value.shape = onnx_ir.Shape([size if isinstance(size, (int, str)) else size.value for size in named])


def read_onnx(path: Path) -> Runner:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # CPU time is then work alone
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def write_program(request: Request, folder: Path) -> Path:
    path = folder / "model.pt2"
    file = io.BytesIO()  # torch's writer of files aborts the process where the disk is full
    torch.export.save(request.program(), file)
    path.write_bytes(file.getbuffer())
    return path


def read_program(path: Path) -> Runner:
    return torch.export.load(path).module()


def write_aoti(request: Request, folder: Path) -> Path:
    path = folder / "model_aoti.pt2"
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(request.program(), package_path=str(path))
    return path


def read_aoti(path: Path) -> Runner:
    return torch._inductor.aoti_load_package(str(path))  # type: ignore[return-value]


def write_safetensors(request: Request, folder: Path) -> Path:
    return save_pretrained(request.network, folder)


def read_safetensors(path: Path) -> Runner:
    return from_pretrained(path).eval()


FORMATS = {
    "onnx": Format(write_onnx, read_onnx, ("model.onnx", "model.onnx.data")),
    "program": Format(write_program, read_program, ("model.pt2",)),
    "aoti": Format(write_aoti, read_aoti, ("model_aoti.pt2",)),
    "safetensors": Format(write_safetensors, read_safetensors, (CONFIG, README, WEIGHTS)),
}


def as_pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


@contextmanager
def quiet() -> Iterator[None]:
    """Exporters speak of their own affairs; what is wrong with a result, the comparison says."""
    loggers = [
        logging.getLogger(name) for name in ("torch.onnx", "torch.export", "torch.utils", "onnxscript", "onnx_ir")
    ]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)

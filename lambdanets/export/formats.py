"""Export of a network to several formats. Each file is loaded and compared with the original before it is kept."""

import copy
import importlib.util
import io
import json
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lambdanets.export.check import ROUNDINGS, SEED, TOLERANCE, Latency, compare, latencies, shapes_to_compare
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

if TYPE_CHECKING:
    from lambdanets.export.accuracy import LabelledImages
    from lambdanets.train.inference.evaluate import Images

MOST_IMAGES, MOST_PIXELS = 1024, 4096  # largest dynamic batch and side
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
NOISE_BATCHES = 4  # batches of two noise images to calibrate int8 activations without --data
Runner = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Exported:
    """One exported file or folder.

    Attributes:
        format: a key of `FORMATS`.
        path: the file, or the folder for "safetensors".
        bytes: total file size.
        difference: largest difference of the scores, relative to the largest score of the original.
        latency: median latency of one image.
        top1: top-1 accuracy on the labelled images (0 to 1), or None without images.
    """

    format: str
    path: Path
    bytes: int
    difference: float
    latency: Latency
    top1: float | None = None


@dataclass(frozen=True)
class Export:
    """The result of an export.

    Attributes:
        files: the exported files and folders.
        eager: latency of the original network in eager PyTorch.
        size: "fixed" or "dynamic".
        shapes: shapes of the images on which the outputs were compared.
        folder: the output folder.
        rounding: relative difference of the original's scores between float32 and float64.
        tolerance: largest allowed relative difference: `TOLERANCE`, or `ROUNDINGS * rounding` if that is larger.
        left: files of other formats from earlier exports in the folder, possibly of another network.
        images: number of images on which top-1 was measured.
        top1: top-1 accuracy of the original (0 to 1), or None without images.
    """

    files: tuple[Exported, ...]
    eager: Latency
    size: str
    shapes: tuple[tuple[int, ...], ...]
    folder: Path
    rounding: float
    tolerance: float
    left: tuple[str, ...] = ()
    images: int = 0
    top1: float | None = None


def export(
    network: Network,
    folder: str | Path,
    *,
    formats: Sequence[str] = ("onnx", "program", "safetensors"),
    size: str = "fixed",
    image_size: int | tuple[int, int] | None = None,
    rounds: int = 10,
    images: "Images | None" = None,
    most_images: int = 1000,
) -> Export:
    """Export a network for CPU inference in float32, and compare and time the exported files.

    The input of an exported network is [batch, channels, height, width]: 1 to 1024 normalised images. Its output is
    [batch, classes], before the softmax.

    Args:
        network: a network from `create_model` or `from_pretrained`.
        folder: output folder, created if it does not exist. Files of earlier exports in the same formats are replaced;
            those of other formats are kept and listed in the result's `left`.
        formats: keys of `FORMATS`: "onnx" (model.onnx), "onnx-int8" (convolutions and projections with int8 weights
            and activations, model_int8.onnx), "openvino" (model.xml and model.bin), "program" (torch.export,
            model.pt2), "aoti" (compiled by AOTInductor, model_aoti.pt2) and "safetensors" (config.json, README.md and
            model.safetensors, for the hub).
        size: "fixed" for one image size, which is faster, or "dynamic" for any image size.
        image_size: the fixed size, which is also timed; an int or (height, width). Default: that of the weights.
        rounds: number of timed runs.
        images: labelled images from `find_images`, to measure top-1 accuracy and to calibrate int8 activations.
            Without them the calibration uses noise, and int8 may be inaccurate.
        most_images: maximum number of images, evenly spaced.

    Raises:
        ValueError: if a format cannot be exported, or its scores differ from the original by more than the tolerance:
            `TOLERANCE`, or `ROUNDINGS` times the original's own difference between float32 and float64 if that is
            larger, as in untrained networks. The file is then deleted. int8 scores only have to be finite.

    >>> import tempfile
    >>> from lambdanets import create_model
    >>> from lambdanets.export.formats import export
    >>> model = create_model("lambda_resnet_tiny", num_classes=10).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = export(model, folder, formats=("safetensors",), rounds=1)
    >>> [one.path.name == done.folder.name for one in done.files]
    [True]
    >>> done.files[0].difference <= done.tolerance
    True
    """
    folder = Path(folder)
    check_request(network, formats, size, folder)
    card = network.card or default_card(network)
    height, width = as_pair(card.preprocessing.size if image_size is None else image_size)
    original = network.eval().to("cpu", torch.float32)
    smallest = original.feature_info[-1]["reduction"] + 1  # so that the last map has more than one position
    if size == "dynamic" and min(height, width) < smallest:
        raise ValueError(f"--size dynamic needs images of at least {smallest} pixels per side, got {height} x {width}")
    shape = (1, original.config.in_chans, height, width)
    shapes = shapes_to_compare(shape, size == "dynamic", smallest)
    labelled = None
    if images is not None:
        from lambdanets.export.accuracy import LabelledImages

        sized = replace(card, preprocessing=replace(card.preprocessing, size=(height, width)))
        labelled = LabelledImages(images, sized, original.config.in_chans, original.num_classes, most_images)
        next(labelled.batches(1), None)  # raises an error early if the classes do not match
    request = Request(original, shape, size == "dynamic", smallest, labelled)
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
            if FORMATS[name].rounds and not math.isfinite(difference):
                raise ValueError(f"{name} gives scores that are not finite: nothing was kept of it")
            if not FORMATS[name].rounds and not difference <= tolerance:
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
    top1, count = ({}, 0) if labelled is None else labelled.accuracies(runners)
    files = tuple(
        Exported(name, path, size_of, difference, found[name], top1.get(name))
        for name, path, size_of, difference in made
    )
    left = tuple(
        file for name in FORMATS if name not in formats for file in FORMATS[name].files if (folder / file).exists()
    )
    return Export(
        files, found["eager"], size, tuple(shapes), folder, rounding, tolerance, left, count, top1.get("eager")
    )


@dataclass(frozen=True)
class Request:
    """A network to export and the shape of its images."""

    network: Network
    shape: tuple[int, int, int, int]
    dynamic: bool
    smallest: int
    labelled: "LabelledImages | None" = None

    def program(self) -> torch.export.ExportedProgram:
        """Return the network as a program of plain torch operators, with folded norms and a dynamic batch."""
        copied = plain_network(self.network, self.shape, fixed=not self.dynamic)
        example = torch.zeros(2, *self.shape[1:])  # torch.export would specialise on a batch of one
        with torch.no_grad():
            return torch.export.export(copied, (example,), dynamic_shapes=(self.open_sizes(),))

    @cached_property
    def onnx(self) -> "torch.onnx.ONNXProgram":
        """The ONNX program, with preprocessing and class names in its metadata."""
        program = torch.onnx.export(
            self.program(),
            input_names=["images"],
            output_names=["scores"],
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        name_sizes(program.model, self.open_sizes())
        if self.network.name is not None:
            program.model.metadata_props[KEY] = self.description()
        return program

    def description(self) -> str:
        """Return preprocessing, class names and the configuration as JSON for the metadata of a file."""
        return json.dumps(describe_network(self.network, self.network.card or default_card(self.network)))

    def calibration(self) -> Iterator[Tensor]:
        """Yield batches of images to calibrate the range of activations."""
        if self.labelled is not None:
            from lambdanets.export.accuracy import CALIBRATED

            yield from (images for images, _ in self.labelled.batches(CALIBRATED))
            return
        generator = torch.Generator().manual_seed(SEED)
        for _ in range(NOISE_BATCHES):
            yield torch.randn(2, *self.shape[1:], generator=generator)

    def open_sizes(self) -> dict[int, Any]:
        sizes = {0: torch.export.Dim("batch", min=1, max=MOST_IMAGES)}
        if self.dynamic:
            sizes[2] = torch.export.Dim("height", min=self.smallest, max=MOST_PIXELS)
            sizes[3] = torch.export.Dim("width", min=self.smallest, max=MOST_PIXELS)
        return sizes


def check_request(network: nn.Module, formats: Sequence[str], size: str, folder: Path) -> None:
    """Refuses what cannot work, before anything takes time."""
    if not isinstance(network, Network):
        raise ValueError(f"network must come from create_model or from_pretrained, got {type(network).__name__}")
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        said = f"unknown format {', '.join(unknown)}" if unknown else "no format"
        raise ValueError(f"{said}; choose from {', '.join(FORMATS)}")
    if size not in ("fixed", "dynamic"):
        raise ValueError(f"unknown size {size!r}; choose fixed or dynamic")
    there = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    if there.exists() and not there.is_dir():
        raise ValueError(f"{there} is a file: exports go into a folder, choose another path")
    for name in formats:
        missing = [package for package in FORMATS[name].packages if importlib.util.find_spec(package) is None]
        if missing:
            extra = "openvino" if "openvino" in missing else "export"
            raise ValueError(
                f"{name} needs {', '.join(missing)}: pip install 'lambdanets[{extra}]', or leave {name} out"
            )
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
    """A format: functions to write a network, and to load it as a function of images."""

    write: Callable[[Request, Path], Path]
    read: Callable[[Path], Runner]
    files: tuple[str, ...]  # files that it may write
    packages: tuple[str, ...] = ()  # packages that it needs
    rounds: bool = False  # whether it is quantised, so that results differ


def write_onnx(request: Request, folder: Path) -> Path:
    path = folder / "model.onnx"
    request.onnx.save(str(path))
    return path


def name_sizes(model: Any, sizes: dict[int, Any]) -> None:
    """Rename dynamic sizes to "batch", "height" and "width" instead of the exporter's symbols."""
    import onnx_ir

    letters = {str(model.graph.inputs[0].shape[axis]): dim.__name__ for axis, dim in sizes.items()}
    for value in (*model.graph.inputs, *model.graph.outputs):
        named = [letters.get(str(size), size) for size in value.shape]
        value.shape = onnx_ir.Shape([size if isinstance(size, (int, str)) else size.value for size in named])


def read_onnx(path: Path) -> Runner:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # CPU time without busy waiting
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def write_onnx_int8(request: Request, folder: Path) -> Path:
    """Write ONNX with int8 weights (one scale per channel) and activations for convolutions and projections.

    Position tables and the products of lambdas with queries stay float32: their values differ by orders of magnitude.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    class Images(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = request.calibration()

        def get_next(self) -> dict[str, Any] | None:  # type: ignore[override]
            images = next(self.left, None)
            return None if images is None else {"images": images.numpy()}

    path = folder / "model_int8.onnx"
    with tempfile.TemporaryDirectory() as place:
        exact = write_onnx(request, Path(place))
        graph = onnx.load(str(exact), load_external_data=False).graph
        weights = {tensor.name: len(tensor.dims) for tensor in graph.initializer if "positions" not in tensor.name}
        names = [
            node.name
            for node in graph.node
            if (node.op_type in ("Conv", "Gemm") and node.input[1] in weights)
            or (node.op_type == "MatMul" and any(weights.get(name) == 2 for name in node.input))
        ]
        quantize_static(
            str(exact),
            str(path),
            Images(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            nodes_to_quantize=names,
            extra_options={"OpTypesToExcludeOutputQuantization": ["Gemm"]},  # scores
        )
    return path


def write_openvino(request: Request, folder: Path) -> Path:
    import openvino  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as place:  # from ONNX, because openvino.convert_model may send telemetry
        model = openvino.Core().read_model(write_onnx(request, Path(place)))
        if request.network.name is not None:
            model.set_rt_info(request.description(), [KEY])
        openvino.save_model(model, str(folder / "model.xml"), compress_to_fp16=False)
    return folder / "model.xml"


def read_openvino(path: Path) -> Runner:
    import openvino  # pyright: ignore[reportMissingImports]

    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino.Core().compile_model(str(path), "CPU", settings)
    return lambda images: torch.from_numpy(compiled(images.numpy())[0])


def write_program(request: Request, folder: Path) -> Path:
    path = folder / "model.pt2"
    file = io.BytesIO()  # torch's file writer aborts the process if the disk is full
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
    "onnx": Format(write_onnx, read_onnx, ("model.onnx", "model.onnx.data"), ONNX_PACKAGES),
    "onnx-int8": Format(write_onnx_int8, read_onnx, ("model_int8.onnx",), ONNX_PACKAGES, rounds=True),
    "openvino": Format(write_openvino, read_openvino, ("model.xml", "model.bin"), (*ONNX_PACKAGES, "openvino")),
    "program": Format(write_program, read_program, ("model.pt2",)),
    "aoti": Format(write_aoti, read_aoti, ("model_aoti.pt2",)),
    "safetensors": Format(write_safetensors, read_safetensors, (CONFIG, README, WEIGHTS)),
}


def as_pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings of the exporters; wrong results are detected by comparison."""
    loggers = [
        logging.getLogger(name)
        for name in ("torch.onnx", "torch.export", "torch.utils", "onnxscript", "onnx_ir", "root")
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

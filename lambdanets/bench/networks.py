"""The command `lambdanets bench network`: speed and memory of whole networks."""

import ast
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from lambdanets.accelerate import accelerate
from lambdanets.bench.compiled import Way, compilation
from lambdanets.bench.throughput import Precision, Protocol, Throughput, free_memory, measure_network
from lambdanets.files import write_json
from lambdanets.machine import describe, installed, threads
from lambdanets.models import create_model
from lambdanets.models.counts import count_parameters, meta_network
from lambdanets.models.registry import configure
from lambdanets.options import BENCHES, check_positive, chosen_device, optional
from lambdanets.tables import wide

TIMM, ACCELERATED = "timm:", "accelerate:"
ATTENTION = ("axial_attention", "local_attention")
DEPTHS = (50, 101, 152, 350)
PRESETS = {
    "resnet50-placements": (
        "resnet50",
        *(f"resnet50,placement={placement}" for placement in ("CCCL", "CCLL", "CLLL", "LLLL")),
        *(
            name
            for depth in DEPTHS
            for name in (f"lambda_resnet{depth}", f"resnet_rs{depth}", f"resnet_rs{depth},se=False")
        ),
        *(f"resnet50,placement=LLLL,layer={layer}" for layer in ATTENTION),
        "resnet50",  # again, to detect drift of the machine
    ),
    "timm-lambda": (
        *(
            f"{prefix}timm:{name}"
            for name in ("lambda_resnet26t", "lambda_resnet26rpt_256", "lambda_resnet50ts")
            for prefix in ("", ACCELERATED)
        ),
        "timm:halonet50ts",
        "timm:botnet26t_256",
        "timm:lambda_resnet26t",  # again
    ),
}


@dataclass(frozen=True)
class Entry:
    """A network to measure: one of lambdanets with arguments, or one of timm, unchanged or with our lambda layers."""

    text: str  # as given on the command line
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    accelerated: bool = False

    @classmethod
    def parse(cls, text: str) -> "Entry":
        """Parse `NAME` or `NAME,argument=value,...`, where a value is a Python literal or a word."""
        name, *parts = re.split(r",(?=\w+=)", text.removeprefix(ACCELERATED))
        arguments = {}
        for part in parts:
            key, _, value = part.partition("=")
            try:
                arguments[key] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                arguments[key] = value
        return cls(text, name, arguments, text.startswith(ACCELERATED))

    @property
    def from_timm(self) -> bool:
        return self.name.startswith(TIMM)

    def check(self) -> None:
        """Raise ValueError if the network cannot be built, before anything is measured."""
        if self.accelerated and not self.from_timm:
            raise ValueError(f"{self.text}: {ACCELERATED} is for timm's networks (timm:NAME): remove it")
        if not self.from_timm:
            try:
                meta_network(self.name, **self.arguments)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{self.text}: {error}") from error
            return
        if installed("timm") is None:
            raise ValueError(f"{self.text}: timm is not installed (pip install 'lambdanets[bench]')")
        import timm

        if not timm.is_model(self.name.removeprefix(TIMM)):
            raise ValueError(f"{self.text}: timm has no model {self.name.removeprefix(TIMM)!r}")

    def build(self, size: tuple[int, int] | None) -> nn.Module:
        """Build the network for images of a size."""
        if not self.from_timm:
            image_size = {} if size is None else {"image_size": size}
            return create_model(self.name, **{**self.arguments, **image_size})
        import timm

        name = self.name.removeprefix(TIMM)
        configuration = timm.get_pretrained_cfg(name)
        fixed = configuration is not None and configuration.fixed_input_size
        other_size = {"img_size": size} if fixed and size not in (None, self.image_size()) else {}
        network = timm.create_model(name, **{**other_size, **self.arguments})
        return accelerate(network).model if self.accelerated else network

    def image_size(self) -> tuple[int, int]:
        """Return height and width of the images that the network was designed for."""
        if not self.from_timm:
            return configure(self.name, **self.arguments).image_grid
        import timm

        configuration = timm.get_pretrained_cfg(self.name.removeprefix(TIMM))
        _, height, width = configuration.input_size if configuration is not None else (3, 224, 224)
        return height, width


@dataclass(frozen=True)
class NetworkRow:
    """The result of one network and protocol, or the error that stopped it."""

    network: str
    image_size: tuple[int, int]
    parameters: int | None
    protocol: Protocol
    result: Throughput | None
    error: str | None = None


@dataclass(frozen=True)
class BenchNetwork:
    """Measure training and inference throughput, latency and peak memory of whole networks by the paper's protocol.

    The batch size is the largest of 1024, 512, ... that fits in memory. Training is forward, backward and a step of
    SGD; for inference batch norm is folded into convolutions. Results are written after every network. An error stops
    only the network that causes it.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional, optional("NAME ...")] = ()
    """Networks: resnet50 or resnet50,placement=CCLL,scope=7 (lambdanets), timm:resnet50 (timm), or
    accelerate:timm:lambda_resnet26t (timm with our lambda layers)."""
    preset: Annotated[Literal["resnet50-placements", "timm-lambda"] | None, optional("NAME")] = None
    """Measure a list of networks. resnet50-placements: ResNet-50 with lambda layers in some stages, LambdaResNets,
    ResNet-RS and attention. timm-lambda: timm's lambda networks before and after lambdanets.accelerate, halonet50ts
    and botnet26t."""
    dtype: tuple[Precision, ...] = ("float32",)
    """Precisions: float32, tf32 (float32 tensors, products in TF32), bfloat16 (in training autocast with float32
    weights)."""
    compile: Way | Literal["both", "all"] = "no"
    """no: eager mode. yes: torch.compile. graphs: also CUDA graphs. blocks: compile block by block, which is much
    faster (on a GPU with a CUDA graph of the step). both: no and yes. all: each of them."""
    train: bool = True
    """Measure training."""
    infer: bool = True
    """Measure inference."""
    latency: bool = True
    """Also measure inference with batch size 1 (compiled networks compile again for it)."""
    fold: bool = True
    """Fold batch norm into convolutions for inference."""
    channels_last: bool = True
    """Use the channels-last memory format."""
    image_size: Annotated[int | None, optional("PIXELS")] = None
    """Image size in pixels for all networks. Default: the size of each network."""
    batch: Annotated[int | None, optional("N")] = None
    """Largest batch size to try. Default: 1024, on a CPU 8."""
    memory_batch: Annotated[int | None, optional("N")] = None
    """Batch size for peak memory, the same for all networks. Default: 128, on a CPU 8."""
    repeats: int = 20
    """Number of timed steps."""
    seconds: float = 10.0
    """Time budget in seconds per network and protocol; no new step is timed after it, except for the first three."""
    minutes: Annotated[float | None, optional("MINUTES")] = None
    """Time budget in minutes; no new network starts after it."""
    device: Annotated[str | None, optional("DEVICE")] = None
    """Device, such as cpu, cuda or cuda:1. Default: a GPU if there is one."""
    threads: Annotated[int | None, optional("N")] = None
    """Number of CPU threads. Default: torch's setting."""
    quick: bool = False
    """Use images of 64 pixels, a batch of 2 and two repeats, for a smoke test."""
    output: Annotated[Path | None, optional("PATH")] = None
    """JSON file to write. Default: runs/bench/networks-DEVICE.json."""

    def run(self) -> int:
        return bench_networks(self)


def bench_networks(options: BenchNetwork) -> int:
    """Measure all networks, print tables, and return the exit status: 1 if a network could not be measured."""
    device = chosen_device(options.device)
    texts = (*PRESETS.get(options.preset or "", ()), *options.names)
    if not texts:
        raise ValueError("no networks given: pass names, such as resnet50 lambda_resnet50, or --preset")
    check_positive(
        batch=options.batch, memory_batch=options.memory_batch, image_size=options.image_size, repeats=options.repeats
    )
    entries = [Entry.parse(text) for text in texts]
    for entry in entries:
        entry.check()
    protocols = make_protocols(options, device)
    output = options.output or BENCHES / f"{result_name(options, device)}.json"
    rows: list[NetworkRow] = []
    start, lost = time.monotonic(), None
    with threads(options.threads):
        about = describe(device)
        for number, entry in enumerate(entries, start=1):
            side = options.image_size or (64 if options.quick else None)
            size = (side, side) if side else entry.image_size()
            for protocol in protocols:
                if lost is None and options.minutes and time.monotonic() - start > 60 * options.minutes:
                    lost = f"not measured: the time budget of --minutes {options.minutes:g} was used up"
                row = NetworkRow(entry.text, size, None, protocol, None, lost)
                if lost is None:
                    row = measure(entry, size, protocol, device)
                    lost = cuda_lost(device)
                rows.append(row)
                print(f"[{number}/{len(entries)} {time.monotonic() - start:.0f} s] {line(row)}", flush=True)
                write(output, options, device, about, rows)
    console = wide(Console())
    for table in tables(rows):
        console.print(table)
    console.print(f"written to {output}", highlight=False, soft_wrap=True)
    return 1 if any(row.error for row in rows) else 0


def make_protocols(options: BenchNetwork, device: torch.device) -> list[Protocol]:
    """Return the protocols of all precisions, ways to compile and modes."""
    modes = [m for m, wanted in (("training", options.train), ("inference", options.infer)) if wanted]
    if not modes:
        raise ValueError("--no-train and --no-infer leave nothing to measure")
    if "tf32" in options.dtype and device.type != "cuda":
        raise ValueError("--dtype tf32 needs a CUDA GPU: use float32")
    cuda = device.type == "cuda"
    several: dict[str, tuple[Way, ...]] = {"both": ("no", "yes"), "all": get_args(Way)}
    ways = several.get(options.compile, (options.compile,))
    batch = options.batch or (2 if options.quick else 1024 if cuda else 8)
    return [
        Protocol(
            mode=mode,  # type: ignore[arg-type]
            precision=precision,
            **compilation(way, device),  # type: ignore[arg-type]
            channels_last=options.channels_last,
            fold=options.fold,
            batch=batch,
            memory_batch=options.memory_batch or min(batch, 128 if cuda else 8),
            repeats=2 if options.quick else options.repeats,
            seconds=options.seconds,
            latency=options.latency,
        )
        for precision in dict.fromkeys(options.dtype)
        for way in ways
        for mode in modes
    ]


def measure(entry: Entry, size: tuple[int, int], protocol: Protocol, device: torch.device) -> NetworkRow:
    """Measure one network, and return its result or the error."""
    parameters = result = error = None

    def build() -> nn.Module:
        nonlocal parameters
        network = entry.build(size)
        parameters = count_parameters(network).total
        return network

    try:
        result = measure_network(build, size, protocol, device)
    except Exception as problem:  # the other networks must still be measured
        error = f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"
    free_memory()
    return NetworkRow(entry.text, size, parameters, protocol, result, error)


def cuda_lost(device: torch.device) -> str | None:
    """Return an error message if the GPU no longer works in this process, as after some kernel errors."""
    if device.type != "cuda":
        return None
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:
        return f"not measured: the GPU failed earlier ({str(error).partition(chr(10))[0]})"
    return None


def result_name(options: BenchNetwork, device: torch.device) -> str:
    return "-".join(["networks", device.type, *(["quick"] if options.quick else [])])


def write(
    output: Path, options: BenchNetwork, device: torch.device, about: dict[str, object], rows: Sequence[NetworkRow]
) -> None:
    """Write all rows so far, atomically, so that an interrupted run keeps its results."""
    settings = {name: value for name, value in asdict(options).items() if name != "output"}
    result = {"name": result_name(options, device), **about, "settings": settings, "rows": [asdict(r) for r in rows]}
    write_json(output, result)


def line(row: NetworkRow) -> str:
    if row.result is None:
        return f"{row.network}, {kind(row.protocol)}: {row.error}"
    found = row.result
    return f"{row.network}, {kind(row.protocol)}: {found.examples_per_second:.4g} ex/s with batch {found.batch}"


def kind(protocol: Protocol) -> str:
    return f"{protocol.mode} {protocol.precision}{f' {protocol.how}' if protocol.compiled else ''}"


def tables(rows: Sequence[NetworkRow]) -> list[Table]:
    """Return one table per protocol, with ratios to its first network."""
    found = []
    for protocol in dict.fromkeys(row.protocol for row in rows):
        table = Table(title=f"{kind(protocol)}: ratios are to the first row")
        for title in ("network", "image", "params (M)", "batch", "ex/s", "ratio", "s / 1024", "ms, batch 1"):
            table.add_column(title, justify="left" if title == "network" else "right")
        table.add_column("peak GiB (batch)", justify="right")
        table.add_column("ratio", justify="right")
        chosen = [row for row in rows if row.protocol == protocol]
        first = chosen[0].result
        for row in chosen:
            table.add_row(*cells(row, first))
        found.append(table)
    return found


def cells(row: NetworkRow, first: Throughput | None) -> list[str]:
    size = "x".join(map(str, dict.fromkeys(row.image_size)))
    parameters = "-" if row.parameters is None else f"{row.parameters / 1e6:.1f}"
    found = row.result
    if found is None:
        return [escape(f"{row.network} ({row.error})"), size, parameters]
    comparable = first is not None and first.peak_batch == found.peak_batch
    return [
        escape(row.network),
        size,
        parameters,
        str(found.batch),
        f"{found.examples_per_second:.4g}",
        "-" if first is None else f"{found.examples_per_second / first.examples_per_second:.2f}",
        f"{found.seconds_per_1024:.3g}",
        "-" if found.latency is None else f"{found.latency * 1e3:.3g}",
        f"{found.peak_bytes / 2**30:.2f} ({found.peak_batch})",
        f"{found.peak_bytes / first.peak_bytes:.2f}" if first is not None and comparable else "-",
    ]

"""Measure time and memory of a training step of Mask R-CNN with several backbones, in one run.

python benchmarks/detector_step.py --output benchmarks/results/detect-cuda.json
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from lambdanets.bench.networks import Entry, cuda_lost
from lambdanets.bench.throughput import free_memory
from lambdanets.bench.timing import once, peak_bytes
from lambdanets.detect.config import Heads
from lambdanets.detect.network import LEVELS, assemble
from lambdanets.files import write_json
from lambdanets.layers import GlobalAttention2d
from lambdanets.layers.attention import keep_format, to_image
from lambdanets.machine import describe
from lambdanets.models.registry import create_model
from lambdanets.options import BENCHES, chosen_device, optional
from lambdanets.tables import wide

FLEX = "flex_attention"
NETWORKS = (
    "resnet_rs101",
    "lambda_resnet101",
    "resnet_rs101,se=False",
    "lambda_resnet101,layer=global_attention",
    f"lambda_resnet101,layer={FLEX}",
    "resnet_rs101",  # again, to show how stable the machine was
)
CLASSES, WARM_UP = 80, 3
FLEX_TOLERANCE = 1e-2  # its products are in TF32


@dataclass(frozen=True)
class BenchRow:
    """The result of one backbone at one size, or its error."""

    network: str
    height: int
    width: int
    batch: int
    precision: str
    compiled: bool
    parameters: int | None = None
    seconds: float | None = None  # of a training step, the median
    fastest: float | None = None
    backbone_seconds: float | None = None  # forward and backward of the backbone and its pyramid alone
    peak_bytes: int | None = None
    loss: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class BenchDetector:
    """Measure time and peak memory of a training step of Mask R-CNN (forward, backward, SGD) with several backbones.

    All backbones get the same synthetic images and objects. An error affects only the row that it occurs in.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional, optional("NAME ...")] = ()
    """Backbones, such as lambda_resnet101 or resnet_rs101,se=False. Default: LambdaResNet-101, ResNet-RS-101
    with and without SE, and global self-attention in the same blocks, eager and with flex_attention."""
    sizes: tuple[str, ...] = ("1024x1024", "1333x800")
    """Image sizes, as WIDTHxHEIGHT."""
    batch: int = 4
    """Images per step."""
    objects: int = 10
    """Objects per image."""
    dtype: tuple[Literal["float32", "bfloat16"], ...] = ("bfloat16",)
    """bfloat16: autocast with float32 weights."""
    compile: Literal["no", "yes", "both"] = "no"
    """Compile the backbone with torch.compile."""
    padded: bool = False
    """Make every second image smaller than the canvas, so that padding must be masked."""
    cudnn_benchmark: bool = False
    """Let cuDNN benchmark its algorithms for every shape. Training does not, because the shapes of the heads vary."""
    repeats: int = 20
    """Number of timed steps."""
    seconds: float = 15.0
    """Time budget of one row in seconds, after at least three steps."""
    minutes: Annotated[float | None, optional("MINUTES")] = None
    """Time budget in minutes; no new row starts after it."""
    device: Annotated[str | None, optional("DEVICE")] = None
    """cpu or cuda; default: a GPU if there is one."""
    output: Annotated[Path | None, optional("PATH")] = None
    """The JSON file; default: runs/bench/detect-DEVICE.json."""

    def run(self) -> int:
        return bench(self)


def bench(options: BenchDetector) -> int:
    device = chosen_device(options.device)
    entries = [Entry.parse(text) for text in options.names or NETWORKS]
    for entry in entries:
        without_layer(entry).check()
    sizes = [read_size(text) for text in options.sizes]
    output = options.output or BENCHES / f"detect-{device.type}.json"
    compiled = {"no": (False,), "yes": (True,), "both": (False, True)}[options.compile]
    rows: list[BenchRow] = []
    about, start, lost = describe(device), time.monotonic(), None
    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    for height, width in sizes:
        for precision in dict.fromkeys(options.dtype):
            for c in compiled:
                for entry in entries:
                    row = BenchRow(entry.text, height, width, options.batch, precision, c)
                    if lost is None and options.minutes and time.monotonic() - start > 60 * options.minutes:
                        lost = f"not measured: the budget of --minutes {options.minutes:g} was used up"
                    row = replace(row, error=lost) if lost else measure(entry, row, options, device)
                    lost = lost or cuda_lost(device)
                    rows.append(row)
                    print(f"[{time.monotonic() - start:.0f} s] {line(row)}", flush=True)
                    write(output, options, about, rows)
    console = wide(Console())
    for table in tables(rows):
        console.print(table)
    console.print(f"written to {output}", highlight=False, soft_wrap=True)
    return 1 if any(row.error for row in rows) else 0


def read_size(text: str) -> tuple[int, int]:
    """Return the height and width of WIDTHxHEIGHT."""
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) >= 32 and int(height) >= 32):
        raise ValueError(f"--sizes {text}: expected WIDTHxHEIGHT with sides of at least 32, for example 1024x1024")
    return int(height), int(width)


def without_layer(entry: Entry) -> Entry:
    """Return the configuration of an entry."""
    if entry.arguments.get("layer") != FLEX:
        return entry
    return Entry(entry.text, entry.name, {k: v for k, v in entry.arguments.items() if k != "layer"})


def make(entry: Entry, size: tuple[int, int]) -> Any:
    arguments: dict[str, Any] = dict(entry.arguments)
    if arguments.get("layer") == FLEX:
        largest = tuple(-(-side // 8) for side in size)  # the input of c4
        arguments["layer"] = lambda channels: FlexAttention2d(channels, input_size=largest)
    body = create_model(entry.name, features_only=True, out_indices=LEVELS, image_size=size, **arguments)
    return assemble(body, Heads(convolutions=4, norm=True), CLASSES)


def measure(entry: Entry, row: BenchRow, options: BenchDetector, device: torch.device) -> BenchRow:
    found: dict[str, Any] = {}
    try:
        found = timed(entry, row, options, device)
    except Exception as problem:  # measure the other rows after any error
        found["error"] = f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"
    free_memory()
    return replace(row, **found)


def timed(entry: Entry, row: BenchRow, options: BenchDetector, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    if entry.arguments.get("layer") == FLEX:
        check_flex(device)
    model = make(entry, (row.height, row.width)).to(device, memory_format=torch.channels_last).train()
    images, targets, sizes = made_up(row, options, device)
    if row.compiled:
        model.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    half = torch.autocast(device.type, torch.bfloat16, enabled=row.precision == "bfloat16")

    def step() -> torch.Tensor:
        with half:
            loss = torch.stack([part.float() for part in model(images, targets, sizes).values()]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    loss = 0.0
    for _ in range(WARM_UP):
        loss = float(step())
    if loss != loss or abs(loss) == float("inf"):
        raise ValueError(f"the loss is {loss}: steps with a non-finite loss are not timed")
    held = [*model.parameters(), *(state["momentum_buffer"] for state in optimizer.state.values())]
    peak = peak_bytes(step, device) + sum(t.numel() * t.element_size() for t in held)
    times = repeated(step, device, options)
    inputs = torch.randn(row.batch, 3, row.height, row.width, device=device)
    inputs = inputs.contiguous(memory_format=torch.channels_last)

    def backbone() -> None:
        with half:
            maps = model.backbone(inputs)
            total = torch.stack([m.float().mean() for m in maps.values()]).sum()
        total.backward()
        optimizer.zero_grad(set_to_none=True)

    model.transform.padding.set([(row.height, row.width)] * row.batch, (row.height, row.width), device)
    backbone()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": median(times),
        "fastest": min(times),
        "backbone_seconds": median(repeated(backbone, device, options)),
        "peak_bytes": peak,
        "loss": loss,
    }


@cache
def compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


class FlexAttention2d(GlobalAttention2d):
    """GlobalAttention2d with PyTorch's flex_attention, compiled on a GPU.

    The kernels of GlobalAttention2d write out a bias for every pair of positions; here the two relative logits of a
    pair are looked up inside the kernel.
    """

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.project(x)
        width = x.shape[3]
        rows = torch.einsum("bhyxk,yik->bhyxi", queries, self.height(x.shape[2])).flatten(2, 3).contiguous()
        columns = torch.einsum("bhyxk,xjk->bhyxj", queries, self.width(width)).flatten(2, 3).contiguous()

        def with_positions(score: Tensor, b: Tensor, h: Tensor, n: Tensor, m: Tensor) -> Tensor:
            return score + rows[b, h, n, m // width] + columns[b, h, n, m % width]

        attend = compiled() if x.is_cuda else flex_attention
        flat = [part.flatten(2, 3) for part in (queries, keys, values)]
        output = attend(*flat, score_mod=with_positions, scale=1.0)
        return keep_format(to_image(output.unflatten(2, x.shape[2:])), x)


def check_flex(device: torch.device) -> None:
    """Check values and all gradients against the plain layer."""
    plain = GlobalAttention2d(256, input_size=(24, 20)).to(device)
    flex = FlexAttention2d(256, input_size=(24, 20)).to(device)
    flex.load_state_dict(plain.state_dict())
    x = torch.randn(2, 256, 24, 20, device=device)
    weight = torch.randn_like(x)
    found = []
    for layer in (plain, flex):
        inputs = x.clone().requires_grad_()
        output = layer(inputs)
        found.append([output, *torch.autograd.grad((output * weight).sum(), [inputs, *layer.parameters()])])
    for mine, theirs in zip(*found, strict=True):
        error = float((mine - theirs).norm() / theirs.norm())
        if not error < FLEX_TOLERANCE:
            raise ValueError(f"flex_attention differs from attention by {error:.2g}")


def repeated(function: Any, device: torch.device, options: BenchDetector) -> list[float]:
    times: list[float] = []
    while len(times) < options.repeats and (len(times) < 3 or sum(times) < options.seconds):
        times.append(once(function, device))
    return times


def made_up(row: BenchRow, options: BenchDetector, device: torch.device) -> tuple[torch.Tensor, list, list]:
    """Return images, objects of all sizes with masks, and image sizes."""
    generator = torch.Generator().manual_seed(0)
    shape = (row.batch, 3, row.height, row.width)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)
    targets, sizes = [], []
    for i in range(row.batch):
        height, width = row.height, row.width
        if options.padded and i % 2:
            height, width = height * 3 // 4, width * 3 // 4
        sides = torch.tensor([width, height], dtype=torch.float32)
        extent = sides * (0.03 + 0.3 * torch.rand(options.objects, 2, generator=generator))
        corner = (sides - extent) * torch.rand(options.objects, 2, generator=generator)
        boxes = torch.cat([corner, corner + extent], dim=1)
        masks = torch.zeros(options.objects, height, width, dtype=torch.uint8)
        for mask, (x0, y0, x1, y1) in zip(masks, boxes.round().int().tolist(), strict=True):
            mask[y0 : max(y1, y0 + 1), x0 : max(x1, x0 + 1)] = 1
        labels = torch.randint(1, CLASSES + 1, (options.objects,), generator=generator)
        targets.append({"boxes": boxes.to(device), "labels": labels.to(device), "masks": masks.to(device)})
        sizes.append((height, width))
    return images, targets, sizes


def write(output: Path, options: BenchDetector, about: dict[str, object], rows: Sequence[BenchRow]) -> None:
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
    result = {"name": "detect", **about, "settings": settings, "rows": [asdict(row) for row in rows]}
    write_json(output, result)


def line(row: BenchRow) -> str:
    head = f"{row.network} {row.width}x{row.height} {row.precision}{' compiled' if row.compiled else ''}"
    if row.seconds is None or row.peak_bytes is None:
        return f"{head}: {row.error}"
    return f"{head}: {row.seconds * 1e3:.4g} ms, {row.peak_bytes / 2**30:.2f} GiB"


def tables(rows: Sequence[BenchRow]) -> list[Table]:
    """Return a table for each size and precision, with ratios to its first backbone."""
    found = []
    kinds = dict.fromkeys((row.width, row.height, row.precision, row.compiled) for row in rows)
    for width, height, precision, compiled in kinds:
        wanted = (width, height, precision, compiled)
        chosen = [row for row in rows if (row.width, row.height, row.precision, row.compiled) == wanted]
        first = chosen[0]
        title = f"Mask R-CNN, training step, {width}x{height}, batch {first.batch}, {precision}"
        table = Table(title=title + (", backbone compiled" if compiled else "") + ": ratios are to the first row")
        for name in ("backbone", "params (M)", "step (ms)", "ratio", "backbone (ms)", "ratio", "peak GiB", "ratio"):
            table.add_column(name, justify="left" if name == "backbone" else "right")
        for row in chosen:
            if row.seconds is None or row.backbone_seconds is None or row.peak_bytes is None:
                table.add_row(escape(f"{row.network} ({row.error})"))
                continue
            table.add_row(
                escape(row.network),
                f"{(row.parameters or 0) / 1e6:.1f}",
                f"{row.seconds * 1e3:.4g}",
                ratio(row.seconds, first.seconds),
                f"{row.backbone_seconds * 1e3:.4g}",
                ratio(row.backbone_seconds, first.backbone_seconds),
                f"{row.peak_bytes / 2**30:.2f}",
                ratio(row.peak_bytes, first.peak_bytes),
            )
        found.append(table)
    return found


def ratio(value: float, first: float | None) -> str:
    return "-" if not first else f"{value / first:.2f}"


def main(words: Sequence[str] | None = None) -> int:
    return tyro.cli(BenchDetector, args=words).run()


if __name__ == "__main__":
    sys.exit(main())

"""The command `lambdanets bench kernels`: kernel times of a lambda layer on a GPU, compared with the GPU's limits."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from lambdanets.bench import roofline
from lambdanets.bench.cases import DOWNSAMPLING, STAGES, BenchCase, Shape, make_cases, parse_scope
from lambdanets.bench.check import MismatchError, check_operation
from lambdanets.bench.layers import built, layer_step
from lambdanets.bench.peers import MODES, ours
from lambdanets.files import write_json
from lambdanets.machine import describe
from lambdanets.ops.triton.streams import NEVER, from_work
from lambdanets.options import BENCHES, check_positive, chosen_device, optional
from lambdanets.tables import wide

WARM_UP = 5  # steps that compile and raise the clocks


@dataclass(frozen=True)
class BenchKernels:
    """Measure the kernels of one lambda layer on a GPU: time, useful work, memory traffic, share of the GPU's limits.

    Inference (`layer.fuse()`) and a training step, eager and channels-last, run under torch's profiler, which measures
    kernels without Python overhead and gaps. Kernels that would overlap run one after another. They are grouped by
    result: the output (forward), the gradients of queries (dq), lambdas (g), values (dv) and embeddings (dT), expanded
    tables, the content lambda, batch norms, projections. Each result is first compared with the float64 reference.
    """

    device: Annotated[str | None, optional("DEVICE")] = None
    """The GPU, such as cuda or cuda:1. Default: the current GPU."""
    shapes: Annotated[tuple[str, ...], optional("HxWxC ...")] = ()
    """Feature maps, such as 32x32x96. Default: those of ResNet-50 and of its downsampling blocks."""
    scope: str = "23"
    """Scope of position interactions: a number, or global."""
    batch: int = 256
    """Batch size."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type. Shares of the limits are shown for bfloat16 and float16."""
    heads: int = 4
    """Number of heads: queries per lambda."""
    key_depth: int = 16
    """Depth of queries and keys."""
    steps: int = 20
    """Number of profiled steps; times are medians."""
    output: Annotated[Path | None, optional("PATH")] = None
    """JSON file to write. Default: runs/bench/kernels-cuda-DTYPE.json."""

    def run(self) -> int:
        check_positive(batch=self.batch, heads=self.heads, key_depth=self.key_depth, steps=self.steps)
        shapes = tuple(map(Shape.parse, self.shapes)) or (*STAGES, *DOWNSAMPLING)
        cases = make_cases(shapes, (parse_scope(self.scope),), self.batch, self.dtype, self.heads, self.key_depth)
        if not torch.cuda.is_available() or chosen_device(self.device).type != "cuda":
            found = f"got --device {self.device}" if torch.cuda.is_available() else "torch finds none"
            raise ValueError(
                f"`lambdanets bench kernels` needs a CUDA GPU, {found}: on a CPU use `lambdanets bench op` or "
                "`bench layer`"
            )
        return bench(self, cases, chosen_device(self.device))


def bench(options: BenchKernels, cases: list[BenchCase], device: torch.device) -> int:
    """Run the benchmark, and return the exit status: 1 if a check failed."""
    console = Console()
    name = f"kernels-{device.type}-{options.dtype}"
    output = options.output or BENCHES / f"{name}.json"
    peaks = roofline.peaks_of(torch.cuda.get_device_name(device), options.dtype)
    settings = {key: value for key, value in asdict(options).items() if key != "output"}
    result: dict[str, Any] = {
        "name": name,
        **describe(device),
        "settings": settings | {"shapes": [str(case.shape) for case in cases]},
        "peaks": None if peaks is None else asdict(peaks),
        "rows": [],
        "mismatches": [],
    }
    for case in cases:
        for mode in MODES:
            try:
                check_operation(case, "auto", device, mode == "training")
            except MismatchError as mismatch:
                result["mismatches"].append(str(mismatch))
                continue
            with from_work(NEVER):  # no overlap, which makes single kernels slower
                times = kernel_times(step_of(case, mode, device), device, options.steps)
            rows = roofline.grouped(case, mode, times)
            result["rows"] += rows
            console.print(f"\n{case.name}, {mode}: {roofline.sentence(rows, peaks)}", highlight=False, soft_wrap=True)
            wide(console).print(table(rows, peaks))
        write_json(output, result)  # after every case, so that an interrupted run keeps its results
    console.print(f"written to {output}", highlight=False, soft_wrap=True)
    for mismatch in result["mismatches"]:
        console.print(f"not measured, the check failed: {mismatch}", style="red", markup=False, soft_wrap=True)
    return 1 if result["mismatches"] else 0


def step_of(case: BenchCase, mode: str, device: torch.device) -> Callable[[], object]:
    """Return a step of our layer: fused inference, or forward and backward with a given output gradient."""
    build = ours if mode == "training" else lambda case: ours(case).fuse()
    module, x = built(build, case, mode, torch.channels_last, device)
    return partial(layer_step, module, x, torch.ones_like(x))  # the output has the shape of x


def kernel_times(step: Callable[[], object], device: torch.device, steps: int) -> list[roofline.KernelTime]:
    """Return the times of all kernels of a step, by name."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        for _ in range(steps):
            step()
        torch.cuda.synchronize(device)
    found = [event for event in recorded.events() or [] if event.device_type.name == "CUDA"]
    if not found:
        raise OSError("torch's profiler recorded no kernels: profiling may be restricted to administrators")
    microseconds = defaultdict(list)
    for event in sorted(found, key=lambda event: event.time_range.start):
        microseconds[event.name].append(event.time_range.elapsed_us())
    return [roofline.per_step(name, calls, steps) for name, calls in microseconds.items()]


def table(rows: list[dict[str, Any]], peaks: roofline.Peaks | None) -> Table:
    """Return the table of a case and mode."""
    shown = Table()
    for title in roofline.TITLES:
        shown.add_column(title, justify="left" if title == roofline.TITLES[0] else "right")
    for cells in roofline.lines(rows, peaks):
        shown.add_row(*cells, end_section=cells[0] == rows[-1]["group"])
    return shown

"""`lambdanets bench kernels`: which kernels a lambda layer runs on a GPU, and how near each is to the GPU's limits."""

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

WARM_UP = 5  # steps that compile, and let the clocks rise


@dataclass(frozen=True)
class BenchKernels:
    """One lambda layer on a GPU, kernel by kernel: time, useful work, least traffic, and the share of the limits.

    Inference (`layer.fuse()`) and a training step, eager, channels-last, under torch's profiler, which times kernels
    alone: not Python, and not the gaps between them; kernels that run beside each other otherwise run one by one here.
    They are grouped by what they compute: the output (forward), the gradients of queries (dq), lambdas (g), values (dv)
    and embeddings (dT), tables of positions, the content lambda, batch norms, projections. Each result is first
    compared with the float64 reference.
    """

    device: Annotated[str | None, optional("DEVICE")] = None
    """cuda or cuda:1."""
    shapes: Annotated[tuple[str, ...], optional("HxWxC ...")] = ()
    """Feature maps, such as 32x32x96. By default those of ResNet-50 and of its downsampling blocks."""
    scope: str = "23"
    """A number, or global."""
    batch: int = 256
    """Images."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """bfloat16, float16 or float32. Shares of the limits are for the first two."""
    heads: int = 4
    """Queries for each lambda."""
    key_depth: int = 16
    """Depth of queries and keys."""
    steps: int = 20
    """Steps that are profiled in a row; times are medians."""
    output: Annotated[Path | None, optional("PATH")] = None
    """The JSON file; runs/bench/kernels-cuda-DTYPE.json by default."""

    def run(self) -> int:
        check_positive(batch=self.batch, heads=self.heads, key_depth=self.key_depth, steps=self.steps)
        shapes = tuple(map(Shape.parse, self.shapes)) or (*STAGES, *DOWNSAMPLING)
        cases = make_cases(shapes, (parse_scope(self.scope),), self.batch, self.dtype, self.heads, self.key_depth)
        if not torch.cuda.is_available() or chosen_device(self.device).type != "cuda":
            found = f"--device {self.device}" if torch.cuda.is_available() else "torch finds none here"
            raise ValueError(
                f"bench kernels looks at the kernels of a CUDA GPU, and {found}; "
                "`lambdanets bench op` and `bench layer` measure on a CPU too"
            )
        return bench(self, cases, chosen_device(self.device))


def bench(options: BenchKernels, cases: list[BenchCase], device: torch.device) -> int:
    """Runs the benchmark; returns the exit status, 1 if a check failed."""
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
            with from_work(NEVER):  # beside another a kernel takes longer
                times = kernel_times(step_of(case, mode, device), device, options.steps)
            rows = roofline.grouped(case, mode, times)
            result["rows"] += rows
            console.print(f"\n{case.name}, {mode}: {roofline.sentence(rows, peaks)}", highlight=False, soft_wrap=True)
            wide(console).print(table(rows, peaks))
        write_json(output, result)  # after every case, so that a run that is stopped loses nothing
    console.print(f"written to {output}", highlight=False, soft_wrap=True)
    for mismatch in result["mismatches"]:
        console.print(f"no number, the check failed: {mismatch}", style="red", markup=False, soft_wrap=True)
    return 1 if result["mismatches"] else 0


def step_of(case: BenchCase, mode: str, device: torch.device) -> Callable[[], object]:
    """A step of our layer: folded for inference, or forward and backward with a gradient that is there already."""
    build = ours if mode == "training" else lambda case: ours(case).fuse()
    module, x = built(build, case, mode, torch.channels_last, device)
    return partial(layer_step, module, x, torch.ones_like(x))  # the output has the shape of x


def kernel_times(step: Callable[[], object], device: torch.device, steps: int) -> list[roofline.KernelTime]:
    """Every kernel that a step runs, by its name."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        for _ in range(steps):
            step()
        torch.cuda.synchronize(device)
    found = [event for event in recorded.events() or [] if event.device_type.name == "CUDA"]
    if not found:
        raise OSError("torch's profiler saw no kernel: this machine may allow profiling to administrators only")
    microseconds = defaultdict(list)
    for event in sorted(found, key=lambda event: event.time_range.start):
        microseconds[event.name].append(event.time_range.elapsed_us())
    return [roofline.per_step(name, calls, steps) for name, calls in microseconds.items()]


def table(rows: list[dict[str, Any]], peaks: roofline.Peaks | None) -> Table:
    shown = Table()
    for title in roofline.TITLES:
        shown.add_column(title, justify="left" if title == roofline.TITLES[0] else "right")
    for cells in roofline.lines(rows, peaks):
        shown.add_row(*cells, end_section=cells[0] == rows[-1]["group"])
    return shown

"""The commands `lambdanets bench op` and `bench layer`: check and time all contenders in one run, and write JSON."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import nan
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from lambdanets.bench import show
from lambdanets.bench.cases import (
    DOWNSAMPLING,
    SCOPES,
    STAGES,
    BenchCase,
    OpInputs,
    Shape,
    make_cases,
    op_inputs,
    parse_scope,
)
from lambdanets.bench.check import MismatchError, check_operation, check_pooled, check_twin
from lambdanets.bench.peers import MODES, Contender, contenders
from lambdanets.bench.timing import interleaved, once, peak_bytes
from lambdanets.files import write_json
from lambdanets.machine import describe, threads
from lambdanets.ops import explain, lambda_op
from lambdanets.ops.choose import BACKENDS
from lambdanets.options import BENCHES, check_positive, chosen_device, optional

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
Family = Literal["public", "convolution", "depthwise", "attention"]
HOPELESS = 30  # backends that are predicted to be this many times slower than the chosen one are not measured
LAUNCHES = 0.02  # seconds: launch overhead does not matter in GPU steps that take longer
QUICK_SHAPES = (Shape(6, 6, 16),)


@dataclass(frozen=True)
class BenchLayer:
    """Measure whole layers: the lambda layer, public lambda layers, convolutions and, on a GPU, attention.

    All layers run interleaved, each in its faster memory format; times are medians. The lambda layer is first compared
    with the float64 reference, and with every public layer that computes the same function.
    """

    device: Annotated[str | None, optional("DEVICE")] = None
    """Device, such as cpu, cuda or cuda:1. Default: a GPU if there is one."""
    shapes: Annotated[tuple[str, ...], optional("HxWxC ...")] = ()
    """Feature maps, such as 32x32x96. Default: those of ResNet-50, on a GPU also of its downsampling blocks."""
    scopes: Annotated[tuple[str, ...], optional("SCOPE ...")] = ()
    """Scopes of position interactions: numbers, or global. Default: 7 23 global."""
    batch: Annotated[int | None, optional("N")] = None
    """Batch size. Default: 4 on a CPU, 256 on a GPU."""
    dtype: Annotated[Literal["float32", "bfloat16", "float16", "float64"] | None, optional("DTYPE")] = None
    """Data type. Default: float32 on a CPU, bfloat16 on a GPU."""
    heads: int = 4
    """Number of heads: queries per lambda."""
    key_depth: int = 16
    """Depth of queries and keys."""
    against: tuple[Family, ...] = get_args(Family)
    """Layers to compare with: public lambda layers, the 3x3 convolution, a depthwise convolution as large as the scope
    followed by a 1x1 convolution, and attention (GPU only)."""
    pooled: bool = False
    """Add 2x average pooling after the lambda layer, and compare with a convolution of stride 2."""
    all_backends: bool = False
    """Measure the lambda layer with each backend, not only with the one that it chooses."""
    modes: tuple[Literal["inference", "training"], ...] = ("inference", "training")
    """Modes to measure; training is a forward and a backward pass, including the gradient of the input."""
    repeats: int = 9
    """Number of rounds over all layers."""
    seconds: float = 10.0
    """Time budget in seconds per case and mode; no new round starts after it, except for the first three."""
    threads: Annotated[int | None, optional("N")] = None
    """Number of CPU threads. Default: torch's setting."""
    quick: bool = False
    """Use a tiny shape and few repeats, for a smoke test."""
    output: Annotated[Path | None, optional("PATH")] = None
    """JSON file to write. Default: runs/bench/NAME.json."""

    def run(self) -> int:
        if self.pooled and self.against != ("convolution",):
            raise ValueError("--pooled compares with a convolution of stride 2 only: add --against convolution")
        return bench(self, "layer", operation=False, layers=True)


@dataclass(frozen=True)
class BenchOp(BenchLayer):
    """Measure the operation alone with each backend; on a CPU also whole layers.

    `*` marks the backend that `auto` chooses. Each result is first compared with the float64 reference.
    """

    layers: Annotated[bool | None, optional("True|False")] = None
    """Measure whole layers too. Default: on a CPU only."""

    def run(self) -> int:
        if self.pooled:
            raise ValueError(
                "--pooled is for whole layers: use `lambdanets bench layer --pooled --against convolution`"
            )
        on_cpu = chosen_device(self.device).type == "cpu"
        return bench(self, "op", operation=True, layers=on_cpu if self.layers is None else self.layers)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement."""

    case: BenchCase
    kind: str  # operation, layer
    mode: str
    contender: str
    family: str = "ours"
    milliseconds: float = nan  # median
    fastest_milliseconds: float = nan
    repeats: int = 0
    peak_bytes: int = 0
    memory_format: str = "-"
    check: float | None = None  # relative error against the reference or, for a public layer, against ours
    ratio: float | None = None  # time divided by that of our layer, or by that of the backend that auto chooses
    chosen: bool = False  # whether auto chooses it


@dataclass(frozen=True)
class LeftOut:
    """A contender that was not measured, and the reason."""

    case: str
    contender: str
    reason: str


@dataclass(frozen=True)
class Runner:
    """The measurements of a run."""

    options: BenchLayer
    device: torch.device
    rows: list[Row]
    left_out: list[LeftOut]
    mismatches: list[str]

    def measure(self, rows: list[Row], functions: dict[str, Callable[[], object]], base: str) -> None:
        """Time the contender of each row, and store the rows with ratios to the time of `base`."""
        times = interleaved(functions, self.device, self.options.repeats, self.options.seconds)
        peaks = {name: peak_bytes(function, self.device) for name, function in functions.items()}
        for row in rows:
            found = times[row.contender]
            self.rows.append(
                replace(
                    row,
                    milliseconds=found.median * 1e3,
                    fastest_milliseconds=found.fastest * 1e3,
                    repeats=len(found.seconds),
                    peak_bytes=peaks[row.contender],
                    ratio=found.median / times[base].median if base in times else None,
                )
            )

    def operation(self, case: BenchCase, mode: str) -> None:
        """Measure the operation alone with every backend."""
        training = mode == "training"
        inputs = op_inputs(case, self.device)
        with torch.set_grad_enabled(training):
            reasons = explain(inputs.queries, inputs.keys, inputs.values, inputs.positions)
        predicted = {name: said for name, said in reasons.items() if not isinstance(said, str)}
        chosen = min(predicted, key=predicted.__getitem__)
        rows: list[Row] = []
        functions: dict[str, Callable[[], object]] = {}
        for name, said in reasons.items():
            if not isinstance(said, str) and said > HOPELESS * predicted[chosen]:
                said = f"predicted to be more than {HOPELESS} times slower than {chosen}"
            if isinstance(said, str):
                self.left_out.append(LeftOut(case.name, name, said))
                continue
            try:
                error = check_operation(case, name, self.device, training)
            except MismatchError as mismatch:
                self.mismatches.append(str(mismatch))
                continue
            rows.append(Row(case=case, kind="operation", mode=mode, contender=name, check=error, chosen=name == chosen))
            functions[name] = partial(operation_step, inputs, name, training)
            functions[name]()
        self.measure(rows, functions, chosen)

    def layer(self, case: BenchCase, mode: str) -> None:
        """Measure our layer and all others."""
        rows: list[Row] = []
        functions: dict[str, Callable[[], object]] = {}
        for contender in contenders(self.device, self.options.all_backends):
            if mode not in contender.modes or contender.family not in ("ours", *self.options.against):
                continue
            reason = contender.why_not(case)
            if reason is None:
                try:
                    row = Row(case=case, kind="layer", mode=mode, contender=contender.name, family=contender.family)
                    row = replace(row, check=self.check(contender, case, mode))
                    memory_format, functions[row.contender] = self.best_format(contender, case, mode)
                    rows.append(replace(row, memory_format=memory_format))
                    continue
                except MismatchError as mismatch:
                    self.mismatches.append(str(mismatch))
                    continue
                except (RuntimeError, ValueError) as error:  # out of memory, or a backend that cannot run
                    if contender.name == "ours":
                        raise
                    reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            self.left_out.append(LeftOut(case.name, contender.name, reason))
        self.measure(rows, functions, "ours")

    def check(self, contender: Contender, case: BenchCase, mode: str) -> float | None:
        if contender.family == "ours":
            backend = contender.name.partition(", ")[2]
            backend = backend if backend in BACKENDS else "auto"
            if case.pooled:
                return check_pooled(case, backend, self.device, mode == "training")
            return check_operation(case, backend, self.device, mode == "training")
        return None if contender.twin is None else check_twin(contender, case, self.device)

    def best_format(self, contender: Contender, case: BenchCase, mode: str) -> tuple[str, Callable[[], object]]:
        """Return the faster memory format of a contender, and a step in it."""
        found = {}
        formats = FORMATS
        if "compiled" in contender.name:  # the other format is never faster on a GPU and takes minutes to compile
            formats = {"channels_last": torch.channels_last}
        for name, memory_format in formats.items():
            step = partial(layer_step, *built(contender.build, case, mode, memory_format, self.device))
            step()  # compiles, allocates
            second = once(step, self.device)
            # Short steps may be dominated by launch overhead.
            hopeless = found and second > LAUNCHES and second > 3 * min(time for time, _ in found.values())
            found[name] = (second if hopeless else self.roughly(step), step)
        name = min(found, key=lambda name: found[name][0])
        return name, found[name][1]

    def roughly(self, step: Callable[[], object]) -> float:
        """Return the approximate seconds of a step that ran before, without launch overhead for short GPU steps."""
        twice = [once(step, self.device) for _ in range(2)]
        if self.device.type != "cuda" or min(twice) > LAUNCHES:
            return min(twice)
        return interleaved({"": step}, self.device, 1, 1.0)[""].median


def operation_step(inputs: OpInputs, backend: str, training: bool) -> object:
    """Run the operation, in training with its backward pass."""
    with torch.set_grad_enabled(training):
        output = lambda_op(inputs.queries, inputs.keys, inputs.values, inputs.positions, backend=backend)
        return torch.autograd.grad(output, inputs.leaves, inputs.gradient) if training else output


def built(
    build: Callable[[BenchCase], nn.Module],
    case: BenchCase,
    mode: str,
    memory_format: torch.memory_format,
    device: torch.device,
) -> tuple[nn.Module, Tensor]:
    """Return a layer and its input for `layer_step`."""
    torch.manual_seed(0)
    module = build(case).to(device, case.torch_dtype).train(mode == "training")
    for weight in module.parameters():
        if weight.ndim == 4:
            weight.data = weight.data.contiguous(memory_format=memory_format)
    x = case.image(device).contiguous(memory_format=memory_format)
    return module, x.requires_grad_(mode == "training")


def layer_step(module: nn.Module, x: Tensor, gradient: Tensor | None = None) -> object:
    """Run a forward pass and, if x requires a gradient, a backward pass. The default output gradient is ones."""
    with torch.set_grad_enabled(x.requires_grad):
        y = module(x)
        if not x.requires_grad:
            return y
        return torch.autograd.grad(y, [x, *module.parameters()], torch.ones_like(y) if gradient is None else gradient)


def bench(options: BenchLayer, what: str, *, operation: bool, layers: bool, console: Console | None = None) -> int:
    """Run a benchmark, and return the exit status: 1 if a check failed."""
    console = console or Console()
    device = chosen_device(options.device)
    check_positive(batch=options.batch, heads=options.heads, key_depth=options.key_depth, repeats=options.repeats)
    options = with_defaults(options, device)
    cases = make_cases(
        tuple(map(Shape.parse, options.shapes)),
        tuple(map(parse_scope, options.scopes)),
        options.batch or 1,
        options.dtype or "float32",
        options.heads,
        options.key_depth,
        options.pooled,
    )
    runner = Runner(options, device, [], [], [])
    output = options.output or BENCHES / f"{result_name(options, what, device)}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with threads(options.threads), Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("bench", total=len(cases) * len(options.modes) * (operation + layers))
        for case in cases:
            for mode in (mode for mode in MODES if mode in options.modes):
                for wanted, measure in ((operation, runner.operation), (layers, runner.layer)):
                    if wanted:
                        progress.update(task, description=f"{case.name}, {mode}")
                        measure(case, mode)
                        progress.advance(task)
                # After every case, so that an interrupted run keeps its results.
                write_json(output, as_json(options, what, device, runner))
    show.tables(runner.rows, runner.left_out, console)
    console.print(f"written to {output}", highlight=False, soft_wrap=True)
    for mismatch in runner.mismatches:
        console.print(f"not measured, the check failed: {mismatch}", style="red", markup=False, soft_wrap=True)
    return 1 if runner.mismatches else 0


def with_defaults(options: BenchLayer, device: torch.device) -> BenchLayer:
    """Return the options with the defaults that depend on the device or on --quick."""
    cuda = device.type == "cuda"
    usual = DOWNSAMPLING if options.pooled else (*STAGES, *DOWNSAMPLING) if cuda else STAGES
    shapes = QUICK_SHAPES if options.quick else usual
    scopes = ("3", "global") if options.quick else tuple("global" if s is None else str(s) for s in SCOPES)
    return replace(
        options,
        shapes=options.shapes or tuple(map(str, shapes)),
        scopes=options.scopes or scopes,
        batch=options.batch or (2 if options.quick else 256 if cuda else 4),
        dtype=options.dtype or ("bfloat16" if cuda else "float32"),
        repeats=min(options.repeats, 2) if options.quick else options.repeats,
    )


def result_name(options: BenchLayer, what: str, device: torch.device) -> str:
    parts = [what, device.type, *["pooled"] * options.pooled]
    parts += [options.dtype] if options.dtype not in (None, "float32") else []
    parts += ["quick"] if options.quick else []
    return "-".join(parts)


def as_json(options: BenchLayer, what: str, device: torch.device, runner: Runner) -> dict[str, Any]:
    """Return the content of the JSON file."""
    settings = {name: value for name, value in asdict(options).items() if name != "output"}
    own = [{name: value for name, value in asdict(row).items() if name != "case"} for row in runner.rows]
    return {
        "name": result_name(options, what, device),
        **describe(device),
        "settings": settings,
        "memory": "CUDA: max_memory_allocated beyond the start; CPU: torch's CPU allocator, without oneDNN's scratch",
        "rows": [row.case.fields() | fields for row, fields in zip(runner.rows, own, strict=True)],
        "left_out": [asdict(one) for one in runner.left_out],
        "mismatches": runner.mismatches,
    }

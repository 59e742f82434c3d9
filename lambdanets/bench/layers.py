"""`lambdanets bench`: the one runner. Checks, then times, everyone in the same run; prints ratios and writes JSON."""

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
HOPELESS = 30  # a backend that is predicted to be so many times slower than the chosen one is not waited for
LAUNCHES = 0.02  # seconds: a step that takes longer on a GPU does not wait for Python
QUICK_SHAPES = (Shape(6, 6, 16),)


@dataclass(frozen=True)
class BenchLayer:
    """Whole layers: ours beside the public lambda layers, the convolution it replaces and, on a GPU, attention.

    Everyone runs in the same minutes, round-robin, in the memory format that suits it best; times are medians. Our
    layer is first compared with the float64 reference, and with every public layer that computes the same function.
    """

    device: Annotated[str | None, optional("DEVICE")] = None
    """cpu, cuda or cuda:1. A GPU if there is one."""
    shapes: Annotated[tuple[str, ...], optional("HxWxC ...")] = ()
    """Feature maps, such as 32x32x96. By default those of ResNet-50, on a GPU also of its downsampling blocks."""
    scopes: Annotated[tuple[str, ...], optional("SCOPE ...")] = ()
    """Scopes, such as 7 23 global, the default."""
    batch: Annotated[int | None, optional("N")] = None
    """Images; 4 on a CPU and 256 on a GPU by default."""
    dtype: Annotated[Literal["float32", "bfloat16", "float16", "float64"] | None, optional("DTYPE")] = None
    """float32, bfloat16, float16 or float64; by default float32 on a CPU and bfloat16 on a GPU."""
    heads: int = 4
    """Queries for each lambda."""
    key_depth: int = 16
    """Depth of queries and keys."""
    against: tuple[Family, ...] = get_args(Family)
    """Baselines of whole layers: public lambda layers, the 3x3 convolution, a depthwise convolution as large as the
    scope followed by a 1x1 convolution, and on a GPU attention."""
    pooled: bool = False
    """With average pooling by half after our layer, beside a convolution that strides: blocks that halve their map."""
    all_backends: bool = False
    """Our layer with each backend, not only the one that it chooses."""
    modes: tuple[Literal["inference", "training"], ...] = ("inference", "training")
    """Training is a forward and a backward pass, with the gradient of the input."""
    repeats: int = 9
    """Rounds over all contenders."""
    seconds: float = 10.0
    """Start no further round after this long in one case and mode (three rounds run anyway)."""
    threads: Annotated[int | None, optional("N")] = None
    """CPU threads; torch's own number by default."""
    quick: bool = False
    """A tiny shape and few repeats: does it run?"""
    output: Annotated[Path | None, optional("PATH")] = None
    """The JSON file; runs/bench/NAME.json by default."""

    def run(self) -> int:
        if self.pooled and self.against != ("convolution",):
            raise ValueError("--pooled is for blocks that halve their map: measure it with --against convolution")
        return bench(self, "layer", operation=False, layers=True)


@dataclass(frozen=True)
class BenchOp(BenchLayer):
    """The operation alone, by each of our backends; on a CPU also whole layers beside the public ones.

    `*` marks the backend that `auto` chooses. Every time belongs to a result that agrees with the float64 reference.
    """

    layers: Annotated[bool | None, optional("True|False")] = None
    """Whole layers too; by default on a CPU only."""

    def run(self) -> int:
        if self.pooled:
            raise ValueError("--pooled is for whole layers: lambdanets bench layer --pooled --against convolution")
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
    milliseconds: float = nan  # the median
    fastest_milliseconds: float = nan
    repeats: int = 0
    peak_bytes: int = 0
    memory_format: str = "-"
    check: float | None = None  # relative error against the reference or, for a public layer, against ours
    ratio: float | None = None  # time over ours; of an operation: over the backend that auto chooses
    chosen: bool = False  # by auto


@dataclass(frozen=True)
class LeftOut:
    """Who was not measured, and why."""

    case: str
    contender: str
    reason: str


@dataclass(frozen=True)
class Runner:
    """What all measurements of a run share."""

    options: BenchLayer
    device: torch.device
    rows: list[Row]
    left_out: list[LeftOut]
    mismatches: list[str]

    def measure(self, rows: list[Row], functions: dict[str, Callable[[], object]], base: str) -> None:
        """Time the contender of each row, and keep the rows with ratios to the time of `base`."""
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
        """Every backend on the operation alone."""
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
                said = f"predicted to take more than {HOPELESS} times as long as {chosen}"
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
        """Our layer and all others."""
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
                except (RuntimeError, ValueError) as error:  # out of memory, a backend that cannot
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
        """A step of the contender in the memory format in which it is faster."""
        found = {}
        formats = FORMATS
        if "compiled" in contender.name:  # minutes of compiling for a format that is never faster on a GPU
            formats = {"channels_last": torch.channels_last}
        for name, memory_format in formats.items():
            step = partial(layer_step, *built(contender.build, case, mode, memory_format, self.device))
            step()  # compiles, allocates
            second = once(step, self.device)
            # One call from Python may take long for its launches alone, whatever the GPU needs.
            hopeless = found and second > LAUNCHES and second > 3 * min(time for time, _ in found.values())
            found[name] = (second if hopeless else self.roughly(step), step)
        name = min(found, key=lambda name: found[name][0])
        return name, found[name][1]

    def roughly(self, step: Callable[[], object]) -> float:
        """Seconds of a step that ran before. Launches from Python would hide what differs on a GPU."""
        twice = [once(step, self.device) for _ in range(2)]
        if self.device.type != "cuda" or min(twice) > LAUNCHES:
            return min(twice)
        return interleaved({"": step}, self.device, 1, 1.0)[""].median


def operation_step(inputs: OpInputs, backend: str, training: bool) -> object:
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
    """A layer and its input for `layer_step`."""
    torch.manual_seed(0)
    module = build(case).to(device, case.torch_dtype).train(mode == "training")
    for weight in module.parameters():
        if weight.ndim == 4:
            weight.data = weight.data.contiguous(memory_format=memory_format)
    x = case.image(device).contiguous(memory_format=memory_format)
    return module, x.requires_grad_(mode == "training")


def layer_step(module: nn.Module, x: Tensor, gradient: Tensor | None = None) -> object:
    """A forward pass and, where x wants its gradient, a backward pass; without a gradient of the output from ones."""
    with torch.set_grad_enabled(x.requires_grad):
        y = module(x)
        if not x.requires_grad:
            return y
        return torch.autograd.grad(y, [x, *module.parameters()], torch.ones_like(y) if gradient is None else gradient)


def bench(options: BenchLayer, what: str, *, operation: bool, layers: bool, console: Console | None = None) -> int:
    """Runs a benchmark; returns the exit status, 1 if a check failed."""
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
                # After every case, so that a run that is stopped loses nothing.
                write_json(output, as_json(options, what, device, runner))
    show.tables(runner.rows, runner.left_out, console)
    console.print(f"written to {output}", highlight=False, soft_wrap=True)
    for mismatch in runner.mismatches:
        console.print(f"no number, the check failed: {mismatch}", style="red", markup=False, soft_wrap=True)
    return 1 if runner.mismatches else 0


def with_defaults(options: BenchLayer, device: torch.device) -> BenchLayer:
    """The options with everything that depends on the device or on --quick filled in."""
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

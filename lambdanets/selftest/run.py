"""The self-test: draw cases, run them on the backends, and report the results."""

import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lambdanets.ops import triton as fused
from lambdanets.ops.choose import BACKENDS, NAMES
from lambdanets.ops.triton.streams import from_work
from lambdanets.options import chosen_device, optional
from lambdanets.selftest.agreement import Verdict, choices, judge, oracle, run_backend
from lambdanets.selftest.cases import SelftestCase, build, draw

DEFAULT_CASES = 300
COMPILED = ("fused",)  # backends that compile kernels; they run only cases with sizes from a small grid
HALF = ("bfloat16", "float16")
SHOWN_FAILURES = 20


@dataclass(frozen=True)
class Selftest:
    """Check that all implementations compute the paper's equations on this machine.

    The test draws random lambda operations over all variants, sizes and dtypes, and runs each on every backend that
    can; on a GPU half of them run only on the fused kernels. Output and gradients are compared with the paper's
    einsums in float64. The error may be at most twice that of plain PyTorch in the same dtype. The exit status is 1 if
    a result differs, or if a backend that can run on this machine ran no case.
    """

    cases: Annotated[int | None, optional("N")] = None
    """Number of cases. Default: 300, or with --minutes no limit."""
    seed: int = 0
    """Random seed; the same seed gives the same cases on every machine."""
    minutes: Annotated[float | None, optional("MINUTES")] = None
    """Time budget in minutes."""
    device: Annotated[str | None, optional("DEVICE")] = None
    """Device, such as cpu, cuda or cuda:1. Default: a GPU if there is one."""
    backend: Annotated[str | None, optional("NAME")] = None
    """Test only this backend, such as gemm or conv."""
    case: Annotated[int | None, optional("NUMBER")] = None
    """Run only this case of the seed, to reproduce a failure."""

    def run(self) -> int:
        return selftest(self)


@dataclass(frozen=True)
class Failure:
    """A case that failed on a backend."""

    case: SelftestCase
    backend: str
    what: str

    def command(self, device: torch.device) -> str:
        """Return the command that reproduces the failure."""
        return (
            f"lambdanets selftest --seed {self.case.seed} --case {self.case.number} "
            f"--backend {self.backend} --device {device}"
        )


@dataclass
class Tally:
    """The results of one backend."""

    cases: int = 0
    failures: int = 0
    worst: float = 0.0  # largest error / allowed error
    worst_half: float = 0.0  # largest error / error of plain PyTorch, in half precision
    reasons: dict[str, int] = field(default_factory=dict)  # reasons why cases did not run, with their counts

    def add(self, case: SelftestCase, verdicts: list[Verdict]) -> None:
        self.worst = max([self.worst, *(v.share for v in verdicts)])
        if case.dtype in HALF:  # not relative to plain PyTorch where it happens to be exact
            self.worst_half = max([self.worst_half, *(v.error / v.plain for v in verdicts if v.by_plain)])


def selftest(options: Selftest, console: Console | None = None) -> int:
    """Run the self-test, print its report, and return the exit status."""
    console = console or Console()
    device = chosen_device(options.device)
    names = chosen_backends(options.backend)
    if options.case is not None:
        numbers = range(options.case, options.case + 1)
    else:
        unlimited = options.cases is None and options.minutes is not None
        numbers = range(10**9 if unlimited else (DEFAULT_CASES if options.cases is None else options.cases))
    deadline = float("inf") if options.minutes is None else time.monotonic() + 60 * options.minutes

    # By default, cases with sizes of compiled kernels run only on these kernels on a GPU.
    alone = device.type == "cuda" and options.backend is None and options.case is None
    tallies = {name: Tally() for name in names}
    failures: list[Failure] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # cases are too small for more threads
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    drawn = 0
    try:
        # from_work(0): kernels overlap on a GPU even though the cases are small.
        with from_work(0), Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("selftest", total=len(numbers) if len(numbers) < 10**9 else None)
            for number in numbers:
                if time.monotonic() > deadline:
                    break
                failures += run_case(draw(options.seed, number), device, tallies, alone)
                drawn += 1
                progress.update(task, advance=1, description=f"selftest, {len(failures)} failures")
    finally:
        torch.set_num_threads(threads)
    if options.case is not None:
        console.print(f"case {options.case} of seed {options.seed}: {draw(options.seed, options.case).words()}")
    return report(options, console, device, drawn, tallies, failures)


def chosen_backends(wanted: str | None) -> list[str]:
    """Return the names of the backends to test."""
    if wanted is not None and wanted not in NAMES:
        raise ValueError(f"unknown backend {wanted!r}; choose one of {', '.join(NAMES)}")
    return list(NAMES) if wanted is None else [wanted]


def run_case(case: SelftestCase, device: torch.device, tallies: dict[str, Tally], alone: bool = False) -> list[Failure]:
    """Run a case on every backend that can; with `alone` on compiled kernels only, if the case has their sizes."""
    inputs = build(case, device)
    reasons = choices(case, inputs)
    runnable = []
    for name, tally in tallies.items():
        reason = why_not(case, name, reasons, alone)
        if reason is None:
            runnable.append(name)
        else:
            tally.reasons[reason] = tally.reasons.get(reason, 0) + 1
    if not runnable:
        return []
    truth = oracle(case, inputs)
    failures = []
    for name in runnable:
        tally = tallies[name]
        tally.cases += 1
        try:
            verdicts = judge(truth, run_backend(case, inputs, name), name)
        except Exception as error:  # a crash is a failure, and the remaining cases still run
            failures.append(Failure(case, name, f"{type(error).__name__}: {error}".splitlines()[0]))
            tally.failures += 1
            tally.worst = float("inf")
            continue
        tally.add(case, verdicts)
        wrong = [v for v in verdicts if not v.passed]
        if wrong:
            tally.failures += 1
            said = ", ".join(f"{v.tensor} error {v.error:.1e}, allowed: {v.allowed:.1e}" for v in wrong)
            failures.append(Failure(case, name, said))
    return failures


def why_not(case: SelftestCase, name: str, reasons: dict[str, str | float], alone: bool) -> str | None:
    """Return the reason why a case does not run on a backend, or None."""
    chosen = next(iter(reasons)) if name == "auto" else name  # the first one runs
    if chosen in COMPILED and not case.kernel_sizes:
        return "the sizes are outside the grid for which kernels are compiled"
    kernels_can = any(not isinstance(reasons.get(kernel, ""), str) for kernel in COMPILED)
    if alone and case.kernel_sizes and kernels_can and chosen not in COMPILED:
        return "on a GPU cases with sizes of compiled kernels run only on these kernels"
    if name in BACKENDS and case.positions == "none":
        return "content lambdas alone use the same code for all backends and are tested as auto"
    reason = reasons.get(name)
    return reason if isinstance(reason, str) else None


def can_run_here(name: str, device: torch.device) -> str | None:
    """Return the reason why a backend cannot run on this machine, tested with a plain 2-d case, or None."""
    if name not in BACKENDS:
        return None
    grids: Any = {"query_grid": (5, 5), "context_grid": (5, 5), "scope": (3, 3), "dilation": (1, 1), "stride": (1, 1)}
    plain = SelftestCase(0, 0, True, "float32", 1, 2, 4, 8, 0, positions="relative", **grids)
    reason = choices(plain, build(plain, device))[name]
    return reason if isinstance(reason, str) else None


def report(
    options: Selftest,
    console: Console,
    device: torch.device,
    drawn: int,
    tallies: dict[str, Tally],
    failures: list[Failure],
) -> int:
    """Print the results, and return the exit status."""
    table = Table(title=f"{drawn} cases of seed {options.seed} on {device}, torch {torch.__version__}")
    table.add_column("backend")
    for title in ("cases", "failures", "worst error\n(1 = allowed)", "half precision, times\nplain PyTorch's error"):
        table.add_column(title, justify="right")
    table.add_column("remark")
    idle = []
    for name, tally in tallies.items():
        remark = ""
        if not tally.cases:
            reason = can_run_here(name, device)
            if reason is None and options.case is None:  # a single case need not run on all backends
                idle.append(name)
            why = reason or max(tally.reasons, key=tally.reasons.__getitem__, default="no case drawn")
            remark = f"did not run: {why}"
        half = f"{tally.worst_half:.2f}" if tally.worst_half else "-"
        worst = f"{tally.worst:.2f}" if tally.cases else "-"
        style = "red" if tally.failures or name in idle else None
        table.add_row(name, str(tally.cases), str(tally.failures), worst, half, escape(remark), style=style)
    console.print(table)
    if tallies.get("fused", Tally()).cases and not fused.interpreted():
        console.print(f"{fused.compiled_kernels()} kernels were compiled for the cases of fused.", highlight=False)
    for failure in failures[:SHOWN_FAILURES]:
        console.print(f"FAILED {failure.backend}: {failure.what}", style="red", markup=False, soft_wrap=True)
        console.print(f"  {failure.case.words()}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"  reproduce: {failure.command(device)}", markup=False, highlight=False, soft_wrap=True)
    if len(failures) > SHOWN_FAILURES:
        console.print(f"... and {len(failures) - SHOWN_FAILURES} more failures")
    if idle:
        console.print(
            f"Backends that can run on this machine ran no case: {', '.join(idle)}. Use a larger --cases", style="red"
        )
    if not failures and not idle:
        console.print("All results agree with the float64 reference.", style="green")
    return 1 if failures or idle else 0

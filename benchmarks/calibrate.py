"""Measure the constants of `lambdanets/ops/choose.py` on this machine: `python benchmarks/calibrate.py`.

Times the position part of the operation by every backend on a grid of problems, inference and training, and fits
    nanoseconds = call + macs * (thousand multiply-adds) + elements * (thousand intermediate elements)
by non-negative least squares on the relative error. Prints the constants as source to paste, and for each problem
how much slower auto's choice is than the fastest backend (the regret).
"""

import sys
from dataclasses import dataclass
from itertools import combinations, product
from math import prod
from typing import Annotated

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lambdanets.bench.timing import interleaved
from lambdanets.machine import threads
from lambdanets.ops import Relative, choose
from lambdanets.ops.choose import BACKENDS, Backend, Rates
from lambdanets.ops.problem import Problem
from lambdanets.options import chosen_device, optional
from lambdanets.tables import wide

Fitted = dict[str, tuple[Rates, Rates]]  # by backend: inference, training


@dataclass(frozen=True)
class Sizes:
    """The sizes of a problem."""

    grid: tuple[int, ...]
    scope: tuple[int, ...]
    batch: int
    value_depth: int
    heads: int = 4
    key_depth: int = 16
    intra_depth: int = 1

    def __str__(self) -> str:
        grid, scope = "x".join(map(str, self.grid)), "x".join(map(str, self.scope))
        depth = f" u {self.intra_depth}" if self.intra_depth > 1 else ""
        return f"{grid} scope {scope} b {self.batch} v {self.value_depth}{depth}"

    def problem(self, device: torch.device, dtype: torch.dtype, training: bool) -> Problem:
        N, K, V, U = prod(self.grid), self.key_depth, self.value_depth, self.intra_depth

        def tensor(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=dtype, requires_grad=training)

        return Problem(
            queries_BNHK=tensor(self.batch, N, self.heads, K),
            keys_BMKU=None,
            values_BMVU=tensor(self.batch, N, V, U),
            positions=Relative(tensor(*self.scope, K, U), self.grid),
            key_norm="softmax",
            mask_NM=None,
            context_mask_BM=None,
            causal=False,
        )


def grid_of_problems(quick: bool) -> list[Sizes]:
    """Return the problems: the stages of the paper's networks, sizes between them, and 1-d and 3-d problems."""
    if quick:
        return [Sizes((side, side), (scope, scope), 1, 8) for side, scope in product((4, 8), (3, 7))]
    found = []
    for side, value_depth in ((7, 128), (10, 64), (14, 64), (20, 32), (28, 32), (40, 16), (56, 16)):
        for scope, batch in product((7, 15, 23, 2 * side - 1), (1, 4)):
            found.append(Sizes((side, side), (scope, scope), batch, value_depth))
    found += [Sizes((side, side), (7, 7), 2, 32, intra_depth=4) for side in (7, 14, 28)]
    found += [Sizes((length,), (scope,), 4, 32) for length, scope in product((64, 256, 1024), (7, 23, 127))]
    found += [Sizes((side,) * 3, (scope,) * 3, 1, 16) for side, scope in product((4, 8), (3, 7))]
    return found


@dataclass(frozen=True)
class Measured:
    """Measure the seconds and the work of every backend that can run a problem."""

    sizes: Sizes
    training: bool
    seconds: dict[str, float]
    work: dict[str, tuple[float, float]]


def step(backend: Backend, problem: Problem, training: bool) -> object:
    with torch.set_grad_enabled(training):
        output = backend.position_output(problem)
        leaves = [tensor for tensor in problem.tensors if tensor is not None]
        return torch.autograd.grad(output, leaves, torch.ones_like(output)) if training else output


def measure(sizes: Sizes, device: torch.device, dtype: torch.dtype, training: bool, repeats: int) -> Measured:
    problem = sizes.problem(device, dtype, training)
    able = {name: backend for name, backend in BACKENDS.items() if backend.why_not(problem) is None}
    functions = {name: lambda backend=backend: step(backend, problem, training) for name, backend in able.items()}
    for function in functions.values():
        function()
    times = interleaved(functions, device, repeats, seconds=2.0)
    return Measured(
        sizes,
        training,
        {name: timing.fastest for name, timing in times.items()},  # disturbances only add time
        {name: backend.work(problem) for name, backend in able.items()},
    )


def non_negative(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Solve least squares with non-negative coefficients exactly, by trying every subset of the few columns."""
    count = columns.shape[1]
    best, found = float("inf"), np.zeros(count)
    for size in range(1, count + 1):
        for chosen in map(list, combinations(range(count), size)):
            solution = np.linalg.lstsq(columns[:, chosen], target, rcond=None)[0]
            residual = float(np.square(columns[:, chosen] @ solution - target).sum())
            if (solution >= 0).all() and residual < best:
                best, found = residual, np.zeros(count)
                found[chosen] = solution
    return found


def fit(measured: list[Measured], name: str, training: bool) -> Rates:
    rows = [one for one in measured if one.training == training and name in one.seconds]
    if not rows:
        raise ValueError(f"backend {name!r} cannot run any of the problems on this device")
    nanoseconds = np.array([one.seconds[name] * 1e9 for one in rows])
    work = np.array([(1.0, one.work[name][0] / 1e3, one.work[name][1] / 1e3) for one in rows])
    return Rates(*(float(x) for x in non_negative(work / nanoseconds[:, None], np.ones(len(rows)))))


def predicted(one: Measured, rates: Fitted) -> dict[str, float]:
    found = {}
    for name, (macs, elements) in one.work.items():
        rate = rates[name][one.training]
        found[name] = (rate.call + (rate.macs * macs + rate.elements * elements) / 1e3) * 1e-9
    return found


def regret(one: Measured, rates: Fitted) -> tuple[str, str, float]:
    """Return the fastest backend, the choice of `auto`, and the ratio of their times."""
    best = min(one.seconds, key=one.seconds.__getitem__)
    guess = predicted(one, rates)
    pick = min(guess, key=guess.__getitem__)
    return best, pick, one.seconds[pick] / one.seconds[best]


def source(rates: Fitted) -> str:
    """Return the constants as Python code for choose.py."""

    def written(rate: Rates) -> str:
        return f"Rates({rate.call:.3g}, {rate.macs:.3g}, {rate.elements:.3g})"

    lines = [
        f'    "{name}": ({written(inference)}, {written(training)}),' for name, (inference, training) in rates.items()
    ]
    return "\n".join(["RATES = {", *lines, "}"])


@dataclass(frozen=True)
class Calibrate:
    """Measure and print the constants of the cost model of `auto`."""

    device: Annotated[str | None, optional("DEVICE")] = None
    """cpu, cuda or cuda:1; default: a GPU if there is one."""
    dtype: str = "float32"
    """dtype of the operation."""
    repeats: int = 5
    """Number of runs; the fastest one counts."""
    threads: Annotated[int | None, optional("N")] = None
    """CPU threads; default: torch's number."""
    quick: bool = False
    """Measure only a few tiny problems, to test the script."""

    def run(self, console: Console | None = None) -> int:
        console = console or Console()
        device, dtype = chosen_device(self.device), getattr(torch, self.dtype)
        wanted = list(product(grid_of_problems(self.quick), (False, True)))
        with threads(self.threads):
            measured = [
                measure(sizes, device, dtype, training, self.repeats)
                for sizes, training in track(wanted, "calibrate", console=console, transient=True)
            ]
        names = [name for name in BACKENDS if any(name in one.seconds for one in measured)]
        rates = {name: (fit(measured, name, False), fit(measured, name, True)) for name in names}
        now = {name: choose.RATES[device.type][name] for name in names}
        show(measured, rates, now, console)
        console.print(source(rates), highlight=False, soft_wrap=True)
        return 0


def show(measured: list[Measured], rates: Fitted, now: Fitted, console: Console) -> None:
    table = Table(title="Slowdown of auto's choice relative to the fastest backend")
    for title in ("problem", "mode", "fastest", "fitted", "regret", "current", "regret", "milliseconds"):
        table.add_column(title)
    for one in measured:
        best, pick, fitted_regret = regret(one, rates)
        _, current, current_regret = regret(one, now)
        times = " ".join(f"{name} {seconds * 1e3:.3g}" for name, seconds in one.seconds.items())
        mode = "training" if one.training else "inference"
        table.add_row(str(one.sizes), mode, best, pick, f"{fitted_regret:.2f}", current, f"{current_regret:.2f}", times)
    wide(console).print(table)
    for name, which in (("fitted", rates), ("current", now)):
        all_regrets = [regret(one, which)[2] for one in measured]
        mean = float(np.exp(np.mean(np.log(all_regrets))))
        console.print(f"{name} constants: regret {mean:.3f} in the geometric mean, {max(all_regrets):.2f} at worst")


if __name__ == "__main__":
    import tyro

    sys.exit(tyro.cli(Calibrate).run())

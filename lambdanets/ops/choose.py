"""The choice of the implementation (backend).

Each implementation has a function `why_not(problem)`, which returns None if it can run and the reason if it cannot.
`"auto"` takes the one with the lowest predicted time. The prediction uses constants measured on a CPU, which
`benchmarks/calibrate.py` prints: nanoseconds for a call, for a thousand multiply-adds and for a thousand intermediate
elements. On a GPU `"auto"` takes `fused` wherever it can run. The others are ranked there by the constants of the CPU,
because none were measured, so the predicted seconds are meaningless.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from lambdanets.ops import conv, depthwise, dft, fft, gemm
from lambdanets.ops.positions import Relative
from lambdanets.ops.problem import Problem
from lambdanets.ops.triton import backend as fused_backend


@dataclass(frozen=True)
class Backend:
    """An implementation of the position part of the operation.

    `whole_output`, if there is one, computes the whole operation, accumulated in a given dtype. It returns None for
    problems that it does not support.
    """

    name: str
    why_not: Callable[[Problem], str | None]
    work: Callable[[Problem], tuple[float, float]]
    position_output: Callable[[Problem], Tensor]
    whole_output: Callable[[Problem, torch.dtype], Tensor | None] | None = None


@dataclass(frozen=True)
class Rates:
    """Costs in nanoseconds: of a call, of a thousand multiply-adds and of a thousand intermediate elements."""

    call: float
    macs: float
    elements: float


MODULES = {"gemm": gemm, "conv": conv, "depthwise": depthwise, "dft": dft, "fft": fft, "fused": fused_backend}
BACKENDS = {
    name: Backend(name, module.why_not, module.work, module.position_output, getattr(module, "whole_output", None))
    for name, module in MODULES.items()
}
NAMES = ("auto", "reference", *BACKENDS)

NEVER = Rates(1e12, 0.0, 0.0)  # can run on request, but "auto" does not take it

# (inference, training step), from `python benchmarks/calibrate.py --threads 1`, float32, a core with AVX-512. "dft"
# and "gemm" have become a little faster since. "depthwise" was measured on a busy machine (the others took 1.1 to 2.3
# times their constants) and is not scaled, so it is chosen only where it is clearly faster (inference, scope 7). The
# call cost of its training step is that of "conv", because the fit gave less than for inference.
CPU_RATES = {
    "gemm": (Rates(1.6e5, 32.6, 352.0), Rates(5.11e5, 68.4, 3310.0)),
    "conv": (Rates(2.5e5, 17.0, 920.0), Rates(6.8e5, 184.0, 5420.0)),
    "depthwise": (Rates(5.78e5, 28.5, 300.0), Rates(6.8e5, 357.0, 6000.0)),
    "dft": (Rates(5.69e5, 36.1, 248.0), Rates(1.37e6, 118.0, 775.0)),
    "fft": (Rates(1.76e5, 594.0, 308.0), Rates(7.24e5, 1200.0, 883.0)),
    "fused": (NEVER, NEVER),  # Triton's interpreter
}
# No rates were measured on a GPU: "fused" comes first, "depthwise" is never chosen.
CUDA_RATES = {**CPU_RATES, "depthwise": (NEVER, NEVER), "fused": (Rates(0.0, 0.0, 0.0), Rates(0.0, 0.0, 0.0))}
RATES = {"cpu": CPU_RATES, "cuda": CUDA_RATES}
MOST_CHOICES = 1024
_choices: dict[Hashable, str] = {}  # cache of `fastest` by `key_of`: choosing is a sixth of the time of a small layer


def seconds(backend: Backend, problem: Problem) -> float:
    """Return the predicted time of the position part, including the backward pass if gradients are needed."""
    rates = RATES.get(problem.device.type, CPU_RATES)[backend.name][problem.needs_grad]
    macs, elements = backend.work(problem)
    return (rates.call + (rates.macs * macs + rates.elements * elements) / 1e3) * 1e-9


def reasons(problem: Problem) -> dict[str, str | float]:
    """Return for each implementation the predicted seconds, fastest first, or the reason why it cannot run."""
    if problem.positions is None:
        return dict.fromkeys(BACKENDS, 0.0)
    found = {name: backend.why_not(problem) or seconds(backend, problem) for name, backend in BACKENDS.items()}
    return dict(sorted(found.items(), key=lambda item: float("inf") if isinstance(item[1], str) else item[1]))


def choose(problem: Problem, wanted: str) -> Backend:
    """Return the implementation to run. Raise ValueError if `wanted` is unknown or cannot run."""
    if wanted == "auto":
        fused = BACKENDS["fused"]
        if problem.device.type == "cuda" and problem.positions is not None and fused.why_not(problem) is None:
            return fused  # shortcut: by CUDA_RATES it is always the fastest
        key = key_of(problem)
        if key is None:
            return fastest(problem)
        if key not in _choices:
            if len(_choices) >= MOST_CHOICES:
                _choices.clear()
            _choices[key] = fastest(problem).name
        return BACKENDS[_choices[key]]
    if wanted not in BACKENDS:
        raise ValueError(unknown(wanted, problem))
    reason = None if problem.positions is None else BACKENDS[wanted].why_not(problem)
    if reason is not None:
        raise ValueError(f"backend {wanted!r} cannot run here: {reason}. {alternatives(problem)}")
    return BACKENDS[wanted]


def fastest(problem: Problem) -> Backend:
    """Return the implementation with the lowest predicted time."""
    return BACKENDS[next(iter(reasons(problem)))]  # gemm can always run, so the first one can


def key_of(problem: Problem) -> Hashable:
    """Return everything that the choice depends on, for relative positions without masks; otherwise None."""
    positions, keys = problem.positions, problem.keys_BMKU
    if not isinstance(positions, Relative) or problem.mask_NM is not None or problem.context_mask_BM is not None:
        return None
    grids = positions.query_grid, positions.context_grid, positions.dilation, positions.stride
    types = problem.queries_BNHK.dtype, problem.values_BMVU.dtype, positions.table.dtype, keys is None
    sizes = problem.sizes, tuple(positions.table.shape), positions.kept is None
    if not all(type(size) is int for size in problem.sizes):  # symbolic sizes
        return None
    return *grids, *types, *sizes, problem.key_norm, problem.causal, problem.needs_grad, problem.device


def unknown(wanted: str, problem: Problem) -> str:
    """Return the error message for an unknown backend."""
    return f"unknown backend {wanted!r}; choose one of {', '.join(map(repr, NAMES))}. {alternatives(problem)}"


def alternatives(problem: Problem) -> str:
    """Return a sentence that lists which implementations can run, and why the others cannot."""
    said = [
        f"{name}: {'cannot run, ' + why if isinstance(why, str) else 'can run'}"
        for name, why in reasons(problem).items()
    ]
    return "For this input: " + "; ".join(["auto: can run", "reference: can run", *said])

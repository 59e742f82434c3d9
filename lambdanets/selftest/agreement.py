"""Comparison of a case on a backend with the float64 reference: values and all gradients.

As for FlashAttention, the normwise error of each tensor against float64 may be twice that of plain PyTorch in the same
dtype. Plain PyTorch may happen to be exact, and in float32 and float64 two correct orders of summation may differ by
more, so an error is also allowed if it is within the rounding error of any stable algorithm:
    eps(dtype) |expected|  +  4 eps(accumulation dtype) |the same sums with every term made positive|
The second norm accounts for cancellation. For backends with a Fourier transform the factor is 8 instead of 4, because
terms are rounded in the transform and in its inverse.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lambdanets.ops import content, dft, explain, fft, gemm, lambda_op, lambda_reference
from lambdanets.ops.positions import Dense, Positions, Relative
from lambdanets.ops.reference import L2_EPSILON, embed
from lambdanets.selftest.cases import Inputs, SelftestCase

TIMES_PLAIN = 2.0
TIMES_ROUNDING = 4.0
INFERENCE = "output without gradients"
FOURIER = ("dft", "fft", "auto")  # backends that may use a Fourier transform
# Every constant for the size of chunks, and a value for which small cases need several chunks
CHUNKS = (
    (gemm, "WORKSPACE", 3000),
    (gemm, "PART", 300),
    (fft, "WORKSPACE", 3000),
    (dft, "WORKSPACE", 3000),
    (dft, "TILE", 2),
    (content, "MASKED_WEIGHTS", 3000),
    (content, "CAUSAL_CHUNK", 3),
)

Results = dict[str, Tensor]  # "output", a gradient for each input, and INFERENCE


@dataclass(frozen=True)
class Verdict:
    """The error of one tensor against float64, that of plain PyTorch, and the allowed error."""

    tensor: str
    error: float
    plain: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # False for NaN

    @property
    def by_plain(self) -> bool:
        """Whether the error of plain PyTorch determines the allowed error, not the rounding bound."""
        return 0 < self.allowed <= TIMES_PLAIN * self.plain

    @property
    def share(self) -> float:
        """The error divided by the allowed error."""
        if self.error <= self.allowed:
            return self.error / self.allowed if self.allowed else 0.0
        return self.error / self.allowed if self.allowed and self.error == self.error else float("inf")


@dataclass(frozen=True, eq=False)
class Oracle:
    """The expected results of a case and the tolerances."""

    case: SelftestCase
    inputs: Inputs
    expected: Results
    plain: Results
    magnitude: Results


def options_of(case: SelftestCase, inputs: Inputs) -> dict[str, Any]:
    """Return the options of the operation for `lambda_op` and `explain`."""
    return {
        "content": case.content,
        "key_norm": case.key_norm,
        "multi_head": case.multi_head,
        "mask": inputs.mask,
        "context_mask": inputs.context_mask,
        "causal": case.causal,
    }


def choices(case: SelftestCase, inputs: Inputs) -> dict[str, str | float]:
    """Return the result of `explain` for a case: for each backend a prediction, or the reason why it cannot run."""
    tensors = inputs.tensors
    assert tensors["queries"] is not None
    assert tensors["values"] is not None
    return explain(tensors["queries"], tensors["keys"], tensors["values"], inputs.positions, **options_of(case, inputs))


def differentiate(
    function: Callable[[Tensor, Tensor | None, Tensor, Positions | None], Tensor],
    inputs: Inputs,
    leaves: dict[str, Tensor | None],
    embeddings: Tensor | None,
    gradient: Tensor,
) -> Results:
    """Return the output and the gradients of all leaves that require one."""
    queries, values = leaves["queries"], leaves["values"]
    assert queries is not None
    assert values is not None
    output = function(queries, leaves["keys"], values, inputs.placed(embeddings))
    wanted = {name: leaf for name, leaf in leaves.items() if leaf is not None and leaf.requires_grad}
    found = torch.autograd.grad(output, list(wanted.values()), gradient.to(output.dtype), materialize_grads=True)
    return {"output": output.detach(), **dict(zip(wanted, found, strict=True))}


def oracle(case: SelftestCase, inputs: Inputs) -> Oracle:
    """Compute the reference in float64, in the dtype of the case, and in float64 without cancellation."""
    options = {**options_of(case, inputs), "query_softmax": case.query_softmax}

    def reference(*args: Any) -> Tensor:
        return lambda_reference(*args, **options)

    exact = inputs.leaves(torch.float64, case.frozen)
    expected = differentiate(reference, inputs, exact, exact["embeddings"], inputs.gradient)
    rough = inputs.leaves(None, case.frozen)
    # einsum needs one dtype, so wide embeddings are cast to the dtype of the activations, as under autocast.
    embeddings = None if rough["embeddings"] is None else rough["embeddings"].to(inputs.gradient.dtype)
    plain = differentiate(reference, inputs, rough, embeddings, inputs.gradient)
    magnitude = magnitudes(case, inputs)
    for results in (expected, plain, magnitude):
        results[INFERENCE] = results["output"]
    return Oracle(case, inputs, expected, plain, magnitude)


def magnitudes(case: SelftestCase, inputs: Inputs) -> Results:
    """Return the output and gradients with every term positive and none masked, for normalised keys."""
    leaves = inputs.leaves(torch.float64, case.frozen)
    divisor = None
    with torch.no_grad():
        keys = leaves["keys"]
        if keys is not None and case.key_norm is not None:
            if case.masked:  # each query normalises over its own context: at most 1
                divisor = keys.abs() if case.key_norm == "l2" else None
                leaves["keys"] = torch.ones_like(keys)
            elif case.key_norm == "softmax":
                leaves["keys"] = keys.softmax(dim=1)
            else:
                divisor = keys.norm(dim=1, keepdim=True)
                leaves["keys"] = keys / divisor
        if case.query_softmax and leaves["queries"] is not None:
            leaves["queries"] = leaves["queries"].softmax(dim=-1)
        positive = {name: None if leaf is None else leaf.abs() for name, leaf in leaves.items()}
    for name, leaf in positive.items():
        if leaf is not None:
            leaf.requires_grad_(name != case.frozen)
    options = {**options_of(case, inputs), "key_norm": None, "mask": None, "causal": False}

    def reference(queries: Tensor, keys: Tensor | None, values: Tensor, positions: Positions | None) -> Tensor:
        if isinstance(positions, Relative):
            # A Fourier transform mixes all positions: its rounding errors also reach pairs outside the scope or mask,
            # in proportion to the contribution of an average embedding.
            average = positions.table.flatten(0, positions.dims - 1).mean(dim=0)
            positions = Dense(embed(positions) + average)
        return lambda_reference(queries, keys, values, positions, **options)

    found = differentiate(reference, inputs, positive, positive["embeddings"], inputs.gradient.abs())
    gradient = found.get("keys")
    if divisor is not None and gradient is not None:  # the gradient of l2 divides by the norm once more
        found["keys"] = (gradient / divisor.clamp(min=L2_EPSILON)).nan_to_num(0.0)
    return found


def run_backend(case: SelftestCase, inputs: Inputs, backend: str) -> Results:
    """Return output and gradients of a backend in the dtype of the case, and the output without gradients."""
    leaves = inputs.leaves(None, case.frozen)
    options = {**options_of(case, inputs), "query_softmax": case.query_softmax, "backend": backend}

    def run(*args: Any) -> Tensor:
        return lambda_op(*args, **options)

    with conditions(case):
        found = differentiate(run, inputs, leaves, leaves["embeddings"], inputs.gradient)
        with torch.no_grad():  # may run different code
            given = (leaves[name] for name in ("queries", "keys", "values"))
            found[INFERENCE] = run(*given, inputs.placed(leaves["embeddings"]))
    return found


@contextlib.contextmanager
def conditions(case: SelftestCase) -> Iterator[None]:
    """Set tiny chunks and NaN in new memory if the case has them, and full float32 precision in convolutions."""
    chunks = [(module, name, getattr(module, name), value) for module, name, value in CHUNKS if case.small_workspace]
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    tf32 = torch.backends.cudnn.allow_tf32
    try:
        for module, name, _, value in chunks:
            setattr(module, name, value)
        torch.backends.cudnn.allow_tf32 = False  # on by default, with errors of 1e-3
        with warnings.catch_warnings():
            if case.poisoned:  # deterministic mode fills torch.empty with NaN
                warnings.simplefilter("ignore")
                torch.use_deterministic_algorithms(True, warn_only=True)
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.allow_tf32 = tf32
        for module, name, value, _ in chunks:
            setattr(module, name, value)


def judge(truth: Oracle, found: Results, backend: str) -> list[Verdict]:
    """Return a verdict for the output and each gradient of a backend."""
    times = TIMES_ROUNDING * (2 if backend in FOURIER else 1)
    dtype = getattr(torch, truth.case.dtype)
    summed = torch.promote_types(dtype, torch.float32)
    verdicts = []
    for name, expected in truth.expected.items():
        got, plain, magnitude = found.get(name), truth.plain[name], truth.magnitude[name]
        if got is None or got.shape != expected.shape:
            verdicts.append(Verdict(name, float("nan"), 0.0, 0.0))
            continue
        error = (got.double() - expected).norm().item()
        plain_error = (plain.double() - expected).norm().item()
        rounding = torch.finfo(dtype).eps * expected.norm().item()
        rounding += times * torch.finfo(summed).eps * magnitude.norm().item()
        twice = TIMES_PLAIN * plain_error if math.isfinite(plain_error) else 0.0
        verdicts.append(Verdict(name, error, plain_error, max(twice, rounding)))
    return verdicts

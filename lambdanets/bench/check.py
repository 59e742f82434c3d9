"""Correctness checks before measurements: the operation against the reference, our layer against public layers.

Letters: B batch, N queries, M context positions, H heads, K key depth, V value depth.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lambdanets.bench.cases import BenchCase, OpInputs, op_inputs
from lambdanets.bench.peers import Contender, without_position_bias
from lambdanets.layers.pool import halved
from lambdanets.ops import lambda_op, lambda_reference
from lambdanets.ops import triton as fused
from lambdanets.ops.gemm import relation_rows

SAMPLED_QUERIES, SAMPLED_WINDOWS = 32, 8
# Normwise relative errors: rounding is far below them, a wrong formula far above.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
TF32_TOLERANCE = 5e-3


class MismatchError(Exception):
    """Two implementations disagree."""


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of the expected tensor."""
    difference = (found.double() - expected.double()).norm()
    return (difference / expected.double().norm().clamp(min=torch.finfo(torch.float64).tiny)).item()


def tolerance(dtype: torch.dtype, device: torch.device) -> float:
    """Return the allowed relative error."""
    tf32 = torch.backends.cudnn.allow_tf32 or torch.get_float32_matmul_precision() != "highest"
    return TF32_TOLERANCE if dtype == torch.float32 and device.type == "cuda" and tf32 else TOLERANCE[dtype]


def check_operation(case: BenchCase, backend: str, device: torch.device, training: bool) -> float:
    """Compare a backend at the sizes of a case with the reference in float64, and return the largest relative error.

    The reference is computed only for a few queries. With an output gradient that is zero for the other queries, it
    gives all gradients too.
    """
    inputs = op_inputs(case, device)
    rows = sampled(case.positions, SAMPLED_QUERIES, device)
    gradient = torch.zeros_like(inputs.gradient)
    gradient[:, rows] = inputs.gradient[:, rows]
    with torch.set_grad_enabled(training):
        output = lambda_op(inputs.queries, inputs.keys, inputs.values, inputs.positions, backend=backend)
        found = [output[:, rows]]
        if training:
            found += torch.autograd.grad(output, inputs.leaves, gradient)
        expected = reference_rows(op_inputs(case, device, torch.float64), rows, training)
    return compared(found, expected, backend, case, device)


def check_pooled(case: BenchCase, backend: str, device: torch.device, training: bool) -> float:
    """Compare the pooled output like `check_operation`, for a few windows."""
    inputs, exact = op_inputs(case, device), op_inputs(case, device, torch.float64)
    share_PN = shares_of_windows(case.grid, device)
    some = sampled(len(share_PN), SAMPLED_WINDOWS, device)
    rows = share_PN[some].any(0).nonzero().squeeze(1)
    with torch.set_grad_enabled(training):
        output = pooled_output(inputs, case, backend)
        right = torch.einsum("pn,bnhv->bphv", share_PN[some][:, rows], reference_rows(exact, rows, False)[0])
        found, expected = [output[:, some]], [right]
        if training:
            gradient = torch.zeros_like(output)
            gradient[:, some] = inputs.gradient[:, some]
            found += torch.autograd.grad(output, inputs.leaves, gradient)
            expected += torch.autograd.grad(right, exact.leaves, exact.gradient[:, some])
    return compared(found, expected, backend, case, device)


def pooled_output(inputs: OpInputs, case: BenchCase, backend: str) -> Tensor:
    """Return the pooled output [B, P, H, V], computed in one step where a layer would do so."""
    queries, keys, values, positions = inputs.queries, inputs.keys, inputs.values, inputs.positions
    sizes = (case.key_depth, values.shape[2], case.heads)
    if backend in ("auto", "fused") and fused.why_not(queries.device, queries.dtype, *sizes) is None:
        return fused.fused_relative(
            queries, values, None, positions.table, case.grid, case.grid, keys=keys, pooled=True
        )
    output = lambda_op(queries, keys, values, positions, backend=backend)
    images = output.flatten(2).mT.unflatten(2, case.grid)
    return halved(images).flatten(2).mT.unflatten(2, output.shape[2:])


def shares_of_windows(grid: tuple[int, int], device: torch.device) -> Tensor:
    """Return the weight of each position in each pooling window, [P, N]."""
    height, width = (
        ((torch.arange(side) - 2 * torch.arange((side + 1) // 2)[:, None]).abs() <= 1).double() / 3 for side in grid
    )
    return torch.einsum("pn,qm->pqnm", height, width).flatten(2).flatten(0, 1).to(device)


def sampled(count: int, most: int, device: torch.device) -> Tensor:
    """Return at most `most` evenly spaced indices below `count`."""
    return torch.linspace(0, count - 1, min(count, most), device=device).round().long().unique()


def compared(
    found: Sequence[Tensor], expected: Sequence[Tensor], backend: str, case: BenchCase, device: torch.device
) -> float:
    """Return the largest relative error. Raise MismatchError if it is not allowed."""
    worst = max(relative_error(mine, right) for mine, right in zip(found, expected, strict=True))
    allowed = tolerance(case.torch_dtype, device)
    if not worst <= allowed:
        raise MismatchError(
            f"{backend} at {case.name}: relative error {worst:.1e} against the reference, allowed: {allowed}"
        )
    return worst


def reference_rows(inputs: OpInputs, rows: Tensor, training: bool) -> list[Tensor]:
    """Return the output of the reference for some queries, and in training the gradients."""
    positions = relation_rows(inputs.positions, rows)
    output = lambda_reference(inputs.queries[:, rows], inputs.keys, inputs.values, positions)
    if not training:
        return [output]
    return [output, *torch.autograd.grad(output, inputs.leaves, inputs.gradient[:, rows])]


def check_twin(contender: Contender, case: BenchCase, device: torch.device) -> float:
    """Compare output and input gradient of our layer and a public one with equal weights, in float32 training mode."""
    assert contender.twin is not None
    # Two images: with one, BatchNorm2d of torch 2.15 has a wrong gradient on the CPU in the public layers.
    small = BenchCase(case.shape, case.scope, 2, "float32", case.heads, case.key_depth)
    torch.manual_seed(0)
    peer = without_position_bias(contender.build(small))
    layer = contender.twin(peer, small)
    x = small.image(device)
    results = [forward_backward(module.to(device).train(), x) for module in (layer, peer)]
    worst = max(relative_error(mine, theirs) for mine, theirs in zip(*results, strict=True))
    allowed = 10 * tolerance(torch.float32, device)  # both sides are float32, and batch norm divides
    if not worst <= allowed:
        raise MismatchError(
            f"our layer and {contender.name} differ at {case.name}: relative error {worst:.1e}, allowed: {allowed}"
        )
    return worst


def forward_backward(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the gradient of the input."""
    x = x.clone().requires_grad_()
    y = module(x)
    weight = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)
    return y.detach(), torch.autograd.grad((y * weight).sum(), x)[0]

"""Roofline model of the kernels of a lambda layer: useful work, minimum memory traffic, and share of the GPU's limits.

Useful work counts pairs of query and context in scope and on the map, as the paper does. Traffic counts what each
kernel must read and write once. Overheads of the implementation (padding, expanded tables, partial sums) do not count.
A kernel can read the results of the previous one from the cache, so small maps can exceed the memory bandwidth.

Letters: B batch, N queries and context positions, C channels, H heads, K key depth, V value depth,
S channels of the projection: queries, values and keys.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from lambdanets.bench.cases import BenchCase
from lambdanets.ops.triton.problem import content_flops, count_flops

# fmt: off
# Kernels by result, in the notation of the paper; norms, projections and the rest have no letter.
GROUPS = {
    "forward": ("forward_small", "forward_large", "forward_window"),
    "dq": ("query_gradients_small", "query_gradients_large", "query_gradients_window"),
    "g": ("lambda_gradients",),  # the gradients of lambdas; for small maps they are computed inside dv and dT
    "dv": ("value_gradients", "value_gradients_window"),
    "dT": ("table_gradients", "table_gradients_window", "sum_table_parts", "fold"),
    "tables": ("expand",),  # for the forward, dq and dv
    "content": ("content_forward", "content_backward"),
    "norms": ("batch_moments", "normalise_parts", "gradient_moments", "gradients_of_parts"),
    "projections": (),  # matrix products, see PRODUCTS
    "other": (),
}
# fmt: on
GROUP_OF = {kernel: group for group, kernels in GROUPS.items() for kernel in kernels}
# cuBLAS and CUTLASS. For some maps dc is also computed by such a product.
PRODUCTS = re.compile("nvjet|cutlass|gemm|gemv|splitk", re.IGNORECASE)
TITLES = ("group", "µs", "calls", "useful GFLOP", "useful TFLOP/s", "MB", "TB/s", "share of the limit")


@dataclass(frozen=True)
class Peaks:
    """The limits of a GPU per second: FLOPs of dense half-precision products, and bytes of memory traffic."""

    flops: float
    bytes: float


# By torch's device name, from NVIDIA's data sheets of H200, H100 (SXM) and A100 (SXM), without sparsity. The data
# sheets assume boost clocks, which long products do not sustain.
PEAKS = {
    "NVIDIA H200": Peaks(989e12, 4.8e12),
    "NVIDIA H100 80GB HBM3": Peaks(989e12, 3.35e12),
    "NVIDIA A100-SXM4-80GB": Peaks(312e12, 2.039e12),
    "NVIDIA A100-SXM4-40GB": Peaks(312e12, 1.555e12),
}


def peaks_of(gpu: str, dtype: str) -> Peaks | None:
    """Return the limits of a GPU, or None for unknown GPUs and for float32, which has several precisions."""
    return PEAKS.get(gpu) if dtype in ("bfloat16", "float16") else None


@dataclass(frozen=True)
class KernelTime:
    """Time and number of calls of a kernel in one step."""

    name: str
    microseconds: float
    calls: float


@dataclass(frozen=True)
class Work:
    """The minimum work of a group of kernels in one step."""

    flops: int
    bytes: int


def group_of(kernel: str) -> str:
    """Return the group of a kernel by its name."""
    return GROUP_OF.get(kernel) or ("projections" if PRODUCTS.search(kernel) else "other")


def per_step(kernel: str, microseconds: Sequence[float], steps: int) -> KernelTime:
    """Return the median over steps, given all calls in order; the mean if the number of calls differs between steps."""
    calls, rest = divmod(len(microseconds), steps)
    if rest:
        return KernelTime(kernel, sum(microseconds) / steps, len(microseconds) / steps)
    sums = [sum(microseconds[first : first + calls]) for first in range(0, len(microseconds), calls)]
    return KernelTime(kernel, median(sums), calls)


def work_of(case: BenchCase, mode: str, g_is_written: bool) -> dict[str, Work]:
    """Return the work of each group that has useful work. `g_is_written`: dv and dT read g instead of computing it."""
    B, N, C, H, K = case.batch, case.positions, case.shape.channels, case.heads, case.key_depth
    V, scopes, size = C // H, case.scopes, torch.empty(0, dtype=case.torch_dtype).element_size()
    lambdas = count_flops((B, N, H * K), (B, N, V), (*scopes, K, 1), case.grid, case.grid, 1)  # includes applying them
    spread = 2 * B * N * H * K * V
    content = content_flops((B, N, K), (B, N, V))
    q, k, v, x, g = (B * N * depth for depth in (H * K, K, V, C, K * V))  # elements; the output has those of x
    table, weight = scopes[0] * scopes[1] * K, (H * K + V + K) * C
    normed, product = q + v, q + v + k
    whole = 4 * B * K * V  # bytes of the content lambda, or of its gradient, in float32
    projection = 2 * B * N * weight

    if mode == "inference":
        return {
            "forward": Work(lambdas, size * (q + v + table + x) + whole),
            "content": Work(content, size * (k + v) + whole),
            "projections": Work(projection, size * (x + weight + product)),
        }
    if g_is_written:
        gradients = {
            "g": Work(spread, size * (q + x + g) + whole),
            "dv": Work(lambdas - spread, size * (g + table + v)),
            "dT": Work(lambdas - spread, size * (g + v + table)),
        }
    else:
        gradients = {
            "dv": Work(lambdas, size * (q + x + table + v) + whole),
            "dT": Work(lambdas, size * (q + x + v + table)),
        }
    moments, norm = normed, 2 * product
    gradient_moments, norm_gradient = 2 * normed, normed + 2 * product
    return {
        "forward": Work(lambdas, size * (q + v + table + x) + whole),
        "dq": Work(lambdas, size * (x + v + table + q) + whole),
        **gradients,
        # Backward: gradients of keys and of values; the latter are added to dv.
        "content": Work(3 * content, size * ((k + v) + (2 * k + 3 * v)) + 3 * whole),
        "norms": Work(0, size * (moments + norm + gradient_moments + norm_gradient)),
        # Backward: gradients of the input and of the weights.
        "projections": Work(3 * projection, size * 3 * (x + weight + product)),
    }


def grouped(case: BenchCase, mode: str, times: Iterable[KernelTime]) -> list[dict[str, Any]]:
    """Return the rows of the result, one for each group that ran."""
    times = sorted(times, key=lambda time: -time.microseconds)
    found = {group: [time for time in times if group_of(time.name) == group] for group in GROUPS}
    works = work_of(case, mode, bool(found["g"]))
    rows = []
    for group, kernels in found.items():
        if kernels:
            work = works.get(group)
            rows.append(
                {
                    **case.fields(),
                    "mode": mode,
                    "group": group,
                    "microseconds": sum(time.microseconds for time in kernels),
                    "calls": sum(time.calls for time in kernels),
                    "flops": work and work.flops,
                    "bytes": work and work.bytes,
                    "kernels": [vars(time) for time in kernels],
                }
            )
    return rows


def least_times(row: dict[str, Any], peaks: Peaks) -> dict[str, float]:
    """Return the microseconds of a row's work at each limit of the GPU."""
    return {
        "compute": 1e6 * (row["flops"] or 0) / peaks.flops,
        "memory": 1e6 * (row["bytes"] or 0) / peaks.bytes,
    }


def share(rows: Sequence[dict[str, Any]], peaks: Peaks | None) -> float | None:
    """Return the minimum time of these rows under the GPU's limits, divided by their measured time."""
    if peaks is None:
        return None
    least = sum(max(least_times(row, peaks).values()) for row in rows)
    return least / sum(row["microseconds"] for row in rows)


def lines(rows: Sequence[dict[str, Any]], peaks: Peaks | None) -> list[list[str]]:
    """Return the cells of a table with TITLES: a line per group of one case and mode, and their sum."""
    found = []
    for row in rows:
        time, flops, size = row["microseconds"], row["flops"], row["bytes"]
        cells = [row["group"], number(time), number(row["calls"])]
        cells += [number(flops / 1e9), number(flops / 1e6 / time)] if flops else ["-", "-"]
        cells += [number(size / 1e6), number(size / 1e6 / time)] if size else ["-", "-"]
        part = share([row], peaks)
        if peaks is None or not part:
            cells.append("-")
        else:
            least = least_times(row, peaks)
            cells.append(f"{part:.0%} ({max(least, key=least.__getitem__)})")
        found.append(cells)
    time, flops = sum(row["microseconds"] for row in rows), sum(row["flops"] or 0 for row in rows)
    calls, part = sum(row["calls"] for row in rows), share(rows, peaks)
    cells = ["sum", number(time), number(calls), number(flops / 1e9), number(flops / 1e6 / time), "-", "-"]
    return [*found, [*cells, "-" if part is None else f"{part:.0%}"]]


def sentence(rows: Sequence[dict[str, Any]], peaks: Peaks | None) -> str:
    """Summarise one case and mode in a line."""
    time, calls = (sum(row[name] for row in rows) for name in ("microseconds", "calls"))
    parts = ", ".join(f"{row['group']} {number(row['microseconds'])}" for row in rows)
    part = share(rows, peaks)
    limit = "" if part is None else f"; {part:.0%} of the limit"
    return f"{number(time)} µs in {number(calls)} kernel{'s' if calls != 1 else ''} ({parts}){limit}"


def number(value: float) -> str:
    """Format a number with three significant digits, without dropping digits before the decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

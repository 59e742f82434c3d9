"""The paper's complexity tables: growth of time and memory when one size doubles, by formula and measured.

Letters: b batch, n queries (and context positions, m = n), r local scope, h heads, k key depth, d output depth (d / h
per head), u intra-depth.

The operations are those of the paper's equations with all embeddings in memory; only the lambda convolution uses our
implementation. Space is the peak memory of a call, including its output, which the formulas omit, and the embeddings.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, einsum

from lambdanets.bench.timing import interleaved, peak_bytes
from lambdanets.machine import threads
from lambdanets.ops import Dense, Relative, lambda_op


@dataclass(frozen=True)
class Sizes:
    """One value for each letter."""

    b: int = 4
    n: int = 256
    r: int = 31
    h: int = 4
    k: int = 16
    d: int = 64
    u: int = 1

    @property
    def v(self) -> int:
        return self.d // self.h

    def doubled(self, letter: str) -> "Sizes":
        return replace(self, **{letter: 2 * getattr(self, letter)})

    def text(self) -> str:
        return " ".join(f"{letter}={value}" for letter, value in vars(self).items())


Call = Callable[[], object]
QUICK = Sizes()
CPU = Sizes(n=512)
CUDA = Sizes(b=16, n=1024, r=63)


@dataclass(frozen=True)
class Operation:
    """A row of a complexity table; `build` returns a call and the embeddings that it keeps in memory."""

    time: str  # the formulas as printed in the paper
    space: str
    seconds: Callable[[Sizes], float]  # the formulas as functions
    elements: Callable[[Sizes], float]
    build: Callable[[Sizes, torch.device], tuple[Call, Sequence[Tensor]]]
    letters: str = "bnkd"  # the sizes that are doubled


def draw(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(0), device=device)


def attention(relative: bool) -> Callable[[Sizes, torch.device], tuple[Call, Sequence[Tensor]]]:
    """Build multi-head softmax attention; `relative` adds an embedding for every pair of positions."""

    def build(s: Sizes, device: torch.device) -> tuple[Call, Sequence[Tensor]]:
        queries, keys = (draw(s.b, s.n, s.h, s.k, device=device) for _ in range(2))
        values = draw(s.b, s.n, s.h, s.v, device=device)
        embeddings = draw(s.n, s.n, s.k, device=device) if relative else None

        def call() -> Tensor:
            logits = einsum("bnhk,bmhk->bhnm", queries, keys)
            if embeddings is not None:
                logits += einsum("bnhk,nmk->bhnm", queries, embeddings)
            return einsum("bhnm,bmhv->bnhv", logits.softmax(dim=-1), values)

        return call, []  # the paper's table does not count the embeddings of attention

    return build


def linear_attention(s: Sizes, device: torch.device) -> tuple[Call, Sequence[Tensor]]:
    queries, keys = (draw(s.b, s.n, s.h, s.k, device=device) for _ in range(2))
    values = draw(s.b, s.n, s.h, s.v, device=device)
    return lambda: lambda_op(queries, keys, values, multi_head=True, backend="reference"), []


def lambda_layer(*, multi_head: bool = False) -> Callable[[Sizes, torch.device], tuple[Call, Sequence[Tensor]]]:
    def build(s: Sizes, device: torch.device) -> tuple[Call, Sequence[Tensor]]:
        heads = (s.h,) if multi_head else ()
        depth = (s.u,) if s.u > 1 else ()
        queries = draw(s.b, s.n, s.h, s.k, device=device)
        keys = draw(s.b, s.n, *heads, s.k, *depth, device=device)
        values = draw(s.b, s.n, *heads, s.v, *depth, device=device)
        embeddings = draw(s.n, s.n, *heads, s.k, *depth, device=device)
        positions = Dense(embeddings)

        def call() -> Tensor:
            return lambda_op(queries, keys, values, positions, multi_head=multi_head, backend="reference")

        return call, [embeddings]

    return build


def lambda_convolution(s: Sizes, device: torch.device) -> tuple[Call, Sequence[Tensor]]:
    queries, keys = draw(s.b, s.n, s.h, s.k, device=device), draw(s.b, s.n, s.k, device=device)
    values, table = draw(s.b, s.n, s.v, device=device), draw(s.r, s.k, device=device)
    positions = Relative(table, (s.n,))
    return lambda: lambda_op(queries, keys, values, positions, backend="conv"), [table]


def lambda_row(space: str, *, multi_head: bool, letters: str) -> Operation:
    """Return a lambda layer with corrected formulas: the paper's table of multi-head layers swaps knm and hknm."""
    groups = (lambda s: s.h) if multi_head else (lambda s: 1)
    return Operation(
        "bnmkd" if multi_head else "bnmkud/h" if "u" in letters else "bnmkd/h",
        space,
        lambda s: s.b * s.n * s.n * s.k * s.u * s.v * groups(s),
        lambda s: groups(s) * (s.k * s.n * s.n * s.u + s.b * s.n * s.k * s.v),
        lambda_layer(multi_head=multi_head),
        letters,
    )


def attention_row(relative: bool) -> Operation:
    return Operation(
        "bnm(hk+d)",
        "bhnm",
        lambda s: s.b * s.n * s.n * (s.h * s.k + s.d),
        lambda s: s.b * s.h * s.n * s.n,
        attention(relative),
        "bnkdh",
    )


MULTI_QUERY = lambda_row("knm + bnkd/h", multi_head=False, letters="bnkdh")
MULTI_HEAD = lambda_row("hknm + bnkd (printed: knm + bnkd)", multi_head=True, letters="bnkdh")
TABLES: dict[str, dict[str, Operation]] = {
    "tab:interactions_alternatives": {
        "Attention": attention_row(relative=False),
        "Relative attention": attention_row(relative=True),
        "Linear attention": Operation(
            "bnkd",
            "bkd (ours also has the output, bnd)",
            lambda s: s.b * s.n * s.k * s.d,
            lambda s: s.b * s.k * s.d,
            linear_attention,
        ),
        "Lambda layer": MULTI_QUERY,
        "Lambda convolution": Operation(
            "bnrkd/h",
            "kr + bnkd/h",
            lambda s: s.b * s.n * s.r * s.k * s.v,
            lambda s: s.k * s.r + s.b * s.n * s.k * s.v,
            lambda_convolution,
            "bnrkdh",
        ),
    },
    "tab:multihead_vs_multiquery": {
        "Multi-head lambda layer": MULTI_HEAD,
        "Multi-query lambda layer": replace(MULTI_QUERY, space="knm + bnkd/h (printed: hknm + bnkd/h)"),
    },
    "tab:complexity_u": {
        "Lambda layer (u > 1)": lambda_row("knmu + bnkv", multi_head=False, letters="ubnk"),
    },
}


@dataclass(frozen=True)
class Growth:
    """Ratios of time and memory after and before doubling one size."""

    seconds: float  # measured
    bytes: float
    base_seconds: float
    base_bytes: int


def formula(operation: Operation, sizes: Sizes, letter: str) -> tuple[float, float]:
    """Return the growth of time and space according to the formulas."""
    double = sizes.doubled(letter)
    return (
        operation.seconds(double) / operation.seconds(sizes),
        operation.elements(double) / operation.elements(sizes),
    )


def measure_growth(
    operation: Operation, sizes: Sizes, letter: str, device: torch.device, repeats: int, seconds: float
) -> Growth:
    """Time both sizes in turn and compare the fastest repeats, which other load on the machine affects least.

    It uses one CPU thread: synchronising several would add time that does not grow with the size.
    """
    calls, space = {}, {}
    for name, one in (("base", sizes), ("double", sizes.doubled(letter))):
        call, held = operation.build(one, device)
        call()
        calls[name] = call
        space[name] = peak_bytes(call, device) + sum(t.numel() * t.element_size() for t in held)
    with threads(1):
        times = interleaved(calls, device, repeats, seconds)
    base = times["base"].fastest
    return Growth(times["double"].fastest / base, space["double"] / space["base"], base, space["base"])

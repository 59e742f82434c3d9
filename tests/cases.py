"""Cases of the lambda operation: sizes and options in, the result and every gradient out.

Letters: B batch, N queries, M context positions, H heads, K key depth, V value depth, U intra-depth, R relations.
"""

from dataclasses import dataclass, replace
from math import prod

import torch

from lambdanets.ops import Dense, Relation, Relative, lambda_op, lambda_reference

RELATIONS = 5


@dataclass(frozen=True)
class Case:
    """One operation. `positions` is "relative", "dense", "relation" or None."""

    grid: tuple[int, ...] = (4, 5)
    context: tuple[int, ...] | None = None
    scope: tuple[int, ...] = (3, 3)
    dilation: int | tuple[int, ...] = 1
    stride: int | tuple[int, ...] = 1
    batch: int = 2
    heads: int = 2
    key_depth: int = 3
    value_depth: int = 4
    intra_depth: int = 1
    positions: str | None = "relative"
    content: bool = True
    key_norm: str | None = "softmax"
    query_softmax: bool = False
    multi_head: bool = False
    causal: bool | str = False
    mask: bool = False
    context_mask: bool = False

    def but(self, **changes) -> "Case":
        return replace(self, **changes)

    @property
    def context_grid(self) -> tuple[int, ...]:
        return self.grid if self.context is None else self.context

    def backends(self) -> list[str]:
        """The implementations that must take this case (written down here, not asked of the package)."""
        if self.positions != "relative" or self.mask:
            return ["gemm"]
        planar = ["dft"] if len(self.grid) == 2 else []
        if len(self.grid) > 3:
            return ["gemm", "fft"]
        return ["gemm", "conv", "depthwise", *planar, "fft"]


class Inputs:
    """Random tensors for a case: leaves that gradients can be asked of, and the options of `lambda_op`."""

    def __init__(self, case: Case, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.case = case
        B, N, M = case.batch, prod(case.grid), prod(case.context_grid)
        H, K, V = case.heads, case.key_depth, case.value_depth
        head = [H] if case.multi_head else []
        U = [] if case.intra_depth == 1 else [case.intra_depth]

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.leaves = {"queries": normal(B, N, H, K), "values": normal(B, M, *head, V, *U)}
        if case.content:
            self.leaves["keys"] = 2 * normal(B, M, *head, K, *U)
        leading = {"relative": [*case.scope], "dense": [N, M], "relation": [RELATIONS]}
        if case.positions is not None:
            self.leaves["embeddings"] = normal(*leading[case.positions], *head, K, *U)
        self.index = torch.randint(-1, RELATIONS, (N, M), generator=generator)
        self.gradient = normal(B, N, H, V)
        mask = context_mask = None
        if case.mask:
            mask = torch.rand(N, M, generator=generator) > 0.4
            mask[N // 2] = False  # a query that may look at nothing
        if case.context_mask:
            context_mask = torch.rand(B, M, generator=generator) > 0.3
            context_mask[1:2] = False  # an example that is padding only
            for name in self.leaves.keys() & {"keys", "values"}:  # padding may hold anything
                self.leaves[name][~context_mask] = float("nan")
        for leaf in self.leaves.values():
            leaf.requires_grad_()
        self.options = {
            "content": case.content,
            "key_norm": case.key_norm,
            "query_softmax": case.query_softmax,
            "multi_head": case.multi_head,
            "mask": mask,
            "context_mask": context_mask,
            "causal": case.causal,
        }

    def positions(self):
        case, embeddings = self.case, self.leaves.get("embeddings")
        if embeddings is None:
            return None
        if case.positions == "dense":
            return Dense(embeddings)
        if case.positions == "relation":
            return Relation(embeddings, self.index)
        return Relative(embeddings, case.grid, case.context_grid, case.dilation, case.stride)

    def arguments(self):
        return self.leaves["queries"], self.leaves.get("keys"), self.leaves["values"], self.positions()

    def forward(self, backend: str = "auto") -> torch.Tensor:
        if backend == "oracle":
            return lambda_reference(*self.arguments(), **self.options)
        return lambda_op(*self.arguments(), **self.options, backend=backend)

    def results(self, backend: str) -> dict[str, torch.Tensor]:
        """The output, and the gradient of every leaf."""
        output = self.forward(backend)
        grads = torch.autograd.grad(output, list(self.leaves.values()), self.gradient.to(output.dtype))
        return {"output": output.detach()} | dict(zip(self.leaves, grads, strict=True))


def assert_agree(case: Case, backend: str, seed: int = 0, tolerance: float = 1e-10) -> None:
    """`backend` gives what the reference gives, in values and every gradient (float64)."""
    inputs = Inputs(case, seed)
    expected, found = inputs.results("oracle"), inputs.results(backend)
    with torch.no_grad():  # other code may run where nothing is kept
        found["output without gradients"] = inputs.forward(backend)
    expected["output without gradients"] = expected["output"]
    for name, wanted in expected.items():
        assert found[name].shape == wanted.shape, name
        assert found[name].isfinite().all(), f"{name} of {backend} is not finite"
        error = (found[name] - wanted).abs().amax().item() if wanted.numel() else 0.0
        scale = max(1.0, wanted.abs().amax().item()) if wanted.numel() else 1.0
        assert error <= tolerance * scale, f"{name} of {backend}: error {error:.2e} at scale {scale:.2e}"


SMALL = Case()
VARIANTS = {
    "plain": SMALL,
    "one_head": SMALL.but(heads=1),
    "multi_head": SMALL.but(multi_head=True, heads=3),
    "intra_depth": SMALL.but(intra_depth=2),
    "multi_head_intra_depth": SMALL.but(multi_head=True, intra_depth=3),
    "deep_values": SMALL.but(key_depth=8, value_depth=9, heads=1),  # gemm: depth first
    "shallow_values": SMALL.but(key_depth=1, value_depth=2, heads=4),  # gemm: context first
    "content_only": SMALL.but(positions=None),
    "position_only": SMALL.but(content=False),
    "l2": SMALL.but(key_norm="l2"),
    "no_key_norm": SMALL.but(key_norm=None),
    "query_softmax": SMALL.but(query_softmax=True),
    "mask": SMALL.but(mask=True),
    "mask_l2": SMALL.but(mask=True, key_norm="l2"),
    "mask_no_norm": SMALL.but(mask=True, key_norm=None),
    "mask_multi_head_intra_depth": SMALL.but(mask=True, multi_head=True, intra_depth=2),
    "mask_causal": SMALL.but(mask=True, causal=True),
    "context_mask": SMALL.but(context_mask=True),
    "context_mask_l2": SMALL.but(context_mask=True, key_norm="l2"),
    "context_mask_no_norm": SMALL.but(context_mask=True, key_norm=None),
    "context_mask_multi_head": SMALL.but(context_mask=True, multi_head=True, intra_depth=2),
    "both_masks": SMALL.but(context_mask=True, mask=True),
    "causal": SMALL.but(causal=True),
    "strict": SMALL.but(causal="strict"),
    "causal_l2": SMALL.but(causal=True, key_norm="l2"),
    "strict_no_norm": SMALL.but(causal="strict", key_norm=None),
    "strict_l2": SMALL.but(causal="strict", key_norm="l2"),
    "causal_intra_depth": SMALL.but(causal=True, intra_depth=2),
    "causal_context_mask": SMALL.but(causal=True, context_mask=True),
    "strict_context_mask_l2": SMALL.but(causal="strict", context_mask=True, key_norm="l2"),
    "causal_multi_head_no_position": SMALL.but(causal=True, multi_head=True, positions=None),
    "causal_many_chunks": SMALL.but(grid=(75,), scope=(7,), causal=True, heads=1),  # running sum: 32 at a time
    "strict_many_chunks": SMALL.but(grid=(75,), scope=(6,), causal="strict", context_mask=True, intra_depth=2),
    "causal_l2_many_chunks": SMALL.but(grid=(70,), scope=(4,), causal=True, key_norm="l2", heads=1),
    "causal_other_grid": SMALL.but(context=(6, 3), causal=True),
    "causal_stride": SMALL.but(grid=(2, 3), context=(4, 5), stride=2, causal="strict"),
    "causal_dense": SMALL.but(positions="dense", causal=True),
    "strict_relation": SMALL.but(positions="relation", causal="strict"),
    "dense": SMALL.but(positions="dense"),
    "dense_multi_head_intra_depth": SMALL.but(positions="dense", multi_head=True, intra_depth=2),
    "dense_other_context": SMALL.but(positions="dense", context=(7,), mask=True),
    "relation": SMALL.but(positions="relation"),
    "relation_intra_depth": SMALL.but(positions="relation", intra_depth=2, context=(3, 3)),
    "relation_multi_head_masks": SMALL.but(positions="relation", multi_head=True, mask=True, context_mask=True),
    "even_scope": SMALL.but(scope=(4, 2)),
    "rectangular_scope": SMALL.but(scope=(1, 5)),
    "scope_1": SMALL.but(scope=(1, 1)),
    "scope_beyond_map": SMALL.but(scope=(11, 14)),
    "global": SMALL.but(scope=(7, 9)),
    "dilation": SMALL.but(grid=(6, 7), dilation=2),
    "dilation_even_per_axis": SMALL.but(grid=(7, 8), scope=(4, 3), dilation=(2, 3)),
    "dilation_beyond_map": SMALL.but(dilation=9),
    "stride": SMALL.but(grid=(3, 3), context=(6, 5), stride=2),
    "stride_dilation_even": SMALL.but(grid=(3, 2), context=(7, 6), stride=(2, 3), dilation=(2, 1), scope=(3, 4)),
    "larger_context": SMALL.but(context=(7, 9)),
    "smaller_context": SMALL.but(grid=(7, 9), context=(2, 3)),
    "mixed_context": SMALL.but(grid=(7, 2), context=(3, 6), scope=(3, 4)),
    "pixel": SMALL.but(grid=(1, 1)),
    "pixel_causal": SMALL.but(grid=(1, 1), causal="strict"),
    "row": SMALL.but(grid=(1, 9)),
    "column": SMALL.but(grid=(9, 1)),
    "1d": SMALL.but(grid=(9,), scope=(4,)),
    "1d_dilation_stride": SMALL.but(grid=(4,), context=(11,), scope=(5,), dilation=2, stride=3),
    "3d": SMALL.but(grid=(2, 3, 4), scope=(3, 2, 3)),
    "3d_causal_intra_depth": SMALL.but(grid=(3, 2, 3), scope=(3, 3, 4), causal=True, intra_depth=2),
    "4d": SMALL.but(grid=(2, 2, 3, 2), scope=(3, 2, 2, 1)),
    "3d_stride": SMALL.but(grid=(2, 2, 2), context=(3, 4, 4), scope=(3, 3, 3), stride=(2, 2, 3)),
    "empty_batch": SMALL.but(batch=0),
    "empty_batch_causal": SMALL.but(batch=0, causal=True, context_mask=True),
    "empty_batch_mask": SMALL.but(batch=0, mask=True, heads=1, key_depth=8, value_depth=9),
}

"""Work in chunks: the same results, and memory that stays within what the docstrings state."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lambdanets.ops import content, dft, fft, gemm
from tests.cases import VARIANTS, Case, Inputs, assert_agree

LARGER = Case(grid=(7, 5), scope=(3, 4), intra_depth=2, batch=3)
CHUNKED = {
    "rows": LARGER,
    "rows_depth_first": LARGER.but(heads=1, key_depth=6, value_depth=7),
    "rows_context_first": LARGER.but(heads=4, key_depth=2, value_depth=2),
    "rows_multi_head": LARGER.but(multi_head=True),
    "rows_causal": LARGER.but(causal=True),
    "rows_strict_context_mask": LARGER.but(causal="strict", context_mask=True),
    "rows_dilation": LARGER.but(dilation=(2, 1)),
    "rows_stride": LARGER.but(grid=(4, 3), context=(8, 6), stride=2),
    "rows_out_of_reach": LARGER.but(grid=(9, 4), context=(2, 4)),  # the last queries see no context row at all
    "rows_larger_context": LARGER.but(grid=(3, 3), context=(9, 9)),
    "rows_global": LARGER.but(scope=(13, 9)),
    "rows_1d": LARGER.but(grid=(13,), scope=(6,)),
    "rows_3d": LARGER.but(grid=(4, 2, 3), scope=(3, 3, 2)),
    "mask": LARGER.but(mask=True),
    "mask_causal_dilation": LARGER.but(mask=True, causal=True, dilation=2),
    "mask_stride": LARGER.but(mask=True, grid=(4, 3), context=(8, 6), stride=2, scope=(4, 3)),
    "mask_l2": LARGER.but(mask=True, key_norm="l2"),
    "mask_context_mask": LARGER.but(mask=True, context_mask=True),
    "dense": LARGER.but(positions="dense"),
    "dense_causal_mask": LARGER.but(positions="dense", causal=True, mask=True),
    "relation": LARGER.but(positions="relation"),
    "relation_strict": LARGER.but(positions="relation", causal="strict"),
    "empty_batch": LARGER.but(batch=0),
}


class Calls:
    """How often a function of a module ran."""

    def __init__(self, monkeypatch, module, name):
        self.count = 0
        function = getattr(module, name)

        def counted(*args, **kwargs):
            self.count += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)


@pytest.mark.parametrize("workspace", [1, 3000], ids=["one_at_a_time", "some_at_a_time"])
@pytest.mark.parametrize("case", CHUNKED.values(), ids=CHUNKED.keys())
def test_gemm(case, workspace, monkeypatch):
    monkeypatch.setattr(gemm, "WORKSPACE", workspace)
    monkeypatch.setattr(content, "MASKED_WEIGHTS", workspace)
    calls = Calls(monkeypatch, gemm, "product")
    assert_agree(case, "gemm")
    if case.batch:
        assert calls.count > case.heads if case.multi_head else calls.count > 1  # it did work in chunks


@pytest.mark.parametrize("weights", [1, 2000], ids=["one_at_a_time", "some_at_a_time"])
@pytest.mark.parametrize("name", [n for n in VARIANTS if "mask" in n or n.startswith(("causal_o", "causal_s"))])
def test_masked_content(name, weights, monkeypatch):
    monkeypatch.setattr(content, "MASKED_WEIGHTS", weights)
    assert_agree(VARIANTS[name], "gemm")


@pytest.mark.parametrize("chunk", [1, 5, 32])
@pytest.mark.parametrize("name", [n for n in VARIANTS if n.startswith(("causal", "strict"))])
def test_running_sum(name, chunk, monkeypatch):
    monkeypatch.setattr(content, "CAUSAL_CHUNK", chunk)
    assert_agree(VARIANTS[name], "gemm")


@pytest.mark.parametrize(
    ("module", "workspace", "chunks"),
    [(dft, 1, 5), (dft, 1400, 3), (fft, 1, 5), (fft, 800, 3)],  # room for one example at a time, and for two
    ids=["dft-one", "dft-two", "fft-one", "fft-two"],
)
def test_fourier_chunks_of_the_batch(module, workspace, chunks, monkeypatch):
    case = Case(grid=(7, 5), scope=(3, 4), batch=5)
    monkeypatch.setattr(module, "WORKSPACE", workspace)
    calls = Calls(monkeypatch, *((dft, "rows_by_frequency") if module is dft else (torch.fft, "irfftn")))
    Inputs(case).forward(module.__name__.rpartition(".")[2])
    assert calls.count == chunks
    assert_agree(case.but(context_mask=True, intra_depth=2), module.__name__.rpartition(".")[2])


TILED = {
    "divisible": (20, 6),
    "remainder": (23, 6),
    "one_row_left": (16, 5),
    "tall": (40, 3),
}


@pytest.mark.parametrize("grid", TILED.values(), ids=TILED.keys())
@pytest.mark.parametrize(
    "changes",
    [{}, {"causal": True}, {"dilation": (2, 1)}, {"scope": (1, 3)}, {"intra_depth": 2, "context_mask": True}],
    ids=["plain", "causal", "dilation", "one_row", "intra_depth_context_mask"],
)
def test_dft_in_tiles_of_rows(grid, changes, monkeypatch):
    monkeypatch.setattr(dft, "TILE", 5)
    case = Case(grid=grid, scope=(4, 3), heads=1).but(**changes)
    axis = Inputs(case).positions().clipped()[1][0]
    tile, _ = dft.tiling(axis)
    assert tile == 5 < grid[0]  # more than one tile
    assert_agree(case, "dft")


@pytest.mark.parametrize("stride", [(2, 1), (3, 2)], ids=str)
def test_dft_in_tiles_with_stride(stride, monkeypatch):
    monkeypatch.setattr(dft, "TILE", 4)
    context = (11 * stride[0], 5)
    assert_agree(Case(grid=(11, 3), context=context, scope=(4, 3), stride=stride), "dft")
    assert_agree(Case(grid=(11, 3), context=(30 * stride[0], 5), scope=(3, 3), stride=stride), "dft")


def test_dft_with_the_package_tile():
    assert_agree(Case(grid=(45, 4), scope=(7, 3), heads=1, batch=1), "dft")


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returned, in elements of storage."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


BOUNDED = {
    "relative": Case(grid=(24, 24), scope=(7, 7)),
    "relative_causal": Case(grid=(24, 24), scope=(7, 7), causal=True, content=False),
    "relative_1d": Case(grid=(600,), scope=(31,)),
    "relative_mask": Case(grid=(24, 24), scope=(7, 7), mask=True, content=False),
    "depth_first": Case(grid=(24, 24), scope=(7, 7), heads=1, key_depth=8, value_depth=16),
}


@pytest.mark.parametrize("case", BOUNDED.values(), ids=BOUNDED.keys())
def test_gemm_memory_is_bounded(case, monkeypatch):
    workspace = 2**16
    monkeypatch.setattr(gemm, "WORKSPACE", workspace)
    case = case.but(heads=min(case.heads, 2), batch=2)
    inputs = Inputs(case)
    pairs = 1
    for side in case.grid:
        pairs *= side * side
    assert pairs * case.key_depth > 10 * workspace  # written out whole it would not fit
    saved = []
    with (
        Largest() as largest,
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.append((t.untyped_storage().data_ptr(), t.numel())) or t, lambda t: t
        ),
    ):
        inputs.results("gemm")
    # A mask is an input of N x M itself; nothing else may be as large as that.
    allowed = max(workspace, pairs if case.mask else 0)
    assert largest.elements <= allowed, f"{largest.elements} elements, allowed {allowed}"
    # What is kept for the backward pass: the inputs (some in another order), not the chunks.
    kept = sum(dict(saved).values())
    given = sum(leaf.numel() for leaf in inputs.leaves.values())
    assert kept <= 8 * given + allowed * (2 if case.mask else 0), f"kept {kept}, inputs {given}"


@pytest.mark.parametrize("causal", [True, "strict"])
@pytest.mark.parametrize("intra_depth", [1, 2])
@pytest.mark.parametrize(("span", "factored"), [(0.5, True), (29, True), (31, False), (900, False)])
def test_causal_softmax_by_one_maximum_or_many(causal, intra_depth, span, factored, monkeypatch):
    """Keys that rise by `span` within the first chunk, where early queries know only small ones."""
    calls = Calls(monkeypatch, content, "factored_output")
    case = Case(grid=(70,), scope=(5,), intra_depth=intra_depth, causal=causal)
    results = []
    for dtype in (torch.float64, torch.float32):
        inputs = Inputs(case, dtype=dtype)
        keys = inputs.leaves["keys"].data
        keys.clamp_(-0.1, 0.1)
        keys[:, 20:] += span - 0.4
        results.append(inputs.results("gemm"))
        assert calls.count == (3 if factored else 2)  # later chunks know the large ones
        calls.count = 0
        results.append(inputs.results("oracle"))
    found, expected, single, expected_single = results
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-10, atol=1e-10, msg=name)
        torch.testing.assert_close(single[name], expected_single[name], rtol=1e-4, atol=1e-4, msg=name)


def test_an_empty_batch_has_no_maximum():
    assert_agree(Case(grid=(40,), scope=(5,), causal=True, batch=0), "gemm")

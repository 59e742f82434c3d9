"""Bad input is refused where it enters: the message has the offending value, and what to do."""

import pytest
import torch

from lambdanets.ops import Dense, Relation, Relative, lambda_op

B, N, M, H, K, V = 2, 6, 6, 2, 3, 4
GOOD = {
    "queries_BNHK": torch.zeros(B, N, H, K),
    "keys": torch.zeros(B, M, K),
    "values": torch.zeros(B, M, V),
    "positions": Relative(torch.zeros(3, 3, K), (2, 3)),
}
TABLE = torch.zeros(3, 3, K)
BAD = {
    "queries_axes": ({"queries_BNHK": torch.zeros(B, N, K)}, ValueError, r"\[B, N, H, K\], got \[2, 6, 3\]"),
    "values_axes": ({"values": torch.zeros(B, M)}, ValueError, r"values must be \[B, M, V\].*got \[2, 6\]"),
    "values_axes_multi_head": (
        {"values": torch.zeros(B, M, V), "multi_head": True},
        ValueError,
        r"\[B, M, H, V\].*got \[2, 6, 4\]",
    ),
    "values_batch": (
        {"values": torch.zeros(3, M, V)},
        ValueError,
        r"\[3, 6, 4\] must have the same B as queries",
    ),
    "values_heads": ({"values": torch.zeros(B, M, 3, V), "multi_head": True}, ValueError, "same B and H as queries"),
    "keys_missing": ({"keys": None}, ValueError, "content=True needs keys: pass keys, or content=False"),
    "keys_depth": ({"keys": torch.zeros(B, M, 5)}, ValueError, r"keys must be \[2, 6, 3\].*got \[2, 6, 5\]"),
    "keys_context": ({"keys": torch.zeros(B, 7, K)}, ValueError, r"keys must be \[2, 6, 3\].*got \[2, 7, 3\]"),
    "keys_intra_depth": ({"keys": torch.zeros(B, M, K, 2)}, ValueError, r"got \[2, 6, 3, 2\]"),
    "nothing_left": ({"content": False, "positions": None}, ValueError, "leaves no interaction: use content=True"),
    "key_norm": ({"key_norm": "layer"}, ValueError, "unknown key_norm 'layer'; choose one of 'softmax', 'l2', None"),
    "causal": ({"causal": "future"}, ValueError, "unknown causal 'future'; choose one of False, True"),
    "positions_kind": ({"positions": TABLE}, TypeError, "Relative or Relation embeddings, got Tensor"),
    "dense_shape": (
        {"positions": Dense(torch.zeros(N, 5, K))},
        ValueError,
        r"Dense embeddings must be \[6, 6, 3\], got \[6, 5, 3\]",
    ),
    "table_depth": (
        {"positions": Relative(torch.zeros(3, 3, 5), (2, 3))},
        ValueError,
        r"must be \[3\] to match.*got \[5\] \(table \[3, 3, 5\]\)",
    ),
    "table_heads": (
        {"values": torch.zeros(B, M, H, V), "keys": torch.zeros(B, M, H, K), "multi_head": True},
        ValueError,
        r"must be \[2, 3\].*got \[3\]",
    ),
    "query_grid": ({"positions": Relative(TABLE, (2, 2), (2, 3))}, ValueError, r"query_grid \(2, 2\) has 4.*has 6"),
    "context_grid": ({"positions": Relative(TABLE, (2, 3), (5, 3))}, ValueError, r"context_grid \(5, 3\) has 15.*6"),
    "relation_shape": (
        {"positions": Relation(torch.zeros(4, K), torch.zeros(N, 5, dtype=torch.long))},
        ValueError,
        r"integers \[6, 6\], got torch.int64 \[6, 5\]",
    ),
    "relation_float": (
        {"positions": Relation(torch.zeros(4, K), torch.zeros(N, M))},
        ValueError,
        r"integers \[6, 6\], got torch.float32",
    ),
    "relation_bool": (
        {"positions": Relation(torch.zeros(4, K), torch.zeros(N, M, dtype=torch.bool))},
        ValueError,
        "got torch.bool",
    ),
    "relation_beyond_table": (
        {"positions": Relation(torch.zeros(4, K), torch.full((N, M), 4))},
        ValueError,
        "index must be from 0 to 3 .*or -1 for no relation, got 4",
    ),
    "relation_negative": (
        {"positions": Relation(torch.zeros(4, K), torch.arange(N * M).view(N, M) % 6 - 2)},  # -2 .. 3
        ValueError,
        "index must be from 0 to 3 .*, got -2",
    ),
    "mask_dtype": ({"mask": torch.ones(N, M)}, TypeError, r"mask must be boolean.*got torch.float32; use mask.bool"),
    "mask_shape": (
        {"mask": torch.ones(B, N, M, dtype=torch.bool)},
        ValueError,
        r"mask must be \[6, 6\].*got \[2, 6, 6\]",
    ),
    "context_mask_dtype": (
        {"context_mask": torch.ones(B, M, dtype=torch.uint8)},
        TypeError,
        r"context_mask must be boolean.*got torch.uint8; use context_mask.bool",
    ),
    "context_mask_shape": (
        {"context_mask": torch.ones(1, M, dtype=torch.bool)},
        ValueError,
        r"context_mask must be \[2, 6\].*got \[1, 6\]",
    ),
    "causal_sizes": (
        {"causal": True, "positions": None, "keys": torch.zeros(B, 4, K), "values": torch.zeros(B, 4, V)},
        ValueError,
        "a query for every context position, got N=6 and M=4",
    ),
}


def test_the_good_input_is_good():
    assert lambda_op(**GOOD).shape == (B, N, H, V)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("changes", "error", "message"), BAD.values(), ids=BAD.keys())
def test_refused(changes, error, message, backend):
    with pytest.raises(error, match=message):
        lambda_op(**(GOOD | changes), backend=backend)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query_grid": (2, 3), "stride": 2}, r"stride \(2, 2\).*context_grid=\(...\)"),
        ({"query_grid": (2, 3), "dilation": 0}, r"dilation must be positive along every axis, got \(0, 0\)"),
        ({"query_grid": (2, 3), "context_grid": (2, 3), "stride": (1, 0)}, r"stride must be positive.*\(1, 0\)"),
        ({"query_grid": (2, 3), "dilation": (1, 2, 3)}, r"dilation must be one size or 2.*got \(1, 2, 3\)"),
        ({"query_grid": (2, 3), "context_grid": (2, 3, 4)}, r"context_grid must be one size or 2"),
    ],
    ids=["stride_without_context_grid", "dilation_0", "stride_0", "dilation_axes", "context_grid_axes"],
)
def test_relative_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        Relative(TABLE, **arguments)


def test_relative_refuses_an_empty_table():
    with pytest.raises(ValueError, match=r"scope must be positive along every axis, got \(3, 0\)"):
        Relative(torch.zeros(3, 0, K), (2, 3))


def test_relative_takes_a_number_for_a_sequence():
    positions = Relative(torch.zeros(3, K), 7)
    assert (positions.query_grid, positions.context_grid, positions.scope) == ((7,), (7,), (3,))

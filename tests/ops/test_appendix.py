"""The paper's appendix: channel, spatial and linear attention are special cases of the lambda operation."""

import pytest
import torch
import torch.nn.functional as F

from lambdanets.ops import Dense, lambda_op

BACKENDS = ["reference", "gemm"]


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_squeeze_and_excitation_is_a_diagonal_lambda(backend):
    """y_nk = w_k q_nk: a context of one element per channel, whose lambda is diag(w), shared by all queries."""
    B, N, C, hidden = 2, 9, 6, 3
    features, down, up = normal(B, N, C), normal(hidden, C), normal(C, hidden)
    excitation = torch.sigmoid(F.relu(features.mean(dim=1) @ down.T) @ up.T)  # [B, C]
    keys = torch.eye(C, dtype=torch.float64).expand(B, C, C)  # element m of the context asks for channel m
    values = torch.diag_embed(excitation)
    found = lambda_op(features[:, :, None], keys, values, key_norm=None, backend=backend)
    close(found[:, :, 0], features * excitation[:, None])


@pytest.mark.parametrize("backend", BACKENDS)
def test_spatial_attention_is_a_scalar_lambda(backend):
    """y_nk = w_n q_nk: each query has the lambda w_n I, here from one embedding w_n e_m per channel m."""
    N, C = 9, 5
    features, weight = normal(1, N, C), normal(C)
    attention = torch.sigmoid(features[0] @ weight)  # [N]
    identity = torch.eye(C, dtype=torch.float64)
    embeddings = attention[:, None, None] * identity  # [N, M=C, K=C]
    values = identity[None]
    found = lambda_op(features[:, :, None], None, values, Dense(embeddings), content=False, backend=backend)
    close(found[:, :, 0], features * attention[:, None])


def feature_map(x):
    return F.elu(x) + 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("multi_head", [False, True], ids=["multi_query", "multi_head"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_linear_attention_is_a_content_lambda(backend, multi_head, causal):
    B, N, H, K, V = 2, 40, 3, 4, 5
    queries = normal(B, N, H, K)
    heads = [H] if multi_head else []
    keys, values = normal(B, N, *heads, K), normal(B, N, *heads, V)
    # The normaliser of kernel attention is one more value that is 1 everywhere.
    ones = torch.ones(*values.shape[:-1], 1, dtype=torch.float64)
    found = lambda_op(
        feature_map(queries),
        feature_map(keys),
        torch.cat([values, ones], dim=-1),
        key_norm=None,
        multi_head=multi_head,
        causal=causal,
        backend=backend,
    )
    for h in range(H):
        key, value = (keys[:, :, h], values[:, :, h]) if multi_head else (keys, values)
        maps = torch.einsum("bnk,bmk->bnm", feature_map(queries[:, :, h]), feature_map(key))
        maps = maps.tril() if causal else maps
        total = maps.sum(dim=-1, keepdim=True)
        close(found[:, :, h, :V], maps @ value)
        close(found[:, :, h, :V] / found[:, :, h, V:], (maps / total) @ value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_softmax_feature_maps_give_maps_that_sum_to_one(backend):
    """The visual linear attentions: softmax over the depth of queries, over the positions of keys."""
    queries, keys = normal(2, 7, 3, 4), normal(2, 8, 4)
    identity = torch.eye(8, dtype=torch.float64).expand(2, 8, 8)  # values that show the map itself
    maps = lambda_op(queries, keys, identity, query_softmax=True, backend=backend)
    close(maps, torch.einsum("bnhk,bmk->bnhm", queries.softmax(-1), keys.softmax(1)))
    close(maps.sum(dim=-1), torch.ones(2, 7, 3, dtype=torch.float64))

"""Memory of interactions: the paper's table, and networks as they are built."""

import pytest

from lambdanets.bench.memory import (
    BFLOAT16,
    GB,
    MB,
    RESNET50,
    Maps,
    axial_attention_bytes,
    global_attention_bytes,
    lambda_bytes,
    network_interactions,
)
from lambdanets.models.counts import meta_network


def test_the_papers_table():
    assert global_attention_bytes(RESNET50, batch=128) / GB == pytest.approx(122.8, abs=0.05)
    assert axial_attention_bytes(RESNET50, batch=128) / GB == pytest.approx(4.82, abs=0.005)
    assert lambda_bytes(RESNET50) / GB == pytest.approx(1.92, abs=0.005)
    assert lambda_bytes(RESNET50, key_depth=8) / GB == pytest.approx(0.96, abs=0.005)
    assert lambda_bytes(RESNET50, shared=True) / GB == pytest.approx(0.625, abs=0.0005)


def test_the_hybrid_of_the_text():
    c4 = [Maps(20 * 20, 8)]
    assert lambda_bytes(c4, size=BFLOAT16) / MB == pytest.approx(39.06, abs=0.005)
    assert lambda_bytes(c4, size=BFLOAT16, shared=True) / MB == pytest.approx(4.88, abs=0.005)
    assert global_attention_bytes(c4, batch=32, size=BFLOAT16) / MB == 625


def test_networks_run_first_blocks_at_the_resolution_before():
    n = [56**2, 28**2, 14**2, 7**2]
    layers = [(n[0], 3), (n[0], 1), (n[1], 3), (n[1], 1), (n[2], 5), (n[2], 1), (n[3], 2)]
    network = meta_network("resnet50", placement="LLLL")
    expected = sum(count * positions**2 for positions, count in layers)
    found = network_interactions(network, (128, 3, 224, 224))
    assert found.embeddings == 4 * 16 * expected
    assert found.attention == 0
    attention = meta_network("resnet50", placement="LLLL", layer="global_attention")
    assert network_interactions(attention, (2, 3, 224, 224)).attention == 4 * 2 * 8 * expected
    axial = meta_network("resnet50", placement="CCLL", layer="axial_attention")
    expected = sum(2 * count * p * round(p**0.5) for p, count in layers[3:])
    assert network_interactions(axial, (1, 3, 224, 224)).attention == 4 * 8 * expected


def test_layers_that_share_a_table_share_what_it_is_written_out_to():
    network = meta_network("resnet26", placement="CCCL", share_positions=True)
    found = network_interactions(network, (1, 3, 224, 224)).embeddings
    assert found == 4 * 16 * (14**4 + 7**4)  # one table, on the two maps of the stage

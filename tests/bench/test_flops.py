"""FLOPs: the paper's numbers, torch's counter, and hand counts of each formula."""

import pytest
import torch
from torch import nn

from lambdanets import LambdaLayer1d, LambdaLayer2d
from lambdanets.models.counts import count_parameters, meta_network
from lambdanets.models.flops import executed_flops, paper_flops

IMAGE = (1, 3, 224, 224)
ALL = {"placement": "LLLL"}


def billions(name, size=224, **arguments):
    return paper_flops(meta_network(name, image_size=size, **arguments), (1, 3, size, size)).total / 1e9


@pytest.mark.parametrize(
    ("arguments", "expected"), [({"position": False}, 5.02), ({"content": False}, 11.89), ({}, 12.02)]
)
def test_content_and_position(arguments, expected):
    assert round(billions("resnet50", **ALL, **arguments), 2) == expected


@pytest.mark.parametrize(("scope", "expected"), [(3, 5.7), (7, 6.1), (15, 7.8), (23, 10.0), (31, 12.4), (None, 19.4)])
def test_scopes(scope, expected):
    assert round(billions("resnet50", placement="CLLL", scope=scope), 1) == expected


def test_mobilenets():
    assert round(billions("mobilenet_v2") * 1e3, 1) == 601.5
    assert round(billions("lambda_mobilenet_v2") * 1e3, 1) == 576.8
    assert round(billions("lambda_mobilenet_v2", key_depth=8) * 1e3, 1) == 563.6


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("resnet50", {}),
        ("resnet26_d", {"se": True}),
        ("resnet_rs50", {}),
        ("mobilenet_v2", {}),
        *(
            ("resnet26", {"placement": "CCLL", "layer": layer})
            for layer in (
                "linear_attention",
                "multi_query_linear_attention",
                "augmented_convolution",
                "global_attention",
                "axial_attention",
                "local_attention",
            )
        ),
    ],
)
def test_agrees_with_torchs_counter(name, arguments):
    """Rectangles, and more than one image: formulas that mix up axes show."""
    network = meta_network(name, **arguments)
    shape = (2, 3, 96, 160)
    assert paper_flops(network, shape).total == executed_flops(network, shape)


def test_a_lambda_layer_by_hand():
    layer = LambdaLayer2d(12, 24, heads=3, key_depth=5, intra_depth=2, scope=(3, 9))
    B, Y, X, C, H, K, V, U = 2, 6, 7, 12, 3, 5, 8, 2
    N = Y * X
    projections = N * C * (H * K + K * U + V * U)
    content = N * K * V * U + N * H * K * V
    position = N * (3 * 7) * K * V * U + N * H * K * V  # the scope is 3 x 9, the map 7 wide
    assert paper_flops(layer, (B, C, Y, X)).total == 2 * B * (projections + content + position)


def test_heads_of_their_own_multiply_the_lambdas():
    shape = (1, 8, 50)
    one = paper_flops(LambdaLayer1d(8, heads=1, key_depth=4, scope=7), shape).total
    shared = paper_flops(LambdaLayer1d(16, heads=2, key_depth=4, scope=7), (1, 16, 50)).total
    own = paper_flops(LambdaLayer1d(16, heads=2, key_depth=4, scope=7, multi_head=True), (1, 16, 50)).total
    lambdas = 50 * 8 * 4 * (7 + 1)  # position and content
    projections = 2 * 50 * 16 * (4 + 8)  # one more key and value
    assert own - shared == 2 * lambdas + projections
    assert one > 0


def test_an_einsum_with_dense_embeddings_executes_more():
    layer = LambdaLayer2d(16, scope=3, backend="gemm").to("meta").eval()
    assert executed_flops(layer, (1, 16, 24, 24)) > paper_flops(layer, (1, 16, 24, 24)).total


def test_by_kind_adds_up():
    found = paper_flops(meta_network("resnet26", placement="CCLL"), IMAGE)
    kinds = found.by_kind()
    assert set(kinds) == {"Conv2d", "LambdaLayer2d", "Linear"}
    assert sum(kinds.values()) == found.total
    assert kinds["Linear"] == 2 * 2048 * 1000


def test_norms_and_activations_cost_nothing():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2))
    assert paper_flops(network, (1, 3, 8, 8)).total == 2 * 36 * 4 * 27


def test_parameters_count_a_shared_table_once():
    shared = count_parameters(meta_network("resnet26", **ALL, share_positions=True))
    assert shared.positions == 4 * 23 * 23 * 16
    assert count_parameters(meta_network("resnet26", **ALL)).positions == 8 * 23 * 23 * 16
    assert shared.total == sum(p.numel() for p in meta_network("resnet26", **ALL, share_positions=True).parameters())


def test_counting_leaves_no_hooks():
    network = meta_network("resnet26")
    paper_flops(network, (1, 3, 64, 64))
    assert not any(module._forward_hooks for module in network.modules())
    with pytest.raises(RuntimeError):
        paper_flops(network, (1, 5, 64, 64))
    assert not any(module._forward_hooks for module in network.modules())
    assert torch.is_grad_enabled()


def test_counting_changes_nothing_in_a_network_that_trains():
    network = nn.Sequential(nn.BatchNorm2d(8), LambdaLayer2d(8)).train()
    network[1].norm_queries.eval()
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    assert paper_flops(network, (2, 8, 5, 5)).total > 0 < executed_flops(network, (2, 8, 5, 5))
    assert all(torch.equal(buffer, before[name]) for name, buffer in network.named_buffers())
    assert [name for name, module in network.named_modules() if not module.training] == ["1.norm_queries"]

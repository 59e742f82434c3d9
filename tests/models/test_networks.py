"""What the networks are: blocks, placements, scopes, and the same outputs as the networks they descend from."""

import subprocess
import sys
import warnings
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

from lambdanets.layers import LambdaLayer2d, LocalAttention2d, SqueezeExcitation2d
from lambdanets.models import LAYERS, ROWS, Bottleneck, ResNet, create_model, list_models
from lambdanets.models.blocks import DropPath, blur_by_half
from tests.models.helpers import SMALL, fake, images, meta, randomized, settled, small


@pytest.mark.parametrize("name", list_models())
def test_a_step_on_odd_rectangles(name: str) -> None:
    with FakeTensorMode():
        network = create_model(name).train()
        scores = network(torch.randn(2, 3, 97, 131))
        scores.sum().backward()
    assert scores.shape == (2, ROWS[name].num_classes)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in network.parameters())


@pytest.mark.parametrize("case", SMALL)
def test_backward_reaches_every_parameter(case: str) -> None:
    network = small(case).double().train()
    x = images(case, dtype=torch.float64).requires_grad_()
    scores = network(x)
    assert scores.shape == (2, network.num_classes)
    (scores * torch.randn_like(scores)).sum().backward()
    assert x.grad is not None
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name


def test_bottlenecks_start_as_the_identity() -> None:
    x = torch.rand(1, 256, 5, 7)
    for spatial in (None, LambdaLayer2d(64)):
        torch.testing.assert_close(Bottleneck(256, 64, spatial=spatial)(x), x)


def test_a_lambda_block_written_out() -> None:
    """The lambda at the input's resolution, pooling, norm; the shortcut pools 2x2 and odd edges are averages."""
    block = randomized(Bottleneck(24, 8, stride=2, spatial=LambdaLayer2d(8, scope=5), shortcut="pool")).double().eval()
    x = torch.randn(2, 24, 7, 10, dtype=torch.float64)

    def norm(module: nn.Module, y: torch.Tensor) -> torch.Tensor:
        assert isinstance(module, nn.BatchNorm2d)
        return F.batch_norm(y, module.running_mean, module.running_var, module.weight, module.bias, eps=module.eps)

    y = torch.relu(norm(block.bn1, torch.einsum("oc,bcyx->boyx", block.conv1.weight[:, :, 0, 0], x)))
    y = F.pad(block.conv2(y), [1, 1, 1, 1])
    y = torch.stack([y[..., i : i + 7 : 2, j : j + 10 : 2] for i in range(3) for j in range(3)]).sum(0) / 9
    y = norm(block.bn3, F.conv2d(torch.relu(norm(block.bn2, y)), block.conv3.weight))
    rows = [x[:, :, i : i + 2].mean(2) for i in range(0, 7, 2)]
    pooled = torch.stack([torch.stack([r[..., j : j + 2].mean(-1) for j in range(0, 10, 2)], -1) for r in rows], -2)
    assert block.downsample is not None
    shortcut = norm(block.downsample[2], F.conv2d(pooled, block.downsample[1].weight))
    torch.testing.assert_close(block(x), torch.relu(y + shortcut))


def descendants() -> list[tuple[str, dict, str, dict]]:
    return [
        ("resnet50", {}, "torchvision", {"name": "resnet50"}),
        ("mobilenet_v2", {}, "torchvision", {"name": "mobilenet_v2"}),
        ("resnet26_d", {}, "timm", {"model_name": "resnet26d"}),
        ("resnet50", {"se": True}, "timm", {"model_name": "seresnet50"}),
        ("resnet_rs50", {}, "timm", {"model_name": "resnetrs50"}),
    ]


@pytest.mark.parametrize(("name", "arguments", "library", "theirs"), descendants())
def test_outputs_of_the_networks_they_descend_from(name: str, arguments: dict, library: str, theirs: dict) -> None:
    """Their state dicts load as they are (torchvision numbers the layer of its classifier)."""
    if library == "timm":
        other = pytest.importorskip("timm").create_model(**theirs)
    else:
        other = pytest.importorskip("torchvision").models.get_model(**theirs)
    other = randomized(other).eval()
    ours = create_model(name, **arguments).eval()
    state = {key.replace("classifier.1.", "classifier."): value for key, value in other.state_dict().items()}
    ours.load_state_dict(state)
    x = torch.randn(1, 3, 75, 93)
    with torch.no_grad():
        expected, got = other(x), ours(x)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def lambda_blocks(network: nn.Module) -> dict[int, list[int]]:
    """Blocks with a lambda layer in each stage, counted from 1."""
    assert isinstance(network, ResNet)
    found: dict[int, list[int]] = {}
    for name, module in network.named_modules():
        if isinstance(module, LambdaLayer2d):
            stage, block = name.removeprefix("layer").split(".")[:2]
            found.setdefault(int(stage) + 1, []).append(int(block) + 1)
    return found


@pytest.mark.parametrize(
    ("depth", "c4", "c5", "blocks"),
    [
        (50, [3], 3, 6),
        (101, [6, 12, 18], 3, 23),
        (152, [5, 10, 15, 20, 25, 30], 3, 36),
        (200, [5, 10, 15, 20, 25, 30], 3, 36),
        (270, [8, 16, 24, 32, 40, 48], 4, 53),
        (350, [10, 20, 30, 40, 50, 60], 4, 72),
        (420, [10, 20, 30, 40, 50, 60, 70, 80], 4, 87),
    ],
)
def test_placement_of_lambda_resnets(depth: int, c4: list[int], c5: int, blocks: int) -> None:
    network = meta(f"lambda_resnet{depth}")
    assert lambda_blocks(network) == {4: c4, 5: list(range(1, c5 + 1))}
    every = {4: list(range(1, blocks + 1)), 5: list(range(1, c5 + 1))}
    assert lambda_blocks(meta(f"lambda_resnet{depth}_c4")) == every
    excited = {name.split(".")[0] for name, m in network.named_modules() if isinstance(m, SqueezeExcitation2d)}
    assert excited == {"layer1", "layer2"}


def test_no_se_beside_another_layer() -> None:
    network = meta("resnet26", placement=("C", (1,), "L", "C"), se=True)
    excited = [name for name, m in network.named_modules() if isinstance(m, SqueezeExcitation2d)]
    assert excited == [f"{block}.se" for block in ("layer1.0", "layer1.1", "layer2.1", "layer4.0", "layer4.1")]


def tables(network: nn.Module) -> list[tuple[int, ...]]:
    return [m.positions.scope for m in network.modules() if isinstance(m, LambdaLayer2d) and m.positions is not None]


def test_scopes() -> None:
    def of(**arguments: object) -> list[tuple[int, ...]]:
        return tables(meta("resnet26", placement="LLLL", **arguments))

    assert of() == [(23, 23)] * 8
    assert of(intra_depth=4) == [(7, 7)] * 8
    assert of(intra_depth=4, scope=9) == [(9, 9)] * 8
    assert of(scope=[5, 7]) == [(5, 7)] * 8
    assert of(scope="global") == of(scope=None)
    assert of(scope=[3, 3, 3, "global"]) == [(3, 3)] * 6 + [(27, 27), (13, 13)]
    assert of(scope=(7, 7, (3, 5), 23)) == [(7, 7)] * 4 + [(3, 5)] * 2 + [(23, 23)] * 2
    # The first block of a stage works at its input's resolution; every halving rounds up.
    assert of(scope=None, image_size=(97, 160)) == [
        *[(2 * 25 - 1, 2 * 40 - 1)] * 3,
        *[(2 * 13 - 1, 2 * 20 - 1)] * 2,
        *[(2 * 7 - 1, 2 * 10 - 1)] * 2,
        (2 * 4 - 1, 2 * 5 - 1),
    ]


def test_a_global_scope_takes_its_image_size_and_no_more() -> None:
    arguments = {"placement": "CLLL", "scope": None, "image_size": (97, 131), "num_classes": 3}
    assert fake("resnet26", 97, 131, **arguments).shape == (1, 3)
    assert fake("resnet26", 64, 95, **arguments).shape == (1, 3)
    with pytest.raises(ValueError, match="larger input_size"):
        fake("resnet26", 99, 163, **arguments)


def test_shared_positions_are_shared_in_a_stage_only() -> None:
    network = create_model("resnet26", placement="LLLL", share_positions=True)
    owned = [m.positions for m in network.modules() if isinstance(m, LambdaLayer2d)]
    assert len(owned) == 8
    assert [id(p) for p in owned[::2]] == [id(p) for p in owned[1::2]]
    assert len({id(p) for p in owned}) == 4


@pytest.mark.parametrize("layer", LAYERS)
def test_hybrids_of_every_layer(layer: str) -> None:
    """Outputs depend on the layer's own parameters, and its options arrive."""
    arguments = {"placement": ("C", "C", (2,), "L"), "image_size": (61, 83), "num_classes": 7}
    options = {name: value for name, value in {"heads": 2, "key_depth": 6}.items() if name in LAYERS[layer].options}
    x = torch.randn(2, 3, 61, 83)
    network = settled(randomized(create_model("resnet26", layer=layer, **options, **arguments)), x).eval()
    layers = [network.layer3[1].conv2, network.layer4[0].conv2, network.layer4[1].conv2]  # type: ignore[index]
    assert isinstance(network.layer3[0].conv2, nn.Conv2d)  # type: ignore[index]
    scores = network(x)
    assert scores.shape == (2, 7)
    own = [p for m in layers for p in m.parameters()]
    grads = torch.autograd.grad((scores * torch.randn_like(scores)).sum(), own)
    assert all(g.abs().max() > 0 for g in grads)
    inner = getattr(layers[0], "attention", getattr(layers[0], "rows", layers[0]))
    assert {name: getattr(inner, name) for name in options} == options


def test_options_arrive_in_the_lambda_layers() -> None:
    options = {"key_norm": None, "query_softmax": True, "multi_head": True, "intra_depth": 2, "backend": "gemm"}
    network = meta("lambda_resnet_tiny", batch_norm=False, heads=8, key_depth=4, embedding_std=0.5, **options)
    layers = [m for m in network.modules() if isinstance(m, LambdaLayer2d)]
    assert len(layers) == 4
    for layer in layers:
        assert {name: getattr(layer, name) for name in options} == options
        assert isinstance(layer.norm_queries, nn.Identity)
        assert (layer.heads, layer.key_depth) == (8, 4)
        assert layer.positions is not None
        assert layer.positions.embedding_std == 0.5
    mobile = [m for m in meta("lambda_mobilenet_v2").modules() if isinstance(m, LambdaLayer2d)]
    assert [(m.key_depth, m.heads, m.channels, m.positions and m.positions.scope) for m in mobile] == [
        (32, 4, 64, (5, 5)),
        (32, 4, 160, (5, 5)),
    ]


def test_options_of_layers_that_are_nowhere_are_named() -> None:
    with pytest.warns(UserWarning, match="resnet26 has only convolutions, so layer, heads has no effect: also"):
        meta("resnet26", layer="axial_attention", heads=4)
    with pytest.warns(UserWarning, match=r"mobilenet_v2 has .* scope has no effect"):
        meta("mobilenet_v2", scope=7)


def test_a_layer_given_as_a_function() -> None:
    def layer(channels: int) -> nn.Module:
        return LocalAttention2d(channels, heads=2, scope=5)

    assert isinstance(meta("resnet26", placement="CCCL", layer=layer).layer4[1].conv2, LocalAttention2d)  # type: ignore


def test_two_lambda_layers_in_one_block_warn() -> None:
    def two(channels: int) -> nn.Module:
        return nn.Sequential(LambdaLayer2d(channels), LambdaLayer2d(channels))

    with pytest.warns(UserWarning, match="has two lambda layers") as caught, torch.device("meta"):
        create_model("resnet26", placement="CCCL", layer=two)
    assert [str(w.message).split()[0] for w in caught] == ["layer4.0", "layer4.1"]
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("error")
        create_model("lambda_patch_small")
        create_model("resnet26", placement="LLLL")


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    [
        ("lambda_resnet100", {}, ValueError, "did you mean lambda_resnet.*101"),
        ("zzz", {}, ValueError, r"list_models\(\)"),
        ("resnet50", {"head": 4}, TypeError, "did you mean heads"),
        ("resnet50", {"placement": "LLL"}, ValueError, "name 4 stages"),
        ("resnet50", {"placement": "CCXL"}, ValueError, "stage c4 must be 'C', 'L'"),
        ("resnet50", {"placement": ("C", "C", (7,), "L")}, ValueError, "from 1 to 6"),
        ("resnet50", {"layer": "lambdas"}, ValueError, "'lambda', 'linear_attention'"),
        ("resnet50", {"layer": "se"}, ValueError, "se=True"),
        ("resnet50", {"layer": "axial_attention", "intra_depth": 4}, ValueError, "has no option intra_depth"),
        ("resnet50", {"layer": nn.Identity, "heads": 4}, ValueError, "has no option heads"),
        ("resnet50", {"layer": "local_attention", "scope": None, "placement": "CCCL"}, ValueError, "set a scope"),
        ("resnet50", {"scope": (3, 5, 7), "placement": "CCCL"}, ValueError, "each of 4 stages"),
        (
            "resnet50",
            {"scope": "whole", "placement": "CCCL"},
            ValueError,
            "'global'.*'auto'.* got 'whole'",
        ),
        ("resnet50", {"stem": "deeper"}, ValueError, "'vanilla', 'deep', 'tiered', 'strided', 'small'"),
        ("resnet50", {"shortcut": "none"}, ValueError, "'conv', 'pool'"),
        ("resnet50", {"activation": "tanh"}, ValueError, "'relu', 'silu', 'mish', 'gelu'"),
        ("resnet50", {"act_layer": "silu"}, TypeError, "activation='relu'"),
        ("resnet_tiny", {"blur": "stem"}, ValueError, "use blur='all'"),
        ("resnet50", {"global_pool": "mean"}, ValueError, "'avg', 'max', 'avgmax', 'catavgmax', ''"),
        ("resnet50", {"global_pool": ""}, ValueError, "num_classes=0"),
        ("resnet50", {"drop_rate": 1.0}, ValueError, "drop_rate"),
        ("resnet50", {"num_classes": -1}, ValueError, "num_classes must be from 0 to 10000000, got -1"),
        ("resnet50", {"num_classes": None}, ValueError, "num_classes must be a whole number, got None"),
        ("resnet50", {"in_chans": 0}, ValueError, "in_chans .* got 0"),
        (
            "resnet50",
            {"image_size": "224"},
            ValueError,
            "image_size .* or a list of 2 values, got '224'",
        ),
        ("resnet50", {"image_size": 0}, ValueError, "image_size must be from 1 to 8192, got 0"),
        ("resnet50", {"placement": None}, ValueError, "placement must be text or a list, got None"),
        ("resnet50", {"placement": ("C", "C", 3, "L")}, ValueError, r"placement\[2\] must be text or a list, got 3"),
        ("resnet50", {"depths": (3, 4, 6)}, ValueError, r"depths must be a list of 4 values, got \(3, 4, 6\)"),
        ("resnet50", {"depths": (3, 4, 0, 3)}, ValueError, r"depths\[2\] must be from 1 to 200, got 0"),
        ("resnet50", {"widths": 64}, ValueError, "widths must be a list of 4 values, got 64"),
        (
            "resnet50",
            {"se": (True, False)},
            ValueError,
            r"true or false or a list of 4 values, got \(True, F",
        ),
        ("mobilenet_v2", {"placement": 10}, ValueError, "placement must be a list, got 10"),
        ("resnet50", {"image_size": (32, -1)}, ValueError, r"image_size\[1\] must be from 1 to 8192, got -1"),
        ("lambda_mobilenet_v2", {"placement": (18,)}, ValueError, "from 1 to 17"),
        ("lambda_patch_tiny", {"depth": 2}, ValueError, "at least 4"),
        ("resnet50", {"position": "x"}, ValueError, "position must be true or false, got 'x'"),
        ("resnet50", {"batch_norm": 3}, ValueError, "batch_norm must be true or false, got 3"),
        ("resnet50", {"se_reduction": 0}, ValueError, "se_reduction must be from 1 to 65536, got 0"),
        ("resnet50", {"heads": 1e9}, ValueError, "heads must be a whole number .* got 1000000000.0"),
        ("resnet50", {"heads": 10**9}, ValueError, "heads must be from 1 to 65536, got 1000000000"),
        ("resnet50", {"heads": 10**400}, ValueError, "heads must be from 1 to 65536"),
        (
            "resnet50",
            {"key_norm": "l3"},
            ValueError,
            "one of 'softmax', 'l2', 'none' or none, got 'l3'",
        ),
        ("resnet50", {"embedding_std": float("nan")}, ValueError, "embedding_std must be .* got nan"),
        ("resnet50", {"drop_path_rate": "0.1"}, ValueError, "drop_path_rate must be a number.* got '0.1'"),
        ("resnet50", {"image_size": 100_000}, ValueError, "image_size must be from 1 to 8192, got 100000"),
        ("resnet50", {"layer": 3}, ValueError, "layer must be text or a function, got 3"),
        ("lambda_patch_tiny", {"expansion": 0}, ValueError, "expansion must be from 1 to 65536, got 0"),
        ("resnet50", {"num_heads": 4}, TypeError, "has no argument num_heads; use heads"),
        ("resnet50", {"kernel_size": 4, "hads": 4}, TypeError, r"use scope; did you mean heads\?"),
        ("resnet50", {"pretrained": True}, ValueError, "no weights are published"),
        ("resnet50", {"out_indices": (1,)}, ValueError, "features_only=True"),
        ("resnet50", {"features_only": True, "out_indices": (5,)}, ValueError, "0 to 4"),
    ],
)
def test_errors_say_what_to_do(name: str, arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), torch.device("meta"):
        create_model(name, **arguments)


@pytest.mark.parametrize("kind", ["silu", "mish", "gelu"])
def test_the_activation_is_everywhere(kind: str) -> None:
    found = Counter(type(m).__name__.lower() for m in meta("resnet_rs50", activation=kind, se=False).modules())
    assert found["relu"] == 0
    assert found[kind] == 3 + 1 + 16  # of the stem, after the maximum pooling's place, of the blocks


def test_blurred_networks_alias_less_and_keep_their_sizes() -> None:
    ours = blur_by_half()
    x = torch.randn(2, 3, 7, 10, dtype=torch.float64)
    row = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64) / 4
    kernel = (row[:, None] * row).expand(3, 1, 3, 3)
    theirs = F.conv2d(x, kernel, stride=2, padding=1, groups=3)
    torch.testing.assert_close(ours(x)[:, :, 1:-1, 1:], theirs[:, :, 1:-1, 1:])
    assert torch.equal(ours(torch.ones(1, 1, 5, 1)), torch.ones(1, 1, 3, 1))  # the border does not darken
    for stem, blur in (("vanilla", "stem"), ("deep", "all"), ("strided", "all"), ("small", "all")):
        plain, blurred = (create_model("resnet26", stem=stem, blur=kind, num_classes=2) for kind in ("none", blur))
        randomized(plain)
        blurred.load_state_dict(plain.state_dict())  # filters have no parameters
        image = torch.randn(2, 3, 45, 64)
        sizes = [[m.shape for m in net.forward_intermediates(image)[1]] for net in (plain, blurred)]
        assert sizes[0] == sizes[1]
        assert not torch.allclose(plain(image), blurred(image))
    strides = {m.stride for m in blurred.layer2.modules() if isinstance(m, torch.nn.Conv2d)}
    assert strides == {(1, 1), (2, 2)}  # the shortcut still strides
    assert blurred.layer2[0].conv2.stride == (1, 1)


def test_stochastic_depth() -> None:
    x = torch.ones(4000, 2, 1, 1)
    dropped = DropPath(0.25).train()(x)
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert torch.equal(dropped[:, 0], dropped[:, 1])  # an example is kept or dropped as a whole
    assert dropped.mean() == pytest.approx(1, abs=0.05)
    assert torch.equal(DropPath(0.25).eval()(x), x)
    rates = [m.rate for m in meta("resnet26", drop_path_rate=0.7).modules() if isinstance(m, DropPath)]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])


def test_import_stays_light() -> None:
    heavy = ("timm", "torchvision", "huggingface_hub", "safetensors")
    code = f"import lambdanets, sys; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

"""Networks with other implementations' lambda layers give the same with ours in their places, in float64."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import lambdanets
from lambdanets.accelerate import AcceleratedLayer, original_state
from lambdanets.models.memory_format import to_channels_last
from tests.convert import peers
from tests.models.helpers import randomized, settled

timm = pytest.importorskip("timm")
lambda_networks = pytest.importorskip("lambda_networks")
TOLERANCE = 1e-9


def lucidrains(channels: int, **options: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls torch.meshgrid without saying how to index
        return lambda_networks.LambdaLayer(channels, dim_k=6, heads=3, **options)


def lucidrains_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1, bias=False),
        lucidrains(12, r=5, dim_u=2),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Sequential(lucidrains(12, n=16), nn.ReLU()),
        nn.Flatten(),
    )


# Networks, how many lambda layers each has, and the side of the images.
NETWORKS = {
    "lambda_resnet26t": (lambda: timm.create_model("lambda_resnet26t", num_classes=5), 3, 64),
    "lambda_resnet26rpt_256": (lambda: timm.create_model("lambda_resnet26rpt_256", num_classes=5, img_size=64), 3, 64),
    "lambda_resnet50ts": (lambda: timm.create_model("lambda_resnet50ts", num_classes=5), 5, 64),
    "lucidrains": (lucidrains_network, 2, 16),
    "d-li14": (lambda: peers.LambdaResNet((1, 1, 1, 1), 5, scope=5, intra=2), 4, 32),
}


def ready(module: nn.Module, x: Tensor) -> nn.Module:
    """In float64, with norms and biases that are not those of the start."""
    module = module.double()
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return settled(randomized(module), x)


def images(side: int) -> Tensor:
    return torch.randn(2, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def assert_close(found: Tensor, expected: Tensor, what: str = "") -> None:
    assert expected.abs().max() > 1e-6, what
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max(), what


@pytest.mark.parametrize("case", NETWORKS)
def test_networks_give_equal_outputs_gradients_and_state_dicts(case: str) -> None:
    build, count, side = NETWORKS[case]
    torch.manual_seed(0)
    x = images(side)
    theirs = ready(build(), x)
    before = copy.deepcopy(theirs.state_dict())
    random_state = torch.random.get_rng_state()
    model, summary = lambdanets.accelerate(copy.deepcopy(theirs))
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert (len(summary.replaced), summary.left) == (count, {})
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in theirs.parameters())
    assert all(type(m).__name__ != "LambdaLayer" for m in model.modules())
    with torch.no_grad():
        assert_close(model.eval()(x), theirs.eval()(x))
    shared = []
    for network in (theirs, model):
        own = x.clone().requires_grad_()
        scores = network.train()(own)
        (scores**2).sum().backward()
        shared.append((scores, own.grad, {n: p.grad for n, p in network.named_parameters()}))
    assert_close(shared[1][0], shared[0][0])
    assert_close(shared[1][1], shared[0][1])
    for name, gradient in shared[1][2].items():
        if name in shared[0][2]:
            assert_close(gradient, shared[0][2][name], name)
    # A step changes weights and statistics; what comes out under the old names is what the original has after it.
    for network in (theirs, model):
        torch.optim.SGD(network.parameters(), lr=1e-4).step()
    after = original_state(model)
    assert after.keys() == before.keys()
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-7, atol=1e-9, msg=name)
    model.load_state_dict(before)
    for name, tensor in original_state(model).items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, msg=name)
    again, _ = lambdanets.accelerate(copy.deepcopy(theirs))
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(again.eval()(x), model.eval()(x))


def test_pooling_inside_of_a_layer() -> None:
    """timm's windows of two drop the last row of an odd map."""
    from timm.layers.lambda_layer import LambdaLayer

    x = torch.randn(2, 12, 7, 5, dtype=torch.float64)
    theirs = ready(nn.Sequential(LambdaLayer(12, stride=2, num_heads=3, dim_head=6, r=3, qkv_bias=True)), x)
    model, summary = lambdanets.accelerate(copy.deepcopy(theirs))
    assert len(summary.replaced) == 1
    for training in (True, False):
        assert_close(model.train(training)(x), theirs.train(training)(x))
    state = original_state(model)
    assert state.keys() == theirs.state_dict().keys()
    assert not state["0.qkv.bias"].any()  # they have no effect
    theirs.load_state_dict(state)
    assert_close(model(x), theirs(x))


def test_a_layer_alone_is_replaced_by_a_new_module() -> None:
    theirs = lucidrains(12, r=3).eval()
    model, summary = lambdanets.accelerate(theirs)
    assert isinstance(model, AcceleratedLayer)
    assert summary.replaced == {"": "lucidrains' LambdaLayer"}
    assert not model.training
    assert original_state(model).keys() == theirs.state_dict().keys()


def test_for_inference_norms_are_folded() -> None:
    torch.manual_seed(0)
    theirs = ready(timm.create_model("lambda_resnet26t", num_classes=5), images(64)).eval()
    kept = copy.deepcopy(theirs)
    summary = lambdanets.accelerate(theirs, inference=True)
    model = summary.model
    assert summary.folded == sum(isinstance(m, nn.BatchNorm2d) for m in kept.modules()) - 3 * 3
    assert "28 batch norms folded" in str(summary)
    layer = model.get_submodule("stages.3.0.self_attn")
    assert layer.fused_projection is not None
    with torch.no_grad():
        assert_close(model(images(64)), kept(images(64)))
    alone = lambdanets.accelerate(copy.deepcopy(lucidrains_network()), inference=True)
    assert alone.folded == 0
    assert alone.model[1].fused_projection is not None
    shaped = lambdanets.accelerate(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), inference=True, input_shape=(1, 3, 4, 4)
    )
    assert shaped.folded == 1


def test_settings_of_parameters_stay() -> None:
    theirs = timm.create_model("lambda_resnet26t").to(torch.bfloat16)
    layer = theirs.get_submodule("stages.2.1.self_attn")
    layer.qkv.requires_grad_(False)
    layer.norm_v.eval()
    layer.norm_q.eps, layer.norm_q.momentum = 0.5, 0.25
    model, _ = lambdanets.accelerate(theirs.train())
    layer = model.get_submodule("stages.2.1.self_attn")
    frozen = {name for name, parameter in layer.named_parameters() if not parameter.requires_grad}
    assert frozen == {"to_queries.weight", "to_keys.weight", "to_values.weight"}
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert (layer.norm_queries.eps, layer.norm_queries.momentum) == (0.5, 0.25)
    assert layer.training


def test_channels_last_works_afterwards() -> None:
    theirs = timm.create_model("lambda_resnet26t", num_classes=5)
    with pytest.raises(RuntimeError):
        copy.deepcopy(theirs).to(memory_format=torch.channels_last)
    model, _ = lambdanets.accelerate(theirs)
    model = model.to(memory_format=torch.channels_last)
    assert model.stem.conv2.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.isfinite(model(images(64).float())).all()


def test_networks_with_weights_of_five_axes_become_channels_last() -> None:
    network = to_channels_last(timm.create_model("lambda_resnet26t", num_classes=5))
    weight = network.get_parameter("stages.3.1.conv1_1x1.conv.weight")
    assert weight.stride() == weight.to(memory_format=torch.channels_last).stride() == (2048, 1, 2048, 2048)


def test_what_is_left_says_why() -> None:
    class LambdaLayer(nn.Linear):
        """Somebody else's."""

    class Other(type(lucidrains(12, r=3))):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = Other(12, dim_k=6, heads=3, r=3)
    hooked, synced = lucidrains(12, r=3), nn.SyncBatchNorm.convert_sync_batchnorm(lucidrains(12, r=3))
    hooked.register_forward_hook(lambda *_: None)
    tied = lucidrains(12, r=3), lucidrains(12, r=3)
    tied[0].to_q.weight = tied[1].to_q.weight
    ours = lambdanets.LambdaLayer2d(12)
    with torch.device("meta"):
        empty = lucidrains(12, r=3)
    left = {
        "unknown": LambdaLayer(2, 2),
        "other": other,
        "hooked": hooked,
        "synced": synced,
        "tied": tied[0],
        "tied_too": tied[1],
        "empty": empty,
    }
    model = nn.ModuleDict({**left, "ours": ours, "attention": nn.MultiheadAttention(4, 1)})
    summary = lambdanets.accelerate(model)
    assert not summary.replaced
    assert summary.left.keys() == left.keys()
    for name, module in left.items():
        assert model[name] is module
    assert "parameters are not those of" in summary.left["unknown"]
    assert "outputs differ" in summary.left["other"]
    assert "has hooks" in summary.left["hooked"]
    assert "norm_q is SyncBatchNorm" in summary.left["synced"]
    assert "shares parameters" in summary.left["tied"]
    assert "meta device" in summary.left["empty"]
    assert "0 lambda layers replaced, 7 not replaced" in str(summary)


def test_a_module_with_two_names_is_replaced_once() -> None:
    layer = lucidrains(12, r=3)
    model, summary = lambdanets.accelerate(nn.ModuleList([layer, layer]))
    assert len(summary.replaced) == 2
    assert model[0] is model[1]


def test_wrapped_models_are_refused() -> None:
    with pytest.raises(TypeError, match="before wrapping"):
        lambdanets.accelerate(nn.DataParallel(lucidrains(12, r=3)))


def test_a_damaged_state_dict_is_an_error_of_loading() -> None:
    model, _ = lambdanets.accelerate(nn.Sequential(lucidrains(12, r=3)))
    state = original_state(model)
    del state["0.norm_q.bias"]
    with pytest.raises(RuntimeError, match=r"0: this is not lucidrains' LambdaLayer: missing norm_q.bias"):
        model.load_state_dict(state)

"""Learning rates and decays, at steps where they can be worked out by hand."""

import math
from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn

from lambdanets.train.config import Ema, Optimizer, Schedule
from lambdanets.train.distributed import World
from lambdanets.train.ema import MovingAverage, decay_of_step
from lambdanets.train.optim import make_optimizer, parameter_groups, step
from lambdanets.train.schedule import learning_rate

KINDS = get_args(get_type_hints(Optimizer)["kind"])


def rates(schedule, steps, batch_size=512):
    return {s: learning_rate(schedule, batch_size, s, steps=1000, steps_per_epoch=10) for s in steps}


def test_warmup_is_linear_and_the_cosine_ends_at_nothing():
    found = rates(Schedule(rate=0.1, per_batch=256, warmup_epochs=5.0), (0, 25, 50, 525, 999))
    assert found[0] == 0
    assert found[25] == pytest.approx(0.1)  # half of 0.1 * 512 / 256
    assert found[50] == pytest.approx(0.2)
    assert found[525] == pytest.approx(0.1)  # half way
    assert 0 < found[999] < 1e-5


def test_the_flat_cosine_starts_late():
    schedule = Schedule(kind="flat_cosine", rate=1.0, per_batch=0, warmup_epochs=1.0, flat=0.5)
    found = rates(schedule, (5, 10, 500, 750, 999))
    assert found[5] == pytest.approx(0.5)
    assert found[10] == found[500] == 1.0
    assert found[750] == pytest.approx(0.5)
    assert 0 < found[999] < 1e-4
    late = rates(Schedule(kind="flat_cosine", rate=1.0, per_batch=0, warmup_epochs=80.0, flat=0.5), (800, 900))
    assert list(late.values()) == pytest.approx([1.0, 0.5])  # the warmup ends after `flat`


def test_exponential_falls_every_three_epochs():
    found = rates(Schedule(kind="exponential", rate=0.1, per_batch=0, warmup_epochs=2.0), (10, 20, 49, 50, 80))
    assert found[10] == pytest.approx(0.05)
    assert found[20] == found[49] == pytest.approx(0.1)
    assert found[50] == pytest.approx(0.099)
    assert found[80] == pytest.approx(0.1 * 0.99**2)


def test_drops_and_constant():
    schedule = Schedule(kind="drops", rate=1.0, per_batch=0, warmup_epochs=0.0, factor=0.1, drops=(0.9, 0.95))
    assert list(rates(schedule, (0, 899, 900, 950)).values()) == pytest.approx([1, 1, 0.1, 0.01])
    constant = Schedule(kind="constant", rate=1.0, per_batch=0, warmup_epochs=0.0)
    assert set(rates(constant, (0, 500, 999)).values()) == {1.0}


def test_the_average_forgets_its_start():
    assert decay_of_step(Ema(decay=0.9999, horizon=0.0), 0, 10**6) == pytest.approx(0.1)
    assert decay_of_step(Ema(decay=0.9999, horizon=0.0), 10**6, 10**6) == 0.9999
    assert decay_of_step(Ema(decay=0.9999), 900, 1000) == pytest.approx(0.99)  # the horizon is 100 steps
    assert decay_of_step(Ema(decay=0.5, warmup=False), 0, 1000) == 0.5


def test_shared_tables_stay_shared_and_frozen_parameters_stay():
    first, second, frozen = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    frozen.requires_grad_(False)
    model = nn.Sequential(first, second, frozen)
    average = MovingAverage(model)
    assert average.module[0].weight is average.module[1].weight
    start = first.weight.detach().clone()
    with torch.no_grad():
        first.weight += 1.0
    average.update(0.25, skip=torch.tensor(0.0))
    torch.testing.assert_close(average.module[0].weight, start + 0.25)
    assert torch.equal(average.module[2].weight, frozen.weight)


def test_no_decay_on_biases_and_norms():
    from lambdanets import create_model

    network = create_model("lambda_resnet_tiny", widths=(4, 4, 8, 8), depths=(1, 1, 1, 1))
    decayed, spared = parameter_groups(network, 0.1)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(spared["params"]) == len(list(network.parameters()))
    tables = [p for name, p in network.named_parameters() if "positions" in name]
    assert tables
    assert all(any(p is table for p in decayed["params"]) for table in tables)
    assert all(p.ndim == 1 for p in spared["params"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_that_is_not_finite_leaves_weights_and_state(kind, dtype):
    """Also the very first one, whose momentum does not exist yet."""
    model = nn.Linear(3, 2).to(dtype)
    optimizer = make_optimizer(model, Optimizer(kind=kind, weight_decay=0.1))
    before = [p.detach().clone() for p in model.parameters()]
    for value, finite in ((float("nan"), False), (1.0, True)):
        for p in model.parameters():
            p.grad = torch.full_like(p, value)
        step(optimizer, 0.1, skip=torch.tensor(float(not finite)))
        if not finite:
            assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    fresh = nn.Linear(3, 2).to(dtype)
    with torch.no_grad():
        for p, old in zip(fresh.parameters(), before, strict=True):
            p.copy_(old)
            p.grad = torch.ones_like(p)
    step(make_optimizer(fresh, Optimizer(kind=kind, weight_decay=0.1)), 0.1, skip=torch.tensor(0.0))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


def test_rmsprop_is_tensorflows():
    """The mean of squares starts at 1, epsilon is inside the root, the rate inside the momentum."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = make_optimizer(model, Optimizer(kind="rmsprop", alpha=0.9, eps=1e-3, momentum=0.9, weight_decay=0.0))
    weight, square, momentum = model.weight.item(), 1.0, 0.0
    for rate, gradient in ((0.1, 2.0), (0.05, -3.0), (0.2, 0.5)):
        model.weight.grad = torch.tensor([[gradient]])
        step(optimizer, rate, skip=torch.tensor(0.0))
        square = 0.9 * square + 0.1 * gradient**2
        momentum = 0.9 * momentum + rate * gradient / math.sqrt(square + 1e-3)
        weight -= momentum
        assert model.weight.item() == pytest.approx(weight, rel=1e-5)


def test_adamw_decays_apart_from_the_gradient():
    model = nn.Linear(1, 1, bias=False)
    settings = Optimizer(kind="adamw", momentum=0.9, alpha=0.99, eps=1e-8, weight_decay=0.1)
    optimizer = make_optimizer(model, settings)
    weight, square, momentum = model.weight.item(), 0.0, 0.0
    for number, (rate, gradient) in enumerate(((0.1, 2.0), (0.05, -3.0), (0.2, 0.5)), 1):
        model.weight.grad = torch.tensor([[gradient]])
        step(optimizer, rate, skip=torch.tensor(0.0))
        momentum = 0.9 * momentum + 0.1 * gradient
        square = 0.99 * square + 0.01 * gradient**2
        weight -= rate * 0.1 * weight
        weight -= rate * (momentum / (1 - 0.9**number)) / (math.sqrt(square / (1 - 0.99**number)) + 1e-8)
        assert model.weight.item() == pytest.approx(weight, rel=1e-5)


def test_lamb_scales_the_step_to_the_weights():
    """Against the algorithm of the paper (1904.00962), with bias correction; one-dimensional parameters as in AdamW."""
    model = nn.Linear(3, 2).double()
    settings = Optimizer(kind="lamb", momentum=0.9, alpha=0.99, eps=1e-6, weight_decay=0.1)
    optimizer = make_optimizer(model, settings)
    weights = [p.detach().clone() for p in model.parameters()]
    moments = [[torch.zeros_like(p), torch.zeros_like(p)] for p in weights]
    for number, rate in enumerate((0.1, 0.05, 0.2), 1):
        for i, p in enumerate(model.parameters()):
            gradient = torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(10 * number + i))
            p.grad = gradient.clone()
            first, second = moments[i]
            first += 0.1 * (gradient - first)
            second += 0.01 * (gradient**2 - second)
            update = first / (1 - 0.9**number) / ((second / (1 - 0.99**number)).sqrt() + 1e-6)
            if p.ndim > 1:
                update += 0.1 * weights[i]
                update *= weights[i].norm() / update.norm()
            weights[i] -= rate * update
        step(optimizer, rate, skip=torch.tensor(0.0))
    for p, weight in zip(model.parameters(), weights, strict=True):
        torch.testing.assert_close(p.detach(), weight)


def test_muon_orthogonalises_the_steps_of_matrices_and_moves_the_rest_as_adamw():
    network = small(heads=1)  # with four heads the values have two channels, too few for Muon
    rate, scale = 1e-3, 0.2  # steps have the root mean square of AdamW's, about 0.2
    settings = Optimizer(kind="muon", momentum=0.9, alpha=0.99, eps=1e-8, weight_decay=0.0)
    optimizer = make_optimizer(network, settings)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    for i, p in enumerate(network.parameters()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    step(optimizer, rate, skip=torch.tensor(0.0))
    moved = {name: (p.detach() - before[name]) / rate for name, p in network.named_parameters()}
    signs = {name for name, change in moved.items() if torch.allclose(change.abs(), torch.ones(()), atol=1e-3)}
    tables = {name for name in before if name.endswith("positions.table")}
    assert tables
    assert signs == tables | network.no_weight_decay() | {"fc.weight"}  # AdamW's first step is the sign
    for name in before.keys() - signs:
        matrix = moved[name].flatten(1)
        singular = torch.linalg.svdvals(matrix) / (scale * max(matrix.shape) ** 0.5)
        assert 0.5 < singular.min() <= singular.max() < 1.5


def small(**changes):
    from lambdanets import create_model

    return create_model(
        "lambda_resnet_tiny", widths=(4, 4, 8, 8), depths=(1, 2, 1, 1), scope=3, num_classes=3, **changes
    )


def test_each_depth_has_its_learning_rate():
    network = small()
    groups = parameter_groups(network, 0.1, layer_decay=0.5)
    names = {p: name for name, p in network.named_parameters()}
    assert sorted(names[p] for group in groups for p in group["params"]) == sorted(names.values())
    scales = {names[p]: group["lr_scale"] for group in groups for p in group["params"]}
    wanted = {"conv1": 0.5**6, "layer1.0": 0.5**5, "layer2.0": 0.5**4, "layer2.1": 0.5**3, "layer4.0": 0.5, "fc": 1.0}
    for prefix, scale in wanted.items():
        assert {s for name, s in scales.items() if name.startswith(f"{prefix}.")} == {scale}
    decays = {names[p]: group["weight_decay"] for group in groups for p in group["params"]}
    assert {name for name, decay in decays.items() if not decay} == network.no_weight_decay()
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    optimizer = make_optimizer(network, Optimizer(momentum=0.0, weight_decay=0.0, layer_decay=0.5))
    for p in network.parameters():
        p.grad = torch.ones_like(p)
    step(optimizer, 0.1, skip=torch.tensor(0.0))
    for name, p in network.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] - 0.1 * scales[name])
    with pytest.raises(ValueError, match=r"optimizer\.layer_decay supports only image classification"):
        parameter_groups(nn.Linear(2, 2), 0.1, layer_decay=0.5)


@pytest.mark.parametrize("name", ["lambda_resnet_tiny", "resnet_rs50", "lambda_mobilenet_v2", "lambda_patch_tiny"])
def test_depths_are_those_of_timm(name):
    pytest.importorskip("timm")
    from timm.models import group_parameters

    from lambdanets import create_model

    with torch.device("meta"):
        network = create_model(name, num_classes=3)
    assert network.depths() == group_parameters(network, network.group_matcher(), reverse=True)


@pytest.mark.parametrize(
    ("part", "frozen"),
    [
        ("stem", ("conv1", "bn1")),
        ("layer2", ("conv1", "bn1", "layer1", "layer2")),
        ("features", ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4")),
    ],
)
def test_frozen_parts_do_not_learn_and_their_statistics_stay(part, frozen):
    network = small()
    network.freeze(part)
    names = {name for name, _ in network.named_parameters()}
    assert {n for n, p in network.named_parameters() if not p.requires_grad} == {
        name for name in names if name.split(".")[0] in frozen
    }
    network.eval().train()
    before = {name: t.clone() for name, t in network.state_dict().items()}
    network(torch.randn(4, 3, 16, 16)).square().sum().backward()
    step(make_optimizer(network, Optimizer()), 0.1, skip=torch.tensor(0.0))
    changed = {name for name, t in network.state_dict().items() if not torch.equal(t, before[name])}
    assert not [name for name in changed if name.split(".")[0] in frozen]
    assert changed >= {n for n in before if "running" in n and n.split(".")[0] not in frozen} | {"fc.weight", "fc.bias"}


def test_a_part_that_is_not_there_cannot_be_frozen():
    with pytest.raises(
        ValueError, match="cannot freeze 'layer9'; choose from stem, layer1, layer2, layer3, layer4 and"
    ):
        small().freeze("layer9")


def test_recalibration_leaves_frozen_statistics():
    network = small()
    network.freeze("layer1")
    with torch.no_grad():
        for name, buffer in network.named_buffers():
            if "running" in name:
                buffer.fill_(2.0)
    average = MovingAverage(network)
    average.recalibrate([torch.randn(4, 3, 16, 16)], lambda model, batch: model(batch), World())
    for name, buffer in average.network().named_buffers():
        if "running" in name:
            assert torch.equal(buffer, torch.full_like(buffer, 2.0)) == name.startswith(("bn1", "layer1")), name
    assert not average.module.training

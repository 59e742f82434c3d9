"""Learning rates and decays, at steps where they can be worked out by hand."""

import math

import pytest
import torch
from torch import nn

from lambdanets.train.config import Ema, Optimizer, Schedule
from lambdanets.train.ema import MovingAverage, decay_of_step
from lambdanets.train.optim import make_optimizer, parameter_groups, step
from lambdanets.train.schedule import learning_rate


def rates(schedule, steps, batch_size=512):
    return {s: learning_rate(schedule, batch_size, s, steps=1000, steps_per_epoch=10) for s in steps}


def test_warmup_is_linear_and_the_cosine_ends_at_nothing():
    found = rates(Schedule(rate=0.1, per_batch=256, warmup_epochs=5.0), (0, 25, 50, 525, 999))
    assert found[0] == 0
    assert found[25] == pytest.approx(0.1)  # half of 0.1 * 512 / 256
    assert found[50] == pytest.approx(0.2)
    assert found[525] == pytest.approx(0.1)  # half way
    assert 0 < found[999] < 1e-5


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


@pytest.mark.parametrize("kind", ["sgd", "rmsprop", "adamw"])
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

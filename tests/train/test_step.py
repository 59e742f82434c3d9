"""What a step costs the host, and what is kept off the host: average, statistics, and the metrics of the log."""

import math
import random

import numpy as np
import pytest
import torch
from safetensors.torch import save_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lambdanets.data.order import mix
from lambdanets.train import foreach, step_metrics
from lambdanets.train.distributed import World
from lambdanets.train.ema import MovingAverage
from lambdanets.train.engine import Engine, seed_all
from lambdanets.train.loop import fit
from lambdanets.train.statistics import RunningStatistics
from lambdanets.train.step_metrics import StepMetrics
from lambdanets.train.task import Outcome, Share
from tests.train.tasks import Numbers, config, final, same


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do: on a GPU each of these is a launch or more."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.append(str(function))
        return function(*arguments, **(keywords or {}))


class Deep(Numbers):
    """As many layers as wanted."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def model(self):
        layers = [layer for _ in range(self.layers) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6))]
        return nn.Sequential(*layers, nn.Linear(6, 3))


@pytest.mark.parametrize("layers", [1, 8])
def test_a_step_asks_torch_for_few_things_however_many_layers(tmp_path, layers):
    engine = Engine(Deep(layers), config(tmp_path), World(), steps=100)
    share = Share(0, 1, 16, 1)
    batches = engine.task.batches(0, 0, share)
    engine.step(0, batches, share, 0.1)
    engine.statistics.begin()
    outcome = engine.backward(1, next(batches), 0, share)
    with Operations() as asked:
        engine.metrics.note(outcome)
        engine.statistics.collect(last=True)
        engine.update(1, 0.1)
    free = ("profiler", "aten.view", "aten.detach", "aten.split")  # nothing for the device
    ours = [name for name in asked.names if not name.startswith(free)]
    assert len(ours) <= 20, ours


def test_the_norm_is_that_of_all_tensors_however_many_numbers():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in ((), (5,), (8, 6, 3, 3), (4096, 4096))]
    tensors[2] = tensors[2].to(memory_format=torch.channels_last)
    exact = torch.stack([t.double().norm() for t in tensors]).norm()
    torch.testing.assert_close(foreach.total_norm(tensors).double(), exact, rtol=1e-5, atol=0)
    tensors[1][3] = float("nan")
    assert foreach.total_norm(tensors).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("number", "kept"), [(math.nan, False), (math.inf, False), (-math.inf, False), (3.0, True), (1e-44, True)]
)
def test_one_number_that_is_not_finite_is_found_and_others_stay(number, kept, dtype):
    tensors = [torch.randn(8, 6, 3, 3, dtype=dtype).to(memory_format=torch.channels_last), torch.randn(7, dtype=dtype)]
    tensors[0][5, 2, 1, 0] = number
    before = [tensor.clone() for tensor in tensors]
    assert bool(foreach.unscaled_(tensors, torch.tensor(0.25))) == kept
    if kept:
        assert all(torch.equal(one, other * 0.25) for one, other in zip(tensors, before, strict=True))


def test_gradients_whose_squares_overflow_are_skipped_whatever_is_logged(tmp_path, monkeypatch):
    update = Engine.update

    def enlarged(engine, step, rate):
        if step == 7:
            for parameter in engine.parameters:
                parameter.grad *= 1e25
        update(engine, step, rate)

    monkeypatch.setattr(Engine, "update", enlarged)
    for every in (1, 5):
        records = []
        out = tmp_path / str(every)
        fit(Numbers(), config(out, log_every=every, precision="float32"), watch=records.append)
        assert [record["step"] for record in records if record["event"] == "skipped_step"] == [7]
    assert same(final(tmp_path / "1"), final(tmp_path / "5"))


def test_the_log_has_the_norm_of_its_step_and_none_where_that_was_skipped(tmp_path, monkeypatch):
    norms, records, update = {}, [], Engine.update

    def watched(engine, step, rate):
        norms[step + 1] = float(torch.cat([p.grad.flatten() for p in engine.parameters]).norm())
        update(engine, step, rate)

    monkeypatch.setattr(Engine, "update", watched)
    fit(Numbers(spoilt={9}), config(tmp_path, log_every=5), watch=records.append)
    found = {record["step"]: record["grad_norm"] for record in records if record["event"] == "step"}
    assert math.isnan(found.pop(10))  # null in the file
    assert found == pytest.approx({step: norms[step] for step in found})
    assert len(found) > 2


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_average_moves_unless_the_device_says_no(memory_format):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 2).double()).to(memory_format=memory_format)
    average = MovingAverage(model)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn_like(p)
    average.update(0.3, skip=torch.tensor(1.0))
    assert all(torch.equal(a, b) for a, b in zip(average.module.parameters(), before, strict=True))
    average.update(0.3, skip=torch.tensor(0.0))
    for mine, theirs, old in zip(average.module.parameters(), model.parameters(), before, strict=True):
        torch.testing.assert_close(mine, old + 0.3 * (theirs.detach() - old))


def test_a_parameter_with_gaps_is_refused():
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(torch.zeros(2, 8)[:, :3])
    with pytest.raises(ValueError, match=r"weight is not dense in memory \(strides \(8, 1\)\)"):
        MovingAverage(model)


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3)).train()


def forward(model, inputs):
    for norm in model:
        norm(inputs.to(norm.running_mean))


@pytest.mark.parametrize("masked", [False, True])
def test_statistics_that_are_not_finite_undo_the_step_though_the_gradient_is(masked):
    for spoilt in (float("nan"), float("inf"), None):
        model = normed()
        if masked:
            model.register_buffer("mask", torch.tensor([0.0, float("-inf")], dtype=torch.float64))
        known = list(model.buffers())
        statistics = RunningStatistics(model, World())
        statistics.begin()
        forward(model, torch.randn(8, 3))
        statistics.collect(last=True)
        statistics.commit(statistics.merged(torch.tensor(True)))
        old = {name: t.clone() for name, t in model.state_dict().items()}
        statistics.begin()
        forward(model, torch.randn(8, 3))
        if spoilt is not None:
            model[1].running_var[2] = spoilt
        new = {name: t.clone() for name, t in model.state_dict().items()}
        statistics.collect(last=True)
        finite = statistics.merged(torch.tensor(True))
        statistics.commit(finite)
        assert bool(finite) == (spoilt is None)
        assert same(model.state_dict(), new if finite else old)
        assert all(a is b for a, b in zip(model.buffers(), known, strict=True))  # as others know them
        assert not statistics.merged(torch.tensor(False))


def test_a_network_that_was_trained_has_buffers_of_its_own(tmp_path):
    model = normed()
    statistics = RunningStatistics(model, World())
    statistics.begin()
    forward(model, torch.randn(8, 3))
    statistics.collect(last=True)
    statistics.commit(torch.tensor(True))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(RuntimeError):
        save_model(model, str(tmp_path / "flat.safetensors"))  # or `release` would not be needed
    statistics.release()
    save_model(model, str(tmp_path / "own.safetensors"))
    assert same(model.state_dict(), before)
    with torch.no_grad():
        model[0].running_mean.fill_(5.0)
    statistics.begin()  # what was loaded or changed meanwhile counts
    forward(model, torch.randn(8, 3))
    statistics.put_back()
    assert torch.equal(model[0].running_mean, torch.full((3,), 5.0))


def test_a_long_log_interval_is_read_now_and_then_and_says_the_same(tmp_path, monkeypatch):
    whole, often = tmp_path / "whole", tmp_path / "often"
    records = {whole: [], often: []}
    for folder in records:
        watch = records[folder].append
        fit(Numbers(spoilt={3, 4, 9}), config(folder, log_every=11, micro_batch=4), watch=watch)
        monkeypatch.setattr(step_metrics, "MOST_WAITING", 2)
    curves = [
        [
            [r.get(name) for name in ("event", "step", "loss", "top1", "grad_norm")]
            for r in found
            if r["event"] != "tick"
        ]
        for found in records.values()
    ]
    assert curves[0] == curves[1]
    assert same(final(whole), final(often))


def test_metrics_are_means_over_the_finite_steps():
    found = StepMetrics(4, World())
    steps = [(True, 2.0, (1.0, 3.0)), (False, 9.0, (9.0, 9.0)), (True, 4.0, (5.0, 7.0)), (True, None, (4.0, 4.0))]
    for step, (finite, norm, losses) in enumerate(steps):
        for loss in losses:
            found.note(Outcome(torch.tensor(loss, requires_grad=True), {"right": torch.tensor(3)}, examples=4))
        found.end_step(step, torch.tensor(finite), None if norm is None else torch.tensor(norm))
    kept = StepMetrics(4, World())
    kept.load(found.state())
    for one in (found, kept):
        assert one.means() == {"loss": 4.0, "grad_norm": 3.0, "right": 0.75}
        assert (one.positions(), one.total, one.in_a_row) == ([1], 1, 0)
        assert (one.means(), one.positions()) == ({}, [])


def test_seeds_are_those_of_torch_python_and_numpy():
    seed_all(1, 2, 3)
    found = torch.rand(3), random.random(), np.random.random()
    seed = mix(1, 2, 3)
    torch.manual_seed(seed & (2**63 - 1))
    random.seed(seed)
    np.random.seed(seed & (2**32 - 1))
    assert torch.equal(found[0], torch.rand(3))
    assert found[1:] == (random.random(), np.random.random())

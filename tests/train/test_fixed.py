"""Steps in fixed memory: the same numbers, also where recorded operations are repeated, as a CUDA graph does."""

import gc
import math
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lambdanets.pseudo.config import DistillConfig, OnlineTeacher
from lambdanets.pseudo.distill import Distill
from lambdanets.train import fixed
from lambdanets.train.classify import Classify
from lambdanets.train.config import DataConfig, Ema, Optimizer, Schedule
from lambdanets.train.distributed import World
from lambdanets.train.engine import Engine
from lambdanets.train.fixed import FixedSteps, why_not
from lambdanets.train.loop import fit
from lambdanets.train.task import Share
from tests.support.image_runs import EVERYTHING, folder_of_images, image_config, weights
from tests.train.tasks import Numbers, StopAt, config, final, records, same
from tests.train.weights import small_weights

CLASSES = ("class0", "class1", "class2")

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Recorder(TorchDispatchMode):
    """Keeps operations with the tensors that they read and wrote. Values that Python saw are constants from then on."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = str(function)
        assert "_local_scalar_dense" not in name, "the host waits for the device"
        found = function(*arguments, **(keywords or {}))
        if not name.startswith(("profiler", "aten.detach")):
            self.operations.append((function, arguments, keywords or {}, found))
        return found

    def replay(self):
        for function, arguments, keywords, before in self.operations:
            now = function(*arguments, **keywords)
            for mine, new in zip(pytree.tree_leaves(before), pytree.tree_leaves(now), strict=True):
                if isinstance(mine, Tensor) and mine.data_ptr() != new.data_ptr():
                    mine.detach().copy_(new)


class Replayed:
    """In place of `fixed.Graph`: the first calls compute, one is recorded, and all others repeat its operations."""

    def __init__(self, function, engine):
        self.function, self.calls, self.recorder = function, 0, None

    def __call__(self):
        self.calls += 1
        if self.recorder is not None:
            with torch.no_grad():
                self.recorder.replay()
        elif self.calls <= 2:
            self.function()
        else:
            self.recorder = Recorder()
            with self.recorder:
                self.function()


@pytest.fixture
def steps(monkeypatch):
    """Which steps engines make: `steps("fixed")` in fixed memory, `steps("replayed")` recorded and repeated."""
    start, memory = Engine.__init__, fixed.Memory.__init__

    def choose(kind):
        def begin(engine, *arguments):
            start(engine, *arguments)
            engine.fixed = FixedSteps(engine) if kind != "eager" else None

        def make(self, engine, *arguments):
            memory(self, engine, *arguments)
            if kind == "replayed":
                self.run = Replayed(self.compute, engine)

        monkeypatch.setattr(Engine, "__init__", begin)
        monkeypatch.setattr(fixed.Memory, "__init__", make)

    return choose


def logged(folder):
    names = ("step", "loss", "top1", "grad_norm", "lr")
    skipped = [record["step"] for record in records(folder, "skipped_step")]
    return [[record[name] for name in names] for record in records(folder, "step")], skipped


SETTINGS = [
    dict(precision="float64"),
    dict(precision="float32", clip_norm=0.3, optimizer=Optimizer(kind="adamw", alpha=0.99, eps=1e-8)),
    dict(precision="bfloat16", ema=Ema(decay=0.0), optimizer=Optimizer(nesterov=True)),
    dict(precision="float16", ema=Ema(decay=0.9, recalibrate=2)),
    dict(precision="float32", optimizer=Optimizer(kind="adamw"), log_every=3),
]


@pytest.mark.parametrize("kind", ["fixed", "replayed"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings["precision"])
def test_steps_in_fixed_memory_are_the_same_to_the_last_bit(tmp_path, steps, kind, settings):
    """With dropout, steps that are not finite, evaluations between them, and a resume."""
    settings = dict(schedule=Schedule(rate=0.02, per_batch=0)) | settings
    whole, other, parts = (config(tmp_path / name, **settings) for name in ("whole", "other", "parts"))
    steps("eager")
    fit(Numbers(spoilt={3, 9}), whole)
    steps(kind)
    fit(Numbers(spoilt={3, 9}), other)
    fit(Numbers(spoilt={3, 9}), parts, watch=StopAt(15, event="tick"))
    steps("eager")
    fit(Numbers(spoilt={3, 9}), parts, resume=True)
    assert logged(whole.out) == logged(other.out)
    assert logged(whole.out)[1] == [3, 9]
    assert same(final(whole.out), final(other.out))
    assert same(final(whole.out), final(parts.out))


@pytest.mark.parametrize("cache", ["device", "none"])
def test_augmentation_of_batches_is_recorded_as_well(tmp_path, steps, cache):
    """Crops of images on the device, RandAugment, erasing and mixing have new random numbers in each replay."""
    images = folder_of_images(tmp_path / "images", count=30)
    data = DataConfig(path=str(images), workers=0, cache=cache)
    found = []
    for kind in ("eager", "replayed"):
        steps(kind)
        run = image_config(images, tmp_path / kind, data=data, augment=EVERYTHING, epochs=4.0)
        fit(Classify(run), run)
        found.append(weights(run.out))
    assert same(*found)


def test_an_online_teacher_is_recorded_as_well(tmp_path, steps):
    images = folder_of_images(tmp_path / "images", count=30)
    teacher = OnlineTeacher(weights=str(small_weights(tmp_path / "t.safetensors", CLASSES)[1]), size=12, weight=0.5)
    found = []
    for kind in ("eager", "replayed"):
        steps(kind)
        base = image_config(images, tmp_path / kind, augment=EVERYTHING, epochs=4.0)
        run = DistillConfig(**base.__dict__, teacher=teacher)
        fit(Distill(run), run)
        found.append(weights(run.out))
    assert same(*found)


def test_another_shape_gets_memory_of_its_own(tmp_path, steps):
    class Growing(Numbers):
        def batches(self, epoch, first_step, share):
            for inputs, labels in super().batches(epoch, first_step, share):
                yield (inputs, labels) if epoch < 2 else (inputs[:12], labels[:12])

    steps("eager")
    fit(Growing(), config(tmp_path / "eager"))
    steps("replayed")
    fit(Growing(), config(tmp_path / "replayed"))
    assert same(final(tmp_path / "eager"), final(tmp_path / "replayed"))


def test_a_captured_step_that_is_replaced_gives_its_memory_back_at_once(monkeypatch):
    """And not when Python looks for cycles: with progressive resizing that would be the memory of several steps."""

    class Graph:
        def replay(self):
            pass

    class Owner:
        def __init__(self):
            self.calls, self.run = (
                0,
                fixed.Graph(self.compute, SimpleNamespace(optimizer=SimpleNamespace(param_groups=[]))),
            )

        def compute(self):
            self.calls += 1

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, stand_in in (
        ("Stream", lambda: stream),
        ("current_stream", lambda: stream),
        ("stream", lambda stream: nullcontext()),
        ("synchronize", lambda: None),
        ("CUDAGraph", Graph),
        ("graph", lambda graph, **options: nullcontext()),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    owner = Owner()
    for _ in range(fixed.WARM_UP + 3):
        owner.run()
    assert owner.calls == fixed.WARM_UP + 1
    left = weakref.ref(owner)
    gc.disable()
    try:
        del owner
        assert left() is None
    finally:
        gc.enable()


def test_a_number_that_python_froze_would_be_noticed(tmp_path, steps, monkeypatch):
    """The recorder is a test only if it finds this."""
    move = Engine.move
    monkeypatch.setattr(Engine, "move", lambda engine, rate, weight, with_norm: move(engine, float(rate), weight, True))
    steps("replayed")
    with pytest.raises(AssertionError, match="the host waits"):
        fit(Numbers(), config(tmp_path))


def test_reasons_against_a_capture(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"--capture on is not possible: CUDA graphs need a GPU"):
        fit(Numbers(), config(tmp_path / "on", capture="on"))
    assert not (tmp_path / "on" / "log.jsonl").exists()
    gpu, one = World(device=torch.device("cuda")), Share(0, 1, 16, 1)

    def reason(share=one, world=gpu, task=None, **settings):
        settings = config(tmp_path, **settings)
        return why_not(task or Numbers(), settings, world, share, Engine(Numbers(), settings, World(), 10)) or ""

    assert reason() == ""
    assert "several processes" in reason(world=replace(gpu, size=2))
    assert "4 micro-batches" in reason(share=Share(0, 1, 4, 4))
    assert "optimizer.kind rmsprop skips non-finite steps on the host" in reason(optimizer=Optimizer(kind="rmsprop"))
    varying = Numbers()
    varying.not_captured = "its shapes vary"
    assert reason(task=varying) == "its shapes vary"
    monkeypatch.setattr(fixed, "AUTO_CAPTURES", True)
    assert fit(Numbers(), config(tmp_path / "auto")).finished
    (start,) = records(tmp_path / "auto", "start")
    assert "Steps are not captured as a CUDA graph: CUDA graphs need a GPU" in start["note"]


def gpu_config(out, capture, **changes):
    settings = dict(device="cuda", precision="float32", channels_last=False, capture=capture)
    return config(out, **(settings | changes))


@on_gpu
@pytest.mark.parametrize("settings", SETTINGS[1:], ids=lambda settings: settings["precision"])
def test_captured_and_eager_runs_agree_on_a_gpu(tmp_path, settings):
    eager, captured, parts = (
        gpu_config(tmp_path / name, capture, **settings)
        for name, capture in (("eager", "off"), ("captured", "on"), ("parts", "on"))
    )
    for one in (eager, captured):
        fit(Numbers(spoilt={3, 9}), one)
    fit(Numbers(spoilt={3, 9}), parts, watch=StopAt(15, event="tick"))
    fit(Numbers(spoilt={3, 9}), parts, resume=True)
    assert logged(eager.out)[1] == logged(captured.out)[1] == logged(parts.out)[1] == [3, 9]
    tolerance = 1e-4 if settings["precision"] == "float32" else 5e-2
    for name, wanted in final(eager.out).items():
        for folder in (captured.out, parts.out):
            torch.testing.assert_close(final(folder)[name], wanted, rtol=tolerance, atol=tolerance)


@on_gpu
def test_dropout_differs_in_each_captured_step_and_follows_the_seed():
    class Dropping(Numbers):
        def loss(self, model, batch):
            outcome = super().loss(model, batch)
            kept = torch.nn.functional.dropout(torch.ones(64, device=batch[0].device), 0.5)
            outcome.sums["kept"] = (kept * 2.0 ** torch.arange(64, device=kept.device).remainder(20)).sum()
            return outcome

    found = []
    for capture in (True, False, True):
        engine = Engine(Dropping(), gpu_config("unused", "on"), World(device=torch.device("cuda")), 100)
        engine.fixed = FixedSteps(engine) if capture else None
        batch = [t.cuda() for t in next(engine.task.batches(0, 0, Share(0, 1, 16, 1)))]
        drawn = []
        for step in range(8):
            engine.step(step, iter([batch]), Share(0, 1, 16, 1), 0.0)
            engine.metrics.read()
            drawn.append(engine.metrics.sums[engine.metrics.names.index("kept")])
            engine.metrics.sums = None
        assert len(set(drawn)) == 8
        assert not any(math.isnan(one) for one in drawn)
        found.append(drawn)
    assert found[0] == found[1] == found[2]

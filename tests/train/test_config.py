"""Configurations: JSON and back, and sentences for what is wrong in one."""

import dataclasses
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lambdanets.cli import main
from lambdanets.data.augment import Augment
from lambdanets.detect.config import DetectConfig, DetectData
from lambdanets.experiments.language.task import LanguageConfig
from lambdanets.options import chosen_device
from lambdanets.pseudo.config import CoTrainConfig
from lambdanets.train.config import DataConfig, Ema, ModelConfig, Optimizer, RunConfig, Schedule, TrainConfig
from lambdanets.train.inference.command import Using
from lambdanets.typed import from_json, to_json

CONFIGS = {
    "default": TrainConfig(),
    "changed": TrainConfig(
        out=Path("somewhere/else"),
        model=ModelConfig(name="resnet50", placement="CCLL", options=("scope=7", "heads=8"), image_size=96),
        data=DataConfig(path="x", validation="y", channels=1, mean=(0.5,), std=(0.25,), workers=3),
        augment=Augment(crop_scale=None, padding=4, flip=0.0),
        optimizer=Optimizer(kind="rmsprop"),
        schedule=Schedule(kind="drops", drops=(0.5, 0.75)),
        ema=Ema(decay=0.0),
        micro_batch=4,
    ),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_json_and_back(config):
    assert from_json(TrainConfig, json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("epocs", 3, ["unknown key epocs", "did you mean epochs?"]),
        ("model.nme", "x", ["model.nme", "did you mean model.name?"]),
        ("batch_size", "many", ["batch_size must be a whole number", "'many'"]),
        ("batch_size", 2.5, ["batch_size must be a whole number", "2.5"]),
        ("batch_size", True, ["batch_size must be a whole number", "True"]),
        ("epochs", 10**400, ["epochs must be a number", "000..."]),
        ("epochs", "long", ["epochs must be a number", "'long'"]),
        ("compile", 1, ["compile must be true or false", "1"]),
        ("optimizer.kind", "adam", ["optimizer.kind must be one of 'sgd', 'rmsprop', 'adamw', 'lamb'", "'adam'"]),
        ("schedule.drops", 0.5, ["schedule.drops must be a list", "0.5"]),
        ("schedule.drops", ["half"], ["schedule.drops[0] must be a number", "'half'"]),
        ("model", "resnet50", ["model must be an object", "'resnet50'"]),
        ("out", 3, ["out must be a path", "3"]),
    ],
)
def test_what_is_wrong_is_named(path, value, words):
    data = json.loads(json.dumps(to_json(TrainConfig())))
    *parents, last = path.split(".")
    place = data
    for name in parents:
        place = place[name]
    place[last] = value
    with pytest.raises(ValueError, match=re.escape(words[0])) as refused:
        from_json(TrainConfig, data)
    assert words[-1] in str(refused.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RunConfig(batch_size=0), "batch_size must be at least 1, got 0"),
        (lambda: RunConfig(epochs=0.0), "epochs must be finite and above 0"),
        (lambda: RunConfig(micro_batch=0), "micro_batch must be at least 1"),
        (lambda: RunConfig(epochs=math.nan), "epochs must be finite and above 0, got nan"),
        (lambda: RunConfig(clip_norm=math.nan), "clip_norm must be at least 0, got nan"),
        (lambda: Optimizer(momentum=2.0), "optimizer.momentum must be at least 0 and below 1, got 2.0"),
        (lambda: Optimizer(weight_decay=-1.0), "weight_decay must be at least 0, got -1.0"),
        (lambda: Schedule(rate=-1.0), "schedule.rate must be finite and above 0, got -1.0"),
        (lambda: Schedule(rate=math.nan), "schedule.rate must be finite and above 0, got nan"),
        (lambda: Schedule(every=0.0), "schedule.every must be finite and above 0"),
        (lambda: Schedule(warmup_epochs=-3.0), "warmup_epochs must be at least 0"),
        (lambda: Schedule(drops=(0.9, 3.0)), "schedule.drops must be fractions of the run between 0 and 1"),
        (lambda: TrainConfig(label_smoothing=1.0), "label_smoothing"),
        (lambda: Ema(decay=1.0), "ema.decay"),
        (lambda: DataConfig(channels=1), "one number for each of 1 channels"),
        (lambda: DataConfig(held_out=1.0), "data.held_out"),
        (lambda: DataConfig(crop=0.0), "data.crop"),
        (lambda: ModelConfig(options=("scope",)), "name=value"),
        (lambda: ModelConfig(batch_norm_momentum=0.0), "batch_norm_momentum"),
        (lambda: ModelConfig(options=("scop=7",)).row(), "did you mean scope"),
        (lambda: ModelConfig(options=("image_size=(64,32)",)).size, "square"),
    ],
)
def test_values_that_cannot_be(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def numbers_of(config, path=()):
    """Where the numbers of a configuration are: paths of names, and whether each is whole."""
    for name, value in vars(config).items():
        one = value[0] if isinstance(value, tuple) and value else value
        if dataclasses.is_dataclass(value):
            yield from numbers_of(value, (*path, name))
        elif isinstance(one, float | int) and not isinstance(one, bool):
            yield (*path, name), value


def changed(config, path, value):
    name, *rest = path
    return replace(config, **{name: changed(getattr(config, name), rest, value) if rest else value})


def absurd(config):
    for path, value in numbers_of(config):
        one = value[0] if isinstance(value, tuple) else value
        worst = [10**12 + 1, -(10**12) - 1, 10**400] if isinstance(one, int) else [1e300, -1e300, math.inf, math.nan]
        for bad in worst if path[-1] != "seed" else [10**400]:
            yield path, (bad,) * len(value) if isinstance(value, tuple) else bad


WITH_NUMBERS = {
    "train": replace(TrainConfig(), micro_batch=8, model=ModelConfig(image_size=64), data=DataConfig(workers=1)),
    "detect": replace(DetectConfig(), data=DetectData(workers=1)),
    "cotrain": CoTrainConfig(),
    "language": LanguageConfig(),
}


@pytest.mark.parametrize("config", WITH_NUMBERS.values(), ids=WITH_NUMBERS)
def test_every_number_of_every_configuration_is_bounded(config):
    count = 0
    for path, bad in absurd(config):
        with pytest.raises(ValueError, match=path[-1]) as refused:
            changed(config, path, bad)
        assert len(str(refused.value)) < 600
        count += 1
    assert count > 60


@pytest.mark.parametrize(
    "words",
    [
        "train digits --epochs 1e300",
        "train digits --epochs nan",
        "train digits --batch-size 1000000000000",
        "train digits --log-every 10000000000",
        "train digits --model.image-size 100000",
        "train imagenette --schedule.rate inf",
        "train cotrain --pseudo.ratio nan",
        "detect train shapes --size 100000",
        "detect train shapes --heads.hidden 1000000000000",
        "experiments language train start --length 10000000000",
        "experiments language generate nowhere --seed 99999999999999999999",
    ],
)
def test_the_command_line_refuses_them_with_a_sentence(words, capsys):
    try:
        status = main(words.split())
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert re.search("be between|above 0", " ".join(capsys.readouterr().err.split()))


def test_model_options_reach_the_network():
    config = ModelConfig(
        name="resnet50", placement="CCLL", embedding_std=0.02, options=("scope=(7,7,23,23)", "se=True")
    )
    row = config.row()
    assert (row.scope, row.se, row.embedding_std, row.placement) == ((7, 7, 23, 23), True, 0.02, "CCLL")
    assert replace(config, image_size=96).size == 96
    assert config.size == 224


def test_the_size_of_embeddings_may_be_a_rule():
    config = TrainConfig(model=ModelConfig(embedding_std="unit"))
    assert from_json(TrainConfig, to_json(config)).model.row().embedding_std == "unit"
    with pytest.raises(ValueError, match=r"model.embedding_std .*'one'"):
        from_json(TrainConfig, {"model": {"embedding_std": "one"}})


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("pretrained=owner/name", "cannot contain pretrained: use --model.pretrained"),
        ("num_classes=0", "cannot contain num_classes: the number of classes follows from the data"),
        ("features_only=True", "cannot contain features_only"),
        ("scope=[[[", "scope must be"),
        ("scope=((1,),(2,(3,)))", "scope"),
        ("heads=1e9", "heads must be a whole number .* got 1000000000.0"),
        ("heads=" + "9" * 400, "heads must be from 1 to 65536"),
        ("scope=" + "[" * 900, "scope must be"),
        ("scope=" + "[" * 5000, "has 5,000 characters"),
        ("bogus=1", "has no argument bogus"),
        ("num_heads=4", "has no argument num_heads; use heads"),
        ("scope", "name=value"),
    ],
)
def test_odd_options_of_a_network(word, message):
    with pytest.raises(ValueError, match=message) as refused:
        ModelConfig(options=(word,)).row()
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("name", ["mps", "xpu", "meta"])
def test_devices_that_are_not_supported(name):
    with pytest.raises(ValueError, match=f"device '{name}' is not supported: use cpu, cuda or cuda:1"):
        chosen_device(name)


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert chosen_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match="device 'cuda:7': torch finds 2 CUDA GPUs"):
        chosen_device("cuda:7")


def test_images_that_are_too_large():
    with pytest.raises(ValueError, match=r"between 1 and 8,192 pixels, got 100000: one image .* takes 120 GB"):
        ModelConfig(image_size=100_000)
    with pytest.raises(ValueError, match="--image-size must be between"):
        Using(image_size=100_000)

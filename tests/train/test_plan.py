"""The rules that choose settings for somebody's images: facts in, settings out. No image is read, no network runs."""

import pytest

from lambdanets.train.config import TrainConfig
from lambdanets.train.plan import Facts, Machine, make_plan, names_of, new_folder, with_settings

CPU, GPU = Machine("cpu", cores=2), Machine("cuda", "a GPU")


def facts(images=500, classes=5, side=160, **changes) -> Facts:
    sizes = tuple((f"class{i}", images // classes) for i in range(classes))
    return Facts(**(dict(path="pets", class_sizes=sizes, short_side=side, pixels=side * side) | changes))


def fast(config: TrainConfig) -> float:
    return 1e6


def by_pixels(config: TrainConfig) -> float:
    """Images per second of a laptop."""
    return 300.0 * (64 / config.model.size) ** 2


PHOTOS, SMALL = facts(), facts(side=28, grey=True, mean=0.13, std=0.31)


@pytest.mark.parametrize(
    ("data", "machine", "expected"),
    [
        (PHOTOS, CPU, {"model.name": "resnet26_d", "model.placement": "CCLL", "model.image_size": 128}),
        (PHOTOS, CPU, {"optimizer.kind": "adamw", "batch_size": 32, "data.cache": "memory", "precision": "float32"}),
        (PHOTOS, CPU, {"data.held_out": 0.2, "epochs": 80.0, "data.channels": 3, "augment.flip": 0.5}),
        (PHOTOS, GPU, {"model.name": "resnet50_d", "model.image_size": 128, "optimizer.kind": "sgd"}),
        (PHOTOS, GPU, {"batch_size": 64, "schedule.rate": 0.2, "precision": "bfloat16", "epochs": 300.0}),
        (facts(10_000), GPU, {"batch_size": 128, "schedule.rate": 0.4, "data.held_out": 0.1}),
        (facts(validation=100), CPU, {"data.held_out": 0.0, "epochs": 64.0}),
        (facts(100_000), CPU, {"epochs": 20.0, "data.cache": "none"}),
        (facts(20), CPU, {"batch_size": 4, "epochs": 150.0}),
        (facts(side=80), CPU, {"model.image_size": 96}),
        (facts(side=50), CPU, {"model.image_size": 64}),
        (facts(pixels=12_000_000), CPU, {"data.cache": "device"}),
        (facts(pixels=12_000_000), GPU, {"data.cache": "auto", "augment.cutmix": 1.0, "augment.mixup": 0.2}),
        (SMALL, CPU, {"model.name": "lambda_resnet_tiny", "model.image_size": 28, "augment.padding": 2}),
        (SMALL, CPU, {"augment.crop_scale": None, "data.channels": 1, "data.mean": (0.13,), "data.crop": 1.0}),
        (SMALL, GPU, {"model.name": "lambda_resnet_tiny", "model.options": ()}),
        (facts(class_sizes=(("3", 50), ("8", 60))), CPU, {"augment.flip": 0.0}),
        (facts(class_sizes=(("arrow_left", 50), ("arrow_right", 60))), CPU, {"augment.flip": 0.0}),
    ],
)
def test_rules(data, machine, expected):
    config = make_plan(data, machine, fast).config
    assert {name: value_of(config, name) for name in expected} == expected


def value_of(config, name):
    for part in name.split("."):
        config = getattr(config, part)
    return config


def test_the_largest_images_that_are_fast_enough_are_taken():
    """80 epochs of 400 images, and 12 evaluations: at 128 px 7 minutes at this speed, at 96 px 4, at 64 px 2."""
    sizes = {minutes: make_plan(PHOTOS, CPU, by_pixels, minutes=minutes).config.model.size for minutes in (8, 5, 2)}
    assert sizes == {8: 128, 5: 96, 2: 64}
    asked = []
    make_plan(PHOTOS, CPU, lambda config: asked.append(config.model.size) or 1e6)
    assert asked == [128]  # the probe takes time


def test_too_little_time_means_fewer_epochs():
    plan = make_plan(PHOTOS, CPU, by_pixels, minutes=1)
    assert plan.config.model.size == 64
    assert 30 < plan.config.epochs < 50
    assert plan.seconds <= 60
    assert "limited by the time, 80 would be better" in text(plan)
    hopeless = make_plan(PHOTOS, CPU, lambda config: 1.0)
    assert hopeless.config.epochs == 5
    assert hopeless.seconds > 8 * 60
    assert f"about {round(hopeless.seconds / 60)} min: more than 8 min" in text(hopeless)


def test_what_is_given_stays_and_the_rest_follows():
    given = {"model.image_size": 96, "epochs": 3, "batch_size": 16, "augment.flip": 0, "seed": 5, "log_every": 7}
    config = make_plan(PHOTOS, CPU, by_pixels, given).config
    assert {name: value_of(config, name) for name in given} == given
    assert config.model.name == "resnet26_d"
    assert config.schedule.rate == pytest.approx(0.004 / 2**0.5, rel=1e-2)
    assert config.schedule.warmup_epochs <= 0.3
    own = make_plan(PHOTOS, CPU, by_pixels, {"model.name": "lambda_resnet50", "epochs": 100}, minutes=1).config
    assert (own.model.name, own.model.options, own.epochs) == ("lambda_resnet50", (), 100.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ephocs": 3}, "unknown key ephocs in the configuration; did you mean epochs"),
        ({"model.nme": "x"}, "did you mean model.name"),
        ({"modl.name": "x"}, "unknown setting modl.name"),
        ({"epochs": "many"}, "epochs must be a number"),
        ({"model.name": "lambda_resnet51"}, "unknown model"),
    ],
)
def test_wrong_settings_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        make_plan(PHOTOS, CPU, by_pixels, given).config.model.row()


def text(plan) -> str:
    return "\n".join(map(str, plan.reasons))


def test_every_choice_has_a_reason():
    plan = make_plan(PHOTOS, CPU, by_pixels, minutes=5)
    said = text(plan)
    assert [reason.setting for reason in plan.reasons] == [
        *("network", "image size", "validation", "augmentation", "optimiser", "epochs", "time")
    ]
    assert "96 px: 128 px would take 7 min" in said
    assert "100 images held out: 20% of each class" in said
    assert "the dataset has no validation split" in said
    assert "about 4 min" in said
    assert "at most 5 min, set by you" in said
    assert "image size      32 px: set by you" in text(make_plan(PHOTOS, CPU, fast, {"model.image_size": 32}))


def test_unequal_classes_are_said():
    said = text(make_plan(facts(class_sizes=(("cat", 300), ("dog", 90))), CPU, fast))
    assert "'cat' has 300 images and 'dog' 90" in said
    assert "classes " not in text(make_plan(facts(class_sizes=(("cat", 100), ("dog", 90))), CPU, fast))


def test_small_classes_keep_an_image_of_two_to_judge_by():
    rare = tuple((f"class{i}", 2) for i in range(10))
    said = text(make_plan(facts(class_sizes=(*rare, ("one", 1))), CPU, fast))
    assert "10 images held out: 48% of each class" in said


def test_validation_images_are_said():
    said = text(make_plan(facts(validation=70), CPU, fast))
    assert "70 images: the validation split of the dataset" in said
    assert "held out" not in said


def test_large_photos_are_said():
    assert "images of 12 million pixels take longer" in text(make_plan(facts(pixels=12_000_000), CPU, fast))
    assert "reading" not in text(make_plan(PHOTOS, CPU, fast))


def test_records_come_every_few_seconds():
    slow, quick = (make_plan(PHOTOS, CPU, lambda config, rate=rate: rate).config for rate in (2.0, 320.0))
    assert slow.log_every == 1
    assert quick.log_every == 50  # 5 s of 10 steps


def test_settings_have_dotted_names():
    names = names_of(TrainConfig())
    assert {"epochs", "model.image_size", "augment.crop_scale"} <= set(names)
    config = with_settings(TrainConfig(), {"augment.crop_scale": None, "out": "x", "data.mean": [0.1, 0.2, 0.3]})
    assert (config.augment.crop_scale, str(config.out), config.data.mean) == (None, "x", (0.1, 0.2, 0.3))


def test_folders_of_runs_are_new(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(new_folder("some/pets/")) == "runs/pets"
    (tmp_path / "runs" / "pets").mkdir(parents=True)
    assert str(new_folder("some/pets/")) == "runs/pets-2"
    assert str(new_folder("some/pets/", again=True)) == "runs/pets"
    assert str(new_folder("shards/train-{0..9}.tar")) == "runs/train-0"

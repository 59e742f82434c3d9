"""Recipes hold the paper's numbers, and every one can be built, written down and asked for."""

import json
import re
from dataclasses import replace

import pytest

from lambdanets.cli import main
from lambdanets.detect.command import RECIPES as DETECTORS
from lambdanets.experiments.reproduce import ROWS
from lambdanets.models.registry import configure
from lambdanets.pseudo import cotrain as _cotrain  # noqa: F401  # its base class is replaced below
from lambdanets.recipes import (
    ROWS_350,
    UNPUBLISHED_350,
    cotrain,
    cotrain_350,
    imagenet_90,
    imagenet_350,
    imagenet_350_unpublished,
    imagenette,
    mobilenet_350,
)
from lambdanets.recipes.coco import coco_mask_rcnn, coco_one_gpu
from lambdanets.recipes.small import debug
from lambdanets.train.command import RECIPES, Resume
from lambdanets.train.config import TrainConfig
from lambdanets.train.resume import check_config
from lambdanets.typed import from_json, to_json

IMAGES = 1_281_167 * 0.98


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_whole(name):
    recipe = RECIPES[name]
    config = recipe.make()
    assert config.recipe == name
    assert str(config.out) == f"runs/{name}"
    assert from_json(type(config), json.loads(json.dumps(to_json(config)))) == config
    network = configure(config.model.name, **config.model.arguments())
    if name.startswith(("imagenet_", "mobilenet_", "cotrain_350")):
        assert network.embedding_std == 1.0  # the paper's
    for word in ("Command:", "Hardware:"):
        assert word in recipe.document
    if name not in ("debug",):
        assert "Expected:" in recipe.document
    assert (config.augment.randaugment_probability, config.augment.randaugment_cutout) == (1.0, True)
    steps = config.epochs * IMAGES / config.batch_size
    if name.startswith("imagenet_"):
        assert steps > 20_000  # or the decays of 0.9999 would not settle
        assert config.model.batch_norm_momentum == 1e-4
        assert config.ema.decay == 0.9999
        assert config.data.held_out == (0.0 if name == "imagenet_90" else 0.02)  # the paper says it for 350 epochs


def test_the_90_epoch_setup_is_the_papers():
    config = imagenet_90()
    assert (config.epochs, config.batch_size, config.optimizer.weight_decay) == (90, 4096, 1e-4)
    assert config.schedule.peak(config.batch_size) == pytest.approx(1.6)
    assert (config.schedule.kind, config.schedule.warmup_epochs, config.label_smoothing) == ("cosine", 5, 0.1)
    assert (config.optimizer.kind, config.optimizer.momentum, config.optimizer.nesterov) == ("sgd", 0.9, False)
    assert (config.augment.randaugment_layers, config.augment.flip, config.model.drop_rate) == (0, 0.5, 0)


# The paper's tables of hyperparameters and of results: the last two columns are seconds a step and supervised top-1.
PAPER_ROWS_350 = """
    50 & 128 & 10 & 0.2 & 0   & 0.058 & 77.4
    50 & 160 & 10 & 0.2 & 0   & 0.089 & 79.2
   101 & 160 & 10 & 0.3 & 0   & 0.14  & 80.8
   101 & 192 & 15 & 0.2 & 0   & 0.20  & 81.9
   152 & 192 & 15 & 0.3 & 0   & 0.28  & 82.5
   152 & 224 & 15 & 0.3 & 0.1 & 0.38  & 83.2
   152 & 256 & 15 & 0.3 & 0.1 & 0.49  & 83.8
   152 & 288 & 15 & 0.3 & 0.1 & 0.63  & -
   270 & 256 & 15 & 0.3 & 0.1 & 0.91  & 84.2
   350 & 256 & 15 & 0.3 & 0.2 & 1.16  & 84.4
   350 & 288 & 15 & 0.3 & 0.2 & 1.48  & 84.5
   350 & 320 & 15 & 0.3 & 0.2 & 1.91  & 84.7
   420 & 320 & 15 & 0.3 & 0.2 & 2.25  & 84.9
"""


def test_every_350_epoch_row_is_the_papers():
    rows = [[cell.strip() for cell in line.split("&")] for line in PAPER_ROWS_350.strip().splitlines()]
    assert len(rows) == len(ROWS_350)
    for row, (depth, size, magnitude, dropout, stochastic_depth, seconds, top1) in zip(ROWS_350, rows, strict=True):
        config = RECIPES[f"imagenet_350_{depth}_{size}"].make()
        assert (config.model.name, config.model.size) == (f"lambda_resnet{depth}", int(size))
        assert (config.augment.randaugment_layers, config.augment.randaugment_magnitude) == (2, int(magnitude))
        assert (config.model.drop_rate, config.model.drop_path_rate) == (float(dropout), float(stochastic_depth))
        assert (row.depth, row.image_size, row.seconds) == (int(depth), int(size), float(seconds))
        assert row.top1 == (None if top1 == "-" else float(top1))


def test_the_350_epoch_setup_is_the_papers():
    config = imagenet_350(152, 224)
    assert (config.epochs, config.optimizer.weight_decay) == (350, 4e-5)
    early = {row.name for row in ROWS_350 if imagenet_350(row.depth, row.image_size).early_stopping}
    assert early == {"imagenet_350_350_288", "imagenet_350_350_320", "imagenet_350_420_320"}
    assert {imagenet_350(row.depth, row.image_size).batch_size for row in ROWS_350} == {2048, 4096}
    with pytest.raises(ValueError, match="no results for depth 50 at 224"):
        imagenet_350(50, 224)


def test_rows_without_published_settings_take_those_of_a_row_that_has_them():
    row_of_the_table = r"\| LambdaResNet-(\S+)(?: with scope (\d+))? at (\d+) \| ([\d.]+) \| (\d+) at (\d+) \|"
    table = re.findall(row_of_the_table, imagenet_350_unpublished.__doc__ or "")
    assert len(table) == len(UNPUBLISHED_350)
    for name, scope, size, top1, *like in table:
        config = RECIPES[f"imagenet_350_{name.lower().replace('-', '_')}_{size}"].make()
        published = imagenet_350(*map(int, like))
        assert (config.model.name, config.model.size) == (f"lambda_resnet{name.lower().replace('-', '_')}", int(size))
        assert config.model.options == ((f"scope={scope}",) if scope else ())
        same = replace(config.model, name=published.model.name, image_size=published.model.image_size, options=())
        assert replace(config, recipe=published.recipe, out=published.out, model=same) == published
        row = next(r for r in ROWS if r.top1 == top1 and r.model == config.model.name and r.image_size == int(size))
        assert (dict(row.arguments) == {"scope": 7}) == bool(scope)
        assert "unpublished settings" in RECIPES[config.recipe].title
        assert "does NOT publish" in RECIPES[config.recipe].document
    with pytest.raises(ValueError, match="lambda_resnet152_c4 at 320"):
        imagenet_350_unpublished("lambda_resnet152_c4", 224)


def test_a_run_of_90_epochs_that_held_out_images_goes_on_doing_so(tmp_path):
    """Its config.json has the value written out; the recipe had it before."""
    before = replace(imagenet_90(), out=tmp_path)
    before = replace(before, data=replace(before.data, held_out=0.02))
    (tmp_path / "config.json").write_text(json.dumps(to_json(before)))
    assert Resume(tmp_path).config() == before
    with pytest.raises(ValueError, match=r"data.held_out was 0.02 and is 0.0"):
        check_config(replace(imagenet_90(), out=tmp_path))  # nor does --resume change it silently


def test_the_hours_in_the_text_follow_from_the_papers_seconds():
    """On 8 TPUv3 cores: seconds for 1024 images, 350 epochs."""
    table = dict(re.findall(r"\| (\d+ at \d+) \| [^|]+ \| (\d+) \|", imagenet_350.__doc__))
    assert len(table) == len(ROWS_350)
    for row in ROWS_350:
        hours = row.seconds * 350 * 1_281_167 / 1024 / 3600
        assert int(table[f"{row.depth} at {row.image_size}"]) == round(hours)


def test_the_mobile_setup_is_the_papers():
    config = mobilenet_350()
    assert (config.optimizer.kind, config.optimizer.momentum, config.optimizer.weight_decay) == ("rmsprop", 0.9, 1e-5)
    assert (config.schedule.peak(4096), config.schedule.peak(64)) == (0.1, 0.1)
    assert (config.schedule.kind, config.schedule.factor, config.schedule.every) == ("exponential", 0.99, 3)
    assert (config.model.drop_rate, config.epochs, config.batch_size) == (0.2, 350, 4096)


def test_imagenette_is_regularised_but_settles():
    config = imagenette()
    assert (config.augment.randaugment_layers, config.model.image_size) == (2, 128)
    assert config.model.batch_norm_momentum == 0.1
    assert config.ema.horizon == 0.1


@pytest.mark.parametrize("make", [coco_mask_rcnn, coco_one_gpu])
def test_the_papers_detectors_keep_the_papers_embeddings(make):
    model = make().model
    assert configure(model.name, **model.arguments()).embedding_std == 1.0


# The command


def test_the_papers_recipes_keep_their_steps_and_the_others_use_every_image():
    carried = {name for name, recipe in RECIPES.items() if recipe.make().remainder == "carry"}
    assert carried == {"digits", "imagenette", "cotrain", "distill"}
    assert {name for name, recipe in DETECTORS.items() if recipe.make().remainder == "carry"} >= {"shapes", "small_set"}
    assert coco_mask_rcnn().remainder == coco_one_gpu().remainder == TrainConfig().remainder == "drop"
    assert cotrain_350().pseudo.epoch == "labelled"
    assert cotrain().pseudo.epoch == "longer"


def test_help_of_a_recipe_says_what_it_costs(capsys):
    with pytest.raises(SystemExit):
        main(["train", "imagenet_90", "--help"])
    out = capsys.readouterr().out
    for word in (
        "Hardware",
        "Hours",
        "78.4",
        "--model.name",
        "--data.path",
        "--schedule.rate",
        "--model.embedding-std",
    ):
        assert word in out
    assert "(default: None)" not in out
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "Hardware" not in capsys.readouterr().out  # a list has titles only


def test_debug_trains_and_resumes_from_the_command_line(tmp_path, capsys):
    out = str(tmp_path / "run")
    arguments = [
        "train",
        "debug",
        "--epochs",
        "0.1",
        "--out",
        out,
        "--no-report",
        "--device",
        "cpu",
        "--batch-size",
        "32",
    ]
    assert main([*arguments, "--model.options", "widths=(4,4,8,8)", "depths=(1,1,1,1)", "scope=3", "key_depth=4"]) == 0
    text = capsys.readouterr().out
    assert "parameters" in text
    assert "validation (ema)" in text
    assert json.loads((tmp_path / "run" / "config.json").read_text())["batch_size"] == 32
    assert main(["train", "resume", out, "--no-report"]) == 0
    assert "resumed at step 11 of 11" in capsys.readouterr().out
    assert main(arguments) == 2
    assert "already holds a run" in capsys.readouterr().err


@pytest.mark.parametrize("again", [["resume", "{run}"], ["debug", "--out", "{run}", "--resume"]])
def test_a_run_from_before_a_field_goes_on_as_it_was(tmp_path, monkeypatch, again):
    data = to_json(debug())
    for name in ("randaugment_probability", "randaugment_cutout"):
        del data["augment"][name]
    (tmp_path / "config.json").write_text(json.dumps(data))
    seen = []

    def classify(config):
        seen.append(config.augment)
        raise ValueError("this is enough")

    monkeypatch.setattr("lambdanets.train.classify.Classify", classify)
    assert main(["train", *(word.format(run=tmp_path) for word in again)]) == 2
    assert seen == [replace(debug().augment, randaugment_probability=0.5, randaugment_cutout=False)]
    assert main(["train", "debug", "--out", str(tmp_path / "new"), "--resume"]) == 2
    assert seen[1:] == [debug().augment]
    assert (seen[1].randaugment_probability, seen[1].randaugment_cutout) == (1.0, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "resume", "nowhere"], ["nowhere is not the folder of a run", "config.json"]),
        (["train", "imagenette", "--data.path", "nowhere"], ["nowhere", "no such"]),
        (["train", "debug", "--model.name", "resnet5O"], ["unknown model 'resnet5O'", "resnet50"]),
        (["train", "debug", "--model.options", "scop=7"], ["scope"]),
        (["train", "debug", "--batch-size", "0"], ["batch_size must be at least 1, got 0"]),
        (["train", "debug", "--device", "toaster"], ["toaster"]),
        (["train", "imagnette"], ["imagnette: no such folder, and no recipe of that name; did you mean imagenette"]),
        (["train", "xyz"], ["xyz: no such folder, and no recipe of that name; `lambdanets train --help` lists"]),
        (["detect", "train", "shape"], ["unknown recipe 'shape': did you mean shapes?"]),
        (["train", "resume", "broken"], ["broken/config.json is not usable JSON"]),
        (["train", "debug", "--model.pretrained", "empty.pt"], ["empty.pt is not a whole torch file"]),
    ],
)
def test_refusals_are_sentences(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.pt").touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").touch()
    try:
        status = main(arguments)
    except SystemExit as ended:  # the parser's own refusals
        status = ended.code
    captured = capsys.readouterr()
    assert status == 2
    assert all(word in captured.err + captured.out for word in words), captured.err + captured.out
    assert "Traceback" not in captured.err

"""Training a detector by the one loop: it learns, resumes to the last bit, and leaves what it should."""

import ast
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from lambdanets.detect import precision
from lambdanets.detect.coco import open_set
from lambdanets.detect.network import make_backbone
from lambdanets.detect.page import write_report
from lambdanets.detect.task import Detect
from lambdanets.detect.use import look_through, open_detector
from lambdanets.models.pretrained import save_weights
from lambdanets.models.registry import create_model
from lambdanets.recipes.coco import COCO_IMAGES, coco_mask_rcnn, coco_one_gpu, shapes
from lambdanets.train.config import ModelConfig
from lambdanets.train.loop import fit
from lambdanets.train.schedule import learning_rate
from lambdanets.train.task import Share
from tests.detect.helpers import TINY, config, write_shapes


def records(folder, event):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run on the made-up set."""
    folder = tmp_path_factory.mktemp("run")
    settings = config(folder, epochs=0.5)
    result = fit(Detect(settings), settings)
    assert result.finished
    return folder


def test_a_run_leaves_weights_results_and_scores(run):
    (start,) = records(run, "start")
    assert (start["classes"], start["masks"], start["evaluated"]) == (3, True, {"validation": 32})
    step = records(run, "step")[-1]
    parts = [v for k, v in step.items() if k.startswith("loss_")]
    assert step["loss"] == pytest.approx(sum(parts), rel=1e-4)
    assert len(parts) == 5
    evaluation = records(run, "evaluation")[-1]
    assert {"box_ap", "box_small", "mask_ap", "mask_ap50", "detections"} <= evaluation.keys()
    results = json.loads((run / "detections.json").read_text())
    assert results[0].keys() == {"image_id", "category_id", "bbox", "score", "segmentation"}


def test_weights_alone_say_what_they_are(run):
    """The last evaluation again, from the file."""
    trained = open_detector(str(run), device="cpu")
    assert trained.class_names == ("circle", "square", "triangle")
    data = open_set("shapes", "validation")
    results = []
    for one in look_through(trained, data, batch_size=3):
        results += [d.as_coco(data.scenes.pictures[one.index].id, trained.about.categories) for d in one.found]
    scores = precision.average_precision(data.scenes.as_coco(), results, masks=True, detections=20)
    logged = [e for e in records(run, "evaluation") if e["weights"] == "ema"][-1]
    for name in ("box_ap", "box_recall", "mask_recall"):
        assert scores.numbers[name] == pytest.approx(logged[name], abs=2e-3)  # other batches: other rounding


def test_one_picture_alone(run):
    trained = open_detector(str(run), device="cpu", precision="float64")
    data = open_set("shapes", "validation")
    together = {one.index: one for one in look_through(trained, data, indices=[0, 1, 2, 3], batch_size=4)}
    alone = {one.index: one for one in look_through(trained, data, indices=[0, 1, 2, 3], batch_size=1)}
    for index, one in together.items():
        assert len(one.found) == len(alone[index].found) > 0
        for a, b in zip(one.found, alone[index].found, strict=True):
            assert a.box == pytest.approx(b.box, abs=1e-6)
            assert (a.label, a.mask) == (b.label, b.mask)


class StopAt:
    def __init__(self, step):
        self.step = step

    def __call__(self, record):
        if record["event"] == "step" and record["step"] == self.step:
            signal.raise_signal(signal.SIGTERM)


def test_a_run_that_stops_and_resumes_is_the_run_that_did_not(tmp_path, run):
    settings = config(tmp_path, epochs=0.5)
    stopped = fit(Detect(settings), settings, watch=StopAt(2))
    assert (stopped.step, stopped.finished) == (2, False)
    torch.manual_seed(99)  # whatever the state of the generators
    assert fit(Detect(settings), settings, resume=True).finished
    for name in ("weights.safetensors", "weights_raw.safetensors"):
        whole, again = load_file(run / name), load_file(tmp_path / name)
        assert whole.keys() == again.keys()
        assert all(torch.equal(whole[key], again[key]) for key in whole)
    assert (tmp_path / "detections.json").read_text() == (run / "detections.json").read_text()


def test_an_epoch_has_whole_steps_of_micro_batches(tmp_path):
    """Left-over micro-batches would end the stream that the workers read ahead in."""
    settings = config(tmp_path, batch_size=24, micro_batch=4)  # of 64 pictures
    batches = Detect(settings).batches(0, 0, Share(rank=0, world=1, micro_batch=4, parts=6))
    assert len(list(batches)) == 12


def test_without_the_evaluator_results_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "available", lambda: False)
    settings = config(tmp_path, epochs=0.25)
    result = fit(Detect(settings), settings)
    assert result.scores["ema"]["validation"].keys() == {"detections", "examples"}
    assert json.loads((tmp_path / "detections.json").read_text())
    assert "faster-coco-eval" in records(tmp_path, "no_evaluator")[0]["reason"]
    assert "detect score" in write_report(tmp_path, 1).read_text()
    with pytest.raises(ValueError, match="early_stopping"):
        Detect(replace(settings, early_stopping=1))


def test_boxes_only_and_bad_entries(tmp_path):
    """A set without outlines, with a broken annotation and a broken picture; no validation split."""
    folder = write_shapes(tmp_path / "data", 24)
    path = folder / "instances_train.json"
    data = json.loads(path.read_text())
    for annotation in data["annotations"]:
        del annotation["segmentation"]
    data["annotations"][0]["bbox"][2] = -1
    path.write_text(json.dumps(data))
    broken = folder / "train" / data["images"][3]["file_name"]
    broken.write_bytes(b"no picture")
    usual = config(tmp_path / "run", epochs=1.0)
    settings = replace(usual, data=replace(usual.data, path=str(folder), cache="none", max_broken=0.2))
    task = Detect(settings)
    assert (task.masks, task.score, task.split, len(task.held)) == (False, "box_ap", "held_out", 2)
    assert fit(task, settings).finished
    assert "inverted" in records(settings.out, "bad_annotation")[0]["reason"]
    assert "inverted" in (settings.out / "problems.txt").read_text()
    assert [r["name"] for r in records(settings.out, "broken_image")] == [broken.name]
    assert "mask_ap" not in records(settings.out, "evaluation")[-1]
    page = write_report(settings.out, 2).read_text()
    assert "inverted" in page


def test_the_report_shows_the_worst_and_the_best(run):
    page = write_report(run, pictures=3).read_text()
    assert page.count('<div class="scene">') == 6
    assert page.count("data:image/jpeg") == 12
    assert "<script" not in page
    for word in ("Worst images", "Best images", "box AP", "mask AP", "parts of the training loss", "triangle"):
        assert word in page


def test_a_classifier_becomes_a_backbone(tmp_path):
    """Weights of another image size and with another head."""
    arguments = dict(word.split("=", 1) for word in TINY)
    network = create_model("lambda_resnet_tiny", **{k: ast.literal_eval(v) for k, v in arguments.items()})
    path = save_weights(network, tmp_path / "classifier.safetensors")
    body = make_backbone(ModelConfig(name="lambda_resnet_tiny", pretrained=str(path), options=TINY), 512)
    wanted = {k: v for k, v in network.state_dict().items() if not k.startswith("fc.")}
    found = body.network.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_the_papers_schedule():
    paper = coco_mask_rcnn()
    steps_per_epoch = COCO_IMAGES // paper.batch_size
    steps = round(paper.epochs * steps_per_epoch)
    assert steps == 130_000

    def rate(step):
        return learning_rate(paper.schedule, 256, step, steps=steps, steps_per_epoch=steps_per_epoch)

    assert (rate(0), rate(500)) == (0, pytest.approx(0.16))
    assert rate(1000) == rate(116_999) == pytest.approx(0.32)
    assert [rate(s) for s in (117_000, 123_500, 126_750)] == pytest.approx([0.032, 0.0032, 0.00032])
    assert (paper.size, paper.optimizer.weight_decay, paper.sync_batch_norm) == (1024, 4e-5, True)
    assert (paper.jitter.scale, paper.heads.detections) == ((0.1, 2.0), 100)
    scaled = coco_one_gpu()
    assert scaled.schedule.peak(scaled.batch_size) == pytest.approx(0.32 * 16 / 256)
    assert scaled.schedule.warmup_epochs * (COCO_IMAGES // 16) == pytest.approx(1000)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_trains_and_finds_boxes_in_full(tmp_path, precision):
    """bfloat16 boxes would be whole multiples of 1/2 from 64 pixels on."""
    settings = config(tmp_path, epochs=0.25, precision=precision)
    result = fit(Detect(settings), settings)
    assert (result.finished, result.skipped) == (True, 0)
    trained = open_detector(str(tmp_path), device="cpu", precision=precision)
    found = [d for one in look_through(trained, open_set("shapes", "test"), indices=range(8)) for d in one.found]
    edges = torch.tensor([v for d in found for v in d.box])
    assert len(edges) > 100
    coarse = edges.to(getattr(torch, precision)).float() == edges
    assert coarse.float().mean() < 0.5


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    """The same weights and the same detections, from torchrun and alone."""
    words = ["-m", "lambdanets", "detect", "train", "debug", "--epochs", "0.5", "--device", "cpu", "--no-report"]
    words += ["--data.workers", "0", "--precision", "float64", "--out"]
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words, str(tmp_path / "several")]
    for command in ([*words, str(tmp_path / "alone")], several):
        subprocess.run([sys.executable, *command], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300)
    alone, together = (load_file(tmp_path / name / "weights.safetensors") for name in ("alone", "several"))
    for key, tensor in alone.items():
        torch.testing.assert_close(together[key], tensor, rtol=1e-9, atol=1e-12)
    found = [json.loads((tmp_path / name / "detections.json").read_text()) for name in ("alone", "several")]
    assert [one["image_id"] for one in found[0]] == [one["image_id"] for one in found[1]]


@pytest.mark.slow
def test_the_made_up_set_is_learnt_by_heart(tmp_path):
    """A tiny lambda backbone with narrowed heads on sixteen pictures: mask AP50 0.9, AP 0.5."""
    folder = write_shapes(tmp_path / "data", 16, tar=True)
    usual = shapes()
    settings = replace(
        usual,
        out=tmp_path / "run",
        device="cpu",
        data=replace(usual.data, path=str(folder), validation=str(folder), workers=0),
        jitter=replace(usual.jitter, scale=(1.0, 1.0), flip=0.0),
        epochs=100.0,
        evaluate_every=100,
    )
    scores = fit(Detect(settings), settings).scores["ema"]["validation"]
    assert scores["mask_ap50"] >= 0.9
    assert scores["mask_ap"] >= 0.5
    assert scores["box_ap"] >= 0.5

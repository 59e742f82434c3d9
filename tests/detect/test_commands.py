"""`lambdanets detect`: what people type."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from lambdanets.cli import main
from lambdanets.detect.command import nothing_found
from lambdanets.detect.config import Heads, Jitter
from lambdanets.detect.network import make_backbone
from lambdanets.detect.rle import encode
from lambdanets.detect.weights import read_about
from lambdanets.layers import GlobalAttention2d
from lambdanets.train.config import ModelConfig
from tests.detect.helpers import write_shapes
from tests.support.scripts import script

detector_step = script("benchmarks/detector_step.py")

QUICK = ["--device", "cpu", "--data.workers", "0", "--epochs", "0.25"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands") / "run"
    assert main(["detect", "train", "debug", "--out", str(folder), *QUICK]) == 0
    return folder


def test_training_writes_weights_and_a_report(run):
    assert (run / "report.html").stat().st_size > 10_000
    assert read_about(run / "weights.safetensors").masks


def test_a_run_is_not_overwritten(run, capsys):
    assert main(["detect", "train", "debug", "--out", str(run), *QUICK]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["detect", "train", "resume", str(run), "--no-report"]) == 0  # finished: nothing is left to do


def test_evaluate_and_score_agree(run, tmp_path, capsys):
    """One way on this machine, the other from a result file."""
    data = write_shapes(tmp_path / "data", 8, "train", tar=True)
    found = tmp_path / "found.json"
    words = ["detect", "evaluate", str(run), str(data), "--split", "train", "--results", str(found), "--json"]
    assert main([*words, "--device", "cpu"]) == 0
    here = json.loads(capsys.readouterr().out)
    assert here["pictures"] == 8
    assert set(here["classes"]["mask"]) == {"circle", "square", "triangle"}
    assert main(["detect", "score", str(found), str(data / "instances_train.json"), "--json"]) == 0
    elsewhere = json.loads(capsys.readouterr().out)
    for name in ("box_ap", "box_ap50", "box_small", "mask_ap", "mask_recall"):
        assert elsewhere[name] == here[name]
    assert main(["detect", "evaluate", str(run), "--device", "cpu"]) == 0  # its own validation pictures, as a table
    assert "AP50" in capsys.readouterr().out


def test_a_run_evaluates_what_it_held_out_and_never_saw(tmp_path, capsys):
    """One file, pictures elsewhere: by default the held-out tenth, not the pictures that it learnt."""
    data, folder = write_shapes(tmp_path / "data", 20), tmp_path / "run"
    place = ["--data.path", str(data / "instances_train.json"), "--data.images", str(data / "train")]
    assert main(["detect", "train", "debug", "--out", str(folder), *QUICK, *place]) == 0
    capsys.readouterr()
    assert main(["detect", "evaluate", str(folder), "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["split"], found["pictures"]) == ("held_out", 2)
    assert main(["detect", "evaluate", str(folder), "--device", "cpu", "--json", "--split", "train"]) == 0
    assert json.loads(capsys.readouterr().out)["pictures"] == 20


def test_a_detector_with_masks_is_evaluated_on_boxes_alone_and_bad_entries_are_named(run, tmp_path, capsys):
    data = write_shapes(tmp_path / "data", 4)
    path = data / "instances_train.json"
    content = json.loads(path.read_text())
    for one in content["annotations"]:
        del one["segmentation"]
    content["annotations"][0]["bbox"] = [5, 5, 0, 5]
    path.write_text(json.dumps(content))
    assert main(["detect", "evaluate", str(run), str(data), "--split", "train", "--device", "cpu", "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert (list(found["classes"]), found["bad_annotations"], found["box_ap"] is None) == (["box"], 1, False)
    assert "is empty" in said.err


WRONG = {
    "image_id": ([1], 2**70),
    "category_id": ("x", True),
    "score": (None, 10**400, float("nan")),
    "bbox": ([1, 2], [1, 2, 3, 1e300], [1, 2, 3, -4]),
    "segmentation": (
        "here",
        {"size": [96, 96], "counts": "04"},
        {"size": [96, 96], "counts": [9216]},
        {"size": [10**6, 10**6], "counts": "0"},
        {"size": [96.0, 96.0], "counts": "0"},
    ),
}


@pytest.mark.parametrize(("key", "wrong"), [(key, value) for key, values in WRONG.items() for value in values])
def test_a_wrong_result_file_is_one_sentence(tmp_path, capsys, key, wrong):
    data = write_shapes(tmp_path / "data", 1)
    right = {"image_id": 1, "category_id": 1, "score": 0.5, "bbox": [1, 2, 3, 4]}
    (tmp_path / "found.json").write_text(json.dumps([right, right | {key: wrong}]))
    assert main(["detect", "score", str(tmp_path / "found.json"), str(data / "instances_train.json")]) == 2
    assert f"detection 1 has the invalid {key} {str(wrong)[:20]}" in capsys.readouterr().err


def test_a_mask_of_another_size_than_its_picture_is_refused(tmp_path, capsys):
    data = write_shapes(tmp_path / "data", 1)
    number = json.loads((data / "instances_train.json").read_text())["images"][0]["id"]
    mask = encode(np.ones((5, 7), bool))
    one = {"image_id": number, "category_id": 1, "score": 0.5, "segmentation": mask}
    (tmp_path / "found.json").write_text(json.dumps([one]))
    assert main(["detect", "score", str(tmp_path / "found.json"), str(data / "instances_train.json")]) == 2
    assert "detection 0 has a mask of [5, 7] pixels (height, width)" in capsys.readouterr().err


def test_results_with_masks_alone_and_of_other_classes(tmp_path, capsys):
    data = write_shapes(tmp_path / "data", 4)
    path, found = data / "instances_train.json", tmp_path / "found.json"
    truth = json.loads(path.read_text())["annotations"]
    keys = ("image_id", "category_id", "segmentation")
    results = [{key: one[key] for key in keys} | {"score": 0.5} for one in truth]
    found.write_text(json.dumps([*results, results[0] | {"category_id": 77}]))
    assert main(["detect", "score", str(found), str(path), "--json"]) == 0
    said = capsys.readouterr()
    scores = json.loads(said.out)
    assert scores["mask_ap"] == pytest.approx(1.0)
    assert "box_ap" not in scores
    assert "no category 77" in said.err


def test_pictures_that_are_looked_at_are_not_drawn_over(run, tmp_path):
    """Also not by the drawing of another of the same name."""
    for name in ("a.jpg", "a.png"):
        Image.new("RGB", (90, 70), (30, 160, 90)).save(tmp_path / name)
    before = {name: (tmp_path / name).read_bytes() for name in ("a.jpg", "a.png")}
    words = ["detect", "predict", str(run), str(tmp_path), "--output", str(tmp_path), "--score", "0"]
    assert main([*words, "--device", "cpu"]) == 0
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    lines = [json.loads(line) for line in (tmp_path / "detections.jsonl").read_text().splitlines()]
    assert [line["drawn"] for line in lines] == ["a-2.jpg", "a-3.jpg"]


def test_predict_draws_and_writes(run, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for i in range(2):
        Image.new("RGB", (90 + 30 * i, 70), (30, 160, 90)).save(tmp_path / "in" / f"{i}.png")
    (tmp_path / "in" / "bad.jpg").write_bytes(b"no picture")
    words = ["detect", "predict", str(run), str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--score", "0"]
    assert main([*words, "--device", "cpu"]) == 1  # one could not be read
    lines = [json.loads(line) for line in (tmp_path / "out" / "detections.jsonl").read_text().splitlines()]
    assert [line["image"].rpartition("/")[2] for line in lines] == ["0.png", "1.png", "bad.jpg"]
    assert "error" in lines[2]
    assert lines[0]["objects"][0].keys() == {"class", "score", "box", "mask"}
    for line, size in zip(lines, [(540, 420), (480, 280)], strict=False):  # small images are enlarged
        drawn = Image.open(tmp_path / "out" / line["drawn"])
        assert drawn.size == size
        assert len(drawn.getcolors(100_000)) > 10
    said = capsys.readouterr().err
    assert "bad.jpg" in said
    assert "--score" not in said


def test_a_hint_if_nothing_is_found(run, tmp_path, capsys):
    Image.new("RGB", (90, 70), (30, 160, 90)).save(tmp_path / "a.png")
    words = [
        "detect",
        "predict",
        str(run),
        str(tmp_path / "a.png"),
        "--output",
        str(tmp_path / "out"),
        "--device",
        "cpu",
    ]
    assert main([*words, "--score", "1"]) == 0
    said = capsys.readouterr().err
    found = re.search(r"1 image has no object with a score of 1 or more; .* is (0\.\d+): --score (0\.\d+) shows", said)
    assert found, said
    (line,) = map(json.loads, (tmp_path / "out" / "detections.jsonl").read_text().splitlines())
    assert line["objects"] == []
    assert line["highest_score"] == pytest.approx(float(found[1]), abs=6e-4)
    assert main([*words, "--score", found[2]]) == 0
    assert "--score" not in capsys.readouterr().err
    (line,) = map(json.loads, (tmp_path / "out" / "detections.jsonl").read_text().splitlines())
    assert line["objects"]
    assert "highest_score" not in line
    assert nothing_found(0.5, [0.004, 0.0]).endswith(
        "2 images have no object with a score of 0.5 or more; the highest score there is 0.004: train longer"
    )


def test_check_names_bad_entries(tmp_path, capsys):
    data = write_shapes(tmp_path / "data", 3)
    assert main(["detect", "check", str(data)]) == 0
    path = data / "instances_train.json"
    content = json.loads(path.read_text())
    content["annotations"][1]["category_id"] = 44
    path.write_text(json.dumps(content))
    assert main(["detect", "check", str(data)]) == 1
    assert "unknown category 44" in capsys.readouterr().out


def test_check_reads_the_pictures(tmp_path, capsys):
    """One of another size than annotated, one that is cut off, and one of the validation pictures among the others."""
    data = write_shapes(tmp_path / "data", 4)
    first, second, third, _ = sorted((data / "train").iterdir())
    (data / "val").mkdir()
    (data / "val" / third.name).write_bytes(third.read_bytes())
    (data / "instances_val.json").write_text((data / "instances_train.json").read_text())
    Image.new("RGB", (7, 5)).save(first)
    second.write_bytes(second.read_bytes()[:200])
    assert main(["detect", "check", str(data)]) == 1
    said = capsys.readouterr().out
    assert "2 images cannot be used" in said
    assert f"train: {first.name}: the image is 7 x 5, but its annotations are for" in said
    assert f"train: {second.name}: cannot be decoded" in said
    assert f"train: {third.name} = validation: {third.name}\n" in said


def test_a_picture_of_a_telephone_is_looked_at_upright(run, tmp_path):
    image, exif = Image.new("RGB", (90, 60), (30, 160, 90)), Image.Exif()
    exif[0x0112] = 6  # turn by a quarter
    image.save(tmp_path / "a.jpg", exif=exif)
    words = ["detect", "predict", str(run), str(tmp_path / "a.jpg"), "--output", str(tmp_path / "out")]
    assert main([*words, "--device", "cpu"]) == 0
    assert Image.open(tmp_path / "out" / "a.jpg").size == (360, 540)  # upright, and enlarged


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluate", "nowhere"], "neither a run folder"),
        (["train", "debug", "--data.path", "nowhere"], "no such folder or COCO file"),
        (["train", "debug", "--data.std", "0", "0", "0"], "std[0] must be from"),
        (["bench", "resnet50"], "is now `python benchmarks/detector_step.py`"),
        (["report", "nowhere"], "not a folder"),
    ],
)
def test_refusals_are_one_sentence(words, said, capsys):
    assert main(["detect", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_weights_of_something_else_are_refused(tmp_path, capsys):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    assert main(["detect", "predict", str(tmp_path / "a.safetensors"), "x.png"]) == 2
    assert "is not a detector" in capsys.readouterr().err


def test_a_run_of_another_kind_is_named_and_its_report_is_kept(run, tmp_path, capsys):
    before = (run / "report.html").read_bytes()
    assert main(["report", str(run)]) == 2
    assert (
        "is a run of detection, which this report does not show: `lambdanets detect --help`" in capsys.readouterr().err
    )
    assert (run / "report.html").read_bytes() == before
    assert main(["train", "resume", str(run)]) == 2
    assert f"`lambdanets detect train resume {run}`" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"augment": {}}')
    assert main(["detect", "train", "resume", str(tmp_path)]) == 2
    assert f"`lambdanets train resume {tmp_path}`" in capsys.readouterr().err


def test_a_detector_is_no_classifier(run, capsys):
    assert main(["predict", str(run), "x.png"]) == 2
    assert "is not a classifier: it has the weights of another task, detector" in capsys.readouterr().err


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="5 levels"):
        Heads(anchors=(8.0, 16.0))
    with pytest.raises(ValueError, match="smaller one first"):
        Jitter(scale=(2.0, 1.0))
    with pytest.raises(ValueError, match="detections must be at least 1"):
        Heads(detections=0)
    for name, value in {"ratios": (), "anchors": (0.0, 1.0, 2.0, 3.0, 4.0), "overlap": 2.0, "canonical": 0.5}.items():
        with pytest.raises(ValueError, match=name):
            Heads(**{name: value})
    with pytest.raises(ValueError, match="flip"):
        Jitter(flip=3.0)
    with pytest.raises(ValueError, match=r"model.options: resnet50 has no argument nonsense"):
        make_backbone(ModelConfig(name="resnet50", options=("nonsense=1",)), 64)
    with pytest.raises(ValueError, match="feature pyramid"):
        make_backbone(ModelConfig(name="lambda_patch_tiny"), 64)


def test_flex_attention_is_global_attention():
    """Torch has no gradients of it on a CPU: on a GPU the benchmark compares those, too, before it measures."""
    torch.manual_seed(0)
    plain = GlobalAttention2d(16, input_size=(7, 5), heads=2).double()
    flex = detector_step.FlexAttention2d(16, input_size=(7, 5), heads=2).double()
    flex.load_state_dict(plain.state_dict())
    x = torch.randn(2, 16, 6, 5, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(flex(x), plain(x), rtol=1e-6, atol=1e-8)


def test_bench_measures_every_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(detector_step, "WARM_UP", 1)
    usual = detector_step.Heads
    monkeypatch.setattr(detector_step, "Heads", lambda **o: replace(usual(**o), channels=8, hidden=8, proposals=20))
    tiny = "lambda_resnet_tiny,stem='strided',widths=(8,8,8,8),depths=(1,1,1,1)"
    names = [f"{tiny},scope=5", f"{tiny},layer=global_attention"]
    words = [*names, "--sizes", "64x48", "--batch", "2", "--objects", "2", "--repeats", "1"]
    monkeypatch.chdir(tmp_path)
    assert detector_step.main([*words, "--padded", "--device", "cpu", "--dtype", "float32"]) == 0
    rows = json.loads((tmp_path / "runs/bench/detect-cpu.json").read_text())["rows"]
    assert [row["network"] for row in rows] == names
    assert all((row["height"], row["width"]) == (48, 64) for row in rows)
    assert all(row["seconds"] > 0 and row["backbone_seconds"] > 0 and row["peak_bytes"] > 0 for row in rows)
    assert "1.00" in capsys.readouterr().out


def test_bench_refuses_sizes_and_networks_that_it_does_not_know():
    with pytest.raises(ValueError, match="WIDTHxHEIGHT"):
        detector_step.main(["resnet50", "--sizes", "big"])
    with pytest.raises(ValueError, match="resnet51"):
        detector_step.main(["resnet51"])

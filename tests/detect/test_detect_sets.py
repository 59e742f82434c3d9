"""benchmarks/detect_sets.py in miniature: weights, training without an evaluator, scores elsewhere, the table."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lambdanets.cli import main
from lambdanets.detect import precision
from lambdanets.detect.coco import splits_of
from tests.detect.helpers import write_shapes
from tests.support.documents import generate
from tests.support.scripts import script

detect_sets = script("benchmarks/detect_sets.py")
BACKBONES = ("lambda_resnet50", "resnet_rs50")
TINY = ["--tiny", "--device", "cpu", "--workers", "0"]


def write_classes(folder: Path) -> Path:
    """Two colours, with noise."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 2)):
        for name in ("red", "blue"):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = generator.integers(0, 90, (40, 40, 3), np.uint8)
                pixels[..., 0 if name == "red" else 2] += 150
                Image.fromarray(pixels).save(folder / split / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Both backbones on a set with masks, a crowd and a test part, by a machine that cannot evaluate."""
    root = tmp_path_factory.mktemp("sets")
    images, out, data = write_classes(root / "images"), root / "out", root / "data" / "nuclei-seg"
    for split, count in (("train", 4), ("validation", 3), ("test", 2)):
        write_shapes(data, count, split, tar=split == "train")
    annotations = data / "instances_valid.json"
    content = json.loads(annotations.read_text())
    content["annotations"][0]["iscrowd"] = 1
    annotations.write_text(json.dumps(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "available", lambda: False)
        for backbone in BACKBONES:
            words = ["weights", str(images), backbone, str(out), "--epochs", "1", "--batch-size", "8", *TINY]
            assert detect_sets.main(words) == 0
            for seed in (0, 1) if backbone == BACKBONES[0] else (0,):
                words = ["train", str(data), backbone, str(out), "--seed", str(seed), "--steps", "3"]
                assert detect_sets.main([*words, "--batch-size", "2", "--pictures", "2", "--together", "3", *TINY]) == 0
    assert (
        detect_sets.main(["score", str(data.parent), str(out / "kept"), "--output", str(root / "detect-sets.json")])
        == 0
    )
    return root


def test_what_a_run_leaves_is_enough_and_small(made):
    kept = made / "out" / "kept" / "nuclei-seg-lambda_resnet50-1"
    about = json.loads((kept / "about.json").read_text())
    assert (about["steps"], about["seed"], about["splits"]) == (3, 1, ["validation", "test"])
    assert about["examples_per_second"] > 0
    assert about["training_seconds"] <= about["seconds"]
    drawn = sorted(kept.glob("picture-*.jpg"))
    assert len(drawn) == 2
    assert max(Image.open(drawn[0]).size) > detect_sets.SHOWN_SIDE  # two, side by side
    assert sum(path.stat().st_size for path in kept.iterdir()) < 2 * 2**20
    start = json.loads((kept / "log.jsonl").read_text().splitlines()[0])
    assert start["config"]["model"]["pretrained"].endswith("weights/lambda_resnet50/weights.safetensors")
    assert start["config"]["heads"]["detections"] == 300


def copied(made: Path, folder: Path, which: str) -> Path:
    kept = folder / "kept"
    for run in (made / "out" / "kept").glob(which):
        shutil.copytree(run, kept / run.name)
    return kept


def test_a_score_has_every_run_and_part(made):
    found = json.loads((made / "detect-sets.json").read_text())
    facts = found["sets"]["nuclei-seg"]["splits"]["validation"]
    there = json.loads((made / "data" / "nuclei-seg" / "instances_valid.json").read_text())["annotations"]
    small = [one for one in there if one["area"] < 1024 and not one["iscrowd"]]
    assert 0 < len(small) < len(there)
    assert facts == {"pictures": 3, "objects": len(there), "crowds": 1, "small": len(small)}
    assert found["weights"].keys() == set(BACKBONES)
    assert [(row["backbone"], row["seed"], row["split"]) for row in found["rows"]] == [
        (backbone, seed, split)
        for backbone, seed in (("lambda_resnet50", 0), ("lambda_resnet50", 1), ("resnet_rs50", 0))
        for split in ("validation", "test")
    ]


def test_small_objects_are_counted(made, tmp_path, monkeypatch):
    there = json.loads((made / "data" / "nuclei-seg" / "instances_valid.json").read_text())["annotations"]
    areas = sorted(one["area"] for one in there if not one["iscrowd"])
    limit = areas[len(areas) // 2]
    monkeypatch.setattr(detect_sets, "SMALL", limit)
    kept = copied(made, tmp_path, "nuclei-seg-lambda_resnet50-0")
    output = tmp_path / "scores.json"
    assert detect_sets.main(["score", str(made / "data"), str(kept), "--output", str(output)]) == 0
    facts = json.loads(output.read_text())["sets"]["nuclei-seg"]["splits"]["validation"]
    assert 0 < facts["small"] == sum(area < limit for area in areas) < len(areas)


def test_scores_are_those_of_the_command(made, tmp_path, capsys):
    """After three steps all are zero: here some of what is there was found, not the same with every seed."""
    annotations = made / "data" / "nuclei-seg" / "instances_valid.json"
    there = [one for one in json.loads(annotations.read_text())["annotations"] if not one["iscrowd"]]
    kept = copied(made, tmp_path, "nuclei-seg-lambda_resnet50-*")
    both = []
    for seed in (0, 1):
        results = kept / f"nuclei-seg-lambda_resnet50-{seed}" / "detections-validation.json"
        wanted = ("image_id", "category_id", "bbox", "segmentation")
        found = [{key: one[key] for key in wanted} | {"score": 0.9} for one in there[seed + 1 :]]
        results.write_text(json.dumps(found))
        assert main(["detect", "score", str(results), str(annotations), "--json", "--detections", "300"]) == 0
        both.append(json.loads(capsys.readouterr().out))
    output = tmp_path / "scores.json"
    assert detect_sets.main(["score", str(made / "data"), str(kept), "--output", str(output)]) == 0
    mean = json.loads(output.read_text())["means"][0]
    assert (mean["backbone"], mean["split"], mean["seeds"]) == ("lambda_resnet50", "validation", [0, 1])
    assert 0 < both[1]["mask_ap"] < both[0]["mask_ap"] < 1
    for name in ("box_ap", "box_recall", "mask_ap", "mask_recall"):
        values = [one[name] for one in both]
        assert mean[name] == pytest.approx(sum(values) / 2)
        assert mean[f"{name}_range"] == [min(values), max(values)]


def test_the_table_shows_them(made):
    path = made / "detect-sets.json"
    found = json.loads(path.read_text())
    for row, small in zip(found["means"], (0.25, 0.1, 0.2, 0.1), strict=True):
        row |= {"mask_small": small, "mask_small_range": [small - 0.01, small + 0.01], "peak_gib": 3.21}
    block = "<!-- bench:detect-sets -->\n<!-- /bench -->"
    (made / "changed").mkdir()
    (made / "changed" / path.name).write_text(json.dumps(found))
    assert "After 3 steps neither backbone detects any object." in generate.filled(block, made / "changed")
    for row in found["means"]:
        row["box_ap50"], row["box_ap50_range"] = 0.5, [0.5, 0.5]
    (made / "changed" / path.name).write_text(json.dumps(found))
    text = generate.filled(block, made / "changed")
    assert "nuclei-seg, validation: 3 images, " in text
    small = found["sets"]["nuclei-seg"]["splits"]["validation"]["small"]
    assert f"{small} of them small, crowd annotations: 1; 3 steps of 2 images at 96 pixels, float32." in text
    assert "| 25.0 (24.0 to 26.0) |" in text
    (difference,) = [
        line for line in text.partition("nuclei-seg, test")[0].splitlines() if "` - `" in line and "mask" in line
    ]
    assert difference.split("|")[-4].strip() == "+5.0"
    assert text.count("| 3 | ") == text.count("| 3.2 | ") == len(BACKBONES)


def test_what_is_done_is_not_done_again(made):
    about = made / "out" / "kept" / "nuclei-seg-resnet_rs50-0" / "about.json"
    before = about.stat().st_mtime_ns
    words = ["train", str(made / "data" / "nuclei-seg"), "resnet_rs50", str(made / "out"), *TINY]
    assert detect_sets.main(words) == 0
    assert about.stat().st_mtime_ns == before


def test_runs_of_another_length_are_not_compared(made, tmp_path):
    kept = copied(made, tmp_path, "nuclei-seg-*-0")
    longer = kept / "nuclei-seg-resnet_rs50-0" / "about.json"
    longer.write_text(json.dumps(json.loads(longer.read_text()) | {"steps": 4}))
    with pytest.raises(ValueError, match="steps 4 instead of 3"):
        detect_sets.main(["score", str(made / "data"), str(kept)])


def test_training_says_what_is_missing(made, tmp_path):
    words = ["train", str(made / "data" / "nuclei-seg"), "resnet_rs50", str(tmp_path), *TINY]
    with pytest.raises(FileNotFoundError, match=r"run `detect_sets\.py weights` first"):
        detect_sets.main(words)
    with pytest.raises(ValueError, match="no finished run"):
        detect_sets.main(["score", str(made / "data"), str(tmp_path)])


def test_a_file_is_one_part_only(made, tmp_path):
    """Validation pictures stand in for missing test pictures, and are not counted as both."""
    assert splits_of(str(made / "data" / "nuclei-seg")) == ("train", "validation", "test")
    write_shapes(write_shapes(tmp_path, 1, "train"), 1, "validation")
    assert splits_of(str(tmp_path)) == ("train", "validation")

"""COCO result files: what is damaged is refused with a sentence."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from lambdanets.cli import main
from lambdanets.detect import rle
from lambdanets.detect.page import write_report
from lambdanets.detect.results import read_results, write_results

ONE = {
    "image_id": 1,
    "category_id": 1,
    "bbox": [2, 3, 7, 5],
    "score": 0.5,
    "segmentation": {"size": [12, 16], "counts": rle.pack([27, 5, 160])},
}


def changed(**values: Any) -> dict[str, Any]:
    one = copy.deepcopy(ONE)
    one["segmentation"] |= values.pop("outline", {})
    return one | values


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (changed(outline={"size": [12]}), "segmentation"),
        (changed(outline={"size": [12, -16]}), "segmentation"),
        (changed(outline={"size": [12, "16"]}), "segmentation"),
        (changed(outline={"size": [12.0, 16]}), "segmentation"),
        (changed(outline={"size": [12, 17]}), "segmentation"),
        (changed(outline={"counts": ""}), "segmentation"),
        (changed(outline={"counts": "\x01"}), "segmentation"),
        (changed(outline={"counts": rle.pack([27, 5])}), "segmentation"),
        (changed(outline={"counts": rle.pack([27, -5, 170])}), "segmentation"),
        (changed(bbox=[0, 0, 1e300, 1e300]), "bbox"),
        (changed(bbox=[0, 0, 10**18, 1]), "bbox"),
        (changed(score=float("nan")), "score"),
        (changed(score=10**400), "score"),
    ],
)
def test_a_damaged_detection_is_named(tmp_path: Path, one: dict[str, Any], words: str):
    path = tmp_path / "results.json"
    path.write_text(json.dumps([ONE, one]))
    with pytest.raises(ValueError, match=words) as caught:
        read_results(path)
    assert str(path) in str(caught.value)


def test_results_that_are_whole_are_read_as_they_were_written(tmp_path: Path):
    assert read_results(write_results(tmp_path / "results.json", [ONE])) == [ONE]


def test_an_outline_has_the_size_of_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_results(tmp_path / "results.json", [changed(image_id=2), ONE])
    runs = {"size": [16, 12], "counts": [27, 5, 160]}
    truth = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [2, 3, 7, 5], "segmentation": runs}
    sizes = ({"id": 1, "height": 16, "width": 12}, {"id": 2, "height": 12, "width": 16})
    data = {
        "images": [{"file_name": f"{size['id']}.png"} | size for size in sizes],
        "annotations": [truth],
        "categories": [{"id": 1, "name": "cat"}],
    }
    (tmp_path / "annotations.json").write_text(json.dumps(data))
    assert main(["detect", "score", str(tmp_path / "results.json"), str(tmp_path / "annotations.json")]) == 2
    assert "results.json: detection 1 has a mask of [12, 16] pixels" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "", '{"a": NaN}'])
def test_a_run_with_a_damaged_configuration_has_no_page(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        write_report(tmp_path)

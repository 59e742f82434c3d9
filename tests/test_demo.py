"""`lambdanets demo`, with networks so small that they learn nothing."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lambdanets import demo
from lambdanets.recipes import digits
from lambdanets.report.log import read_log
from lambdanets.train.config import TrainConfig


@pytest.fixture
def small() -> TrainConfig:
    config = digits()
    options = ("widths=(4,4,8,8)", "depths=(1,1,1,1)", "scope=3")
    model = replace(config.model, image_size=8, options=options)
    return replace(config, model=model, epochs=0.1, batch_size=64, log_every=2, device="cpu")


@pytest.mark.filterwarnings("error:.*has no effect")
def test_it_trains_compares_predicts_and_reports(tmp_path: Path, small: TrainConfig):
    file = io.StringIO()
    assert demo.run(tmp_path / "demo", small, Console(file=file, width=160)) == 0
    said = file.getvalue()
    for number in range(1, 7):
        assert f" {number}. " in said
    runs = [tmp_path / "demo" / name for name in ("lambda", "convolution")]
    for run in runs:
        log = read_log(run / "log.jsonl")
        assert log.end
        top1 = log.evaluated("ema")[-1]["top1"]  # what training said is what the table says
        (row,) = (line for line in said.splitlines() if line.startswith(f"│ {run.name}"))
        assert f"{100 * top1:.1f}%" in row
        assert f"{log.start['parameters']:,}" in row
    scores = [read_log(run / "log.jsonl").evaluated("ema")[-1]["top1"] for run in runs]
    error = 100 * (sum(score * (1 - score) for score in scores) / 1000) ** 0.5
    words = " ".join(said.split())
    assert "one training run of each network, evaluated on 1,000 images" in words
    assert f"the difference has a standard error of {error:.1f} points" in words
    assert "It cannot show which network is better." in words
    models = [read_log(run / "log.jsonl").start["config"]["model"] for run in runs]
    assert [model["placement"] for model in models] == [small.model.placement, "CCCC"]
    assert [model["embedding_std"] for model in models] == [small.model.embedding_std, None]
    images = sorted((tmp_path / "demo" / "images").iterdir())
    assert len(images) == demo.PREDICTED
    assert all(image.name in said for image in images)
    for name in ("view.html", "view.png"):
        assert (tmp_path / "demo" / "view" / name).stat().st_size > 1000
        assert name in said
    page = (runs[0] / "report.html").read_text()
    assert str(runs[0] / "report.html") in said
    assert re.search(r"<th class=\"name\">convolution</th>", page)


def test_images_are_named_after_what_they_are(tmp_path: Path):
    from lambdanets.data.source import open_source
    from lambdanets.report.pictures import picture

    source = open_source("mnist", split="validation")
    pixels = {picture(source, i).tobytes(): int(source.labels[i]) for i in range(len(source))}
    from PIL import Image

    written = demo.write_images(source, tmp_path / "images")
    assert set(written) == set((tmp_path / "images").iterdir())
    labels = [pixels[Image.open(path).tobytes()] for path in written]
    assert [f"a-{label}.png" for label in labels] == [path.name[-7:] for path in written]
    assert len(set(labels)) >= 5


def test_nothing_is_written_over(tmp_path: Path):
    assert demo.unused(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").mkdir()
    assert demo.unused(tmp_path / "demo") == tmp_path / "demo-3"

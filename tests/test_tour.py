"""The tour of the layer."""

import builtins
import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from lambdanets import tour
from lambdanets.ops import choose


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tour, "FIT_STEPS", 2)
    monkeypatch.setattr(tour, "STAGES", dict.fromkeys(tour.STAGES, (6, 32)))


@pytest.mark.usefixtures("small")
def test_it_runs_and_leaves_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    before = torch.get_rng_state()
    tour.run(tmp_path / "new")
    printed = capsys.readouterr().out
    picture = tmp_path / "new" / "position_heatmaps.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 50_000
    assert str(picture) in printed.replace("\n", "")
    for number in range(1, 7):
        assert f" {number}. " in printed
    assert "a mask differs from query to query" in printed
    assert torch.equal(torch.get_rng_state(), before)


def test_variants_are_what_they_say():
    found = {variant.name: variant for variant in tour.all_variants()}
    assert len(found) >= 13
    counts = {name: tour.parameters(variant.layer) for name, variant in found.items()}
    full = counts["default: content and position"]
    assert counts["position only"] == full - 32 * 16
    assert counts["content only (linear attention)"] == full - 23 * 23 * 16
    strided = found["stride 2, 64 channels out"]
    assert tour.shape(strided.layer(*strided.inputs)) == "2x64x8x8"


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *args, **kwargs):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    console = Console(file=io.StringIO(), width=200)
    tour.picture(console, tmp_path)
    assert isinstance(console.file, io.StringIO)
    assert "lambdanets[bench]" in console.file.getvalue()
    assert not list(tmp_path.iterdir())


def test_the_weights_in_the_picture_are_the_layers():
    """The output of the denoiser is what the two heat maps mix: they show the operation, not something near it."""
    torch.manual_seed(0)
    model, noisy = tour.Denoiser().double().eval(), torch.randn(1, 3, 9, 11, dtype=torch.float64)
    position_NM, content_NM = model.interactions(noisy)
    mixed = (position_NM + content_NM) @ noisy[0].flatten(1).T
    torch.testing.assert_close(mixed.T.view(1, 3, 9, 11), model(noisy))


def test_scenes_are_images():
    first, second = tour.scene(np.random.default_rng(0)), tour.scene(np.random.default_rng(1))
    assert first.shape == (tour.SIDE, tour.SIDE, 3)
    assert 0 <= first.min() < first.max() <= 1
    assert not np.array_equal(first, second)


def test_every_time_stands_in_the_column_of_its_backend(monkeypatch):
    """`explain` gives another order for every input; the table has one."""
    monkeypatch.setattr(tour, "lambda_op", lambda *args, backend: names.append(backend))
    names: list[str] = []
    monkeypatch.setattr(tour, "milliseconds", lambda run: run() or float(list(choose.BACKENDS).index(names[-1])))
    console = Console(record=True, width=200, file=io.StringIO())
    tour.backends(console)
    lines = console.export_text().splitlines()
    header = next(line.split() for line in lines if line.startswith("map"))
    row = next(line for line in lines if line.startswith("28x28x128"))
    for name, time in zip(header[1:], re.findall(r"([\d.]+) \(", row), strict=False):
        assert float(time) == list(choose.BACKENDS).index(name)

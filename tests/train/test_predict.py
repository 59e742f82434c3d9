"""`lambdanets predict`: files, folders, stdin; nothing that is broken stops the rest."""

import io
import json
import os
from pathlib import Path

import pytest
import torch
from PIL import Image

from lambdanets.cli import main
from lambdanets.models import Card, Preprocessing, save_weights
from lambdanets.train.inference.predict import gather
from tests.train.weights import MEAN, NAMES, SIZE, STD, image_folder, scores_of, small_network, small_weights


class Stdin:
    def __init__(self, data: bytes, terminal: bool = False) -> None:
        self.buffer = io.BytesIO(data)
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def made(tmp_path: Path):
    network, path = small_weights(tmp_path / "w.safetensors")
    return network, path, list(image_folder(tmp_path / "images", each=1))


def run(capsys, *arguments: object, status: int = 0) -> list[dict]:
    assert main(["predict", *map(str, arguments), "--json", "--device", "cpu"]) == status
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def check(network, found: dict, path: Path) -> None:
    expected = scores_of(network, path).double().softmax(0)
    assert found["image"] == str(path)
    order = expected.argsort(descending=True).tolist()
    assert [one["class"] for one in found["classes"]] == [NAMES[i] for i in order[: len(found["classes"])]]
    for one, i in zip(found["classes"], order, strict=False):
        assert one["probability"] == pytest.approx(float(expected[i]), rel=1e-4)


@pytest.mark.parametrize("options", [["--workers", "0"], ["--batch-size", "2", "--workers", "1"]])
def test_files_in_their_order(made, capsys, options):
    network, weights, images = made
    chosen = [images[3], images[0], images[6], images[0]]
    found = run(capsys, weights, *chosen, "--top", 3, *options)
    assert len(found) == 4
    for one, path in zip(found, chosen, strict=True):
        assert len(one["classes"]) == 3
        check(network, one, path)


def test_more_classes_than_there_are(made, capsys):
    _, weights, images = made
    (found,) = run(capsys, weights, images[0], "--top", 50)
    assert len(found["classes"]) == 7
    assert sum(one["probability"] for one in found["classes"]) == pytest.approx(1)


def test_folders(made, capsys, tmp_path):
    network, weights, images = made
    found = run(capsys, weights, tmp_path / "images")
    assert [one["image"] for one in found] == [str(path) for path in sorted(images)]
    for one, path in zip(found, sorted(images), strict=True):
        check(network, one, path)


def test_files_of_other_formats_are_named(made, capsys, tmp_path):
    _, weights, images = made
    for name in ("one.heic", "two.heic", "three.tif"):
        (images[0].parent / name).write_bytes(b"x")
    assert main(["predict", str(weights), str(tmp_path / "images"), "--device", "cpu", "--json"]) == 0
    said = capsys.readouterr()
    assert f"3 files were not read in {tmp_path / 'images'}: .heic (2), .tif (1). Convert them to JPEG" in said.err
    assert len(said.out.splitlines()) == 7


@pytest.mark.parametrize("format", ["GIF", "BMP"])
def test_gif_and_bmp_through_stdin(made, capsys, monkeypatch, format):
    network, weights, images = made
    stored, plain = io.BytesIO(), io.BytesIO()
    Image.open(images[4]).convert("RGB" if format == "BMP" else "P").save(stored, format)
    Image.open(stored).convert("RGB").save(plain, "PNG")
    images[5].write_bytes(plain.getvalue())
    monkeypatch.setattr("sys.stdin", Stdin(stored.getvalue()))
    (found,) = run(capsys, weights, "-")
    check(network, found | {"image": str(images[5])}, images[5])


@pytest.mark.parametrize("words", [[], ["-"]])
def test_a_list_through_stdin(made, capsys, monkeypatch, words):
    network, weights, images = made
    monkeypatch.setattr("sys.stdin", Stdin(f"{images[2]}\n\n  {images[1].parent}\r\n".encode()))
    found = run(capsys, weights, *words)
    assert len(found) == 2
    check(network, found[0], images[2])
    check(network, found[1], images[1])


def test_an_image_through_stdin(made, capsys, monkeypatch):
    network, weights, images = made
    monkeypatch.setattr("sys.stdin", Stdin(images[4].read_bytes()))
    (found,) = run(capsys, weights, "-")
    assert found["image"] == "stdin"
    check(network, found | {"image": str(images[4])}, images[4])


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_a_bad_image_stops_no_other(made, capsys, tmp_path, batch):
    network, weights, images = made
    bad = {
        "garbage.jpg": b"garbage",
        "empty.png": b"",
        "torn.png": images[0].read_bytes()[:-40],
        "text.txt": b"not an image",
    }
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "nothing").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    bomb = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(bomb, "PNG")
    (tmp_path / "bomb.png").write_bytes(bomb.getvalue())
    places = [*(tmp_path / name for name in (*bad, "nothing", "missing.jpg", "pipe.png", "bomb.png"))]
    mixed = [images[0], *places, images[1]]
    found = run(capsys, weights, *mixed, "--batch-size", batch, status=1)
    assert [one["image"] for one in found] == list(map(str, mixed))
    check(network, found[0], images[0])
    check(network, found[-1], images[1])
    reasons = {Path(one["image"]).name: one["error"] for one in found[1:-1]}
    assert len(reasons) == 8
    assert "No such file" in reasons["missing.jpg"]
    assert "without images" in reasons["nothing"]
    assert "pixels" in reasons["bomb.png"]
    assert all(reasons.values())


def test_only_bad_images(made, capsys, tmp_path):
    _, weights, _ = made
    assert "error" in run(capsys, weights, tmp_path / "a.jpg", status=1)[0]


def test_the_table(made, capsys, tmp_path, monkeypatch):
    _, weights, images = made
    monkeypatch.chdir(tmp_path)  # a short path: where the table breaks a long one depends on how long
    strange = Path("[bold]new\nline.png")
    strange.write_bytes(images[0].read_bytes())
    Path("text.png").write_bytes(b"text")
    assert main(["predict", str(weights), str(strange), "gone.jpg", "text.png", "--device", "cpu"]) == 1
    said = capsys.readouterr()
    assert "[bold]" in said.out.replace("\n", "")
    assert "%" in said.out
    assert "gone" not in said.out
    first, second = said.err.splitlines()
    assert first == "gone.jpg: no such file"
    assert second.startswith("text.png: not a readable ")
    assert "Error" not in second
    assert main(["predict", str(weights), "gone.jpg", "--device", "cpu"]) == 1
    assert capsys.readouterr() == ("", "gone.jpg: no such file\n")


def test_names_keep_to_one_line():
    (given,) = gather(["a\x1b[31m\n.png"])
    assert "\x1b" not in given.name
    assert "\n" not in given.name
    assert given.path == "a\x1b[31m\n.png"


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        (["--top", "0", "x.jpg"], Stdin(b""), ["--top must be at least 1, got 0"]),
        ([], Stdin(b"", terminal=True), ["no images given"]),
        ([], Stdin(b"\n\n"), ["no images"]),
    ],
)
def test_refusals(made, capsys, monkeypatch, arguments, stdin, words):
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(["predict", str(made[1]), *arguments, "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words)


def test_what_stdin_may_not_be(made, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", Stdin(b"\0\1\2" * 100))
    (found,) = run(capsys, made[1], "-", status=1)
    assert "neither" in found["error"]


def test_grey_networks_take_colour_images(tmp_path: Path, capsys):
    _, weights = small_weights(tmp_path / "w.safetensors", in_chans=1)
    images = image_folder(tmp_path / "images", each=1)
    assert len(run(capsys, weights, *images)) == 7


def test_scores_that_are_not_finite_are_an_error(tmp_path, capsys):
    """Finite weights can be so large that the scores are not."""
    network = small_network()
    with torch.no_grad():
        network.get_classifier().weight.fill_(3e38)
    path = save_weights(network, tmp_path / "w.safetensors", Card(Preprocessing(MEAN, STD, SIZE, 1.0), NAMES))
    image = next(iter(image_folder(tmp_path / "images", each=1)))
    (found,) = run(capsys, path, image, status=1)
    assert "not finite" in found["error"]

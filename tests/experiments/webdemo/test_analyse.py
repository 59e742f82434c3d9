"""What is uploaded: read within limits, refused with a sentence, and answered as `predict` answers."""

import base64
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lambdanets.data.decode import BrokenImageError
from lambdanets.detect.draw import colour_of
from lambdanets.experiments.webdemo.analyse import SHOWN_SIDE, Classifier, Finder, open_model, read_picture
from lambdanets.experiments.webdemo.page import Desk
from lambdanets.models.pretrained import KEY, save_weights
from lambdanets.report.show import probability
from lambdanets.train.inference.command import Using
from lambdanets.train.inference.evaluate import evaluate, find_images
from lambdanets.train.inference.predict import Given, predict
from lambdanets.train.inference.trained import Trained, open_trained
from lambdanets.view import interactive
from lambdanets.view.command import as_input, prepared
from tests.data.helpers import photographed
from tests.experiments.webdemo.helpers import KINDS, LIMITS, bomb, detector_weights, noise
from tests.train.weights import NAMES, scores_of, small_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("webdemo")


@pytest.fixture(scope="module")
def classifier(folder: Path) -> Classifier:
    model = open_model(str(small_weights(folder / "classes.safetensors")[1]), device="cpu")
    assert isinstance(model, Classifier)
    return model


@pytest.fixture(scope="module")
def finder(folder: Path) -> Finder:
    model = open_model(str(detector_weights(folder / "objects.safetensors")), device="cpu")
    assert isinstance(model, Finder)
    return model


@pytest.mark.parametrize("size", [(40, 30), (30, 40), (17, 90), (200, 200)])
def test_the_window_is_what_the_network_sees(classifier: Classifier, size: tuple[int, int]):
    """A picture whose pixels say where they are, before and after resizing and cropping."""
    x, y = np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(0, 255, size[1]))
    image = Image.fromarray(np.stack([y, x, x], axis=-1).round().astype(np.uint8))
    seen, _ = as_input(classifier.trained, image)
    top, left, height, width = classifier.window(image)
    rows, columns = (seen[..., channel].double().numpy() / 255 for channel in (0, 1))
    sides = seen.shape[:2]
    for found, start, extent, side in ((rows[:, 0], top, height, sides[0]), (columns[0], left, width, sides[1])):
        expected = start + extent * (np.arange(side) + 0.5) / side
        np.testing.assert_allclose(found, expected.clip(0, 1), atol=0.06)
    assert abs(height * size[1] - width * size[0]) < 0.06 * max(size)  # the crop is a square


def half(path: Path) -> bytes:
    data = noise(path, (200, 150)).read_bytes()
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("garbage.png", lambda _: b"no picture at all", "not a readable JPEG / PNG / WEBP / GIF / BMP"),
        ("empty.jpg", lambda _: b"", "not a readable"),
        ("drawing.png", lambda _: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a readable"),
        ("half.png", lambda folder: half(folder / "whole.png"), "cannot be decoded"),
        ("half.jpg", lambda folder: half(folder / "whole.jpg"), "cannot be decoded"),
        ("large.png", lambda _: b"\x89PNG" + bytes(LIMITS.bytes), "200,004 bytes, more than the limit of 200,000"),
        ("bomb.png", lambda _: bomb(20_000, 20_000), "pixels"),
        ("wide.png", lambda _: bomb(400, 300), "400 x 300 pixels, more than the limit of 100,000"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_sentence(tmp_path: Path, name: str, content, words: str) -> None:
    (tmp_path / name).write_bytes(content(tmp_path))
    with pytest.raises(BrokenImageError, match=words) as refused:
        read_picture(tmp_path / name, LIMITS)
    sentence = str(refused.value)
    assert sentence.startswith("This image cannot be used: ")
    assert sentence.endswith("smaller JPEG.")
    assert str(tmp_path) not in sentence  # nobody learns where it lies


@pytest.mark.parametrize("kind", ["TIFF", "PPM", "TGA"])
def test_other_formats_are_refused_whatever_their_name(tmp_path: Path, kind: str) -> None:
    Image.new("RGB", (20, 20)).save(tmp_path / "picture.png", kind)
    with pytest.raises(BrokenImageError, match="not a readable JPEG / PNG / WEBP / GIF / BMP"):
        read_picture(tmp_path / "picture.png", LIMITS)


def test_a_picture_that_was_deleted_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BrokenImageError, match="upload it again"):
        read_picture(tmp_path / "gone.png", LIMITS)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_telephones_picture_stands_upright(tmp_path: Path, orientation: int) -> None:
    """The camera writes pixels as its sensor lies, and how to turn them: each way shows the same scene."""
    scene = np.zeros((30, 40, 3), np.uint8)
    scene[:12, :16] = (250, 0, 0)
    scene[18:, 24:] = (0, 0, 250)
    (tmp_path / "a.png").write_bytes(photographed(Image.fromarray(scene), orientation))
    assert np.array_equal(np.asarray(read_picture(tmp_path / "a.png", LIMITS)), scene)


@pytest.mark.parametrize("old", [False, True], ids=["new weights", "old weights"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_predict_evaluate_view_and_the_page_agree_on_a_photo(
    tmp_path: Path, classifier: Classifier, orientation: int, old: bool
) -> None:
    """New weights see the photo upright, weights from before the field as it is stored."""
    trained = without_the_field(classifier.trained, tmp_path / "old.safetensors") if old else classifier.trained
    model = Classifier(trained)
    path = tmp_path / "images" / NAMES[2] / "a.png"
    path.parent.mkdir(parents=True)
    scene = Image.open(noise(tmp_path / "plain.png", (12, 12)))
    path.write_bytes(photographed(scene, orientation))
    plain = tmp_path / "plain.png"
    Image.fromarray(np.asarray(Image.open(path) if old else scene)).save(plain)
    expected = scores_of(trained.network, plain).double().softmax(0)

    (predicted,) = predict(trained, [Given("a", str(path))], top=7)
    assert dict(predicted.classes) == pytest.approx({NAMES[i]: float(expected[i]) for i in range(7)}, abs=1e-5)
    desk = Desk(model, (), LIMITS)
    shown = read_picture(path, desk.limits, model.exif_orientation)
    assert {one.name: one.share for one in model.answer(shown).found} == pytest.approx(dict(predicted.classes[:5]))
    evaluated = evaluate(trained, find_images("", str(tmp_path / "images")))
    assert evaluated.loss == pytest.approx(-float(expected[2].log()), abs=1e-4)
    seen, _ = prepared(trained, path)
    assert np.array_equal(seen.numpy(), np.asarray(Image.open(plain)))
    _, answers, _ = next(desk.upload(str(path), 0.0))
    assert probability(predicted.classes[0][1]) in answers


def without_the_field(trained: Trained, path: Path) -> Trained:
    """The same network from a file that an earlier version wrote."""
    save_weights(trained.network, path)
    with safe_open(str(path), "pt") as file:
        ours = json.loads(file.metadata()[KEY])
    assert ours["preprocessing"].pop("exif_orientation") is True
    save_file(load_file(path), path, metadata={"format": "pt", KEY: json.dumps(ours)})
    return open_trained(str(path), Using(device="cpu"))


def test_a_broken_note_of_the_camera_does_not_matter(tmp_path: Path) -> None:
    path = noise(tmp_path / "a.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\xff" + b"\xff" * 40)
    assert read_picture(path, LIMITS).size == (40, 30)


@pytest.mark.parametrize(
    ("name", "mode"),
    [("a.png", "L"), ("a.png", "RGBA"), ("a.png", "LA"), ("a.jpg", "CMYK"), ("a.webp", "RGBA"), ("a.jpg", "L")],
)
def test_every_kind_of_colours_is_answered_as_predict_answers(
    tmp_path: Path, classifier: Classifier, name: str, mode: str
) -> None:
    path = noise(tmp_path / name, mode=mode)
    (expected,) = predict(classifier.trained, [Given("a", str(path))], top=5)
    found = classifier.answer(read_picture(path, LIMITS))
    assert [one.name for one in found.found] == [name for name, _ in expected.classes]
    assert [one.share for one in found.found] == pytest.approx([p for _, p in expected.classes], abs=1e-6)


@pytest.mark.parametrize("mode", ["P", "1", "I;16"])
def test_palettes_bits_and_sixteen_bits(tmp_path: Path, classifier: Classifier, mode: str) -> None:
    if mode == "I;16":
        Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50).save(tmp_path / "a.png")
    else:
        Image.open(noise(tmp_path / "b.png")).convert(mode).save(tmp_path / "a.png")
    image = read_picture(tmp_path / "a.png", LIMITS)
    assert image.mode == mode
    (expected,) = predict(classifier.trained, [Given("a", str(tmp_path / "a.png"))], top=1)
    best = classifier.answer(image).found[0]
    assert (best.name, best.share) == (expected.classes[0][0], pytest.approx(expected.classes[0][1], abs=1e-6))


@pytest.mark.parametrize("name", ["a.webp", "a.png"])
def test_of_an_animation_the_first_picture_counts(tmp_path: Path, name: str) -> None:
    frames = [Image.new("RGB", (20, 16), colour) for colour in ((250, 10, 10), (10, 250, 10), (10, 10, 250))]
    frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], duration=40, lossless=True)
    image = read_picture(tmp_path / name, LIMITS)
    assert image.convert("RGB").getpixel((5, 5)) == (250, 10, 10)


def test_classes_are_those_of_the_network(tmp_path: Path, classifier: Classifier) -> None:
    path = noise(tmp_path / "a.png", size=(12, 12))
    expected = scores_of(classifier.trained.network, path).double().softmax(0)
    found = classifier.answer(read_picture(path, LIMITS))
    assert len(found.found) == 5
    assert {one.name: one.share for one in found.found} == pytest.approx(
        {NAMES[i]: float(expected[i]) for i in expected.topk(5).indices}, abs=1e-5
    )
    assert max(found.picture.size) == SHOWN_SIDE
    assert "resnet26" in classifier.about
    assert "7 classes: ant, bee" in classifier.about


def test_the_maps_are_those_of_view(tmp_path: Path, classifier: Classifier) -> None:
    path = noise(tmp_path / "a.png", size=(12, 12))
    pixels = torch.from_numpy(np.asarray(Image.open(path)).copy())
    preprocessing = classifier.trained.card.preprocessing
    given = (pixels.permute(2, 0, 1) / 255 - torch.tensor(preprocessing.mean)[:, None, None]) / torch.tensor(
        preprocessing.std
    )[:, None, None]
    found, expected = (
        json.loads(re.findall(r'id="data">(.*?)</script>', page.text)[0])
        for page in (
            classifier.look(read_picture(path, LIMITS)),
            interactive(classifier.trained.network, given, picture=pixels),
        )
    )
    assert [one["stage"] for one in found["layers"]] == ["c4", "c5"]
    for one, other in zip(found["layers"], expected["layers"], strict=True):
        for part in ("queries", "keys", "table"):
            ours, theirs = (np.frombuffer(base64.b64decode(which[part]), np.float16) for which in (one, other))
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-3 * np.abs(theirs).max())
    assert "layer3" not in classifier.look(read_picture(path, LIMITS), ("layer4",)).text


def test_objects_have_boxes_and_masks(tmp_path: Path, finder: Finder) -> None:
    path = noise(tmp_path / "a.png", size=(96, 64))
    image = read_picture(path, LIMITS)
    everything, sure = finder.answer(image), finder.answer(image, 0.3)
    found = finder.trained.look(image)
    assert [one.share for one in everything.found] == sorted((one.score for one in found), reverse=True)[:20]
    assert len(everything.found) + everything.more == len(found)
    assert 0 < len(sure.found) + sure.more == sum(one.score >= 0.3 for one in found) < len(found)
    assert {one.name for one in everything.found} <= set(KINDS)
    assert all(one.colour == colour_of(KINDS.index(one.name) + 1) for one in everything.found)
    assert everything.picture.size == (SHOWN_SIDE, round(SHOWN_SIDE * 64 / 96))
    plain, drawn = (np.asarray(one.picture).astype(int) for one in (finder.answer(image, 1.1), everything))
    assert (np.abs(plain - drawn).max(-1) > 20).mean() > 0.01  # boxes and masks
    assert any(one.mask is not None for one in found)
    assert "3 kinds of objects: circle, square" in finder.about


def test_a_detectors_layers_are_looked_into(tmp_path: Path, finder: Finder) -> None:
    page = finder.look(read_picture(noise(tmp_path / "a.png", size=(96, 64)), LIMITS)).text
    assert '"stage": "c4"' in page
    assert '"image": [43, 64]' in page  # as the detector sees it


@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (20_000, 1), (3, 2)])
def test_strips_and_dots_are_answered(tmp_path: Path, classifier: Classifier, finder: Finder, size) -> None:
    image = read_picture(noise(tmp_path / "a.png", size=size), LIMITS)
    assert sum(one.share for one in classifier.answer(image).found) <= 1 + 1e-6
    assert max(finder.answer(image).picture.size) == SHOWN_SIDE


def test_a_network_without_lambda_layers_still_answers(tmp_path: Path) -> None:
    _, path = small_weights(tmp_path / "plain.safetensors", placement="CCCC")
    model = open_model(str(path), device="cpu")
    image = read_picture(noise(tmp_path / "a.png"), LIMITS)
    assert model.answer(image).found
    assert not model.looks
    with pytest.raises(ValueError, match="no LambdaLayer2d"):
        model.look(image)


def test_weights_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        open_model(str(tmp_path / "broken.safetensors"))
    with pytest.raises(FileNotFoundError, match="not the folder of a run"):
        open_model(str(tmp_path / "missing"))


def test_limits_can_be_raised(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (400, 300)).save(file, "PNG")
    (tmp_path / "a.png").write_bytes(file.getvalue())
    assert read_picture(tmp_path / "a.png", replace(LIMITS, pixels=120_000)).size == (400, 300)

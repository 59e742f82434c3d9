"""Transforms give torchvision's pixels; RandAugment has the paper's scale."""

import math
import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.auto_augment import rand_augment_transform
from torchvision.transforms import InterpolationMode, v2

from lambdanets.data import transforms
from lambdanets.data.augment import Augment
from lambdanets.data.decode import open_image
from lambdanets.data.loader import seeded
from lambdanets.data.preprocessing import Preprocessing
from lambdanets.data.transforms import Cutout, evaluation, normalize, rand_augment, random_box, reduced, training
from lambdanets.typed import from_json
from tests.data.helpers import encoded, jpeg, picture

MODES = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}


@pytest.mark.parametrize("size", [(40, 32), (33, 57), (20, 20), (31, 200), (100, 9)])
@pytest.mark.parametrize(("target", "crop"), [(24, 0.875), (28, 1.0), (17, 0.9)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_evaluation_is_torchvisions(size: tuple[int, int], target: int, crop: float, interpolation: str):
    image = picture(0, size)
    preprocessing = Preprocessing(size=target, crop=crop, interpolation=interpolation)
    before = v2.Resize(math.floor(target / crop), MODES[interpolation])
    expected = np.asarray(v2.Compose([before, v2.CenterCrop(target)])(image))
    assert np.array_equal(evaluation(preprocessing)(image), expected)


@pytest.mark.parametrize("size", [(40, 32), (33, 57), (31, 200)])
def test_evaluation_of_rectangles_is_covered(size: tuple[int, int]):
    found = evaluation(Preprocessing(size=(20, 30), crop=0.9))(Image.new("RGB", size, (200, 100, 50)))
    assert found.shape == (20, 30, 3)
    assert (found == (200, 100, 50)).all()  # no border came in


@pytest.mark.parametrize("size", [(5, 200), (300, 7)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_the_middle_of_a_strip_is_that_of_all_of_it(monkeypatch, size: tuple[int, int], interpolation: str):
    image, transform = picture(0, size), evaluation(Preprocessing(size=17, interpolation=interpolation))
    expected = transform(image).astype(int)
    monkeypatch.setattr(transforms, "MOST_RESIZED", 2)
    found = transform(image).astype(int)
    assert np.abs(found - expected).max() <= 1
    assert expected.std() > 10


@pytest.mark.parametrize("size", [(65_000, 1), (1, 65_000)])
def test_a_strip_is_not_made_larger_than_it_must_be(monkeypatch, size: tuple[int, int]):
    """A file of some hundred bytes, which would be 13 GB if its short side became 256 pixels."""
    resize = Image.Image.resize

    def bounded(image, wanted, *options):
        assert wanted[0] * wanted[1] < 10**7
        return resize(image, wanted, *options)

    monkeypatch.setattr(Image.Image, "resize", bounded)
    assert evaluation(Preprocessing(size=224))(Image.new("RGB", size, (200, 100, 50))).shape == (224, 224, 3)


def test_training_crops_are_torchvisions():
    augment = Augment(flip=0.0)
    for seed in range(10):
        image = picture(seed, (60, 45))
        random.seed(seed)
        left, top, right, bottom = random_box(image.size, augment.crop_scale or (1, 1), augment.crop_ratio)
        crop = (top, left, bottom - top, right - left, [24, 24])
        expected = v2.functional.resized_crop(image, *crop, interpolation=InterpolationMode.BICUBIC)  # type: ignore[arg-type]
        random.seed(seed)
        assert np.array_equal(training(24, augment)(image), np.asarray(expected))


@pytest.mark.parametrize("size", [(213, 160), (160, 240), (30, 900)])
def test_crops_are_drawn_as_torchvision_draws_them(size: tuple[int, int]):
    scale, ratio = (0.08, 1.0), (3 / 4, 4 / 3)
    random.seed(0)
    torch.manual_seed(0)
    crop = v2.RandomResizedCrop(10, scale, ratio)
    ours = np.array([random_box(size, scale, ratio) for _ in range(4000)])
    theirs = [crop.make_params([Image.new("L", size)]) for _ in range(4000)]
    boxes = np.array([(p["left"], p["top"], p["left"] + p["width"], p["top"] + p["height"]) for p in theirs])
    assert ours.min() >= 0
    assert (ours[:, 2:] <= size).all()
    spread = np.sqrt((ours.var(0) + boxes.var(0)) / 4000) + 1e-9
    assert (abs(ours.mean(0) - boxes.mean(0)) < 5 * spread).all()
    area, their_area = ((b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1]) for b in (ours, boxes))
    assert np.allclose(np.quantile(area, [0.1, 0.5, 0.9]), np.quantile(their_area, [0.1, 0.5, 0.9]), rtol=0.08)


def test_flips_and_padding():
    image = picture(0, (12, 12))
    pixels = np.asarray(image)
    flipped = training(12, Augment(crop_scale=None, flip=1.0))(image)
    assert np.array_equal(flipped, pixels[:, ::-1])
    shift = training(12, Augment(crop_scale=None, flip=0.0, padding=2))
    padded = np.pad(pixels, ((2, 2), (2, 2), (0, 0)))
    windows = {padded[y : y + 12, x : x + 12].tobytes() for y in range(5) for x in range(5)}
    found = {shift(image).tobytes() for _ in range(400)}
    assert found == windows


def test_one_channel():
    small = training(28, Augment(crop_scale=None, flip=0.0, randaugment_layers=2), channels=1)
    assert small(picture(0, (28, 28)).convert("L")).shape == (28, 28, 1)
    assert evaluation(Preprocessing(size=28, crop=1.0), 1)(picture(0)).shape == (28, 28, 1)
    with pytest.raises(ValueError, match="channels must be 1 or 3, got 4"):
        training(28, channels=4)


@pytest.mark.parametrize(("magnitude", "degrees"), [(5, 15), (10, 30), (15, 45)])
def test_magnitudes_are_on_the_papers_scale(magnitude: int, degrees: float):
    operations = rand_augment(Augment(randaugment_layers=2, randaugment_magnitude=magnitude))
    assert len(operations) == 16
    (rotate,) = (operation for operation in operations if getattr(operation, "name", "") == "Rotate")
    seen = []
    rotate.aug_fn = lambda image, angle, **_: seen.append(abs(angle))  # type: ignore[attr-defined]
    rotate(picture(0))
    assert seen == [pytest.approx(degrees)]


@pytest.mark.parametrize("magnitude", [10, 15])
@pytest.mark.parametrize(
    ("layers", "unchanged"),
    [(1, 1 / 16), (2, 1 / 256 + 1 / 256)],  # Solarize changes nothing from magnitude 10 on; Invert twice is no change
)
def test_every_layer_of_randaugment_is_applied(magnitude: int, layers: int, unchanged: float):
    image = Image.fromarray(np.random.default_rng(0).integers(20, 200, (16, 16, 3), dtype=np.uint8))
    augment = Augment(crop_scale=None, flip=0.0, randaugment_layers=layers, randaugment_magnitude=magnitude)
    change, draws = training(16, augment), 3000
    with seeded(1):
        found = sum(np.array_equal(change(image), np.asarray(image)) for _ in range(draws))
    assert abs(found - draws * unchanged) < 5 * math.sqrt(draws * unchanged)


def test_the_operations_are_those_of_the_reference_implementation():
    names = {getattr(one, "name", type(one).__name__) for one in rand_augment(Augment(randaugment_layers=2))}
    assert names == {
        *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "Color", "Contrast", "Brightness"),
        *("Sharpness", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel", "Cutout", "SolarizeAdd"),
    }


@pytest.mark.parametrize(("magnitude", "reach"), [(5, 20), (10, 40), (15, 60)])
def test_cutout_is_the_reference_implementations(magnitude: int, reach: int):
    (cutout,) = (one for one in rand_augment(Augment(randaugment_magnitude=magnitude)) if isinstance(one, Cutout))
    white = Image.new("RGB", (224, 224), (255, 255, 255))
    areas = []
    with seeded(2):
        for _ in range(200):
            pixels = np.asarray(cutout(white))
            grey = (pixels == 128).all(axis=2)
            assert (grey | (pixels == 255).all(axis=2)).all()
            rows, columns = np.flatnonzero(grey.any(axis=1)), np.flatnonzero(grey.any(axis=0))
            assert grey.sum() == len(rows) * len(columns)  # a rectangle
            assert reach <= min(len(rows), len(columns))
            assert max(len(rows), len(columns)) <= 2 * reach
            areas.append(grey.sum())
    assert max(areas) == (2 * reach) ** 2
    assert min(areas) < 3 * reach**2  # cut off at the border of the image
    assert (np.asarray(white) == 255).all()


@pytest.mark.parametrize("magnitude", [5, 15])
def test_old_runs_keep_their_randaugment(magnitude: int):
    """A configuration from before the fields existed means timm's default, as it was drawn then."""
    old = from_json(Augment, {"randaugment_layers": 2, "randaugment_magnitude": magnitude})
    text = f"rand-m{magnitude}-n2-mstd0-mmax{max(10, magnitude)}"
    before = rand_augment_transform(text, {"interpolation": Image.Resampling.BILINEAR}).ops
    for seed in range(40):
        with seeded(seed):
            expected = picture(seed)
            for operation in random.choices(before, k=2):
                expected = operation(expected)
        with seeded(seed):
            found = picture(seed)
            for operation in random.choices(rand_augment(old), k=2):
                found = operation(found)
        assert np.array_equal(np.asarray(found), np.asarray(expected))


def test_randaugment_draws_from_the_seed_alone():
    change = training(16, Augment(randaugment_layers=2, randaugment_magnitude=15))
    results = []
    for noise in (1, 2):
        np.random.seed(noise)
        torch.manual_seed(noise)
        random.seed(noise)
        with seeded(5, 6, 7):
            results.append(change(picture(0)))
        results.append(random.random())
    assert np.array_equal(results[0], results[2])
    assert results[1] != results[3]  # and the state outside went on as before
    different = set()
    for position in range(50):
        with seeded(position):
            different.add(change(picture(0)).tobytes())
    assert len(different) == 50


def test_a_large_photo_is_decoded_small():
    data = encoded(picture(3, (1600, 1200)), quality=95)
    box = (200, 100, 1400, 1100)
    image, small = reduced(open_image(data), box, (64, 64))
    assert image.size == (400, 300)  # 1000 // (2 * 64) = 7: at 1/4
    assert small == (50, 25, 350, 275)
    exact = open_image(data).crop(box).resize((64, 64), Image.Resampling.BICUBIC)
    quick = image.crop(small).resize((64, 64), Image.Resampling.BICUBIC)
    assert abs(np.asarray(exact).astype(float) - np.asarray(quick)).mean() < 1
    same, unchanged = reduced(open_image(data), box, (300, 300))
    assert (same.size, unchanged) == ((1600, 1200), box)


def test_normalize_is_torchvisions():
    images = torch.randint(0, 256, (2, 3, 5, 4), dtype=torch.uint8)
    preprocessing = Preprocessing()
    reference = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(preprocessing.mean, preprocessing.std)])
    torch.testing.assert_close(normalize(images, preprocessing), reference(images))
    last = images.contiguous(memory_format=torch.channels_last)
    assert normalize(last, preprocessing, torch.bfloat16).is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="1 channels"):
        normalize(images[:, :1], preprocessing)


@pytest.mark.parametrize(
    "wrong",
    [
        {"crop_scale": (0.0, 1.0)},
        {"crop_scale": (0.5, 0.1)},
        {"flip": 2.0},
        {"padding": -1},
        {"interpolation": "best"},
        {"randaugment_probability": 1.5},
    ],
)
def test_wrong_options_are_refused(wrong: dict):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Augment(**wrong)


def test_decoding_is_lazy_until_the_crop_is_known():
    image = open_image(jpeg(0))
    assert transforms.random_box(image.size, (0.5, 1), (1, 1))
    assert image.format == "JPEG"

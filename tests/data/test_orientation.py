"""EXIF orientation: every way in which a camera stores a scene gives the same input."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lambdanets.data.augment import Augment
from lambdanets.data.check import check
from lambdanets.data.decode import BrokenImageError, decode, open_image, orientation_of, upright
from lambdanets.data.loader import Loader, LoaderOptions, seeded
from lambdanets.data.preprocessing import Preprocessing
from lambdanets.data.source import open_source
from lambdanets.data.transforms import evaluation, training
from lambdanets.models.pretrained import Card
from lambdanets.report.pictures import picture as thumbnail
from lambdanets.train.config import DataConfig
from lambdanets.typed import from_json
from tests.data.helpers import encoded, photographed, picture, write_tar

ORIENTATIONS = range(1, 9)
SCENE = picture(3, (61, 40))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_training_sees_the_upright_scene(orientation: int, format: str):
    """Crops, flips and RandAugment are those of the upright image, to the last bit."""
    data = photographed(SCENE, orientation, format)
    shown = Image.fromarray(np.asarray(upright(open_image(data))))
    assert shown.size == SCENE.size
    assert orientation_of(shown) == 1
    for augment in (
        Augment(crop_scale=None, flip=0.5),
        Augment(crop_scale=(0.1, 0.5), randaugment_layers=1),
        Augment(crop_scale=None, padding=4),
    ):
        change = training((24, 17), augment)
        for seed in range(6):
            with seeded(seed):
                expected = change(shown)
            with seeded(seed):
                assert np.array_equal(change(open_image(data)), expected)


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_a_large_photo_is_turned_and_decoded_small(orientation: int):
    """The crop is cut out of a reduced JPEG, in the orientation in which it is stored."""
    scene = picture(5, (1600, 1100))
    data = photographed(scene, orientation, "JPEG", quality=95)
    change = training((48, 64), Augment(crop_scale=(0.4, 0.9), flip=0.0))
    for seed in range(4):
        with seeded(seed):
            expected = change(scene).astype(float)
        with seeded(seed):
            opened = open_image(data)
            found = change(opened)
        assert max(opened.size) < 1600  # it was reduced
        assert np.abs(found - expected).mean() < 2
        assert np.abs(found - expected[:, ::-1]).mean() > 8


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_evaluation_sees_the_upright_scene(orientation: int):
    data = photographed(SCENE, orientation)
    for size, crop in (((20, 31), 1.0), ((24, 24), 0.875)):
        preprocessing = Preprocessing(size=size, crop=crop)
        assert np.array_equal(evaluation(preprocessing)(open_image(data)), evaluation(preprocessing)(SCENE))


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_old_weights_and_runs_see_the_stored_pixels(orientation: int):
    data = photographed(SCENE, orientation)
    stored = Image.fromarray(np.asarray(open_image(data)))
    old = from_json(Card, {"preprocessing": {"size": 24, "crop": 1.0}}).preprocessing
    assert not old.exif_orientation
    assert np.array_equal(evaluation(old)(open_image(data)), evaluation(old)(stored))
    run = from_json(DataConfig, {"path": "x"})
    assert not run.exif_orientation
    assert not run.preprocessing(24).exif_orientation
    change = training(24, Augment(crop_scale=None, flip=0.0), exif_orientation=run.exif_orientation)
    assert np.array_equal(change(open_image(data)), change(stored))
    assert DataConfig().preprocessing(24).exif_orientation
    assert Card().preprocessing.exif_orientation


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("cache", ["none", "memory"])
def test_folders_shards_and_the_cache_agree(tmp_path: Path, orientation: int, cache):
    data = photographed(SCENE, orientation)
    for name in ("a", "b"):
        (tmp_path / "folder" / name).mkdir(parents=True)
        (tmp_path / "folder" / name / "0.png").write_bytes(data)
    write_tar(tmp_path / "shards" / "train-0.tar", [("0.png", data), ("0.cls", b"0")])
    preprocessing = Preprocessing(size=16, crop=1.0)
    expected = evaluation(preprocessing)(SCENE).transpose(2, 0, 1)
    for where in ("folder", "shards"):
        source = open_source(tmp_path / where)
        options = LoaderOptions(batch_size=1, cache=cache)
        for batch in Loader(source, evaluation(preprocessing), options, training=False).epoch(0):
            assert np.array_equal(batch.images[0].numpy(), expected)
        assert np.array_equal(np.asarray(thumbnail(source, 0)), np.asarray(SCENE))


def test_the_cache_of_an_old_run_holds_the_stored_pixels(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.png").write_bytes(photographed(SCENE, 6))
    old = Preprocessing(size=16, crop=1.0, exif_orientation=False)
    options = LoaderOptions(batch_size=1, cache="memory")
    (batch,) = Loader(open_source(tmp_path), evaluation(old), options, training=False).epoch(0)
    stored = SCENE.transpose(Image.Transpose.ROTATE_90)
    assert np.array_equal(batch.images[0].numpy(), evaluation(old)(stored).transpose(2, 0, 1))


def test_a_turned_copy_is_a_copy(tmp_path: Path):
    for split, orientation in (("train", 1), ("val", 8)):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a" / "0.png").write_bytes(photographed(SCENE, orientation))
    sources = {split: open_source(tmp_path, split=split) for split in ("train", "validation")}
    assert len(check(sources, workers=1).leaked) == 1


def test_what_is_turned_is_not_turned_again():
    once = upright(open_image(photographed(SCENE, 6, "JPEG")))
    assert orientation_of(once) == 1
    assert not {"exif", "xmp"} & set(once.info)
    assert once.size == upright(once).size == SCENE.size


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "exif",
    [b"Exif\0\0II*\0\xff\xff\xff\xff" + b"\xff" * 40, b"Exif\0\0", b"Exif\0\0MM\0*" * 9],
    ids=["far", "empty", "odd"],
)
def test_damaged_exif_data_does_not_matter(format: str, exif: bytes):
    data, plain = encoded(SCENE, format, exif=exif), encoded(SCENE, format)
    assert np.array_equal(np.asarray(decode(data)), np.asarray(decode(plain)))
    preprocessing = Preprocessing(size=16)
    assert np.array_equal(evaluation(preprocessing)(open_image(data)), evaluation(preprocessing)(open_image(plain)))


@pytest.mark.parametrize("orientation", [0, 9, 65_535])
def test_an_orientation_that_does_not_exist_is_none(orientation: int):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = open_image(encoded(SCENE, "PNG", exif=exif))
    assert orientation_of(image) == 1


def test_a_torn_png_is_broken_and_not_half_an_image():
    data = photographed(picture(1, (200, 200)), 6)
    for end in (len(data) // 2, len(data) - 30):
        with pytest.raises(BrokenImageError, match="cannot be decoded"):
            training(16, Augment(crop_scale=None))(open_image(data[:end]))

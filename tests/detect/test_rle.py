"""Masks as COCO writes them, compared with pycocotools."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycocotools import mask as coco

from lambdanets.detect import rle


@st.composite
def masks(draw):
    height, width = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    share = draw(st.sampled_from([0.0, 0.02, 0.3, 0.9, 1.0]))
    return np.random.default_rng(draw(st.integers(0, 999))).random((height, width)) < share


@given(masks())
def test_text_is_pycocotools(mask):
    found = rle.encode(mask)
    wanted = coco.encode(np.asfortranarray(mask.astype(np.uint8)))
    assert found == {"size": wanted["size"], "counts": wanted["counts"].decode()}
    np.testing.assert_array_equal(rle.decode(rle.unpack(found["counts"]), mask.shape), mask)


@given(masks(), st.integers(0, 9), st.integers(0, 9), st.integers(0, 5))
def test_a_crop_is_the_whole_picture(mask, left, top, beyond):
    whole = np.zeros((top + mask.shape[0] + beyond, left + mask.shape[1] + beyond), bool)
    whole[top : top + mask.shape[0], left : left + mask.shape[1]] = mask
    assert rle.encode(mask, left, top, whole.shape) == rle.encode(whole)


@pytest.mark.parametrize("text", ["P", "0P", "\x01", "ü", "p" * 40])
def test_what_is_no_run_lengths_is_refused(text):
    with pytest.raises(ValueError, match="run length"):
        rle.unpack(text)


def test_polygons_cover_what_pycocotools_says():
    generator = np.random.default_rng(0)
    shares = []
    for _ in range(100):
        corners = generator.integers(5, 12)
        angles = np.sort(generator.random(corners) * 2 * np.pi)
        radii = generator.uniform(20, 40, corners)
        points = np.stack([50 + radii * np.cos(angles), 60 + radii * np.sin(angles)], axis=1).ravel()
        found = rle.fill_polygon(points, (110, 120))
        wanted = coco.decode(coco.merge(coco.frPyObjects([points.tolist()], 110, 120))).astype(bool)
        shares.append((found & wanted).sum() / (found | wanted).sum())
    assert np.mean(shares) > 0.97  # they treat the pixels at the edge differently
    assert min(shares) > 0.85


def test_polygons_are_drawn_in_bands_of_rows(monkeypatch):
    points = np.random.default_rng(0).uniform(-10, 90, 600)
    whole = rle.fill_polygon(points, (70, 80))
    monkeypatch.setattr(rle, "EDGES_AT_ONCE", 900)
    np.testing.assert_array_equal(rle.fill_polygon(points, (70, 80)), whole)
    assert 0.2 < whole.mean() < 0.8


def test_a_polygon_covers_the_pixels_whose_centres_it_holds():
    mask = rle.fill_polygon([1.0, 1.0, 4.0, 1.0, 4.0, 3.0, 1.0, 3.0], (5, 6))
    wanted = np.zeros((5, 6), bool)
    wanted[1:3, 1:4] = True
    np.testing.assert_array_equal(mask, wanted)
    assert rle.bounds(mask) == (1, 1, 4, 3)
    half = rle.fill_polygon([-5.0, -5.0, 2.4, -5.0, 2.4, 9.0, -5.0, 9.0], (5, 6))  # mostly outside
    np.testing.assert_array_equal(half[0], [True, True, False, False, False, False])

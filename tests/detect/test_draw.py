"""Drawings of detections."""

import numpy as np
import pytest
from PIL import Image

from lambdanets.detect.draw import colour_of, draw, drawn_side, readable_on
from lambdanets.detect.results import Detection


@pytest.mark.parametrize(("size", "width"), [((1000, 600), 5), ((300, 200), 2)])
def test_lines_are_wide_enough_to_see(size: tuple[int, int], width: int):
    box = (0.25 * size[0], 0.25 * size[1], 0.75 * size[0], 0.75 * size[1])
    image = Image.new("RGB", size, (128, 128, 128))
    drawn = np.asarray(draw(image, [Detection(box, 1, 0.9)], ["ant"]))
    row = drawn[size[1] // 2]
    coloured = (row == colour_of(1)).all(-1)
    assert coloured.sum() == 2 * width  # left and right
    assert (row[coloured.nonzero()[0][-1] - width] == 0).all()  # a dark edge inside
    assert (drawn[size[1] // 2, size[0] // 2] == 128).all()


def test_a_name_stays_in_the_picture():
    image = Image.new("RGB", (400, 300), (128, 128, 128))
    name, label = "a long name of a class", 2
    left = np.asarray(draw(image, [Detection((10.0, 100.0, 60.0, 150.0), label, 0.5)], [name, name]))
    right = np.asarray(draw(image, [Detection((370.0, 100.0, 395.0, 150.0), label, 0.5)], [name, name]))
    top = slice(0, 98)  # above the box
    letters = [(one[top] != 128).any(-1).sum() for one in (left, right)]
    assert letters[0] == letters[1] > 100


@pytest.mark.parametrize(("colour", "letters"), [((255, 255, 0), 0), ((0, 0, 255), 255), ((120, 200, 120), 0)])
def test_letters_have_contrast(colour: tuple[int, int, int], letters: int):
    assert readable_on(colour) == (letters,) * 3


@pytest.mark.parametrize(("size", "side"), [((90, 70), 540), ((480, 20), 480), ((479, 479), 958), ((2000, 10), 2000)])
def test_small_drawings_are_enlarged(size: tuple[int, int], side: int):
    assert drawn_side(Image.new("RGB", size)) == side

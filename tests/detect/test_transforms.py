"""Jitter and batches: boxes and masks stay together, randomness follows the seed alone."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from lambdanets.data.decode import BrokenImageError, open_image
from lambdanets.data.loader import LoaderOptions
from lambdanets.detect import rle
from lambdanets.detect.coco import open_set
from lambdanets.detect.config import Jitter
from lambdanets.detect.loader import SceneBatch, SceneLoader
from lambdanets.detect.results import Detection, detections, pasted
from lambdanets.detect.scenes import Segment, make_picture
from lambdanets.detect.shapes import Shapes
from lambdanets.detect.transforms import Fitting, Training, fitted, unpacked
from tests.data.helpers import photographed


def scene(size=(90, 140), boxes=((20, 30, 40, 25), (100, 5, 30, 60)), crowd=(False, False)):
    """A picture whose objects are bright rectangles, each with its own colour."""
    pixels = np.zeros((*size, 3), np.uint8)
    objects = []
    for i, (left, top, width, height) in enumerate(boxes):
        mask = np.zeros(size, bool)
        mask[top : top + height, left : left + width] = True
        pixels[mask] = 100 + 50 * i
        counts = np.array(rle.unpack(rle.encode(mask)["counts"]))
        objects.append(((left, top, width, height), i + 1, crowd[i], float(mask.sum()), Segment(counts=counts)))
    return Image.fromarray(pixels), make_picture(1, "a.png", size, objects)


@pytest.mark.parametrize("seed", range(25))
def test_boxes_masks_and_pixels_stay_together(seed):
    random.seed(seed)
    sample = Training(128, Jitter(scale=(0.3, 2.0)), masks=True)(scene())
    height, width, _ = sample.pixels.shape
    assert max(height, width) <= 128
    masks = unpacked(sample.packed_NHW, width).numpy().astype(bool)
    assert masks.shape == (len(sample.labels_N), height, width)
    for box, label, mask in zip(sample.boxes_N4.tolist(), sample.labels_N.tolist(), masks, strict=True):
        left, top, right, bottom = rle.bounds(mask)
        assert [left, top, right, bottom] == pytest.approx(box, abs=1.6)
        inside = sample.pixels[mask][:, 0]
        assert np.median(np.abs(inside.astype(int) - (50 + 50 * label))) <= 2  # its own colour lies under it


def test_the_scale_is_that_of_large_scale_jitter():
    """The longer side becomes the canvas times a number between 0.1 and 2."""
    random.seed(0)
    transform = Training(100, Jitter(scale=(0.1, 2.0), flip=0.0), masks=False)
    scales = []
    for _ in range(400):
        (_, _, _, across), out = transform.crop((300, 400))
        assert out[0] <= 100
        assert out[1] <= 100
        scales.append(out[1] / across * 400 / 100)
    assert min(scales) == pytest.approx(0.1, abs=0.02)
    assert max(scales) == pytest.approx(2.0, abs=0.02)
    assert np.mean(scales) == pytest.approx(1.05, abs=0.06)


def test_crowds_are_not_trained_on_and_what_a_crop_hides_is_gone():
    random.seed(1)
    sample = Training(140, Jitter(scale=(1.0, 1.0), flip=0.0), masks=True)(scene(crowd=(True, False)))
    assert sample.labels_N.tolist() == [2]
    hidden = 0
    for seed in range(20):
        random.seed(seed)
        sample = Training(64, Jitter(scale=(4.0, 4.0)), masks=True)(scene())
        assert len(sample.boxes_N4) == len(sample.labels_N) == len(sample.packed_NHW)
        hidden += len(sample.labels_N) < 2
    assert hidden > 5


def test_a_picture_that_its_annotations_do_not_fit_is_broken():
    image, picture = scene()
    with pytest.raises(BrokenImageError, match=r"140 x 90.*90 x 140"):
        Fitting(64)((image, replace(picture, height=140, width=90)))


def test_annotations_of_the_upright_photograph_are_refused_with_the_remedy():
    upright, picture = scene((90, 140))
    photo = open_image(photographed(upright, 6))
    assert photo.size == (90, 140)
    with pytest.raises(BrokenImageError, match=r"90 x 140.*for 140 x 90.*EXIF orientation: save the image upright"):
        Fitting(64)((photo, picture))


def loader(workers=0, rank=0, world=1, batch=4):
    transform = Training(64, Jitter(), masks=True)
    return SceneLoader(open_set("shapes"), transform, 64, LoaderOptions(batch, workers, seed=3, rank=rank, world=world))


def same(one: SceneBatch, other: SceneBatch) -> bool:
    tensors = [[b.images, b.indices, *(t for target in b.targets for t in target.values())] for b in (one, other)]
    return one.sizes == other.sizes and all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))


def test_batches_do_not_depend_on_workers_processes_or_where_one_starts():
    whole = list(loader().epoch(2))
    assert len(whole) == 16
    for workers, first in ((2, 0), (0, 11)):
        again = list(loader(workers).epoch(2, first))
        assert all(same(a, b) for a, b in zip(whole[first:], again, strict=True))
    halves = [list(loader(rank=rank, world=2, batch=2).epoch(2)) for rank in range(2)]
    for number, one in enumerate(whole):
        parts = [halves[rank][number] for rank in range(2)]
        assert torch.equal(torch.cat([p.images for p in parts]), one.images)
    assert not same(whole[0], next(iter(loader().epoch(3))))


def test_the_made_up_set_is_the_same_everywhere():
    pixels, _ = Shapes("train").draw(5)
    np.testing.assert_array_equal(pixels, open_set("shapes").read(5))
    other = Shapes("validation").draw(5)[0]
    assert pixels.shape != other.shape or not np.array_equal(pixels, other)
    for picture in Shapes("test").scenes().pictures:
        for box, segment in zip(picture.boxes_N4, picture.segments, strict=True):
            assert rle.bounds(segment.mask(picture.size)) == tuple(box.astype(int))  # exact


def test_detections_come_back_to_the_original_picture():
    output = {
        "boxes": torch.tensor([[8.0, 16.0, 24.0, 48.0]]),
        "labels": torch.tensor([2]),
        "scores": torch.tensor([0.75]),
        "masks": torch.ones(1, 1, 28, 28),
    }
    (found,) = detections(output, (64, 32), (128, 96))  # on the canvas 32 x 64, on disk 96 x 128
    assert found.box == pytest.approx((24.0, 32.0, 72.0, 96.0))
    mask = rle.decode(rle.unpack(found.mask["counts"]), (128, 96))
    left, top, right, bottom = rle.bounds(mask)
    assert (left, top, right, bottom) == (24, 32, 72, 96)
    assert isinstance(found, Detection)
    assert fitted((128, 96), 64) == [64, 48]


def test_masks_are_pasted_where_they_belong():
    """Against bilinear sampling of the whole picture by torch."""
    generator = torch.Generator().manual_seed(0)
    height, width = 70, 80
    masks = torch.rand(20, 1, 28, 28, generator=generator, dtype=torch.float64)
    corner = 60 * torch.rand(20, 2, generator=generator, dtype=torch.float64) - 5  # some reach out of the picture
    boxes = torch.cat([corner, corner + 1 + 40 * torch.rand(20, 2, generator=generator)], dim=1)
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    for mask, box in zip(masks, boxes, strict=True):
        left, top, right, bottom = box.tolist()
        grid = torch.stack([(x - left) / (right - left), (y - top) / (bottom - top)], dim=2).double() * 2 - 1
        sampled = torch.nn.functional.grid_sample(mask[None], grid[None], align_corners=False)[0, 0]
        near = (x > left - 1) & (x < right + 1) & (y > top - 1) & (y < bottom + 1)
        found = rle.decode(rle.unpack(pasted(mask[0].numpy(), box.numpy(), (height, width))["counts"]), (height, width))
        clear = (sampled - 0.5).abs() > 1e-9
        inside = (x > left) & (x < right) & (y > top) & (y < bottom) & clear
        np.testing.assert_array_equal(found[inside], (sampled >= 0.5).numpy()[inside])
        assert not found[~near].any()

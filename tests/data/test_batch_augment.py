"""Augmentation of batches: values of Pillow and torchvision, distributions, and numbers that follow from positions."""

import math
import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms.v2 import functional as V

from lambdanets.data.augment import Augment
from lambdanets.data.batch_augment import (
    BOX,
    MIX,
    ORDERS,
    STREAM,
    BatchAugment,
    color_jitter,
    crops,
    erase,
    flip,
    largest_crop,
    mixed_with_others,
    mixing,
    random_boxes,
    shift,
    uniforms,
)
from lambdanets.data.batch_randaugment import AFFINE, BatchRandAugment, luma
from lambdanets.data.order import mix
from lambdanets.data.transforms import RESAMPLING, Cutout, rand_augment, random_box
from tests.data.helpers import picture


def noise(seed: int, size: tuple[int, int]) -> Image.Image:
    """Has every frequency, unlike a photograph."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def tensor(*images: Image.Image) -> torch.Tensor:
    return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]).float()


def numbers(count: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(uniforms(seed, np.zeros(count, np.int64), np.arange(count), np.arange(columns)))


# Random numbers -------------------------------------------------------------------------------------------------------


def test_numbers_are_a_hash_of_seed_epoch_position_and_column():
    epochs, positions, columns = np.array([0, 3, 3]), np.array([5, 0, 10**9]), np.array([7, 4096])
    found = uniforms(11, epochs, positions, columns)
    assert found.dtype == np.float32
    for i in range(3):
        for j in range(2):
            key = mix(11, STREAM)
            for number in (epochs[i], positions[i], columns[j]):
                key = mix(key ^ int(number))
            assert found[i, j] == (key >> 40) / 2**24


def test_numbers_are_uniform_and_independent():
    found = uniforms(0, np.repeat(np.arange(40), 250), np.tile(np.arange(250), 40), np.arange(8))
    assert found.min() >= 0
    assert found.max() < 1
    assert np.abs(found.mean(0) - 0.5).max() < 4 / math.sqrt(12 * len(found))
    assert np.abs(np.corrcoef(found.T) - np.eye(8)).max() < 5 / math.sqrt(len(found))
    for neighbours in (found[1:, 0], found[250:, 0]):  # the next position, the next epoch
        assert abs(np.corrcoef(found[: len(neighbours), 0], neighbours)[0, 1]) < 5 / math.sqrt(len(neighbours))


def test_a_purpose_keeps_its_numbers_whatever_else_is_on():
    some = BatchAugment(Augment(color_jitter=0.3), (8, 8), (0.5,) * 3)
    more = BatchAugment(Augment(color_jitter=0.3, erasing=0.5, randaugment_layers=2), (8, 8), (0.5,) * 3, whole=True)
    places = np.zeros(5, np.int64), np.arange(5)
    (one, _), (other, _) = some.numbers(3, *places), more.numbers(3, *places)
    assert torch.equal(some.of(one, "jitter"), more.of(other, "jitter"))


# Crops ----------------------------------------------------------------------------------------------------------------

SIZES = [(60, 45), (33, 70), (128, 100), (20, 24), (9, 80)]  # width, height


def flat(images: list[Image.Image]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pixels, starts, widths."""
    pixels = torch.from_numpy(np.concatenate([np.array(image).reshape(-1, 3) for image in images]))
    counts = np.array([image.width * image.height for image in images])
    return pixels, torch.from_numpy(np.cumsum(counts) - counts), torch.tensor([image.width for image in images])


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("size", [(24, 24), (17, 40)])
def test_crops_are_pillows(monkeypatch, interpolation: str, size: tuple[int, int]):
    """Larger and smaller than the input, in one batch; a few pixels differ by 1, where sums are close to a half."""
    images = [noise(seed, sides) for seed, sides in enumerate(SIZES)] + [picture(7, (50, 50))]
    pixels, starts, widths = flat(images)
    boxes = []
    for seed, image in enumerate(images):
        random.seed(seed)
        left, top, right, bottom = random_box(image.size, (0.1, 1.0), (3 / 4, 4 / 3))
        boxes.append((top, left, bottom - top, right - left))
    tile = largest_crop(np.array([i.height for i in images]), np.array([i.width for i in images]), Augment())
    found = crops(pixels, starts, widths, torch.tensor(boxes), tile, size, interpolation)
    monkeypatch.setattr("lambdanets.data.batch_augment.TILE_PIXELS", 2 * tile[0] * tile[1])
    assert torch.equal(found, crops(pixels, starts, widths, torch.tensor(boxes), tile, size, interpolation))
    for image, (top, left, height, width), crop in zip(images, boxes, found, strict=True):
        part = image.crop((left, top, left + width, top + height))
        expected = tensor(part.resize((size[1], size[0]), RESAMPLING[interpolation]))[0]
        difference = (crop - expected).abs()
        if interpolation == "nearest":  # of two pixels that are equally near either may be chosen
            assert (difference == 0).float().mean() > 0.9
        else:
            assert difference.max() <= 1
            assert difference.mean() < 0.1
        assert expected.std() > 10


def test_boxes_are_drawn_as_for_single_images():
    """Areas, shapes and places have the distribution of `random_box`, whose numbers come from elsewhere."""
    count, scale, ratio = 4000, (0.08, 1.0), (3 / 4, 4 / 3)
    for width, height in ((213, 160), (40, 300)):
        sides = torch.full((count,), height), torch.full((count,), width)
        ours = random_boxes(numbers(count, BOX), *sides, scale, ratio).double().numpy()
        random.seed(0)
        theirs = np.array([random_box((width, height), scale, ratio) for _ in range(count)], np.float64)
        left, top, right, bottom = theirs.T
        theirs = np.stack([top, left, bottom - top, right - left], 1)
        assert (ours[:, :2] >= 0).all()
        assert (ours[:, 0] + ours[:, 2] <= height).all()
        assert (ours[:, 1] + ours[:, 3] <= width).all()
        for column in (*range(4), "area", "shape"):
            one, other = (
                np.sort(box[:, column])
                if isinstance(column, int)
                else np.sort(box[:, 2] * box[:, 3] if column == "area" else box[:, 3] / box[:, 2])
                for box in (ours, theirs)
            )
            values = np.unique(np.concatenate([one, other]))
            steps = [np.searchsorted(sample, values, side="right") / count for sample in (one, other)]
            assert np.abs(steps[0] - steps[1]).max() < 1.95 * math.sqrt(2 / count)  # Kolmogorov-Smirnov, p = 0.001


def test_no_crop_is_larger_than_the_tile():
    generator = np.random.default_rng(0)
    augment = Augment(crop_scale=(0.5, 1.0), crop_ratio=(0.6, 1.9))
    heights, widths = generator.integers(1, 90, 3000), generator.integers(1, 90, 3000)
    boxes = random_boxes(
        numbers(3000, BOX), torch.from_numpy(heights), torch.from_numpy(widths), (0.5, 1.0), (0.6, 1.9)
    ).numpy()
    for one in range(0, 3000, 10):
        rows = slice(one, one + 10)
        high, wide = largest_crop(heights[rows], widths[rows], augment)
        assert boxes[rows, 2].max() <= high
        assert boxes[rows, 3].max() <= wide
    assert largest_crop(np.array([160]), np.array([5000]), Augment()) == (160, 215)


def test_flips_and_shifts():
    image = tensor(picture(0)).expand(2000, -1, -1, -1)
    flipped = (flip(image[:, :, :1], numbers(2000, 1)[:, 0], 0.3) != image[:, :, :1]).flatten(1).any(1)
    assert abs(flipped.float().mean() - 0.3) < 0.05
    assert torch.equal(flip(image[:1], torch.zeros(1), 0.5), image[:1].flip(3))
    drawn = numbers(50, 2)
    moved = shift(image[:50], drawn, 3)
    for one, (down, across) in zip(moved, (drawn * 7).floor().long() - 3, strict=True):
        top, left = int(down), int(across)
        expected = picture(0).crop((left, top, left + 40, top + 32))
        assert torch.equal(one, tensor(expected)[0])


# RandAugment ----------------------------------------------------------------------------------------------------------

PHOTOS = [noise(0, (40, 31)), picture(1, (40, 31)), Image.new("RGB", (40, 31), (10, 200, 90))]
PHOTOS.append(picture(2, (40, 31)).point(lambda value: value // 3 + 40))  # without the darkest and the lightest values


@pytest.mark.parametrize("magnitude", [3, 10, 15, 25])
def test_operations_are_timms(monkeypatch, magnitude: int):
    augment = Augment(randaugment_layers=1, randaugment_magnitude=magnitude)
    ours, theirs = BatchRandAugment(augment), rand_augment(augment)
    images = tensor(*PHOTOS)
    assert len(ours.names) == len(theirs) == 16
    for number, operation in enumerate(theirs[:-1]):
        for negative in (False, True):
            monkeypatch.setattr(auto_augment, "_randomly_negate", lambda v, n=negative: -v if n else v)
            expected = tensor(*(operation(image) for image in PHOTOS))
            which = torch.full((len(images),), number), torch.full((len(images),), negative)
            found = ours.apply(images, *which, torch.zeros(len(images), 2))
            if ours.names[number] in AFFINE:
                assert (found - expected).abs().max() <= 1
                assert (found != expected).float().mean() < 0.03
            else:
                assert torch.equal(found, expected), ours.names[number]


def test_cutout_is_that_of_single_images(monkeypatch):
    augment = Augment(randaugment_layers=1)
    ours, theirs = BatchRandAugment(augment), Cutout(augment)
    for y, x in ((0.0, 0.0), (0.5, 0.99), (0.99, 0.3)):
        places = iter([int(x * 40), int(y * 31)])
        monkeypatch.setattr(random, "randrange", lambda _, p=places: next(p))
        found = ours.apply(tensor(PHOTOS[1]), torch.tensor([15]), torch.tensor([False]), torch.tensor([[y, x]]))
        assert torch.equal(found, tensor(theirs(PHOTOS[1])))


def test_every_image_has_an_operation_of_its_own():
    augment = Augment(randaugment_layers=1, randaugment_magnitude=8, randaugment_probability=0.5)
    ours = BatchRandAugment(augment)
    image = tensor(picture(1, (40, 31))).expand(400, -1, -1, -1)
    found = ours(image, numbers(400, ours.numbers))
    unchanged = (found == image).flatten(1).all(1).float().mean()
    assert 0.42 < unchanged < 0.6  # of the others, some do nothing to this image
    assert len({one.numpy().tobytes() for one in found}) > 18  # two signs, and places of Cutout
    kinds = BatchRandAugment(Augment(randaugment_layers=1))
    chosen = (numbers(8000, 5)[:, 0] * len(kinds.names)).floor().long().bincount(minlength=16)
    assert chosen.min() > 400
    two = BatchRandAugment(Augment(randaugment_layers=2, randaugment_magnitude=8))
    drawn = numbers(30, two.numbers)
    once = two.layer(image[:30], drawn[:, :5])
    assert torch.equal(two(image[:30], drawn), two.layer(once, drawn[:, 5:]))


# Colours and erasing --------------------------------------------------------------------------------------------------


def test_color_jitter_is_torchvisions():
    images, drawn = tensor(*PHOTOS), numbers(4, 4)
    drawn[:, 3] = torch.tensor([0.05, 0.3, 0.6, 0.99])
    found = color_jitter(images, drawn, 0.7)
    for image, one, row in zip(images, found, drawn, strict=True):
        brightness, contrast, saturation = (0.3 + 1.4 * float(u) for u in row[:3])
        steps = [
            lambda x, f=brightness: V.adjust_brightness(x, f),
            lambda x, f=contrast: V.adjust_contrast(x, f),
            lambda x, f=saturation: V.adjust_saturation(x, f),
        ]
        expected = image / 255
        for step in ORDERS[int(row[3] * 6)]:
            expected = steps[step](expected)
        assert (one / 255 - expected).abs().max() < 1e-4
    grey = luma(images)
    assert color_jitter(grey, drawn, 0.7).shape == grey.shape
    assert (color_jitter(images, torch.full((4, 4), 0.5), 0.7) - images).abs().max() < 1e-3


def test_erasing():
    count, color = 1500, torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
    images = torch.full((count, 3, 32, 32), 9.0)
    erased = erase(images, numbers(count, 1 + BOX), 0.4, color)
    where = (erased != 9).any(1)
    area = where.flatten(1).float().mean(1)
    chosen = area > 0
    assert abs(chosen.float().mean() - 0.4) < 0.05
    assert area[chosen].min() > 0.01
    assert area[chosen].max() < 0.36
    assert abs(area[chosen].mean() - 0.175) < 0.02
    for one, inside in zip(erased[chosen][:50], where[chosen][:50], strict=True):
        rows, columns = inside.any(1).nonzero()[:, 0], inside.any(0).nonzero()[:, 0]
        assert inside[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].all()  # one rectangle
        assert torch.equal(one[:, inside], color[:, :, 0].expand(-1, int(inside.sum())))


# Mixing ---------------------------------------------------------------------------------------------------------------


def mixings(augment: Augment, count: int = 3000) -> np.ndarray:
    return np.stack([mixing(augment, row, (32, 32), 8) for row in numbers(count, MIX).numpy()])


def test_the_proportions_of_mixup_are_from_beta():
    for alpha in (0.2, 1.0, 3.0):
        found = np.sort(mixings(Augment(mixup=alpha))[:, 0])
        assert np.array_equal(found, np.sort(mixings(Augment(mixup=alpha))[:, 1]))
        expected = np.sort(np.random.default_rng(0).beta(alpha, alpha, 30000))[5::10]
        steps = np.searchsorted(expected, found) / len(expected) - np.arange(len(found)) / len(found)
        assert np.abs(steps).max() < 1.95 * math.sqrt(2 / 3000)


def test_which_batches_are_mixed_and_how():
    found = mixings(Augment(mixup=0.2, cutmix=1.0, cutmix_probability=0.3, mix_probability=0.8))
    mixup, cutmix = found[:, 1] != 1, (found[:, 1] == 1) & (found[:, 0] != 1)
    assert abs(mixup.mean() - 0.8 * 0.7) < 0.05
    assert abs(cutmix.mean() - 0.8 * 0.3) < 0.05
    assert not (mixings(Augment(mixup=0.2), 100)[:, 2:6] != 0).any()
    assert (mixings(Augment(cutmix=1.0), 100)[:, 1] == 1).all()
    assert set(found[:, 6]) == set(range(1, 8))  # every other image, never itself
    assert mixing(Augment(mixup=0.2), numbers(1, MIX).numpy()[0], (8, 8), 1)[6] == 0


def test_mixed_images_and_their_targets():
    images = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 3, 20, 30)
    mixed = mixed_with_others(images, torch.tensor([0.75, 0.75, 0, 0, 0, 0, 2.0]))
    assert mixed.partner_B.tolist() == [2, 3, 4, 0, 1]
    expected = 0.75 * images + 0.25 * images[mixed.partner_B]
    assert torch.allclose(mixed.images, expected)
    assert float(mixed.weight) == 0.75


def test_cutmix_takes_a_box_of_the_partner_and_its_share_of_the_label():
    images = torch.arange(8.0).view(8, 1, 1, 1).expand(8, 3, 32, 32)
    for how in mixings(Augment(cutmix=1.0), 60):
        top, left, bottom, right, further = map(int, how[2:])
        mixed = mixed_with_others(images, torch.from_numpy(how))
        same = mixed.images == images
        assert torch.allclose(same.float().mean((1, 2, 3)), mixed.weight, atol=1e-6)
        assert not same[:, :, top:bottom, left:right].any()
        assert (mixed.images[0, :, top:bottom, left:right] == further).all()


# All of it ------------------------------------------------------------------------------------------------------------

EVERYTHING = Augment(
    crop_scale=(0.3, 1.0),
    padding=2,
    randaugment_layers=2,
    randaugment_probability=0.7,
    color_jitter=0.3,
    erasing=0.3,
    mixup=0.2,
    cutmix=1.0,
)


class NoCopies(TorchDispatchMode):
    """Fails where a tensor goes from one device to another, which a CUDA graph cannot contain."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        devices = {value.device.type for value in args if isinstance(value, torch.Tensor) and value.ndim}
        if isinstance(found, torch.Tensor):
            devices.add(found.device.type)
        assert len(devices) < 2, func
        return found


def test_nothing_waits_for_the_device_or_depends_on_values():
    """On fake tensors, which have no values: a shape or branch that depends on one is an error."""
    variation = BatchAugment(EVERYTHING, (16, 16), (0.5,) * 3, whole=True)
    drawn = variation.numbers(0, np.zeros(6, np.int64), np.arange(6))
    assert variation.randaugment is not None
    with FakeTensorMode(allow_non_fake_inputs=True):  # constants are made before the capture
        device = torch.device("meta")
        variation.color(device)
        variation.randaugment.constant(device, 16, 16)
        pixels = torch.empty(5000, 3, dtype=torch.uint8, device=device)
        starts, widths = (torch.empty(6, dtype=torch.int64, device=device) for _ in range(2))
        rows, how = (torch.empty(one.shape, device=device) for one in drawn)
        with NoCopies():
            boxes = random_boxes(variation.of(rows, "crop"), widths, widths, (0.3, 1.0), (3 / 4, 4 / 3))
            images = crops(pixels, starts, widths, boxes, (20, 20), (16, 16), "bicubic")
            mixed = variation(images, rows, how)
        assert mixed.images.shape == (6, 3, 16, 16)
        assert mixed.images.dtype == torch.float32


def test_grey_images_and_uint8_of_workers():
    variation = BatchAugment(EVERYTHING, (16, 16), (0.5,), whole=True)
    drawn = variation.numbers(0, np.zeros(6, np.int64), np.arange(6))
    grey = luma(tensor(*(picture(seed, (16, 16)) for seed in range(6))))
    mixed = variation(grey, *drawn)
    assert mixed.images.shape == grey.shape
    color = BatchAugment(Augment(color_jitter=0.4), (16, 16), (0.5,) * 3)
    drawn = color.numbers(0, np.zeros(6, np.int64), np.arange(6))
    images = tensor(*(picture(seed, (16, 16)) for seed in range(6)))
    workers = images.byte().contiguous(memory_format=torch.channels_last)
    assert torch.allclose(color(workers, *drawn).images, color(images, *drawn).images, atol=1e-3)
    assert not torch.equal(color(images, *drawn).images, images)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"erasing": 1.5}, "erasing must be between 0 and 1"),
        ({"mixup": -1.0}, "mixup must be between"),
        ({"color_jitter": -0.1}, "c"),
    ],
)
def test_settings_out_of_range(change: dict, words: str):
    with pytest.raises(ValueError, match=words):
        Augment(**change)

"""Images on the device: decoded as workers decode them, in the same order, with the same replacements."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lambdanets.data import resident
from lambdanets.data.augment import Augment
from lambdanets.data.batch_augment import BatchAugment
from lambdanets.data.broken import BrokenImages, TooManyBrokenError
from lambdanets.data.loader import Loader, LoaderOptions
from lambdanets.data.resident import ResidentImages, ResidentLoader, estimated_bytes, stored_size
from lambdanets.data.source import open_source
from lambdanets.data.transforms import training
from tests.data.helpers import Numbered, encoded, photographed, picture, write_folder

CPU = torch.device("cpu")


def images_of(source, augment: Augment, size: int = 16, indices=None, **options) -> ResidentImages:
    chosen = np.arange(len(source)) if indices is None else np.asarray(indices)
    return ResidentImages(source, chosen, (size, size), augment, CPU, 2**30, **options)


def all_of(images: ResidentImages, examples: list[int], augment: Augment, channels: int = 3) -> torch.Tensor:
    """Each example once, augmented."""
    variation = BatchAugment(augment, images.size, (0.5,) * channels, whole=True)
    numbers, how = variation.numbers(0, np.zeros(len(examples), np.int64), np.arange(len(examples)))
    return variation(images.cropped(torch.tensor(examples), variation, numbers), numbers, how).images


@pytest.mark.parametrize("channels", [1, 3])
def test_whole_images_are_those_of_workers(tmp_path: Path, channels: int):
    """Without random crops the pixels are equal: turned, in grey, of any format, enlarged and reduced."""
    place = tmp_path / "a"
    write_folder(tmp_path, {"a": 3}, size=(50, 30))
    for orientation in range(1, 9):
        (place / f"x{orientation}.png").write_bytes(photographed(picture(orientation, (24, 17)), orientation))
        data = photographed(picture(orientation, (300, 190)), orientation, "JPEG", quality=95)
        (place / f"y{orientation}.jpg").write_bytes(data)
    (place / "grey.png").write_bytes(encoded(picture(3).convert("L"), "PNG"))
    (place / "palette.gif").write_bytes(encoded(picture(4).convert("P"), "GIF"))
    source = open_source(tmp_path)
    augment = Augment(crop_scale=None, flip=0.0)
    transform = training(16, augment, channels)
    loader = Loader(source, transform, LoaderOptions(batch_size=len(source)))
    (batch,) = loader.epoch(0)
    images = images_of(source, augment, channels=channels)
    assert images.pixels_PC.shape[1] == channels
    found = all_of(images, batch.indices.tolist(), augment, channels)
    large = torch.tensor([source.name(int(i)).endswith(".jpg") for i in batch.indices])
    assert torch.equal(found[~large], batch.images[~large].float())
    # Photographs are decoded smaller before they are resized, which changes pixels a little.
    assert (found - batch.images.float()).abs().mean() < 3
    stored = images_of(source, augment, channels=channels, exif_orientation=False)
    assert (all_of(stored, batch.indices.tolist(), augment, channels) - found).abs().mean() > 3


def test_memory_images_and_a_part_of_them():
    source = Numbered(9, side=12)
    augment = Augment(crop_scale=None, flip=0.0)
    images = images_of(source, augment, 12, [2, 5, 7])
    assert len(images.pixels_PC) == 3 * 144
    found = all_of(images, [7, 2], augment)
    assert np.array_equal(found.permute(0, 2, 3, 1).numpy(), source.images[[7, 2]])


def test_large_images_are_reduced_and_small_ones_are_not(tmp_path: Path):
    augment = Augment(crop_scale=(0.25, 1.0))
    rule = {"size": (16, 16), "augment": augment}
    assert stored_size(32, 90, **rule) == (32, 90)  # 16 / sqrt(0.25)
    assert stored_size(33, 66, **rule) == (32, 64)
    assert stored_size(400, 100, **rule) == (128, 32)
    assert stored_size(3000, 10, **rule) == (3000, 10)
    assert stored_size(100, 200, size=(16, 16), augment=Augment(crop_scale=(0.16, 1.0))) == (40, 80)
    (tmp_path / "a").mkdir()
    for i, size in enumerate([(400, 300), (301, 400), (30, 20)]):
        (tmp_path / "a" / f"{i}.jpg").write_bytes(photographed(picture(i, size), 6, "JPEG", quality=95))
    source = open_source(tmp_path)
    images = images_of(source, augment)
    sizes = [(int(h), int(w)) for h, w in zip(images.heights, images.widths, strict=True)]
    assert sizes == [(32, 43), (43, 32), (20, 30)]
    assert estimated_bytes(source, np.arange(3), (16, 16), augment, 3) == images.pixels_PC.numel()
    for i, (height, width) in enumerate(sizes[:2]):
        start = int(images.starts[i])
        found = images.pixels_PC[start : start + height * width].view(height, width, 3).numpy()
        expected = np.asarray(picture(i, [(400, 300), (301, 400)][i]).resize((width, height), 3))
        assert np.abs(found.astype(int) - expected).mean() < 3


def test_crops_of_a_batch_lie_in_the_image():
    source = Numbered(6, side=9)
    augment = Augment(crop_scale=(0.3, 1.0), interpolation="bilinear")
    images = images_of(source, augment, 9)
    assert images.tile[0] <= 9
    source.images[:] = np.arange(6)[:, None, None, None] * 40
    constant = images_of(source, augment, 9)
    found = all_of(constant, [0, 1, 2, 3, 4, 5], augment)
    assert torch.equal(found, torch.arange(6.0).mul(40).view(6, 1, 1, 1).expand_as(found))  # none from a neighbour


# Batches --------------------------------------------------------------------------------------------------------------


def both(source, **options) -> tuple[Loader, ResidentLoader]:
    """The loader of workers, and that of resident images."""
    augment = Augment(crop_scale=None, flip=0.0)
    chosen = LoaderOptions(batch_size=4, seed=3, **options)
    indices = np.arange(1, len(source))
    transform = training(8, augment)
    return Loader(source, transform, chosen, indices=indices), ResidentLoader(
        images_of(source, augment, 8, indices), chosen
    )


@pytest.mark.parametrize("remainder", ["drop", "carry"])
def test_order_and_replacements_are_those_of_workers(remainder):
    workers, device = both(Numbered(24, broken=[3, 4, 20]), remainder=remainder, broken=BrokenImages(1.0))
    for epoch in range(3):
        for one, other in zip(workers.epoch(epoch), device.epoch(epoch), strict=True):
            assert torch.equal(one.indices, other.images)
            assert torch.equal(one.indices, other.indices)
            assert torch.equal(one.labels, other.labels)
            assert [broken.index for broken in one.broken] == [broken.index for broken in other.broken]
    later = list(device.epoch(2))[2:]
    assert all(torch.equal(a.images, b.images) for a, b in zip(later, device.epoch(2, 2), strict=True))


def test_too_many_broken_images_stop_the_run():
    _, device = both(Numbered(24, broken=range(2, 14)))
    with pytest.raises(TooManyBrokenError, match="numbered:0"):
        list(device.epoch(0))
    _, device = both(Numbered(24, broken=range(24)), broken=BrokenImages(1.0))
    with pytest.raises(TooManyBrokenError):
        next(device.epoch(0))


@pytest.mark.parametrize("cut", [{"world": 2}, {"parts": 2}])
def test_processes_and_micro_batches_share_the_batches_of_one(cut: dict):
    source, augment = Numbered(19), Augment()
    images = images_of(source, augment)
    alone = ResidentLoader(images, LoaderOptions(batch_size=8))
    pieces = [
        ResidentLoader(images, LoaderOptions(batch_size=4, rank=rank, **cut)).epoch(1)
        for rank in range(cut.get("world", 1))
    ] * cut.get("parts", 1)
    for batch in alone.epoch(1):
        assert torch.equal(batch.images, torch.cat([next(piece).images for piece in pieces]))


def test_what_does_not_fit_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"9 images take 0.0 GiB, and 0.0 GiB of memory on the device are free"):
        ResidentImages(Numbered(9), np.arange(9), (8, 8), Augment(), CPU, 100)
    with pytest.raises(ValueError, match="3 training images are too few for batches of 4"):
        ResidentLoader(images_of(Numbered(3), Augment()), LoaderOptions(batch_size=4))


def test_the_estimate_is_from_some_headers(monkeypatch):
    source = Numbered(1000, side=8)
    reads = []
    original = source.read
    monkeypatch.setattr(source, "read", lambda index: reads.append(index) or original(index))
    assert estimated_bytes(source, np.arange(1000), (8, 8), Augment(), 3) == 1000 * 192
    assert len(reads) == resident.SAMPLED

"""Runs with images on the device, and batch augmentation after workers: which is chosen, and exact resumes."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lambdanets.data.augment import Augment
from lambdanets.data.decode import open_image
from lambdanets.data.transforms import evaluation
from lambdanets.pseudo.config import CoTrainConfig
from lambdanets.train import data_path
from lambdanets.train.classify import Classify
from lambdanets.train.config import DataConfig, TrainConfig
from lambdanets.train.distributed import World
from lambdanets.train.identity import process_difference
from lambdanets.train.loop import fit
from lambdanets.train.task import Share
from lambdanets.typed import from_json, to_json
from tests.support.image_runs import EVERYTHING, folder_of_images, image_config, weights
from tests.train.tasks import StopAt, records, same


def run_of(images, out, cache="device", augment=EVERYTHING, **changes) -> TrainConfig:
    data = DataConfig(path=str(images), workers=0, cache=cache)
    return image_config(images, out, data=data, augment=augment, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of_images(tmp_path_factory.mktemp("images"), broken=(6, 14))


def mended(config: TrainConfig) -> TrainConfig:
    return replace(config, data=replace(config.data, max_broken=0.5))


@pytest.mark.parametrize("cache", ["device", "none"])
def test_runs_stop_and_resume_to_the_last_bit(folder, tmp_path, cache):
    """Broken images, micro-batches and an epoch that ends within a step included."""
    whole, parts = (
        mended(run_of(folder, tmp_path / name, cache, micro_batch=4, remainder="carry")) for name in ("whole", "parts")
    )
    fit(Classify(whole), whole)
    assert fit(Classify(parts), parts, watch=StopAt(8)).step == 8
    assert fit(Classify(parts), replace(parts, data=replace(parts.data, cache="auto")), resume=True).finished
    assert same(weights(whole.out), weights(parts.out))
    (start,) = records(whole.out, "start")
    assert start["data_path"] == ("device" if cache == "device" else "workers")
    assert ("are kept on the device, where batches are augmented" in start["note"]) == (cache == "device")
    assert {r["name"].rpartition("/")[2] for r in records(whole.out, "broken_image")} == {"006.png", "014.png"}


def test_a_run_keeps_its_data_path(folder, tmp_path):
    device, workers = (mended(run_of(folder, tmp_path / cache, cache)) for cache in ("device", "none"))
    for config, other, words in ((device, "none", "keeps its images on the device"), (workers, "device", "workers")):
        fit(Classify(config), config, watch=StopAt(4))
        changed = replace(config, data=replace(config.data, cache=other))
        with pytest.raises(ValueError, match=f"{words}, which data.cache {other} would change: use --data.cache auto"):
            fit(Classify(changed), changed, resume=True)
        auto = replace(config, data=replace(config.data, cache="auto"))
        assert Classify(auto).data_path.on_device == (other == "none")
    assert not same(
        *(
            torch.load(next((c.out / "checkpoints").iterdir()), weights_only=True)["engine"]["model"]
            for c in (device, workers)
        )
    )


def test_the_device_sees_what_workers_see(folder, tmp_path):
    """Without random numbers: the same images, labels and order, so the same weights."""
    plain = Augment(crop_scale=None, flip=0.0)
    found = []
    for cache in ("device", "none"):
        config = mended(run_of(folder, tmp_path / cache, cache, plain))
        fit(Classify(config), config)
        found.append(weights(config.out))
    assert same(*found)


def test_random_numbers_are_those_of_epoch_and_position(folder, tmp_path):
    """In any epoch and from any step on, also where a step begins in one epoch and ends in the next."""
    task = Classify(mended(run_of(folder, tmp_path, remainder="carry", seed=5)))
    share = Share(0, 1, 4, 2, "carry")
    assert task.variation is not None
    places = divmod(np.arange(4 * len(list(task.batches(0, 0, share))), 4 * 30), task.examples)
    for number, (_, _, numbers, how) in enumerate(task.batches(1, 1, share), 2):
        one = slice(4 * number, 4 * number + 4)
        expected = task.variation.numbers(5, places[0][one], places[1][one])
        assert torch.equal(numbers, expected[0])
        assert torch.equal(how, expected[1])


@pytest.mark.parametrize("cache", ["device", "none"])
def test_micro_batches_do_not_depend_on_who_takes_them(folder, tmp_path, cache):
    config = mended(run_of(folder, tmp_path, cache, remainder="carry"))
    task = Classify(config)

    def varied(share: Share) -> list:
        batches = task.batches(1, 1, share)
        task.loaders.clear()  # which are kept by the size of a micro-batch
        return [(task.varied(images, *numbers), labels) for images, labels, *numbers in batches]

    alone = varied(Share(0, 1, 4, 4, "carry"))
    halves = [varied(Share(rank, 2, 4, 2, "carry")) for rank in range(2)]
    assert len(alone) > 4
    for number, (mixed, labels) in enumerate(alone):
        other, theirs = halves[number % 2][number // 2]
        assert all(torch.equal(a, b) for a, b in zip((*mixed, labels), (*other, theirs), strict=True))


def test_evaluation_images_are_those_of_pillow_and_made_once(folder, tmp_path, monkeypatch):
    config = mended(run_of(folder, tmp_path))
    task = Classify(config)
    seen = []

    class Watched(nn.Module):
        def forward(self, images):
            seen.append(images)
            return images.flatten(1)[:, :3]

    world = World()
    first = task.evaluate(Watched(), world, final=False)
    monkeypatch.setattr(type(task.source), "read", lambda *_: pytest.fail("read again"))
    assert task.evaluate(Watched(), world, final=False) == first
    monkeypatch.undo()
    ours = torch.cat(seen[: len(seen) // 2])
    assert torch.equal(ours, torch.cat(seen[len(seen) // 2 :]))
    source, indices = task.parts["validation"]
    transform = evaluation(task.preprocessing)
    readable = [i for i in (range(len(source)) if indices is None else indices) if "014" not in source.name(int(i))]
    pixels = np.stack([transform(open_image(bytes(source.read(int(i))))) for i in readable])
    assert torch.equal(ours, task.inputs(torch.from_numpy(pixels).permute(0, 3, 1, 2)))


class Linear(nn.Module):
    """Remembers its input; its output follows from it."""

    def forward(self, images):
        self.images = images
        return torch.stack([images.mean((1, 2, 3)), images.amax((1, 2, 3)), images.std((1, 2, 3))], 1)


def test_the_loss_of_mixed_targets(folder, tmp_path):
    """Cross entropy with the mixed distribution as its target, smoothed; top-1 counts the larger part."""
    config = mended(run_of(folder, tmp_path, augment=Augment(mixup=1.0), label_smoothing=0.2))
    task, model = Classify(config), Linear()
    weighted = 0
    for batch in task.batches(0, 0, Share(0, 1, 8, 1)):
        images, labels, numbers, how = batch
        mixed = task.varied(images, numbers, how)
        outcome = task.loss(model, batch)
        logits = model(task.inputs(mixed.images))
        targets = mixed.weight * F.one_hot(labels, 3) + (1 - mixed.weight) * F.one_hot(labels[mixed.partner_B], 3)
        expected = F.cross_entropy(logits, targets, label_smoothing=0.2)
        torch.testing.assert_close(outcome.loss, expected)
        right = logits.argmax(1) == (labels if mixed.weight >= 0.5 else labels[mixed.partner_B])
        assert int(outcome.sums["top1"]) == int(right.sum())
        weighted += int(mixed.weight < 0.5)
    assert weighted > 0


def test_augmentation_on_the_device_leaves_what_workers_do(folder, tmp_path):
    """Pixels of workers are those of a run without it; only then come colours and mixing."""
    base = Augment(crop_scale=(0.5, 1.0), randaugment_layers=1)
    plain, more = (
        Classify(mended(run_of(folder, tmp_path, "none", augment)))
        for augment in (base, replace(base, erasing=0.5, mixup=0.2))
    )
    share = Share(0, 1, 8, 1)
    for one, other in zip(plain.batches(0, 0, share), more.batches(0, 0, share), strict=True):
        assert len(one) == 2
        assert all(torch.equal(a, b) for a, b in zip(one, other[:2], strict=True))
        assert not torch.equal(more.varied(other[0], *other[2:]).images, one[0].float())


# The choice -----------------------------------------------------------------------------------------------------------


def path_of(config: TrainConfig, needed: int = 100, why_not=None):
    return data_path.choose_data_path(config, lambda: needed, why_not)


@pytest.mark.parametrize(
    ("cache", "gpu", "needed", "on_device", "note"),
    [
        ("auto", False, 0, False, ""),
        ("none", True, 0, False, ""),
        ("memory", True, 0, False, ""),
        ("auto", True, 2**30, True, "The decoded images take about 1.0 GiB and are kept on the device"),
        (
            "auto",
            True,
            3 * 2**30,
            False,
            "Workers read the images: the decoded images take about 3.0 GiB, more than 25%",
        ),
        ("device", True, 3 * 2**30, True, "The decoded images take about 3.0 GiB and are kept"),
        ("device", False, 2**20, True, "The decoded images take about 0.0 GiB and are kept"),
    ],
)
def test_which_path_is_chosen(tmp_path, monkeypatch, cache, gpu, needed, on_device, note):
    config = run_of("nowhere", tmp_path / "run", cache)
    monkeypatch.setattr(data_path, "chosen_device", lambda _: torch.device("cuda" if gpu else "cpu"))
    monkeypatch.setattr(data_path, "free_memory", lambda _: 8 * 2**30)
    monkeypatch.setattr(data_path, "available_memory", lambda: 2**40)
    found = path_of(config, needed)
    assert found.on_device == on_device
    assert found.note.startswith(note)
    assert bool(found.note) == bool(note)


def test_what_cannot_be_on_the_device_is_refused(tmp_path, monkeypatch):
    config = run_of("nowhere", tmp_path / "run")
    monkeypatch.setattr(data_path, "free_memory", lambda _: 2**30)
    with pytest.raises(ValueError, match=r"take about 2.0 GiB, more than 100% of the 1.0 GiB .*use --data.cache none"):
        path_of(config, 2**31)
    monkeypatch.setattr(data_path, "available_memory", lambda: 2**20)
    with pytest.raises(ValueError, match="of free memory of this machine: use"):
        path_of(config, 2**21)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"take about 0\.0 GiB in each of 4 processes, more than the 0\.0 GiB"):
        path_of(config, 2**19)
    with pytest.raises(ValueError, match="not possible, because it is not: use --data"):
        path_of(config, why_not="it is not")
    auto = run_of("nowhere", tmp_path / "run", "auto")
    monkeypatch.setattr(data_path, "chosen_device", lambda _: torch.device("cuda"))
    assert path_of(auto, why_not="it is not") == data_path.DataPath(False, "Workers read the images, because it is not")


def test_older_configurations_keep_their_path():
    stored = json.loads(json.dumps(to_json(TrainConfig())))
    del stored["data"]["cache"]
    for name in ("color_jitter", "erasing", "mixup", "cutmix", "mix_probability", "cutmix_probability"):
        del stored["augment"][name]
    found = from_json(TrainConfig, stored)
    assert found.data.cache == "none"
    assert not found.augment.on_batches
    assert TrainConfig().data.cache == "auto"


def test_co_training_refuses_what_it_does_not_do(folder, tmp_path):
    config = CoTrainConfig(**run_of(folder, tmp_path, augment=Augment()).__dict__)
    with pytest.raises(ValueError, match=r"data\.cache device is not possible, because co-training reads two sets"):
        config.make_task()
    with pytest.raises(ValueError, match="co-training does not support color_jitter, erasing, mixup and cutmix"):
        CoTrainConfig(augment=Augment(mixup=0.2))


def test_processes_that_choose_differently_are_told():
    message = process_difference(1, "data: data_path", None, "device")
    assert (
        "only one of rank 0 and rank 1 keeps its images on the device: start all processes with --data.cache" in message
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_makes_the_pixels_of_the_cpu(folder, tmp_path):
    config = mended(run_of(folder, tmp_path))
    host, device = Classify(config), Classify(replace(config, device="cuda"))
    share = Share(0, 1, 8, 1)
    for one, other in zip(host.batches(0, 0, share), device.batches(0, 0, share), strict=True):
        mine = host.varied(one[0], *one[2:])
        theirs = device.varied(*(other[i].cuda() for i in (0, 2, 3)))
        assert torch.equal(mine.partner_B, theirs.partner_B.cpu())
        difference = (mine.images - theirs.images.cpu()).abs()
        assert difference.mean() < 0.1  # an operation that depends on a histogram may amplify a difference of 1
        assert (difference < 1).float().mean() > 0.95

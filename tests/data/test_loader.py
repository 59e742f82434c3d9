"""Batches: the same with any workers, processes and resumes; broken images neither stop nor hide."""

import multiprocessing
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lambdanets.data import cache
from lambdanets.data.augment import Augment
from lambdanets.data.broken import BrokenImages, TooManyBrokenError
from lambdanets.data.loader import Batch, Loader, LoaderOptions, Positions
from lambdanets.data.preprocessing import Preprocessing
from lambdanets.data.source import ArraySource, open_source
from lambdanets.data.transforms import evaluation, training
from tests.data.helpers import Numbered, photographed, picture, write_folder

CHANGE = training(6, Augment(randaugment_layers=1))
CENTRE = evaluation(Preprocessing(size=8, crop=1.0))


def options(batch_size: int = 4, **more) -> LoaderOptions:
    return LoaderOptions(batch_size=batch_size, **more)


def equal(left: list[Batch], right: list[Batch]) -> bool:
    pairs = [pair for one, other in zip(left, right, strict=True) for pair in zip(one, other, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


def epochs(loader: Loader, count: int = 2) -> list[Batch]:
    return [batch for epoch in range(count) for batch in loader.epoch(epoch)]


def test_a_batch():
    source = Numbered(11)
    loader = Loader(source, CENTRE, options(seed=3))
    assert len(loader) == 2
    images, labels, indices = next(loader.epoch(0))
    assert images.shape == (4, 3, 8, 8)
    assert images.is_contiguous(memory_format=torch.channels_last)
    for image, label, index in zip(images, labels, indices, strict=True):
        assert np.array_equal(image.permute(1, 2, 0), source.images[index])
        assert label == source.labels[index]


def test_orders_and_crops_differ_between_epochs():
    loader = Loader(Numbered(4), CHANGE, options())
    (first,), (second,) = loader.epoch(0), loader.epoch(1)
    again = torch.argsort(first.indices), torch.argsort(second.indices)
    assert not torch.equal(first.indices, second.indices)
    assert not torch.equal(first.images[again[0]], second.images[again[1]])


def test_each_sample_has_its_own_crop():
    source = Numbered(8)
    source.images[:] = source.images[0]
    (batch,) = Loader(source, CHANGE, options(8)).epoch(0)
    assert len({image.numpy().tobytes() for image in batch.images}) == 8


def test_workers_read_into_the_next_epoch(monkeypatch: pytest.MonkeyPatch):
    starts = []
    original = Positions.__iter__
    monkeypatch.setattr(Positions, "__iter__", lambda self: starts.append(self.start) or original(self))
    loader = Loader(Numbered(22), CHANGE, options())
    epochs(loader, 3)
    assert starts == [0]
    list(loader.epoch(5, 2))
    assert starts == [0, 27]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers: int):
    source = Numbered(22, broken=[3, 4])
    policy = BrokenImages(1.0)
    alone = epochs(Loader(source, CHANGE, options(broken=policy)))
    loader = Loader(source, CHANGE, options(broken=policy, workers=workers))
    assert equal(alone, epochs(loader))
    loader.close()


def test_any_position_can_be_started_from():
    source = Numbered(22)
    whole = epochs(Loader(source, CHANGE, options()), 3)
    for workers in (0, 2):
        loader = Loader(source, CHANGE, options(workers=workers))
        assert equal(whole[8:10], list(loader.epoch(1, 3)))
        assert equal(whole[10:], list(loader.epoch(2)))  # goes on without a restart
        stopped = loader.epoch(0)
        next(stopped)
        stopped.close()
        assert equal(whole[1:5], list(loader.epoch(0, 1)))  # goes on after a stop
        assert equal(whole[5:10], list(loader.epoch(1)))
        assert list(loader.epoch(1, 5)) == []
        loader.close()
    with pytest.raises(ValueError, match="start_batch must be between 0 and 5, got 6"):
        next(Loader(source, CHANGE, options()).epoch(0, 6))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_remainder_of_an_epoch_is_carried_into_the_next(workers: int):
    source = Numbered(22)
    loader = Loader(source, CHANGE, options(remainder="carry", workers=workers))
    whole = epochs(loader, 4)
    assert [len(list(loader.epoch(epoch))) for epoch in range(4)] == [6, 5, 6, 5]  # 22 images are 5.5 batches
    seen = np.concatenate([batch.indices.numpy() for batch in whole])
    for epoch in range(4):
        assert sorted(seen[22 * epoch : 22 * (epoch + 1)]) == list(range(22))
    assert equal(whole[7:11], list(loader.epoch(1, 1)))
    assert equal(whole[11:], [batch for _, batch in zip(range(11), loader.stream(11), strict=False)])
    loader.close()
    for cut in ({"world": 2}, {"parts": 2}):
        ranks = range(cut.get("world", 1))
        parts = [Loader(source, CHANGE, options(2, remainder="carry", rank=rank, **cut)) for rank in ranks]
        pieces = [part.stream(0) for part in parts] * cut.get("parts", 1)
        for batch in whole:
            assert torch.equal(batch.images, torch.cat([next(piece).images for piece in pieces]))


@pytest.mark.parametrize("world", [2, 4])
def test_processes_share_the_batches_of_one(world: int):
    source = Numbered(19)
    alone = epochs(Loader(source, CHANGE, options(8)))
    shared = [epochs(Loader(source, CHANGE, options(8 // world, rank=rank, world=world))) for rank in range(world)]
    for step, batch in enumerate(alone):
        assert torch.equal(batch.images, torch.cat([part[step].images for part in shared]))
        assert torch.equal(batch.indices, torch.cat([part[step].indices for part in shared]))


def test_evaluation_has_every_example_once():
    source = Numbered(23)
    chosen = np.arange(3, 23)
    for world in (1, 3):
        seen = []
        for rank in range(world):
            loader = Loader(source, CENTRE, options(rank=rank, world=world), indices=chosen, training=False)
            for _ in range(2):
                batches = list(loader.epoch(0))
                assert len(batches) == len(loader)
            seen += [int(i) for batch in batches for i in batch.indices]
        assert sorted(seen) == chosen.tolist()
    more = options(rank=3, world=4)
    assert list(Loader(Numbered(3), CENTRE, more, training=False).epoch(0)) == []


def test_nothing_else_is_drawn_from():
    torch.manual_seed(5)
    random.seed(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    for workers in (0, 1):
        loader = Loader(Numbered(8), CHANGE, options(workers=workers))
        epochs(loader)
        loader.close()
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_a_broken_image_is_replaced_named_and_counted():
    chosen = np.arange(40)
    source = Numbered(1000, broken=[7])
    runs = []
    for _ in range(2):
        loader = Loader(source, CENTRE, options(8), indices=chosen)
        batches = epochs(loader)
        assert [(one.index, one.name, one.reason) for one in loader.broken] == [
            (7, "numbered:00007", "Input/output error")
        ]
        assert sum(len(batch.broken) for batch in batches) == 1  # named once, not in every epoch
        runs.append(batches)
    assert equal(*runs)
    for epoch in (runs[0][:5], runs[0][5:]):
        seen = sorted(int(i) for batch in epoch for i in batch.indices)
        assert len(seen) == 40
        assert 7 not in seen
        assert len(set(seen)) == 39  # one image stands in
        assert max(seen) < 40  # of the same split
    labels = torch.cat([batch.labels for batch in runs[0]])
    indices = torch.cat([batch.indices for batch in runs[0]])
    assert torch.equal(labels, torch.from_numpy(source.labels)[indices])


def test_one_percent_broken_trains_and_sixty_stops_with_the_list():
    broken = np.random.default_rng(0).permutation(1000)
    few = Loader(Numbered(1000, broken[:10]), CENTRE, options(100))
    assert sum(len(batch) for batch in few.epoch(0)) == 1000
    assert {one.index for one in few.broken} == set(broken[:10].tolist())
    many = Loader(Numbered(1000, broken[:600]), CENTRE, options(100))
    with pytest.raises(
        TooManyBrokenError, match=r"more than the limit of 5.0%.*lambdanets data check.*numbered:\d+"
    ) as caught:
        list(many.epoch(0))
    assert {one.index for one in caught.value.broken} <= set(broken[:600].tolist())
    assert len(caught.value.broken) > 20


@pytest.mark.parametrize("workers", [0, 1])
def test_all_broken_stops(workers: int):
    loader = Loader(Numbered(20, range(20)), CENTRE, options(workers=workers, broken=BrokenImages(1.0)))
    with pytest.raises(TooManyBrokenError):
        list(loader.epoch(0))
    loader.close()


def test_a_small_set_is_judged_after_an_epoch():
    loader = Loader(Numbered(8, [1, 2]), CENTRE, options(broken=BrokenImages(0.2)))
    with pytest.raises(TooManyBrokenError, match="2 of 8 images"):
        epochs(loader, 3)


def test_a_part_of_a_run_is_judged_with_the_others():
    source = Numbered(8, [1, 2])
    policy = BrokenImages(0.05, others=32)
    with pytest.raises(TooManyBrokenError, match="2 of 39 images"):
        list(Loader(source, CENTRE, options(broken=replace(policy, others=31)), training=False).epoch(0))
    assert sum(len(batch) for batch in Loader(source, CENTRE, options(broken=policy), training=False).epoch(0)) == 6


def test_evaluation_leaves_broken_images_out():
    loader = Loader(Numbered(20, [1, 4, 5, 6, 7]), CENTRE, options(broken=BrokenImages(0.5)), training=False)
    batches = list(loader.epoch(0))
    assert [len(batch) for batch in batches] == [3, 0, 4, 4, 4]
    assert sorted(one.index for batch in batches for one in batch.broken) == [1, 4, 5, 6, 7]


@pytest.mark.parametrize("workers", [0, 2])
def test_pixels_in_memory_change_nothing(tmp_path: Path, workers: int):
    write_folder(tmp_path, {"a": 5, "b": 6})
    (tmp_path / "a" / "002.jpg").write_bytes(b"garbage")
    (tmp_path / "b" / "001.jpg").write_bytes((tmp_path / "b" / "001.jpg").read_bytes()[:300])
    source = open_source(tmp_path)
    policy = BrokenImages(1.0)
    change = training(24, Augment(randaugment_layers=1))  # no crop is so large that a smaller one is decoded
    fresh = Loader(source, change, options(broken=policy))
    kept = Loader(source, change, options(broken=policy, cache="memory", workers=workers))
    assert equal(epochs(fresh), epochs(kept))
    assert sorted(one.index for one in kept.broken) == sorted(one.index for one in fresh.broken) == [2, 6]
    kept.close()


def test_any_function_may_be_the_transform_of_kept_pixels(tmp_path: Path):
    """It gets images as they are stored, in memory or not: only ours say that they turn them."""
    (tmp_path / "a").mkdir()
    for i in range(4):
        (tmp_path / "a" / f"{i}.png").write_bytes(photographed(picture(i), 6))
    sizes = [
        {batch.images.shape for batch in Loader(open_source(tmp_path), np.asarray, options(cache=kept)).epoch(0)}  # type: ignore[arg-type]
        for kept in ("none", "memory")
    ]
    assert sizes == [{(4, 3, 40, 32)}] * 2


def test_kept_pixels_need_no_files(tmp_path: Path):
    write_folder(tmp_path, {"a": 8})
    source = open_source(tmp_path)
    loader = Loader(source, CHANGE, options(cache="memory"), indices=np.arange(6))
    for path in tmp_path.rglob("*.jpg"):
        path.unlink()
    assert len(list(loader.epoch(0))) == 1
    assert loader.broken == ()


def test_too_little_memory_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_folder(tmp_path, {"a": 8})
    source = open_source(tmp_path)
    need = 8 * 40 * 32 * 3
    with pytest.raises(ValueError, match=f"8 images take .* more than cache_bytes={need - 1:,}.*cache='none'"):
        Loader(source, CHANGE, options(cache="memory", cache_bytes=need - 1))
    Loader(source, CHANGE, options(cache="memory", cache_bytes=need))
    monkeypatch.setattr(cache, "available_memory", lambda: 1000)
    with pytest.raises(ValueError, match="GiB of memory are free"):
        Loader(source, CHANGE, options(cache="memory"))


def test_workers_obey_their_parent_alone():
    others = set(multiprocessing.active_children())
    loader = Loader(Numbered(40), CENTRE, options(workers=2, prefetch=1))
    batches = loader.epoch(0)
    for _ in range(2):  # one of each worker: both have started
        next(batches)
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    for worker in workers:  # as a cluster does it: from a process that is not the parent
        assert worker.pid is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            assert os.system(f"kill -{int(number)} {worker.pid}") == 0
    assert len(list(batches)) == 8
    assert all(worker.is_alive() for worker in workers)
    for worker in workers:
        worker.terminate()  # from the parent
        worker.join(10)
        assert not worker.is_alive()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"workers": -1}, "workers must be at least 0"),
        ({"rank": 2, "world": 2}, "rank must be at least 0 and below world 2, got 2"),
        ({"prefetch": 0}, "prefetch at least 1"),
    ],
)
def test_wrong_options_are_refused(wrong: dict, message: str):
    with pytest.raises(ValueError, match=message):
        LoaderOptions(**wrong)
    with pytest.raises(ValueError, match="3 training images are too few for batches of 4"):
        Loader(Numbered(3), CENTRE, options())


def test_an_epoch_has_whole_steps_only():
    """Under accumulation: then one epoch's batches go on into the next one's without a restart of the workers."""
    source = ArraySource(np.zeros((50, 4, 4), np.uint8), np.zeros(50, np.int64), ["a"], "x")
    options = LoaderOptions(batch_size=4, world=2, parts=4)
    loader = Loader(source, training(4, channels=1), options)
    assert len(loader) == 4  # 50 images hold one step of 4 batches of 2 * 4

"""Held-out splits: stratified and stable."""

import numpy as np
import pytest

from lambdanets.data.split import held_out

LABELS = np.repeat([0, 1, 2], [100, 50, 10])
NAMES = [f"{label}/{i:04d}.jpg" for i, label in enumerate(LABELS)]


def test_every_class_gives_its_part():
    train, held = held_out(LABELS, 0.1, names=NAMES)
    assert np.bincount(LABELS[held]).tolist() == [10, 5, 1]
    assert sorted([*train, *held]) == list(range(160))


def test_the_order_of_files_does_not_matter():
    shuffle = np.random.default_rng(0).permutation(160)
    _, held = held_out(LABELS, 0.1, names=NAMES)
    _, again = held_out(LABELS[shuffle], 0.1, names=[NAMES[i] for i in shuffle])
    assert {NAMES[i] for i in held} == {NAMES[shuffle[i]] for i in again}


def test_an_added_image_moves_at_most_one_of_its_class():
    _, held = held_out(LABELS, 0.1, names=NAMES)
    before = {NAMES[i] for i in held}
    for number in range(30):
        names = [*NAMES, f"0/new{number}.jpg"]
        _, after = held_out(np.append(LABELS, 0), 0.1, names=names)
        moved = before ^ {names[i] for i in after if i < 160}
        assert len(moved) <= 1
        assert all(name.startswith("0/") for name in moved)


@pytest.mark.parametrize("fraction", [0.001, 0.02, 0.1, 0.3, 0.5])
def test_small_classes_give_one_and_stay_stable(fraction: float):
    """Every size of a class from one image on: of two or more one is held out, and growing moves at most one."""
    before: set[str] = set()
    for size in range(1, 80):
        names = NAMES[:size]
        train, held = held_out(np.zeros(size), fraction, names=names)
        now = {names[i] for i in held}
        assert len(held) == (max(1, round(fraction * size)) if size > 1 else 0)
        assert len(train) >= 1
        assert len(before ^ (now - {names[-1]})) <= 1
        before = now


def test_seeds_differ_and_nothing_can_be_held_out():
    assert not np.array_equal(held_out(LABELS, 0.1, 0)[1], held_out(LABELS, 0.1, 1)[1])
    train, held = held_out(LABELS, 0)
    assert len(train) == 160
    assert len(held) == 0


@pytest.mark.parametrize("fraction", [-0.1, 1, 1.5])
def test_a_wrong_fraction_is_refused(fraction: float):
    with pytest.raises(ValueError, match=f"got {fraction}"):
        held_out(LABELS, fraction)

"""The order of samples: complete, repeatable, and the same however it is cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lambdanets.data import order

small = st.integers(1, 60)


def test_the_mixer_is_splitmix64():
    assert order.mix(0) == 0xE220A8397B1DCDAF  # the published first output of splitmix64 from state 0
    key = order.mix(7, 3)
    assert order.mixed(key, np.arange(5)).tolist() == [order.mix(7, 3, i) for i in range(5)]


@given(length=small, seed=st.integers(0, 2**70), epoch=small)
def test_an_epoch_has_every_example_once(length: int, seed: int, epoch: int):
    assert sorted(order.permutation(length, seed, epoch)) == list(range(length))


def test_epochs_and_seeds_differ():
    orders = {tuple(order.permutation(50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_no_place_in_the_order_is_preferred():
    firsts = np.bincount([order.permutation(10, 0, epoch)[0] for epoch in range(3000)], minlength=10)
    assert abs(firsts - 300).max() < 5 * np.sqrt(300 * 0.9)


@given(length=small, world=st.integers(1, 5), size=st.integers(1, 7))
def test_a_step_is_the_same_however_it_is_cut(length: int, world: int, size: int):
    """Processes and micro-batches together see what one process with one large batch sees."""
    for batch in range(length // (size * world)):
        whole = list(order.training_positions(batch, size * world, 0, 1))
        parts = [p for rank in range(world) for p in order.training_positions(batch, size, rank, world)]
        assert parts == whole
        micro = [p for part in range(world) for p in order.training_positions(batch * world + part, size, 0, 1)]
        assert micro == whole


@given(step=st.integers(1, 20), more=st.integers(0, 50), world=st.integers(1, 3), seed=small)
def test_an_epoch_that_carries_its_remainder_uses_every_example_once(step: int, more: int, world: int, seed: int):
    length = step * world + more
    epochs = order.Epochs(length, step * world, "carry")
    seen = []
    for number in range(epochs.first(3)):
        parts = [next(epochs.tickets(seed, number, step, rank, world)) for rank in range(world)]
        seen += [ticket for part in parts for ticket in part]
        assert epochs.epoch(number) == parts[0][0][0]
    for epoch in range(3):
        examples = [example for at, _, example in seen if at == epoch]
        assert examples == order.permutation(length, seed, epoch).tolist()
    assert epochs.run(3) == epochs.first(3)
    assert epochs.steps * step * world == pytest.approx(length)


@given(step=st.integers(1, 20), more=st.integers(0, 50), seed=small)
def test_an_epoch_that_drops_its_remainder_has_whole_steps(step: int, more: int, seed: int):
    length = step + more
    epochs = order.Epochs(length, step)
    count = length // step
    assert (epochs.first(2), epochs.steps, epochs.epoch(2 * count - 1)) == (2 * count, count, 1)
    batches = epochs.tickets(seed, count, step, 0, 1)
    second = [example for _ in range(count) for _, _, example in next(batches)]
    assert second == order.permutation(length, seed, 1)[: count * step].tolist()
    assert epochs.run(1.5) == max(1, round(1.5 * count))


@given(length=st.integers(0, 60), world=st.integers(1, 5), size=st.integers(1, 7))
def test_evaluation_sees_every_example_once(length: int, world: int, size: int):
    seen = []
    for rank in range(world):
        for batch in range(order.evaluation_batches(length, size, rank, world)):
            positions = order.evaluation_positions(length, batch, size, rank, world)
            assert 1 <= len(positions) <= size
            seen += positions
    assert sorted(seen) == list(range(length))


def test_replacements_are_spread():
    found = [order.replacement(10, 0, i, attempt) for i in range(200) for attempt in (1, 2, 3)]
    assert set(found) == set(range(10))
    assert max(np.bincount(found)) < 2 * 60

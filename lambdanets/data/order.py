"""Order of the examples: a pure function of (seed, epoch, position).

There is no state, so a resumed run sees the same batches with any number of workers, and a step gets the same examples
with any number of processes. The hash (splitmix64) is implemented here, so that the order does not depend on library
versions.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

Remainder = Literal["drop", "carry"]
Ticket = tuple[int, int, int]  # epoch, position in the epoch, example

INCREMENT, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Hash integers to a 64-bit number."""
    state = 0
    for number in numbers:
        state = (state ^ (number & MASK)) + INCREMENT & MASK
        state = (state ^ state >> 30) * FIRST & MASK
        state = (state ^ state >> 27) * SECOND & MASK
        state ^= state >> 31
    return state


def mixed(key: int | np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Hash an array of numbers with `key` in front, as `mix` does: uint64. Arrays of keys are broadcast."""
    state = numbers.astype(np.uint64) ^ np.uint64(key)
    with np.errstate(over="ignore"):
        state += np.uint64(INCREMENT)
        state = (state ^ state >> np.uint64(30)) * np.uint64(FIRST)
        state = (state ^ state >> np.uint64(27)) * np.uint64(SECOND)
    return state ^ state >> np.uint64(31)


def permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of an epoch: the example at each position, int64 [length]."""
    return np.argsort(mixed(mix(seed, epoch), np.arange(length)), kind="stable")


@dataclass(frozen=True)
class Epochs:
    """Maps steps to epochs.

    The positions of a run are one sequence: step s takes positions s * step to (s + 1) * step - 1, and position p is
    position p % used of epoch p // used. With "drop", `used` is a multiple of the step, and the remaining examples are
    left out of the epoch; with "carry" every example is used, and a step may contain examples of two epochs.
    """

    examples: int
    step: int  # examples per step
    remainder: Remainder = "drop"

    @property
    def used(self) -> int:
        """Number of examples used per epoch."""
        return self.examples - self.examples % self.step if self.remainder == "drop" else self.examples

    @property
    def steps(self) -> float:
        """Steps per epoch; an integer with "drop"."""
        return self.used // self.step if self.used % self.step == 0 else self.used / self.step

    def first(self, epoch: int) -> int:
        """Return the first step that begins in an epoch."""
        return -(-epoch * self.used // self.step)

    def epoch(self, step: int) -> int:
        """Return the epoch in which a step begins."""
        return step * self.step // self.used

    def run(self, epochs: float) -> int:
        """Return the number of steps of a run: rounded with "drop"; enough to use every example with "carry"."""
        steps = epochs * self.steps
        return max(1, round(steps) if self.remainder == "drop" else math.ceil(steps - 1e-6))

    def tickets(self, seed: int, first: int, batch_size: int, rank: int, world: int) -> Iterator[list[Ticket]]:
        """Yield the batches of a process from number `first` on, without end."""
        now, order = -1, np.empty(0, np.int64)
        for number in itertools.count(first):
            batch: list[Ticket] = []
            for place in training_positions(number, batch_size, rank, world):
                epoch, position = divmod(place, self.used)
                if epoch != now:
                    now, order = epoch, permutation(self.examples, seed, epoch)
                batch.append((epoch, position, int(order[position])))
            yield batch

    def places(self, batch: int, batch_size: int, rank: int, world: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the epochs and positions of a batch of a process: two int64 [batch_size]."""
        places = training_positions(batch, batch_size, rank, world)
        return np.divmod(np.arange(places.start, places.stop), self.used)


def training_positions(batch: int, batch_size: int, rank: int, world: int) -> range:
    """Return the positions of a batch of a process. The batches of all processes are contiguous, so the examples of a
    step do not depend on the number of processes and micro-batches."""
    start = (batch * world + rank) * batch_size
    return range(start, start + batch_size)


def evaluation_batches(length: int, batch_size: int, rank: int, world: int) -> int:
    """Return the number of batches of this process, which may differ by one between processes."""
    return -(-len(range(rank, length, world)) // batch_size)


def evaluation_positions(length: int, batch: int, batch_size: int, rank: int, world: int) -> range:
    """Return the positions of an evaluation batch. Each position occurs once over all processes; the last batch may be
    smaller."""
    return range(rank, length, world)[batch * batch_size : (batch + 1) * batch_size]


def replacement(length: int, seed: int, position: int, attempt: int) -> int:
    """Return the position of the example that replaces an unreadable one; it is the same in every epoch."""
    return mix(seed, position, attempt, 0xB20C3) % length

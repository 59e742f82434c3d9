"""Which example comes when: a pure function of (seed, epoch, position).

No state, so a run that resumes at any batch sees what it would have seen, whatever the number of workers; and a step
of all processes together sees the same examples whatever their number. Own arithmetic (splitmix64), so that no
version of a library changes the order of a run.
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
    """A 64-bit number that depends on every bit of every number."""
    state = 0
    for number in numbers:
        state = (state ^ (number & MASK)) + INCREMENT & MASK
        state = (state ^ state >> 30) * FIRST & MASK
        state = (state ^ state >> 27) * SECOND & MASK
        state ^= state >> 31
    return state


def mixed(key: int | np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """`mix(number)` with `key` in front, for an array: uint64. Arrays of keys are broadcast against the numbers."""
    state = numbers.astype(np.uint64) ^ np.uint64(key)
    with np.errstate(over="ignore"):
        state += np.uint64(INCREMENT)
        state = (state ^ state >> np.uint64(30)) * np.uint64(FIRST)
        state = (state ^ state >> np.uint64(27)) * np.uint64(SECOND)
    return state ^ state >> np.uint64(31)


def permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch: position -> example, int64."""
    return np.argsort(mixed(mix(seed, epoch), np.arange(length)), kind="stable")


@dataclass(frozen=True)
class Epochs:
    """Where epochs begin in the sequence of steps.

    The positions of a run are one sequence: step s takes positions s * step to (s + 1) * step - 1, and position p is
    position p % used of epoch p // used. With "drop" `used` is a multiple of the step, and what is left over is
    left out of the epoch; with "carry" every example is used, and a step may end one epoch and begin the next.
    """

    examples: int
    step: int  # examples of a step
    remainder: Remainder = "drop"

    @property
    def used(self) -> int:
        """Examples of an epoch that are used."""
        return self.examples - self.examples % self.step if self.remainder == "drop" else self.examples

    @property
    def steps(self) -> float:
        """Steps of an epoch; whole with "drop"."""
        return self.used // self.step if self.used % self.step == 0 else self.used / self.step

    def first(self, epoch: int) -> int:
        """The first step that begins in an epoch."""
        return -(-epoch * self.used // self.step)

    def epoch(self, step: int) -> int:
        """The epoch in which a step begins."""
        return step * self.step // self.used

    def run(self, epochs: float) -> int:
        """Steps of a run: rounded with "drop"; as many as it takes to use every example with "carry"."""
        steps = epochs * self.steps
        return max(1, round(steps) if self.remainder == "drop" else math.ceil(steps - 1e-6))

    def tickets(self, seed: int, first: int, batch_size: int, rank: int, world: int) -> Iterator[list[Ticket]]:
        """Batch after batch of a process, from its number `first` on, without end."""
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
        """The epochs and positions of a process's batch: two int64 [batch_size]."""
        places = training_positions(batch, batch_size, rank, world)
        return np.divmod(np.arange(places.start, places.stop), self.used)


def training_positions(batch: int, batch_size: int, rank: int, world: int) -> range:
    """Positions of a process's batch. The batches of all processes together are a contiguous stretch, so that it
    does not matter into how many processes and micro-batches a step is cut."""
    start = (batch * world + rank) * batch_size
    return range(start, start + batch_size)


def evaluation_batches(length: int, batch_size: int, rank: int, world: int) -> int:
    """Batches of this process: they differ by one between processes where the examples do not divide."""
    return -(-len(range(rank, length, world)) // batch_size)


def evaluation_positions(length: int, batch: int, batch_size: int, rank: int, world: int) -> range:
    """Every position once over all processes; the last batch may be short."""
    return range(rank, length, world)[batch * batch_size : (batch + 1) * batch_size]


def replacement(length: int, seed: int, position: int, attempt: int) -> int:
    """Which position of the source stands in for one that cannot be read, the same in every epoch."""
    return mix(seed, position, attempt, 0xB20C3) % length

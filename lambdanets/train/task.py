"""What the loop does not know: batches, loss, scores. Classification, detection and pseudo-labels are tasks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from lambdanets.data.order import Epochs, Remainder
from lambdanets.train.distributed import World


@dataclass(frozen=True)
class Share:
    """How a step is cut: micro-batch `part` of process `rank` is number part * world + rank of the step.

    What a task does with a micro-batch must depend on its number and not on who computes it: then any number of
    processes gives the same result.
    """

    rank: int
    world: int
    micro_batch: int
    parts: int  # micro-batches of each process in a step
    remainder: Remainder = "drop"  # what becomes of the examples that do not fill the last step of an epoch

    def epochs(self, examples: int) -> Epochs:
        """Where the epochs of so many examples begin."""
        return Epochs(examples, self.micro_batch * self.parts * self.world, self.remainder)


@dataclass(frozen=True)
class Outcome:
    """What a task says about a micro-batch.

    Attributes:
        loss: a scalar, the mean over its examples.
        sums: other numbers, summed over its examples, on the device: {"top1": how many were right}. They are read with
            the log, so a task makes new ones for every micro-batch and does not change them.
        examples: how many it has.
    """

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    examples: int = 1


class Task(Protocol):
    """A training problem. Derive from this class; the last three methods have defaults."""

    examples: int
    """Training examples of an epoch."""
    score: str = "top1"
    """The number of an evaluation that early stopping watches; more is better."""

    largest_epoch: int = 0
    """An epoch whose batches take most memory."""
    not_captured: str | None = None
    """Why a CUDA graph cannot replay its steps, if so. They need batches of one shape, and a loss that never waits for
    the device."""

    def model(self) -> nn.Module:
        """A new network, on the CPU; torch's random numbers are seeded."""
        ...

    def batches(self, epoch: int, first_step: int, share: Share) -> Iterator[Any]:
        """This process's micro-batches of an epoch, `share.parts` for each step, from a step of the epoch on.

        The epoch has the steps from `share.epochs(self.examples).first(epoch)` to that of the next epoch.
        Any nest of tuples, lists and dicts: the loop moves the tensors in it to the device and looks at nothing.
        """
        ...

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        """Forward, under autocast where the precision asks for it. Call `model` once."""
        ...

    def evaluate(self, model: nn.Module, world: World, final: bool) -> dict[str, dict[str, float]]:
        """{split: {name: number}} over all processes, in no_grad and autocast; `model` is in eval mode.

        The first split is the one that early stopping watches.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """What the `start` record of the log says about the data."""
        return {}

    def notes(self) -> list[str]:
        """Sentences without a full stop, for the start of the log: what the reader should know about the data."""
        return []

    def identity(self) -> dict[str, Any]:
        """What identifies the training data wherever it is stored: lists of class names, numbers, digests.

        A run resumes only, and processes train together only, if it is equal.
        """
        return {}

    def events(self) -> list[dict[str, Any]]:
        """What happened since the last call on this process, as records of the log with an "event"."""
        return []

    def save(self, folder: Path, moment: Literal["start", "end"], models: dict[str, nn.Module], scores: Any) -> None:
        """Files beside the log, on the main process: at step 0, and at the end ("ema" if there is one, and "raw")."""

    def save_weights(self, model: nn.Module, path: Path, scores: dict[str, dict[str, float]]) -> None:
        """Write a network to a file that says what it is, on the main process: after each evaluation, so that a run
        that has not ended can be used. `scores` are those of `evaluate`."""

    def close(self) -> None:
        """Ends worker processes."""

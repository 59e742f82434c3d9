"""Interface of training tasks: batches, loss and metrics. Classification, detection and co-training are tasks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from lambdanets.data.order import Epochs, Remainder
from lambdanets.train.distributed import World


@dataclass(frozen=True)
class Share:
    """Division of a step: micro-batch `part` of process `rank` has number part * world + rank.

    What a task does with a micro-batch must depend only on this number, so that the result does not depend on the
    number of processes.

    Attributes:
        rank: rank of this process.
        world: number of processes.
        micro_batch: examples per micro-batch.
        parts: micro-batches of each process per step.
        remainder: what to do with examples that do not fill the last step of an epoch, "drop" or "carry".

    Example:
        >>> from lambdanets.train.task import Share
        >>> share = Share(rank=0, world=2, micro_batch=32, parts=4)  # a global batch size of 256
        >>> share.epochs(1000).steps
        3
    """

    rank: int
    world: int
    micro_batch: int
    parts: int
    remainder: Remainder = "drop"

    def epochs(self, examples: int) -> Epochs:
        """Return how a number of examples is divided into steps and epochs."""
        return Epochs(examples, self.micro_batch * self.parts * self.world, self.remainder)


@dataclass(frozen=True)
class Outcome:
    """Loss and metrics of a micro-batch.

    Attributes:
        loss: scalar tensor, the mean over the examples.
        sums: metrics summed over the examples, scalar tensors on the device, such as {"top1": correct predictions}.
            They are read later, so create new tensors for every micro-batch.
        examples: number of examples.
    """

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    examples: int = 1


class Task(Protocol):
    """A training problem: a network, its batches, loss and evaluation. Derive from this class and pass it to `fit`.

    The methods after `identity` have defaults.
    """

    examples: int
    """Number of training examples."""
    score: str = "top1"
    """Metric for early stopping and the best weights; higher is better."""

    largest_epoch: int = 0
    """An epoch whose batches need the most memory."""
    not_captured: str | None = None
    """Reason why steps cannot be captured as a CUDA graph, if any. Capture needs batches of one shape, and a loss that
    does not synchronise with the device."""

    def model(self) -> nn.Module:
        """Return a new network on the CPU. torch's random generator is seeded before the call."""
        ...

    def batches(self, epoch: int, first_step: int, share: Share) -> Iterator[Any]:
        """Yield the micro-batches of this process in an epoch, `share.parts` per step, from step `first_step` on.

        The first step of the epoch is `share.epochs(self.examples).first(epoch)`. A batch is any nesting of tuples,
        lists and dicts; the loop moves its tensors to the device.
        """
        ...

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        """Return the loss of a micro-batch. Runs under autocast, depending on the precision; call `model` once."""
        ...

    def evaluate(self, model: nn.Module, world: World, final: bool) -> dict[str, dict[str, float]]:
        """Return {split: {metric: value}} over all processes. Runs in no_grad and autocast, with `model` in eval mode.

        Early stopping uses the first split.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Return a description of the data for the `start` record of the log."""
        return {}

    def notes(self) -> list[str]:
        """Return notes about the data for the start of the log, as sentences without a full stop."""
        return []

    def identity(self) -> dict[str, Any]:
        """Return what identifies the training data independent of its location: class names, numbers, digests.

        It must be equal for a run to resume, and on all processes of a run.
        """
        return {}

    def events(self) -> list[dict[str, Any]]:
        """Return the events since the last call on this process, as records of the log with an "event"."""
        return []

    def save(self, folder: Path, moment: Literal["start", "end"], models: dict[str, nn.Module], scores: Any) -> None:
        """Write files next to the log, on the main process, at the start and at the end of the run.

        Args:
            folder: folder of the run.
            moment: "start" or "end".
            models: the networks, "raw" and, with averaged weights, "ema".
            scores: metrics of the last evaluation.
        """

    def save_weights(self, model: nn.Module, path: Path, scores: dict[str, dict[str, float]]) -> None:
        """Write a network to a self-describing file, on the main process, after each evaluation, so that an unfinished
        run can be used. `scores` come from `evaluate`."""

    def close(self) -> None:
        """Stop worker processes."""

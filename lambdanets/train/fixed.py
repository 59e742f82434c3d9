"""Training steps with static memory, which read and write the same tensors in every step, for CUDA graph capture.

Inputs that differ between steps are copied into static tensors before: the batch, the learning rate and the EMA weight;
random numbers follow the seed of the generator. Everything except `Graph` also runs on a CPU.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lambdanets.train import optim
from lambdanets.train.config import RunConfig
from lambdanets.train.distributed import World
from lambdanets.train.task import Share, Task

if TYPE_CHECKING:
    from lambdanets.train.engine import Engine

AUTO_CAPTURES = False  # whether `capture: auto` captures steps if possible
WARM_UP = 3  # steps before capture, in which libraries choose algorithms and allocate memory


def wanted(config: RunConfig) -> bool:
    return config.capture == "on" or (config.capture == "auto" and AUTO_CAPTURES)


def why_not(task: Task, config: RunConfig, world: World, share: Share, engine: "Engine") -> str | None:
    """Return why the steps of a run cannot be captured as a CUDA graph; None if they can."""
    if world.device.type != "cuda":
        return f"CUDA graphs need a GPU, and the device is {world.device.type}"
    if world.size > 1:
        return "the run has several processes"
    if share.parts > 1:
        return f"a step has {share.parts} micro-batches"
    if task.not_captured is not None:
        return task.not_captured
    if not optim.skips_on_device(engine.optimizer):
        return f"optimizer.kind {config.optimizer.kind} skips non-finite steps on the host; use sgd or adamw"
    if any(getattr(module, "grad_checkpointing", False) for module in engine.model.modules()):
        return "model.grad_checkpointing saves the state of the random generator in every step"
    return None


class FixedSteps:
    """Runs the steps of an engine with static memory, which is reallocated if the shapes of a batch change."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self.memory: Memory | None = None

    def step(self, step: int, batch: Any, share: Share, rate: float) -> None:
        leaves, layout = pytree.tree_flatten(batch)
        kind = layout, [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if self.memory is None or self.memory.kind != kind:
            self.memory = Memory(self.engine, kind, leaves)
        self.memory.fill(leaves, rate, self.engine.average_weight(step))
        self.engine.seed(step, 0, share)
        if self.engine.average is not None:
            self.engine.average.fixed = False
        self.memory.run()
        self.memory.note(step)


class Memory:
    """Static input and output tensors of a step, and the step itself."""

    def __init__(self, engine: "Engine", kind: Any, leaves: list[Any]) -> None:
        self.engine, self.kind = engine, kind
        device = engine.world.device
        self.inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        exact = torch.float32 if device.type == "cuda" else torch.float64  # the dtype that fused optimisers read
        self.rate, self.weight = (torch.zeros((), dtype=exact, device=device) for _ in range(2))
        self.run = self.compute if device.type != "cuda" else Graph(self.compute, engine)

    def fill(self, leaves: list[Any], rate: float, weight: float) -> None:
        for mine, given in zip(self.inputs, leaves, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given)
        self.rate.fill_(rate)
        self.weight.fill_(weight)

    def compute(self) -> None:
        """Run the whole step: forward, backward, clipping, optimiser, EMA, running statistics and metrics."""
        engine = self.engine
        outcome = engine.gradients(pytree.tree_unflatten(self.inputs, self.kind[0]), 1)
        finite, norm = engine.move(self.rate, self.weight, with_norm=True)
        assert norm is not None
        engine.metrics.name(outcome)
        self.examples = outcome.examples
        numbers = [finite, norm, outcome.loss.detach(), *(outcome.sums[name] for name in engine.metrics.names[3:])]
        self.numbers = torch.stack([number.detach().to(torch.float64) for number in numbers])
        engine.optimizer.zero_grad(set_to_none=True)

    def note(self, step: int) -> None:
        numbers = list(self.numbers.clone().unbind())  # copied, because the next step overwrites this memory
        self.engine.metrics.add(step, 1, self.examples, self.engine.norm_is_due(step), numbers)


class Graph:
    """Runs a function as a CUDA graph: called eagerly for the first steps, then captured and replayed. Each replay
    advances the random generator of the device from its seed, like an eager call."""

    def __init__(self, function: Any, engine: "Engine") -> None:
        self.function: Any = function
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream()
        for group in engine.optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True

    def __call__(self) -> None:
        if self.graph is None and self.calls < WARM_UP:
            self.calls += 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.function()
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        if self.graph is None:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                # The pin-memory thread of the loader may allocate memory during the capture.
                with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                    self.function()
            except RuntimeError as error:
                raise ValueError(f"cannot capture the step as a CUDA graph, use --capture off: {error}") from error
            self.graph = graph
            self.function = None  # breaks a reference cycle that would keep the memory of the graph
        self.graph.replay()

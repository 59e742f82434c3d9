"""Throughput of networks by the paper's protocol: with the largest batch of 1024, 512, ... that fits.

A batch fits if it does not exceed the memory and no tensor has 2^31 elements or more, for which kernels are slow.
Training is forward, cross-entropy, backward and a step of SGD with momentum; for inference batch norm is folded.
"""

import copy
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from statistics import median
from typing import Literal

import torch
from torch import Tensor, nn

from lambdanets.bench.check import MismatchError, relative_error
from lambdanets.bench.compiled import TOLERANCE, Compiled, as_graph, check_compiled, compile_blocks, many_variants
from lambdanets.bench.timing import fastest_convolutions, once, peak_bytes, synchronize
from lambdanets.models.fold import fold_batch_norm
from lambdanets.models.memory_format import to_channels_last
from lambdanets.models.untrained import settle, some_images

NORMAL_BATCH = 1024  # the batch size of the latencies in the paper
CLASSES = 1000
WARM_UP = 2  # steps: the first one allocates optimizer state and compiles
TOGETHER = 5  # steps timed together, so that Python prepares the next one while the GPU is busy, as in real use
LONG = 0.25  # seconds: as soon as the steps timed together take this long, more are not needed
INDEXABLE = 2**31  # elements of a tensor from which on cuDNN and torch use slow kernels
SURE = 0.8  # a batch is skipped only if this fraction of its predicted memory exceeds the available memory
Precision = Literal["float32", "tf32", "bfloat16"]
# Allowed relative difference of folded and original network: rounding, accumulated over hundreds of layers
FOLD_TOLERANCE = 1e-2
EXACT_TOLERANCE = 1e-6  # the same in float64, for networks that amplify rounding even more
NO_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed", "not enough memory")


@dataclass(frozen=True)
class Protocol:
    """The settings of a throughput measurement.

    Attributes:
        mode: "inference" or "training".
        precision: "float32"; "tf32", float32 tensors with products in TF32 (CUDA); or "bfloat16", in inference with
            bfloat16 weights, in training autocast with float32 weights.
        compiled: apply torch.compile.
        graphs: compiled with CUDA graphs, without launch overhead (`mode="reduce-overhead"`, with `blocks` one graph of
            the whole step).
        blocks: compile block by block, which takes far less time than compiling a deep network as a whole.
        channels_last: use the channels-last memory format.
        fold: fold batch norm into convolutions for inference.
        batch: the largest batch size to try.
        memory_batch: the batch size of `peak_bytes`, the same for all networks if it fits.
        repeats, seconds: number of timed groups of steps, and time budget after which to stop early (after at least
            three).
        latency: also measure batch size 1 (inference).

    Example:
        >>> from lambdanets.bench.throughput import Protocol
        >>> Protocol("training", "bfloat16", batch=256).how
        'eager'
    """

    mode: Literal["inference", "training"]
    precision: Precision = "float32"
    compiled: bool = False
    graphs: bool = False
    blocks: bool = False
    channels_last: bool = True
    fold: bool = True
    batch: int = NORMAL_BATCH
    memory_batch: int = 128
    repeats: int = 20
    seconds: float = 10.0
    latency: bool = True

    @property
    def how(self) -> str:
        """A description: eager or compiled, as a whole or by blocks, with or without CUDA graphs."""
        if not self.compiled:
            return "eager"
        if self.blocks:
            return "compiled by blocks, a CUDA graph" if self.graphs else "compiled by blocks"
        return "compiled, CUDA graphs" if self.graphs else "compiled"


@dataclass(frozen=True)
class Throughput:
    """The result of a throughput measurement; times are medians.

    Attributes:
        batch: the largest of batch, batch / 2, ... that fits, in memory and in 32-bit indices.
        seconds: time of a step with this batch.
        examples_per_second: throughput.
        seconds_per_1024: latency of 1024 examples, as in the paper.
        repeats: number of measured times.
        latency: seconds for one image, or None.
        peak_bytes: peak memory, including weights, gradients and optimizer state.
        peak_batch: batch size of `peak_bytes`: `memory_batch`, or `batch` if compiled (another one would recompile).
        folded: number of batch norms folded into convolutions.
        fold_error: relative difference of folded and original outputs, or None.
        compile_error: largest relative difference of compiled and eager blocks, including gradients, or None.
    """

    batch: int
    seconds: float
    examples_per_second: float
    seconds_per_1024: float
    repeats: int
    latency: float | None
    peak_bytes: int
    peak_batch: int
    folded: int
    fold_error: float | None
    compile_error: float | None = None


class NoMemoryError(Exception):
    """Raised if not even one image fits in memory."""


def measure_network(
    build: Callable[[], nn.Module], size: tuple[int, int], protocol: Protocol, device: torch.device, channels: int = 3
) -> Throughput:
    """Measure throughput and memory of a network.

    Args:
        build: returns the network.
        size: height and width of the images.
        protocol: the settings.
        device: the device.
        channels: channels of the images.

    Returns:
        The measured values.

    Raises:
        NoMemoryError: if not even one image fits in memory.
        MismatchError: if a folded or compiled network does not agree with the original one.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lambdanets.bench.throughput import Protocol, measure_network
        >>> def build():
        ...     return nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        >>> protocol = Protocol("inference", batch=2, memory_batch=2, repeats=1)
        >>> measure_network(build, (8, 8), protocol, torch.device("cpu")).batch
        2
    """
    torch.manual_seed(0)
    with precision_of(protocol.precision, device), many_variants() if protocol.blocks else nullcontext():
        with device:  # initialising deep networks is slow on a CPU
            network = build()
        folded, error = 0, None
        if protocol.mode == "inference":
            network = settle(network, (2, channels, *size))
            if protocol.fold:
                network, folded, error = folded_network(network, (2, channels, *size))
            if protocol.precision == "bfloat16":
                network = network.to(torch.bfloat16)
        if protocol.channels_last:
            network = to_channels_last(network)
        steps = Steps(network, (channels, *size), protocol, device)
        times: list[float] = []
        latency = None
        try:
            asked = min(protocol.memory_batch, protocol.batch)
            peak, peak_batch = steps.peak(asked)
            batch = steps.may_fit(protocol.batch, peak, peak_batch) if peak_batch == asked else peak_batch
            batch = largest_batch(steps.trial, steps.indexable(batch))
            if protocol.compiled:
                steps.compile()
                batch = largest_batch(steps.trial, batch)
            with fastest_convolutions():  # may need more memory, so the search continues here
                batch = largest_batch(partial(steps.time_into, times), batch)
                if protocol.latency and protocol.mode == "inference":
                    latency = median(steps.time(1, together=1))
            if protocol.compiled or peak_batch > batch:
                free_memory()  # the memory of a CUDA graph
                peak, peak_batch = steps.peak(batch)
        finally:
            if protocol.compiled and not protocol.blocks:  # compiled blocks are reused by the next network
                torch.compiler.reset()
    seconds = median(times)
    return Throughput(
        batch=batch,
        seconds=seconds,
        examples_per_second=batch / seconds,
        seconds_per_1024=seconds * NORMAL_BATCH / batch,
        repeats=len(times),
        latency=latency,
        peak_bytes=peak,
        peak_batch=peak_batch,
        folded=folded,
        fold_error=error,
        compile_error=steps.compile_error,
    )


class Steps:
    """Steps of a network under a protocol."""

    def __init__(self, network: nn.Module, shape: tuple[int, ...], protocol: Protocol, device: torch.device) -> None:
        self.network, self.shape, self.protocol, self.device = network, shape, protocol, device
        self.training = protocol.mode == "training"
        self.network.train(self.training)
        self.largest = 0.0  # largest output of a module, in elements per image; set by `peak`
        self.compiled: Compiled | None = None  # by blocks
        self.compile_error: float | None = None
        self.optimizer = None
        if self.training:
            self.optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-4)

    def compile(self) -> None:
        if self.protocol.blocks:
            self.compiled = compile_blocks(self.network)
            return
        torch.compiler.reset()
        self.network.compile(dynamic=False, mode="reduce-overhead" if self.protocol.graphs else None)

    def images(self, batch: int) -> Tensor:
        pure_half = self.protocol.precision == "bfloat16" and not self.training
        images = torch.randn(batch, *self.shape, device=self.device, dtype=torch.bfloat16 if pure_half else None)
        return images.contiguous(memory_format=torch.channels_last) if self.protocol.channels_last else images

    def step(self, batch: int) -> Callable[[], Tensor]:
        """Return a function that runs one step on random images and returns scores, or in training the loss."""
        images = self.images(batch)
        if self.optimizer is None:
            return lambda: self.infer(images)
        classes = torch.randint(CLASSES, (batch,), device=self.device)
        return lambda: self.train(images, classes)

    def timed_step(self, batch: int) -> Callable[[], object]:
        """Return `step`, as a CUDA graph if it is compiled by blocks with graphs."""
        step = self.step(batch)
        if not (self.protocol.blocks and self.protocol.graphs):
            return step
        free_memory()  # the graph has its own memory pool
        return as_graph(step, None if self.training else TOLERANCE[self.protocol.precision])

    def begin(self) -> None:
        if self.protocol.graphs and not self.protocol.blocks:  # allows overwriting the last result
            torch.compiler.cudagraph_mark_step_begin()

    def autocast(self) -> AbstractContextManager:
        mixed = self.training and self.protocol.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16) if mixed else nullcontext()

    @torch.inference_mode()
    def infer(self, images: Tensor) -> Tensor:
        self.begin()
        return self.network(images)

    def train(self, images: Tensor, classes: Tensor) -> Tensor:
        assert self.optimizer is not None
        self.begin()
        with self.autocast():
            scores = self.network(images)
        loss = nn.functional.cross_entropy(scores.float(), classes % scores.shape[1], label_smoothing=0.1)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def trial(self, batch: int) -> None:
        if self.compiled is not None:
            images, allowed = self.images(batch), TOLERANCE[self.protocol.precision]
            with torch.inference_mode(not self.training):
                self.compile_error = check_compiled(self.compiled, images, allowed, self.autocast)
        self.step(batch)()
        synchronize(self.device)

    def time(self, batch: int, together: int = TOGETHER) -> list[float]:
        step = self.timed_step(batch)
        for _ in range(WARM_UP - 1):
            step()
        last = once(step, self.device)
        together = min(together, ceil(LONG / last)) if self.device.type == "cuda" else 1
        times: list[float] = []
        start = time.perf_counter()
        while len(times) < self.protocol.repeats:
            if len(times) >= 3 and time.perf_counter() - start > self.protocol.seconds:
                break
            times.append(once(lambda: [step() for _ in range(together)], self.device) / together)
        return times

    def time_into(self, times: list[float], batch: int) -> None:
        times[:] = self.time(batch)

    def peak(self, batch: int) -> tuple[int, int]:
        """Return the peak bytes and their batch size, the first of batch, batch / 2, ... that fits."""
        found: list[int] = []

        def run(batch: int) -> None:
            step = self.step(batch)
            with nullcontext() if self.largest else self.watched(batch):  # once, because hooks disturb the compiler
                step()
            found.append(peak_bytes(step, self.device))

        batch = largest_batch(run, batch)
        return found[-1] + self.held(), batch

    @contextmanager
    def watched(self, batch: int) -> Iterator[None]:
        """Record the largest output of a module."""

        def look(module: nn.Module, inputs: object, output: object) -> None:
            if isinstance(output, Tensor):
                self.largest = max(self.largest, output.numel() / batch)

        hooks = [module.register_forward_hook(look) for module in self.network.modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def indexable(self, batch: int) -> int:
        """Return the first of batch, batch / 2, ... whose tensors are not too large for the usual kernels."""
        while batch > 1 and self.largest * batch >= INDEXABLE:
            batch //= 2
        return batch

    def held(self) -> int:
        """Return the bytes of weights, buffers and optimizer state."""
        tensors = [*self.network.parameters(), *self.network.buffers()]
        if self.optimizer is not None:
            tensors += [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        return size_of(tensors)

    def may_fit(self, batch: int, peak: int, peak_batch: int) -> int:
        """Return the first of batch, batch / 2, ... that is not certainly too large for the memory.

        A failed attempt fills the whole memory first, which takes seconds on a GPU. Activations grow with the batch;
        weights, gradients and optimizer state do not.
        """
        fixed = self.held() + (size_of(self.network.parameters()) if self.training else 0)
        growing = max(0, peak - fixed) / peak_batch
        most = memory_of(self.device)
        while batch > peak_batch and fixed + SURE * growing * batch > most:
            batch = max(batch // 2, peak_batch)  # peak_batch is known to fit
        return batch


def size_of(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def memory_of(device: torch.device) -> float:
    """Return the bytes that this process can use; infinity on a CPU, where they are unknown."""
    if device.type != "cuda":
        return inf
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def largest_batch(trial: Callable[[int], None], batch: int) -> int:
    """Return the first of batch, batch / 2, ... for which `trial` does not run out of memory."""
    while batch:
        try:
            trial(batch)
            return batch
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            if not is_no_memory(error):
                raise
        free_memory()  # not in the handler, where the error keeps all tensors of the failed step alive
        batch //= 2
    raise NoMemoryError("not even one image fits in memory")


def is_no_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in text for words in NO_MEMORY)


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def precision_of(precision: Precision, device: torch.device) -> Iterator[None]:
    """Allow TF32 for products of float32 tensors inside the context, or forbid it."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    tf32 = precision == "tf32"
    if tf32 and device.type != "cuda":
        raise ValueError("precision tf32 needs a CUDA GPU: use float32")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def folded_network(network: nn.Module, shape: tuple[int, ...]) -> tuple[nn.Module, int, float]:
    """Return the network with folded batch norms, their number, and the relative difference of the outputs."""
    folded, count = fold_batch_norm(network, shape)
    error = fold_error(folded, network, shape)
    if not error <= FOLD_TOLERANCE:
        # Random weights in hundreds of layers amplify rounding. In float64 there is almost none, so check there.
        exact = copy.deepcopy(network).double()
        found = fold_error(fold_batch_norm(exact, shape)[0], exact, shape)
        if not found <= EXACT_TOLERANCE:
            raise MismatchError(
                f"folding batch norm changed the output by {error:.1e}, allowed: {FOLD_TOLERANCE}, "
                f"and by {found:.1e} in float64, allowed: {EXACT_TOLERANCE}"
            )
    return folded, count, error


def fold_error(folded: nn.Module, network: nn.Module, shape: tuple[int, ...]) -> float:
    images = some_images(network, shape)
    with torch.inference_mode(), precision_of("float32", images.device):
        return relative_error(folded(images), network(images))

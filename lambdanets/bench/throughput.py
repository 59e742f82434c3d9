"""Speed of whole networks by the paper's protocol: the largest batch that fits, from 1024 down by halves.

A batch fits if memory holds it, and no tensor has 2^31 elements: beyond that a batch half as large is faster.

Training is forward, cross-entropy, backward and a step of SGD with momentum; inference has batch norm folded.
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

NORMAL_BATCH = 1024  # the paper gives latencies for this many images
CLASSES = 1000
WARM_UP = 2  # steps: the first allocates optimizer state and compiles, the second is like all that follow
TOGETHER = 5  # steps that are timed as one: Python prepares the next one while the GPU is busy, as in real use
LONG = 0.25  # seconds: fewer steps together that take so long show the same, for Python is far ahead of the GPU
INDEXABLE = 2**31  # elements of one tensor: from there on cuDNN and torch take other, slow kernels
SURE = 0.8  # a batch is left out only if even this part of the memory that it should need is more than there is
Precision = Literal["float32", "tf32", "bfloat16"]
# What a folded network may differ from the one it comes from: rounding, which hundreds of layers add up.
FOLD_TOLERANCE = 1e-2
EXACT_TOLERANCE = 1e-6  # the same in float64, for networks that enlarge rounding even more
NO_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed", "not enough memory")


@dataclass(frozen=True)
class Protocol:
    """How a network is measured.

    Attributes:
        mode: inference or training.
        precision: float32; tf32: float32 tensors, products in TF32 (CUDA); bfloat16: weights too in inference, in
            training autocast over float32 weights.
        compiled: torch.compile of the network.
        graphs: compiled, and its kernels started by CUDA graphs (`mode="reduce-overhead"`, with `blocks` one graph of
            the whole step): Python does not count.
        blocks: compiled block by block, which takes far less time than compiling a deep network whole.
        channels_last: memory format of images and weights.
        fold: batch norm is folded into convolutions for inference.
        batch: where the search begins.
        memory_batch: the batch of `peak_bytes`, one for all networks so that they can be compared (if it fits).
        repeats, seconds: how many times some steps are timed, and when to stop early (after three times at least).
        latency: whether a batch of 1 is timed too (inference).
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
        """eager or compiled, whole or by blocks, with or without CUDA graphs."""
        if not self.compiled:
            return "eager"
        if self.blocks:
            return "compiled by blocks, a CUDA graph" if self.graphs else "compiled by blocks"
        return "compiled, CUDA graphs" if self.graphs else "compiled"


@dataclass(frozen=True)
class Throughput:
    """What was measured; seconds are medians."""

    batch: int  # the largest of batch, batch / 2, ... that fits: in memory, and in 32-bit indices
    seconds: float  # of a step with this batch
    examples_per_second: float
    seconds_per_1024: float  # as the paper gives it
    repeats: int
    latency: float | None  # seconds for one image
    peak_bytes: int  # weights, gradients, optimizer state and all else
    peak_batch: int  # with so many images: `memory_batch`, but `batch` if compiled (another one compiles again)
    folded: int  # pairs of a convolution and a batch norm that became one
    fold_error: float | None  # relative difference of folded and original outputs
    compile_error: float | None = None  # the worst of compiled blocks beside eager ones, gradients too


class NoMemoryError(Exception):
    """Not even one image fits."""


def measure_network(
    build: Callable[[], nn.Module], size: tuple[int, int], protocol: Protocol, device: torch.device, channels: int = 3
) -> Throughput:
    """Measures the network that `build` makes, on images of `size` (height, width)."""
    torch.manual_seed(0)
    with precision_of(protocol.precision, device), many_variants() if protocol.blocks else nullcontext():
        with device:  # drawing initial weights of deep networks takes a CPU long
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
            with fastest_convolutions():  # may need more memory than the search had: it goes on here
                batch = largest_batch(partial(steps.time_into, times), batch)
                if protocol.latency and protocol.mode == "inference":
                    latency = median(steps.time(1, together=1))
            if protocol.compiled or peak_batch > batch:
                free_memory()  # of a CUDA graph
                peak, peak_batch = steps.peak(batch)
        finally:
            if protocol.compiled and not protocol.blocks:  # blocks serve the next network
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
    """Steps of one network."""

    def __init__(self, network: nn.Module, shape: tuple[int, ...], protocol: Protocol, device: torch.device) -> None:
        self.network, self.shape, self.protocol, self.device = network, shape, protocol, device
        self.training = protocol.mode == "training"
        self.network.train(self.training)
        self.largest = 0.0  # elements of an output of a module, for each image; `peak` looks
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
        """A function that runs one step on random images; it returns scores, or the loss in training."""
        images = self.images(batch)
        if self.optimizer is None:
            return lambda: self.infer(images)
        classes = torch.randint(CLASSES, (batch,), device=self.device)
        return lambda: self.train(images, classes)

    def timed_step(self, batch: int) -> Callable[[], object]:
        """`step`, as a CUDA graph where that is ours to make."""
        step = self.step(batch)
        if not (self.protocol.blocks and self.protocol.graphs):
            return step
        free_memory()  # the graph has a memory of its own
        return as_graph(step, None if self.training else TOLERANCE[self.protocol.precision])

    def begin(self) -> None:
        if self.protocol.graphs and not self.protocol.blocks:  # what the last step gave may be overwritten
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
        """Bytes, and the batch that they are of: the first of batch, batch / 2, ... that fits."""
        found: list[int] = []

        def run(batch: int) -> None:
            step = self.step(batch)
            with nullcontext() if self.largest else self.watched(batch):  # once: hooks are in the way of the compiler
                step()
            found.append(peak_bytes(step, self.device))

        batch = largest_batch(run, batch)
        return found[-1] + self.held(), batch

    @contextmanager
    def watched(self, batch: int) -> Iterator[None]:
        """Notes the largest output of a module."""

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
        """The first of batch, batch / 2, ... whose tensors are not too large for the usual kernels."""
        while batch > 1 and self.largest * batch >= INDEXABLE:
            batch //= 2
        return batch

    def held(self) -> int:
        """Bytes of weights, buffers and optimizer state."""
        tensors = [*self.network.parameters(), *self.network.buffers()]
        if self.optimizer is not None:
            tensors += [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        return size_of(tensors)

    def may_fit(self, batch: int, peak: int, peak_batch: int) -> int:
        """Where the search begins: at the first of batch, batch / 2, ... that is not sure to be too large.

        What fails fills the whole memory first, which takes seconds on a GPU. Activations grow with the batch; weights,
        gradients and optimizer state do not.
        """
        fixed = self.held() + (size_of(self.network.parameters()) if self.training else 0)
        growing = max(0, peak - fixed) / peak_batch
        most = memory_of(self.device)
        while batch > peak_batch and fixed + SURE * growing * batch > most:
            batch = max(batch // 2, peak_batch)  # which fits
        return batch


def size_of(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def memory_of(device: torch.device) -> float:
    """Bytes that this process may have; unknown, so without a limit, on a CPU."""
    if device.type != "cuda":
        return inf
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def largest_batch(trial: Callable[[int], None], batch: int) -> int:
    """The first of batch, batch / 2, ... that fits in memory."""
    while batch:
        try:
            trial(batch)
            return batch
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            if not is_no_memory(error):
                raise
        free_memory()  # outside of the handler, where the error would keep every tensor of the failed step
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
    """Products of float32 tensors in TF32, or not."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    tf32 = precision == "tf32"
    if tf32 and device.type != "cuda":
        raise ValueError("tf32 is for CUDA GPUs: use float32")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def folded_network(network: nn.Module, shape: tuple[int, ...]) -> tuple[nn.Module, int, float]:
    """The network with batch norm folded, how many, and how far its output is from the original's (without TF32)."""
    folded, count = fold_batch_norm(network, shape)
    error = fold_error(folded, network, shape)
    if not error <= FOLD_TOLERANCE:
        # Random weights in hundreds of layers enlarge rounding. In float64 there is next to none: is the folding right?
        exact = copy.deepcopy(network).double()
        found = fold_error(fold_batch_norm(exact, shape)[0], exact, shape)
        if not found <= EXACT_TOLERANCE:
            raise MismatchError(
                f"folding batch norm changed the output by {error:.1e}, allowed {FOLD_TOLERANCE}, "
                f"and by {found:.1e} in float64, allowed {EXACT_TOLERANCE}"
            )
    return folded, count, error


def fold_error(folded: nn.Module, network: nn.Module, shape: tuple[int, ...]) -> float:
    images = some_images(network, shape)
    with torch.inference_mode(), precision_of("float32", images.device):
        return relative_error(folded(images), network(images))

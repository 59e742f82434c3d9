"""Throughput of data loading, compared with torchvision's loader with the same crops, flips and RandAugment.

One core is measured in process time, so that other work on the machine does not count; worker processes and images in
device memory are measured in wall-clock time.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from lambdanets.data.augment import Augment
from lambdanets.data.batch_augment import BatchAugment
from lambdanets.data.decode import decode
from lambdanets.data.loader import Loader, LoaderOptions
from lambdanets.data.pack import encoded
from lambdanets.data.preprocessing import Preprocessing
from lambdanets.data.resident import ResidentImages, ResidentLoader
from lambdanets.data.source import Source
from lambdanets.data.transforms import Training, interpolation_of, training

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Speed:
    """Throughput of one way to make batches."""

    name: str
    per_core: float | None  # images per second of process time; None if a GPU does the work
    together: float | None  # images per wall-clock second of all workers or of the device


def measure(
    source: Source,
    image_size: int,
    augment: Augment,
    *,
    images: int = 2000,
    batch_size: int = 250,
    workers: int = 0,
    rounds: int = 3,
    device: torch.device = CPU,
) -> list[Speed]:
    """Measure all ways to make batches, interleaved, and return their medians."""
    images = min(images, len(source))
    batch_size = min(batch_size, images)
    usable = images - images % batch_size
    indices = np.arange(len(source))[:images]
    transform = training(image_size, augment)
    options = LoaderOptions(batch_size=batch_size)
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder)
        write_files(source, indices, files)

        def ours(options: LoaderOptions) -> Callable[[int], Iterator[Any]]:
            loader = Loader(source, transform, options, indices=indices)
            return lambda epoch: loader.epoch(epoch)

        def theirs(workers: int, normalized: bool) -> Callable[[int], Iterator[Any]]:
            loader = reference(files, image_size, transform, batch_size, workers, normalized)
            return lambda epoch: iter(loader)

        kept = replace(options, cache="memory")
        ways: dict[str, Callable[[int], Callable[[int], Iterator[Any]]]] = {
            "torchvision, normalized there": lambda count: theirs(count, True),
            "torchvision, uint8": lambda count: theirs(count, False),
            "lambdanets": lambda count: ours(replace(options, workers=count)),
            "lambdanets, cache in memory": lambda count: ours(replace(kept, workers=count)),
        }
        single = interleaved({name: way(0) for name, way in ways.items()}, usable, rounds, time.process_time)
        several: dict[str, float] = {}
        if workers:
            for name, way in ways.items():  # sequentially, because two sets of workers would share the CPU cores
                several |= interleaved({name: way(workers)}, usable, rounds + 1, time.perf_counter)
    single = {"decoding alone": decoding(source, indices, rounds)} | single
    rows = [Speed(name, rate, several.get(name)) for name, rate in single.items()]
    resident = {f"lambdanets, kept on {device.type}": on_device(source, indices, transform, options, device)}
    clocks = {"together": time.perf_counter} | ({"per_core": time.process_time} if device.type == "cpu" else {})
    found = {kind: interleaved(resident, usable, rounds, clock) for kind, clock in clocks.items()}
    return rows + [Speed(name, found.get("per_core", {}).get(name), found["together"][name]) for name in resident]


def on_device(
    source: Source, indices: np.ndarray, transform: Training, options: LoaderOptions, device: torch.device
) -> Callable[[int], Iterator[Any]]:
    """Return a function that yields the batches of an epoch from images in the memory of a device, augmented there."""
    augment = transform.augment
    images = ResidentImages(source, indices, transform.size, augment, device, 2**62)
    variation = BatchAugment(augment, transform.size, Preprocessing().mean, whole=True)
    loader = ResidentLoader(images, options)

    def batches(epoch: int) -> Iterator[Any]:
        for number, batch in enumerate(loader.epoch(epoch), loader.sampler.first(epoch)):
            places = loader.sampler.epochs.places(number, options.batch_size, 0, 1)
            numbers, how = (values.to(device) for values in variation.numbers(options.seed, *places))
            yield variation(images.cropped(batch.images.to(device), variation, numbers), numbers, how).images
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return batches


def interleaved(
    ways: dict[str, Callable[[int], Iterator[Any]]], images: int, rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Return images per second, excluding the first round, which starts workers and fills caches."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            start = clock()
            count = sum(len(batch[1] if isinstance(batch, list) else batch) for batch in way(turn))
            seconds[name].append(clock() - start)
            assert count == images, (name, count, images)
    return {name: images / median(times[1:]) for name, times in seconds.items()}


def decoding(source: Source, indices: np.ndarray, rounds: int) -> float:
    encoded_images = [data for data in (source.read(int(i)) for i in indices) if isinstance(data, bytes)]
    if not encoded_images:
        return float("inf")
    times = []
    for _ in range(rounds):
        start = time.process_time()
        for data in encoded_images:
            decode(data)
        times.append(time.process_time() - start)
    return len(encoded_images) / median(times)


def reference(
    folder: Path, image_size: int, transform: Training, batch_size: int, workers: int, normalized: bool
) -> torch.utils.data.DataLoader:
    """Return torchvision's ImageFolder and DataLoader, set up as in its training script."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import InterpolationMode, v2

    augment, preprocessing = transform.augment, Preprocessing()
    steps: list[Any] = []
    if augment.crop_scale is not None:
        mode = InterpolationMode(interpolation_of(augment.interpolation).name.lower())
        steps.append(v2.RandomResizedCrop(image_size, augment.crop_scale, augment.crop_ratio, mode))
    else:
        steps.append(v2.Resize((image_size, image_size)))
    if augment.padding:
        steps.append(v2.RandomCrop(image_size, augment.padding))
    steps.append(v2.RandomHorizontalFlip(augment.flip))
    if transform.operations:
        from timm.data.auto_augment import RandAugment

        steps.append(RandAugment(transform.operations, augment.randaugment_layers))
    steps.append(v2.PILToTensor())
    if normalized:
        steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(preprocessing.mean, preprocessing.std)]
    return torch.utils.data.DataLoader(
        ImageFolder(folder, v2.Compose(steps)),
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        persistent_workers=workers > 0,
    )


def write_files(source: Source, indices: np.ndarray, folder: Path) -> None:
    """Write the images as class folders for ImageFolder."""
    for index in indices:
        data, suffix = encoded(source.read(int(index)))
        place = folder / f"class_{source.labels[index]}"
        place.mkdir(exist_ok=True)
        (place / f"{index:08d}.{suffix}").write_bytes(data)

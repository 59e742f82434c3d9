"""Check a dataset: unreadable images, duplicates, and images that are in both training and validation splits."""

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from lambdanets.data.broken import Broken
from lambdanets.data.cache import processors
from lambdanets.data.decode import BrokenImageError, decode
from lambdanets.data.source import Source

CHUNK = 256


@dataclass(frozen=True)
class Place:
    """An image of a split."""

    split: str
    index: int
    name: str
    label: int


@dataclass(frozen=True)
class Checked:
    """Result of `check`."""

    images: int
    unreadable: tuple[Broken, ...]
    duplicates: tuple[tuple[Place, ...], ...]  # the same pixels, within a split
    leaked: tuple[tuple[Place, ...], ...]  # the same pixels, in more than one split
    empty_classes: tuple[str, ...]  # classes of the training set without an image
    single_classes: tuple[str, ...]  # classes of the training set with one image
    missing_classes: tuple[
        tuple[str, str], ...
    ]  # (split, class) without images, although the class has training images
    class_sizes: tuple[tuple[str, int], ...]  # training images per class, largest first

    @property
    def contradictions(self) -> tuple[tuple[Place, ...], ...]:
        """Images with the same pixels and different labels."""
        return tuple(group for group in (*self.duplicates, *self.leaked) if len({place.label for place in group}) > 1)


def check(
    sources: Mapping[str, Source], workers: int | None = None, done: Callable[[int], object] = lambda images: None
) -> Checked:
    """Decode all images of all splits on all CPU cores. Images with equal pixels count as the same image."""
    unreadable: list[Broken] = []
    places: dict[bytes, list[Place]] = {}
    seen = 0
    with ThreadPoolExecutor(workers or processors()) as pool:  # Pillow and hashlib release the GIL
        for split, source in sources.items():
            for start in range(0, len(source), CHUNK):
                indices = range(start, min(start + CHUNK, len(source)))
                for index, found in zip(indices, pool.map(lambda i: fingerprint(source, i), indices), strict=True):  # noqa: B023
                    if isinstance(found, str):
                        unreadable.append(Broken(index, f"{split}: {source.name(index)}", found))
                    else:
                        place = Place(split, index, source.name(index), int(source.labels[index]))
                        places.setdefault(found, []).append(place)
                seen += len(indices)
                done(seen)
    groups = [tuple(group) for group in places.values() if len(group) > 1]
    leaked = tuple(group for group in groups if len({place.split for place in group}) > 1)
    duplicates = tuple(group for group in groups if group not in leaked)
    (_, first), *others = sources.items()
    counts = class_counts(first)
    sizes = tuple(sorted(counts.items(), key=lambda item: -item[1]))
    missing = tuple(
        (split, name)
        for split, source in others
        if (source.labels >= 0).any()  # splits without any labels do not count
        for name, count in class_counts(source).items()
        if not count and counts.get(name)
    )
    return Checked(
        seen,
        tuple(unreadable),
        duplicates,
        leaked,
        empty_classes=tuple(name for name, count in counts.items() if not count),
        single_classes=tuple(name for name, count in counts.items() if count == 1),
        missing_classes=missing,
        class_sizes=sizes,
    )


def class_counts(source: Source) -> dict[str, int]:
    """Return the number of images of each class."""
    counts = np.bincount(source.labels[source.labels >= 0], minlength=len(source.class_names))
    return dict(zip(source.class_names, counts.tolist(), strict=True))


def fingerprint(source: Source, index: int) -> bytes | str:
    """Return a hash of the pixels, or the reason why the image cannot be read."""
    try:
        data = source.read(index)
        pixels = data if isinstance(data, np.ndarray) else np.asarray(decode(data))
    except (BrokenImageError, OSError) as error:
        return str(error)
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()

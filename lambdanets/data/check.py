"""Reads every image once: what is unreadable, what is there twice, what is in training and validation both."""

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
    """One image of one split."""

    split: str
    index: int
    name: str
    label: int


@dataclass(frozen=True)
class Checked:
    """What was found."""

    images: int
    unreadable: tuple[Broken, ...]
    duplicates: tuple[tuple[Place, ...], ...]  # the same pixels, within a split
    leaked: tuple[tuple[Place, ...], ...]  # the same pixels, in more than one split
    empty_classes: tuple[str, ...]  # classes of the training set without an image
    single_classes: tuple[str, ...]  # with one
    missing_classes: tuple[tuple[str, str], ...]  # (split, class): with training images, and none in another split
    class_sizes: tuple[tuple[str, int], ...]  # training images of each class, the largest first

    @property
    def contradictions(self) -> tuple[tuple[Place, ...], ...]:
        """The same pixels with different labels."""
        return tuple(group for group in (*self.duplicates, *self.leaked) if len({place.label for place in group}) > 1)


def check(
    sources: Mapping[str, Source], workers: int | None = None, done: Callable[[int], object] = lambda images: None
) -> Checked:
    """Decodes all images of all splits on all processors. Images with the same pixels are the same."""
    unreadable: list[Broken] = []
    places: dict[bytes, list[Place]] = {}
    seen = 0
    with ThreadPoolExecutor(workers or processors()) as pool:  # Pillow decodes and hashlib hashes without the lock
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
        if (source.labels >= 0).any()  # not where a split has no labels at all
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
    """Images of each class."""
    counts = np.bincount(source.labels[source.labels >= 0], minlength=len(source.class_names))
    return dict(zip(source.class_names, counts.tolist(), strict=True))


def fingerprint(source: Source, index: int) -> bytes | str:
    """A hash of the pixels, or why there are none."""
    try:
        data = source.read(index)
        pixels = data if isinstance(data, np.ndarray) else np.asarray(decode(data))
    except (BrokenImageError, OSError) as error:
        return str(error)
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()

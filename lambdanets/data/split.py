"""Held-out images of a training set, for model selection and early stopping."""

import hashlib
from collections.abc import Sequence

import numpy as np

OWN_HELD_OUT = 0.1  # of the training images, if there are no validation images


def held_out(
    labels: np.ndarray, fraction: float, seed: int = 0, *, names: Sequence[str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Split a training set, and return (training indices, held-out indices) as int64 arrays in increasing order.

    The split is stratified: `fraction` of each class, rounded, and at least one image of classes with two or more. It
    is stable: the images whose names have the smallest hashes are held out, so the order of the files and other classes
    do not matter, and an added image moves at most one other image of its class.

    Args:
        labels: int64 [N].
        fraction: held-out fraction, at least 0 and below 1.
        seed: seed of the hash.
        names: name of each image; by default its index.

    Raises ValueError if the fraction is out of range or the number of names differs from the number of labels.

    Example:
        >>> from lambdanets.data.source import open_source
        >>> from lambdanets.data.split import held_out
        >>> source = open_source("mnist")
        >>> train, held = held_out(source.labels, 0.02)
        >>> len(train), len(held)
        (3920, 80)
    """
    labels = np.asarray(labels)
    if not 0 <= fraction < 1:
        raise ValueError(f"the held-out fraction must be at least 0 and below 1, got {fraction}")
    if names is not None and len(names) != len(labels):
        raise ValueError(f"names must have one entry per label, got {len(names)} names for {len(labels)} labels")
    hashes = np.array([hashed(seed, names[i] if names is not None else str(i)) for i in range(len(labels))], np.uint64)
    held = [np.empty(0, np.int64)]
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        least = int(fraction > 0 and len(members) > 1)  # so that small classes are evaluated, too
        count = max(least, round(fraction * len(members)))
        held.append(members[np.argsort(hashes[members], kind="stable")][:count])
    out = np.sort(np.concatenate(held))
    return np.setdiff1d(np.arange(len(labels)), out), out


def hashed(seed: int, name: str) -> int:
    text = f"{seed}:{name}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")

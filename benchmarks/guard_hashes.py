"""Measure how often `--guard-distance` recognizes changed copies of photographs, and how often it matches others.

python benchmarks/guard_hashes.py imagenette2-160 --output benchmarks/results/guard-imagenette.json
"""

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from PIL import Image, ImageEnhance

from lambdanets.data.decode import load, open_image
from lambdanets.data.guard import open_guarded, perceptual_hash
from lambdanets.data.order import permutation
from lambdanets.files import whole_path
from lambdanets.machine import describe
from lambdanets.options import check_positive


@dataclass(frozen=True)
class GuardHashes:
    """Measure the recognition of changed copies, and false matches."""

    data: Annotated[str, tyro.conf.Positional]
    """Photographs, as `lambdanets pseudo label --guard` takes them."""
    output: Path
    changed: int = 300
    """Number of photographs to modify; each modification is applied to every one of them."""
    different: int = 1500
    """Number of photographs to compare with each other."""
    distances: tuple[int, ...] = (4, 6, 8)
    """Numbers of bits, out of 64, that may differ."""

    def run(self) -> int:
        check_positive(changed=self.changed, different=self.different)
        source = open_guarded(self.data)
        chosen = permutation(len(source), 0, 0)[: max(self.changed, self.different)]
        images = []
        for i in chosen:
            data = source.read(int(i))
            images.append(Image.fromarray(data) if isinstance(data, np.ndarray) else load(open_image(data), "RGB"))
        hashes = np.array([perceptual_hash(image) for image in images])
        rows = []
        for name, change in CHANGES.items():
            found = np.array([perceptual_hash(change(image)) for image in images[: self.changed]])
            bits = np.bitwise_count(found ^ hashes[: self.changed])
            rows.append({"change": name, "found": [float((bits <= d).mean()) for d in self.distances]})
        one, other = np.triu_indices(len(hashes[: self.different]), k=1)
        bits = np.bitwise_count(hashes[one] ^ hashes[other])
        result: dict[str, Any] = {
            "name": "guard",
            **describe(torch.device("cpu")),
            "changed": min(self.changed, len(images)),
            "pairs": len(bits),
            "distances": self.distances,
            "rows": rows,
            "taken_for_the_same": [int((bits <= d).sum()) for d in self.distances],
        }
        with whole_path(self.output) as part:
            part.write_text(json.dumps(result, indent=1) + "\n")
        return 0


def compressed(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=20)
    return Image.open(file)


def cut(pixels: int) -> Callable[[Image.Image], Image.Image]:
    return lambda image: image.crop((pixels, pixels, image.width - pixels, image.height - pixels))


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "JPEG quality 20": compressed,
    "half the size": lambda image: image.resize((image.width // 2, image.height // 2)),
    "20% brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.2),
    "2 pixels cut off each side": cut(2),
    "4 pixels cut off each side": cut(4),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
}

if __name__ == "__main__":
    sys.exit(tyro.cli(GuardHashes).run())

"""Count the files of lambdanets whose code runs in one forward pass of a layer on the CPU.

    python benchmarks/files_crossed.py

Prints the number and the list for `LambdaLayer2d(64)` on a 56x56 map, eager, in training and in eval mode.
"""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import lambdanets
from lambdanets import LambdaLayer2d

PACKAGE = Path(lambdanets.__file__).parent


def files_crossed(layer: torch.nn.Module, x: torch.Tensor) -> list[str]:
    """Return the files of all functions that a second call of the layer runs, relative to the package."""
    layer(x)  # the first call also imports modules and fills caches
    seen: set[str] = set()

    def record(frame: FrameType, event: str, argument: Any) -> None:
        seen.add(frame.f_code.co_filename)

    sys.setprofile(record)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    return sorted(str(Path(name).relative_to(PACKAGE)) for name in seen if Path(name).is_relative_to(PACKAGE))


def main() -> None:
    layer, x = LambdaLayer2d(64), torch.randn(2, 64, 56, 56)
    for mode in ("train", "eval"):
        files = files_crossed(layer.train(mode == "train"), x)
        print(f"{mode}: {len(files)} files")
        for name in files:
            print(f"  {name}")


if __name__ == "__main__":
    main()

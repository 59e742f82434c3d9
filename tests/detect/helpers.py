"""Small datasets and detectors for tests."""

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from lambdanets.detect.coco import open_set
from lambdanets.detect.config import DetectConfig, Heads
from lambdanets.detect.network import Detector, make_detector
from lambdanets.recipes.coco import debug
from lambdanets.train.config import ModelConfig

TINY = ("stem='strided'", "widths=(8,8,16,16)", "depths=(1,1,2,1)", "scope=5", "se=(True,True,False,False)")
NARROW = Heads(
    channels=16,
    hidden=32,
    convolutions=1,
    mask_convolutions=1,
    norm=True,
    anchors=(16.0, 32.0, 64.0, 128.0, 256.0),
    canonical=64.0,
    proposals=40,
    sampled=32,
    least_score=0.0,
)


def tiny_detector(name: str = "lambda_resnet_tiny", options: tuple[str, ...] = TINY, **changes) -> Detector:
    """Randomise running statistics and weights: zeros and ones could hide mistakes."""
    detector = make_detector(ModelConfig(name=name, embedding_std=0.1, options=options), NARROW, 3, **changes)
    generator = torch.Generator().manual_seed(1)
    for module in detector.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            shape = module.weight.shape
            module.weight.data = 0.3 + 0.5 * torch.rand(shape, generator=generator)
            module.bias.data = 0.2 * torch.randn(shape, generator=generator)
            module.running_mean = 0.3 * torch.randn(shape, generator=generator)
            module.running_var = 0.5 + torch.rand(shape, generator=generator)
    return detector


def write_shapes(folder: Path, count: int, split: str = "train", *, tar: bool = False) -> Path:
    """Write a COCO folder with the first images of the synthetic dataset."""
    folder.mkdir(parents=True, exist_ok=True)
    data = open_set("shapes", split)
    (folder / f"instances_{split[:5]}.json").write_text(json.dumps(data.scenes.as_coco(range(count))))
    files = {data.name(i): png(data.read(i)) for i in range(count)}
    if tar:
        write_tar(folder / f"{split[:5]}.tar", files)
    else:
        (folder / split[:5]).mkdir()
        for name, content in files.items():
            (folder / split[:5] / name).write_bytes(content)
    return folder


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def config(out: Path, **changes) -> DetectConfig:
    """Return a configuration that trains in seconds on a CPU."""
    usual = debug()
    return replace(usual, out=out, device="cpu", data=replace(usual.data, workers=0), **changes)

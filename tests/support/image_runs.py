"""Small training runs on synthetic images."""

import os

import numpy as np
from PIL import Image

from lambdanets.data.augment import Augment
from lambdanets.train.config import DataConfig, Ema, ModelConfig, Schedule, TrainConfig

EVERYTHING = Augment(
    crop_scale=(0.5, 1.0), randaugment_layers=1, color_jitter=0.3, erasing=0.3, mixup=0.2, cutmix=1.0
)  # crops, flips and RandAugment by workers or on the device, the others on the device


def folder_of_images(folder, count=60, classes=3, broken=()):
    """Write synthetic images whose brightness depends on the class; `broken` ones are truncated or random bytes."""
    generator = np.random.default_rng(3)
    for i in range(count):
        split = "val" if i % 5 == 4 else "train"
        place = folder / split / f"class{i % classes}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 100, (20, 24, 3)) + 70 * (i % classes)
        path = place / f"{i:03d}.png"
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
        if i in broken:
            data = path.read_bytes()
            path.write_bytes(data[: len(data) // 2] if i % 2 else os.urandom(300))
    return folder


def image_config(images, out, **changes):
    settings = dict(
        out=out,
        epochs=3.0,
        batch_size=8,
        device="cpu",
        log_every=2,
        model=ModelConfig(
            name="lambda_resnet_tiny",
            image_size=16,
            drop_rate=0.1,
            drop_path_rate=0.1,
            options=("widths=(4,4,8,8)", "depths=(1,1,1,1)", "scope=3", "heads=2", "key_depth=4"),
        ),
        data=DataConfig(path=str(images), workers=0),
        augment=Augment(crop_scale=(0.5, 1.0), randaugment_layers=1, randaugment_magnitude=5),
        schedule=Schedule(rate=0.05, per_batch=0, warmup_epochs=1.0),
        ema=Ema(decay=0.9),
    )
    return TrainConfig(**(settings | changes))


def weights(folder):
    from safetensors.torch import load_file

    return load_file(str(folder / "weights.safetensors")) | {
        f"raw.{name}": t for name, t in load_file(str(folder / "weights_raw.safetensors")).items()
    }

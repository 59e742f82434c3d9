"""Setups for one machine: Imagenette, digits, a quick check."""

from dataclasses import replace
from pathlib import Path

from lambdanets.data.augment import Augment
from lambdanets.train.config import DataConfig, Ema, ModelConfig, Optimizer, Schedule, TrainConfig

DIGITS = DataConfig(path="mnist", channels=1, mean=(0.1307,), std=(0.3081,), crop=1.0)  # MNIST's own numbers


def imagenette() -> TrainConfig:
    """Ten classes of ImageNet (9,469 training images) at 128 pixels, regularised as the 350-epoch setup.

    - Command: lambdanets train imagenette --data.path IMAGENETTE --out runs/imagenette
    - Hardware: one GPU of 16 GB or more.
    - Hours: about a quarter on an H200 (estimate).
    - Expected: not measured; the paper has no such row. The convolutional twin is --model.placement CCCC.

    RandAugment with 2 layers of magnitude 10, dropout 0.2, stochastic depth 0.1, label smoothing 0.1. What is scaled to
    a short schedule: batch norm momentum 0.1, an EMA whose horizon is a tenth of the run, and a weight decay of 5e-4.
    In so few steps position embeddings of the paper's size (--model.embedding-std 1) do not leave their random start,
    so here they start at 0.02.
    """
    return TrainConfig(
        recipe="imagenette",
        out=Path("runs/imagenette"),
        model=ModelConfig(
            name="resnet50", placement="CCLL", image_size=128, embedding_std=0.02, drop_rate=0.2, drop_path_rate=0.1
        ),
        data=DataConfig(path="imagenette2-160"),
        augment=Augment(crop_scale=(0.25, 1.0), randaugment_layers=2, randaugment_magnitude=10),
        optimizer=Optimizer(momentum=0.9, weight_decay=5e-4),
        schedule=Schedule(kind="cosine", rate=0.1, per_batch=256, warmup_epochs=5.0),
        ema=Ema(decay=0.999),
        label_smoothing=0.1,
        epochs=120.0,
        batch_size=256,
        remainder="carry",
        precision="bfloat16",
        evaluate_every=5,
        log_every=37,
    )


def digits() -> TrainConfig:
    """4,000 real digits, on a laptop; a start for small grey images. `lambdanets demo` trains it and its twin.

    - Command: lambdanets train digits
    - Hardware: two CPU cores.
    - Hours: a minute or two (73 seconds of one core of an AMD EPYC).
    - Expected: 98% of 1,000 digits it has not seen.
    """
    return TrainConfig(
        recipe="digits",
        out=Path("runs/digits"),
        model=ModelConfig(
            name="lambda_resnet_tiny",
            image_size=28,
            embedding_std=0.1,
            options=("widths=(8,16,32,64)", "depths=(1,1,1,1)"),
        ),
        data=DIGITS,
        augment=Augment(crop_scale=None, padding=2, flip=0.0),
        optimizer=Optimizer(momentum=0.9, weight_decay=5e-4, nesterov=True),
        schedule=Schedule(kind="cosine", rate=0.4, per_batch=128, warmup_epochs=1.0),
        ema=Ema(decay=0.99),
        label_smoothing=0.1,
        epochs=8.0,
        batch_size=32,
        remainder="carry",
        evaluate_every=2,
        log_every=25,
    )


def debug() -> TrainConfig:
    """Twenty steps of `digits`, with everything on: does training work on this machine?

    - Command: lambdanets train debug
    - Hardware: anything; half a minute.
    """
    return TrainConfig(
        recipe="debug",
        out=Path("runs/debug"),
        model=ModelConfig(
            name="lambda_resnet_tiny",
            image_size=28,
            drop_rate=0.1,
            drop_path_rate=0.1,
            options=("widths=(8,16,32,64)", "depths=(1,1,1,1)", "scope=5"),
        ),
        data=replace(DIGITS, held_out=0.1),
        augment=Augment(crop_scale=(0.5, 1.0), flip=0.0, randaugment_layers=1, randaugment_magnitude=5),
        schedule=Schedule(rate=0.05, per_batch=64, warmup_epochs=0.1),
        ema=Ema(decay=0.9),
        epochs=20 / 56,
        batch_size=64,
        micro_batch=32,
        log_every=5,
    )

"""Recipes for one machine: Imagenette, digits, and a quick test."""

from dataclasses import replace
from pathlib import Path

from lambdanets.data.augment import Augment
from lambdanets.train.config import DataConfig, Ema, ModelConfig, Optimizer, Schedule, TrainConfig

DIGITS = DataConfig(path="mnist", channels=1, mean=(0.1307,), std=(0.3081,), crop=1.0)  # mean and std of MNIST


def imagenette() -> TrainConfig:
    """Recipe for Imagenette (ten classes of ImageNet, 9,469 training images): ResNet-50 CCLL at 128 pixels.

    - Command: lambdanets train imagenette --data.path IMAGENETTE --out runs/imagenette
    - Hardware: one GPU with at least 16 GB.
    - Hours: about a quarter on an H200 (estimate).
    - Expected: accuracy not measured; the paper has no results on Imagenette. Use --model.placement CCCC for the
      convolutional baseline.

    Regularised like the paper's 350-epoch setup: RandAugment with 2 layers of magnitude 10, dropout 0.2, stochastic
    depth 0.1, label smoothing 0.1. Adapted to the short schedule: batch norm momentum 0.1, an EMA window of a tenth of
    the run, weight decay 5e-4, and position embeddings with an initial standard deviation of 0.02, because embeddings
    of the paper's scale (--model.embedding-std 1) hardly change in so few steps.

    Example:
        >>> from dataclasses import replace
        >>> from lambdanets.recipes import imagenette
        >>> config = replace(imagenette(), epochs=60.0)
        >>> config.model.name, config.model.placement, config.batch_size
        ('resnet50', 'CCLL', 256)
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
    """Recipe for 4,000 handwritten digits that come with the package; a template for small grey images.

    `lambdanets demo` trains it together with a convolutional baseline.

    - Command: lambdanets train digits
    - Hardware: two CPU cores.
    - Hours: one or two minutes (73 s of one core of an AMD EPYC).
    - Expected: 98% top-1 on 1,000 validation digits.

    Example:
        >>> from lambdanets.recipes import digits
        >>> config = digits()
        >>> config.model.name, config.epochs
        ('lambda_resnet_tiny', 8.0)
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
    """Test recipe: twenty steps on the digits with all features on, to check training on this machine.

    - Command: lambdanets train debug
    - Hardware: any; half a minute on a CPU.

    Example:
        >>> from lambdanets.recipes import debug
        >>> debug().batch_size
        64
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

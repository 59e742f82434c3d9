"""Co-training on labelled and pseudo-labelled images (`lambdanets pseudo-label` makes those)."""

from dataclasses import fields, replace
from pathlib import Path

from lambdanets.pseudo.config import CoTrainConfig, PseudoData
from lambdanets.recipes.imagenet import imagenet_350
from lambdanets.recipes.small import imagenette
from lambdanets.train.config import TrainConfig


def cotrain() -> CoTrainConfig:
    """The imagenette setup, with as many pseudo-labelled as labelled images in every step: few labels, many images.

    - Command: lambdanets train cotrain --data.path LABELLED --pseudo.path LABELS --out runs/cotrain
    - Hardware: one GPU of 16 GB or more.
    - Hours: those of imagenette for as many steps.
    - Expected: not measured yet. More of --pseudo.ratio helps where labels are few; --pseudo.soft needs soft labels.

    An epoch goes through the pseudo-labelled images once.
    """
    base = imagenette()
    return on_top(
        replace(base, recipe="cotrain", out=Path("runs/cotrain")), PseudoData(ratio=1.0, soft=False, epoch="pseudo")
    )


def cotrain_350() -> CoTrainConfig:
    """The paper's semi-supervised LambdaResNet-152 at 288 pixels: the 350-epoch setup and 130M pseudo-labelled images.

    - Command: torchrun --nproc-per-node 8 -m lambdanets train cotrain_350 --data.path IMAGENET --pseudo.path LABELS
    - Hardware: 8 GPUs of 80 GB or more; smaller ones accumulate gradients.
    - Hours: 42 on 8 H200 (estimate: the steps of imagenet_350_152_288, which are half labelled, twice as many).
    - Expected: the paper's top-1 is 86.7, with 130M filtered and balanced images of JFT, which are not public, and
      labels of an EfficientNet-L2.

    Every step holds as many pseudo-labelled as labelled images; an epoch goes through the labelled ones. The paper does
    not say its ratio or the weight of the losses: one to one and equal is our reading.
    """
    base = imagenet_350(152, 288)
    return on_top(replace(base, recipe="cotrain_350", out=Path("runs/cotrain_350")), PseudoData(ratio=1.0))


def on_top(base: TrainConfig, pseudo: PseudoData) -> CoTrainConfig:
    """A setup of labelled images, and pseudo-labelled ones besides."""
    return CoTrainConfig(**{f.name: getattr(base, f.name) for f in fields(base)}, pseudo=pseudo)

"""Training with a teacher: co-training on pseudo-labels (`lambdanets pseudo label`), and distillation."""

from dataclasses import fields, replace
from pathlib import Path

from lambdanets.data.augment import Augment
from lambdanets.pseudo.config import CoTrainConfig, DistillConfig, PseudoData
from lambdanets.recipes.imagenet import imagenet_350
from lambdanets.recipes.small import imagenette
from lambdanets.train.config import DataConfig, Ema, ModelConfig, Optimizer, Schedule, TrainConfig


def cotrain() -> CoTrainConfig:
    """The imagenette setup, with as many pseudo-labelled as labelled images in every step: few labels, many images.

    - Command: lambdanets train cotrain --data.path LABELLED --pseudo.path LABELS --out runs/cotrain
    - Hardware: one GPU of 16 GB or more.
    - Hours: those of imagenette for as many steps.
    - Expected: with a tenth of Imagenette's labels, a teacher of the same size and 2,000 steps, no gain beyond the
      spread of seeds (docs/pseudo-labels.md). Where labels are few, raise --pseudo.ratio; --pseudo.soft needs soft
      labels.

    An epoch goes once through the labelled or the pseudo-labelled images, whichever take more steps.
    """
    base = imagenette()
    return on_top(replace(base, recipe="cotrain", out=Path("runs/cotrain")), PseudoData(ratio=1.0, soft=False))


PSEUDO_TOP1 = {  # depth, image size: the paper's top-1 with 130M pseudo-labelled images
    (50, 128): 82.1,
    (50, 160): 83.4,
    (101, 160): 84.7,
    (101, 192): 85.4,
    (152, 192): 86.1,
    (152, 224): 86.5,
    (152, 288): 86.7,
}


def cotrain_350(depth: int = 152, image_size: int = 288) -> CoTrainConfig:
    """The paper's semi-supervised LambdaResNets: the 350-epoch setup and 130M pseudo-labelled images.

    - Command: torchrun --nproc-per-node 8 -m lambdanets train cotrain_350_152_288 --data.path IMAGENET --pseudo.path
      LABELS; there is cotrain_350_DEPTH_SIZE for each row of the paper's table.
    - Hardware: 8 GPUs of 80 GB or more; smaller ones accumulate gradients.
    - Hours: twice those of imagenet_350_DEPTH_SIZE, as half of a step is labelled (estimate).
    - Expected: the paper's top-1: 82.1 (50 at 128), 83.4 (50 at 160), 84.7 (101 at 160), 85.4 (101 at 192), 86.1 (152
      at 192), 86.5 (152 at 224), 86.7 (152 at 288), with 130M filtered and balanced images of JFT, which are not
      public, and labels of an EfficientNet-L2.

    Every step holds as many pseudo-labelled as labelled images; an epoch goes through the labelled ones. The paper does
    not say its ratio or the weight of the losses: one to one and equal is our reading.
    """
    if (depth, image_size) not in PSEUDO_TOP1:
        there = ", ".join(f"{d} at {s}" for d, s in PSEUDO_TOP1)
        raise ValueError(f"the paper has no row of depth {depth} at {image_size} with pseudo-labels; it has {there}")
    name = f"cotrain_350_{depth}_{image_size}"
    return on_top(
        replace(imagenet_350(depth, image_size), recipe=name, out=Path("runs", name)),
        PseudoData(ratio=1.0, epoch="labelled"),
    )


def on_top(base: TrainConfig, pseudo: PseudoData) -> CoTrainConfig:
    """A setup of labelled images, and pseudo-labelled ones besides."""
    return CoTrainConfig(**{f.name: getattr(base, f.name) for f in fields(base)}, pseudo=pseudo)


def distill() -> DistillConfig:
    """Train a network on the predictions of a teacher for unlabelled photos; teacher and student see the same crops.

    - Command: lambdanets train distill --data.path PHOTOS --teacher.weights TEACHER.safetensors --data.validation
      LABELLED --out runs/distill
    - Hardware: one GPU of 24 GB or more; images that fit are kept in its memory.
    - Hours: not measured. The log says which part of the computation is the teacher's.
    - Expected: not measured.

    The student has the teacher's classes. The folder of photos needs no class folders; a validation set has one folder
    per class of the teacher. With labelled photos, --teacher.weight 0.5 learns from labels and teacher equally.
    """
    return DistillConfig(
        recipe="distill",
        out=Path("runs/distill"),
        model=ModelConfig(name="lambda_resnet50", image_size=128),
        data=DataConfig(path="photos"),
        augment=Augment(crop_scale=(0.25, 1.0), color_jitter=0.3, mixup=0.2, cutmix=1.0),
        optimizer=Optimizer(kind="adamw", weight_decay=0.05, alpha=0.99, eps=1e-8),
        schedule=Schedule(kind="cosine", rate=2e-3, per_batch=512, warmup_epochs=2.0),
        ema=Ema(decay=0.9998, recalibrate=100),
        label_smoothing=0.0,
        epochs=60.0,
        batch_size=512,
        remainder="carry",
        precision="bfloat16",
        evaluate_every=5,
        log_every=100,
        checkpoint_minutes=5.0,
    )

"""Training with a teacher: co-training on pseudo-labels (`lambdanets pseudo label`), and distillation."""

from dataclasses import fields, replace
from pathlib import Path

from lambdanets.data.augment import Augment
from lambdanets.pseudo.config import CoTrainConfig, DistillConfig, PseudoData
from lambdanets.recipes.imagenet import imagenet_350
from lambdanets.recipes.small import imagenette
from lambdanets.train.config import DataConfig, Ema, ModelConfig, Optimizer, Schedule, TrainConfig


def cotrain() -> CoTrainConfig:
    """Recipe for few labels and many unlabelled images: Imagenette with pseudo-labels in half of each batch.

    - Command: lambdanets train cotrain --data.path LABELLED --pseudo.path LABELS --out runs/cotrain
    - Hardware: one GPU with at least 16 GB.
    - Hours: those of imagenette for the same number of steps.
    - Expected: no gain beyond the spread of seeds with a tenth of Imagenette's labels, a teacher of the same size and
      2,000 steps (docs/pseudo-labels.md). With few labels, raise --pseudo.ratio; --pseudo.soft needs soft labels.

    An epoch is one pass over the labelled or the pseudo-labelled images, whichever takes more steps.

    Example:
        >>> from lambdanets.recipes import cotrain
        >>> cotrain().pseudo.ratio
        1.0
    """
    base = imagenette()
    return on_top(replace(base, recipe="cotrain", out=Path("runs/cotrain")), PseudoData(ratio=1.0, soft=False))


PSEUDO_TOP1 = {  # (depth, image size): top-1 in the paper with 130M pseudo-labelled images
    (50, 128): 82.1,
    (50, 160): 83.4,
    (101, 160): 84.7,
    (101, 192): 85.4,
    (152, 192): 86.1,
    (152, 224): 86.5,
    (152, 288): 86.7,
}


def cotrain_350(depth: int = 152, image_size: int = 288) -> CoTrainConfig:
    """The paper's semi-supervised recipe: the 350-epoch recipe with 130M pseudo-labelled images.

    - Command: torchrun --nproc-per-node 8 -m lambdanets train cotrain_350_152_288 --data.path IMAGENET --pseudo.path
      LABELS; each row of the paper's table has a recipe cotrain_350_DEPTH_SIZE.
    - Hardware: 8 GPUs with at least 80 GB; smaller GPUs accumulate gradients.
    - Hours: twice those of imagenet_350_DEPTH_SIZE, because half of each batch is labelled (estimate).
    - Expected: top-1 in the paper 82.1% (50 at 128), 83.4% (50 at 160), 84.7% (101 at 160), 85.4% (101 at 192), 86.1%
      (152 at 192), 86.5% (152 at 224), 86.7% (152 at 288), with 130M filtered and balanced JFT images, which are not
      public, labelled by an EfficientNet-L2. Not reproduced here.

    Each batch has equal numbers of labelled and pseudo-labelled images, and an epoch goes once through the labelled
    images. The paper does not give the ratio or the weights of the losses; we assume 1:1 and equal weights.

    Args:
        depth: depth of the LambdaResNet.
        image_size: image size in pixels.

    Raises ValueError if the paper has no row with this depth and image size.

    Example:
        >>> from lambdanets.recipes import cotrain_350
        >>> cotrain_350(50, 128).recipe
        'cotrain_350_50_128'
    """
    if (depth, image_size) not in PSEUDO_TOP1:
        there = ", ".join(f"{d} at {s}" for d, s in PSEUDO_TOP1)
        raise ValueError(
            f"the paper has no results with pseudo-labels for depth {depth} at {image_size} pixels; it has {there}"
        )
    name = f"cotrain_350_{depth}_{image_size}"
    return on_top(
        replace(imagenet_350(depth, image_size), recipe=name, out=Path("runs", name)),
        PseudoData(ratio=1.0, epoch="labelled"),
    )


def on_top(base: TrainConfig, pseudo: PseudoData) -> CoTrainConfig:
    """Add pseudo-labelled images to a configuration."""
    return CoTrainConfig(**{f.name: getattr(base, f.name) for f in fields(base)}, pseudo=pseudo)


def distill() -> DistillConfig:
    """Recipe for distillation: train on the predictions of a teacher network for unlabelled photos.

    - Command: lambdanets train distill --data.path PHOTOS --teacher.weights TEACHER.safetensors --data.validation
      LABELLED --out runs/distill
    - Hardware: one GPU with at least 24 GB; the images are kept in its memory if they fit.
    - Hours: not measured. The log contains the teacher's share of the computation.
    - Expected: accuracy not measured.

    Teacher and student see the same crops, and the student has the teacher's classes. The photos need no class
    folders; the validation set has one folder per class of the teacher. With labelled photos, --teacher.weight 0.5
    weights labels and teacher equally.

    Example:
        >>> from lambdanets.recipes import distill
        >>> distill().batch_size
        512
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

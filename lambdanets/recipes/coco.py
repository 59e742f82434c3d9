"""Detection recipes: the paper's COCO setup, versions for one GPU and small datasets, and one that runs on a CPU.

They keep 100 detections per image, which is also COCO's maxDets. For images with more objects (cells, crops, crowds)
set `--heads.detections 300`; evaluation then uses the same limit.
"""

from dataclasses import replace
from pathlib import Path

from lambdanets.detect.config import DetectConfig, DetectData, Heads, Jitter
from lambdanets.train.config import Ema, ModelConfig, Optimizer, Schedule

COCO_IMAGES = 118_287  # train2017
STEPS, BATCH, RATE, WARMUP = 130_000, 256, 0.32, 1000
NO_EMA = Ema(decay=0.0)


def coco_mask_rcnn(depth: int = 101) -> DetectConfig:
    """The paper's COCO recipe: Mask R-CNN with a LambdaResNet backbone at 1024x1024 pixels, from scratch.

    - Command: torchrun --nproc-per-node 8 -m lambdanets detect train coco_mask_rcnn --data.path COCO, on one or more
      machines; --model.name lambda_resnet152 for the paper's other backbone.
    - Hardware: the paper used 128 TPUv3 cores with 2 images each. Here any number of GPUs: gradients are accumulated if
      the batch does not fit, and batch norm is synchronised over processes.
    - Expected: in the paper box AP 49.4 (small objects 31.7) and mask AP 43.5 (small 25.9); ResNet-101 with SE
      (--model.name resnet_rs101) has 48.5 (29.9) and 42.8 (24.0). Not reproduced here.

    130,000 steps of 256 images, SGD with momentum 0.9, warmup over 1000 steps from 0 to 0.32, divided by 10 at 90, 95
    and 97.5% of training, weight decay 4e-5, scale jitter of 0.1 to 2.0 and a crop to 1024, flips, synchronised batch
    norm (also in the FPN and the heads, which training from scratch needs). Our choices, not given in the paper:
    no EMA, 4 convolutions in the box head.

    Args:
        depth: depth of the LambdaResNet backbone.

    Example:
        >>> from lambdanets.recipes.coco import coco_mask_rcnn
        >>> coco_mask_rcnn().batch_size
        256
    """
    steps_per_epoch = COCO_IMAGES // BATCH
    return DetectConfig(
        recipe="coco_mask_rcnn",
        out=Path("runs/coco_mask_rcnn"),
        model=ModelConfig(name=f"lambda_resnet{depth}", batch_norm_momentum=0.01),
        heads=Heads(convolutions=4, norm=True),
        data=DetectData(path="coco"),
        jitter=Jitter(scale=(0.1, 2.0), flip=0.5),
        optimizer=Optimizer(momentum=0.9, weight_decay=4e-5),
        schedule=Schedule(
            kind="drops",
            rate=RATE,
            per_batch=BATCH,
            warmup_epochs=WARMUP / steps_per_epoch,
            factor=0.1,
            drops=(0.9, 0.95, 0.975),
        ),
        ema=NO_EMA,
        epochs=STEPS / steps_per_epoch,
        batch_size=BATCH,
        size=1024,
        precision="bfloat16",
        sync_batch_norm=True,
        evaluate_every=10,
        log_every=50,
    )


def coco_one_gpu() -> DetectConfig:
    """COCO recipe for one GPU: the paper's settings with 1/16 of its batch size and learning rate.

    - Command: lambdanets detect train coco_one_gpu --data.path COCO --model.pretrained WEIGHTS
    - Hardware: one GPU with at least 80 GB; smaller GPUs accumulate gradients.
    - Expected: accuracy not measured. 24 epochs are common when starting from classification weights; from scratch use
      the paper's 281 (--epochs 281).

    Batch size 16, warmup over 1000 steps from 0 to 0.02, divided by 10 at 90, 95 and 97.5% of training, weight decay
    4e-5, scale jitter of 0.1 to 2.0.

    Example:
        >>> from lambdanets.recipes.coco import coco_one_gpu
        >>> coco_one_gpu().batch_size
        16
    """
    paper = coco_mask_rcnn(50)
    batch = BATCH // 16
    return replace(
        paper,
        recipe="coco_one_gpu",
        out=Path("runs/coco_one_gpu"),
        batch_size=batch,
        epochs=24.0,
        schedule=replace(paper.schedule, warmup_epochs=WARMUP / (COCO_IMAGES // batch)),
        sync_batch_norm=False,
        evaluate_every=4,
        ema=Ema(decay=0.9998),
    )


def small_set() -> DetectConfig:
    """Recipe for a few hundred images of your own with small objects, starting from classification weights.

    - Command: lambdanets detect train small_set --data.path DATA --model.pretrained WEIGHTS
    - Hardware: one GPU with at least 16 GB.
    - Hours: minutes for a few hundred images.
    - Expected: depends on the dataset. For many objects per image use --heads.detections 300.

    512 pixels, batch size 16, learning rate 0.02, cosine schedule, scale jitter of 0.5 to 2.0, anchors of 16 to 256
    pixels.

    Example:
        >>> from lambdanets.recipes.coco import small_set
        >>> small_set().heads.anchors
        (16.0, 32.0, 64.0, 128.0, 256.0)
    """
    return DetectConfig(
        recipe="small_set",
        out=Path("runs/small_set"),
        model=ModelConfig(name="lambda_resnet50", batch_norm_momentum=0.1),
        heads=Heads(anchors=(16.0, 32.0, 64.0, 128.0, 256.0), canonical=112.0, norm=True, convolutions=4),
        data=DetectData(path="data", cache="memory"),
        jitter=Jitter(scale=(0.5, 2.0), flip=0.5),
        optimizer=Optimizer(momentum=0.9, weight_decay=4e-5),
        schedule=Schedule(kind="cosine", rate=RATE, per_batch=BATCH, warmup_epochs=4.0),
        ema=Ema(decay=0.998),
        clip_norm=10.0,
        epochs=60.0,
        batch_size=16,
        remainder="carry",
        size=512,
        precision="bfloat16",
        evaluate_every=10,
        log_every=10,
    )


def shapes() -> DetectConfig:
    """Demo recipe: Mask R-CNN on generated coloured shapes, a few minutes on two CPU cores.

    - Command: lambdanets detect train
    - Hardware: two CPU cores.
    - Expected: box AP50 0.71, mask AP50 0.69 and mask AP 0.44 on 32 validation images; mask AP50 0.77 on the 64
      training images (one run, seed 0, 320 steps).

    Example:
        >>> from lambdanets.recipes.coco import shapes
        >>> shapes().size
        96
    """
    return DetectConfig(
        recipe="shapes",
        out=Path("runs/shapes"),
        model=ModelConfig(
            name="lambda_resnet_tiny",
            embedding_std=0.1,
            options=("stem='strided'", "widths=(16,32,48,64)", "depths=(1,1,1,1)", "scope=7"),
        ),
        heads=Heads(
            channels=48,
            hidden=128,
            mask_convolutions=2,
            norm=True,
            anchors=(20.0, 34.0, 52.0, 76.0, 100.0),
            ratios=(0.7, 1.0, 1.4),
            canonical=160.0,
            proposals=100,
            sampled=48,
            detections=20,
        ),
        data=DetectData(path="shapes", cache="memory", mean=(0.3, 0.3, 0.3), std=(0.25, 0.25, 0.25)),
        jitter=Jitter(scale=(0.9, 1.1), flip=0.5),
        optimizer=Optimizer(momentum=0.9, weight_decay=1e-4),
        schedule=Schedule(kind="cosine", rate=0.05, per_batch=0, warmup_epochs=3.0),
        ema=Ema(decay=0.99),
        clip_norm=5.0,
        epochs=40.0,
        batch_size=8,
        remainder="carry",
        size=96,
        evaluate_every=10,
        log_every=8,
    )


def debug() -> DetectConfig:
    """Test recipe: a few steps of `shapes` with all features on, to check detection on this machine.

    - Command: lambdanets detect train debug
    - Hardware: any; half a minute on a CPU.

    Example:
        >>> from lambdanets.recipes.coco import debug
        >>> debug().epochs
        1.0
    """
    usual = shapes()
    return replace(
        usual,
        recipe="debug",
        out=Path("runs/debug-detect"),
        model=replace(usual.model, options=(*usual.model.options[:1], "widths=(8,8,16,16)", *usual.model.options[2:])),
        heads=replace(usual.heads, channels=16, hidden=32, convolutions=1, proposals=30, sampled=16),
        size=64,
        epochs=1.0,
        batch_size=8,
        micro_batch=4,
        evaluate_every=1,
        log_every=2,
    )

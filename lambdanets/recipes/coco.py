"""Detection: the paper's setup, versions of it for one GPU, and one for every machine.

Detections per picture are COCO's 100, and so is COCO's maxDets. Pictures with more objects than that (cells, crops,
crowds) need more: `--heads.detections 300`, and then evaluation counts as many.
"""

from dataclasses import replace
from pathlib import Path

from lambdanets.detect.config import DetectConfig, DetectData, Heads, Jitter
from lambdanets.train.config import Ema, ModelConfig, Optimizer, Schedule

COCO_IMAGES = 118_287  # train2017
STEPS, BATCH, RATE, WARMUP = 130_000, 256, 0.32, 1000
NO_EMA = Ema(decay=0.0)


def coco_mask_rcnn(depth: int = 101) -> DetectConfig:
    """The paper's setup: Mask R-CNN on 1024x1024 images, from scratch.

    - Command: torchrun --nproc-per-node 8 -m lambdanets detect train coco_mask_rcnn --data.path COCO, on as many
      machines as there are; --model.name lambda_resnet152 for the other row.
    - Hardware: the paper's was 128 TPUv3 cores, 2 images each. Here as many GPUs as there are: a batch that does not
      fit is accumulated, and batch norm is synchronised over processes.
    - Expected: the paper's box AP 49.4 (small 31.7) and mask AP 43.5 (small 25.9), where ResNet-101 with SE
      (--model.name resnet_rs101) has 48.5 (29.9) and 42.8 (24.0).

    130,000 steps of 256 images, SGD with momentum 0.9, warmup over 1000 steps from 0 to 0.32, divided by 10 at 90, 95
    and 97.5% of training, weight decay 4e-5, scale jitter of 0.1 to 2.0 and a crop to 1024, flips, synchronised batch
    norm (also in pyramid and heads, as training from scratch needs). Where the paper is silent: no average of the
    weights, 4 convolutions in the box head. Detections per image and COCO's maxDets: 100.
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
    """The paper's setup for one GPU, by the linear rule: a sixteenth of its batch, a sixteenth of its learning rate.

    - Command: lambdanets detect train coco_one_gpu --data.path COCO --model.pretrained WEIGHTS
    - Hardware: one GPU of 80 GB or more; smaller ones accumulate gradients.
    - Expected: not measured. With weights for classification 24 epochs are a common length; from scratch it takes the
      paper's 281 (--epochs 281).

    Batch 16, warmup over 1000 steps from 0 to 0.02, drops at 90, 95 and 97.5%, weight decay 4e-5, jitter 0.1 to 2.0.
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
    """A few hundred pictures of your own, small objects, one GPU: from weights for classification.

    - Command: lambdanets detect train small_set --data.path DATA --model.pretrained WEIGHTS
    - Hardware: one GPU of 16 GB or more.
    - Expected: depends on the data; minutes for a few hundred pictures. For many objects in a picture
      --heads.detections 300.

    Canvas 512, batch 16, learning rate 0.02 by the linear rule, cosine, jitter 0.5 to 2.0, anchors of 16 to 256 pixels.
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
    """Coloured shapes that are made from a seed: a detector with masks on two CPU cores, in some minutes.

    - Command: lambdanets detect train
    - Hardware: two CPU cores.
    - Expected: on its 32 validation pictures box AP50 0.71, mask AP50 0.69 and mask AP 0.44 (one run, seed 0); on the
      64 that it learnt from mask AP50 0.77. 320 steps are few: sixteen pictures without jitter are learnt by heart.
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
    """A few steps of `shapes`, with everything on: does detection work on this machine?

    - Command: lambdanets detect train debug
    - Hardware: anything; half a minute.
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

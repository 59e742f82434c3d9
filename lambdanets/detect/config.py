"""Configuration of detectors and their training."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import tyro

from lambdanets.options import check_numbers, optional
from lambdanets.train.config import (
    LARGEST_BATCH,
    ModelConfig,
    RunConfig,
    at_least,
    check_reading,
)
from lambdanets.typed import LARGEST_IMAGE


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Feature pyramid, region proposals, box head and mask head of torchvision, on top of the backbone."""

    channels: int = 256
    """Channels of the feature pyramid and of the convolutions in the heads."""
    hidden: int = 1024
    """Width of the fully connected layers of the box head."""
    convolutions: int = 0
    """Number of 3x3 convolutions in the box head, followed by one fully connected layer; usually 4. 0 uses two
    fully connected layers instead."""
    mask_convolutions: int = 4
    """Number of 3x3 convolutions in the mask head."""
    norm: bool = False
    """Use batch norm in the pyramid, box head and mask head; recommended for training from scratch."""
    anchors: tuple[float, ...] = (32.0, 64.0, 128.0, 256.0, 512.0)
    """Side of the anchors of each of the 5 pyramid levels, in pixels of the resized image; use smaller ones for small
    objects."""
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Aspect ratios (height / width) of the anchors."""
    canonical: float = 224.0
    """Side length of objects that are pooled from the third pyramid level, in pixels of the resized image. Objects of
    half this size are pooled from the second level."""
    proposals: int = 1000
    """Number of region proposals per image; twice as many in training."""
    sampled: int = 512
    """Number of proposals per image that the heads are trained on, at most a quarter of them positive."""
    detections: int = 100
    """Maximum number of detections per image, in prediction and evaluation. COCO uses 100; images with more objects
    need more."""
    least_score: float = 0.05
    """Minimum score of a detection, from 0 to 1."""
    overlap: float = 0.5
    """IoU threshold of non-maximum suppression, per class."""

    def __post_init__(self) -> None:
        at_least(self, 1, "channels", "hidden", "mask_convolutions", "proposals", "sampled", "detections")
        at_least(self, 0, "convolutions")
        for name in ("anchors", "ratios"):
            if not getattr(self, name) or min(getattr(self, name)) <= 0:
                raise ValueError(f"heads.{name} must be numbers above 0, got {getattr(self, name)}")
        for name in ("least_score", "overlap"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"heads.{name} must be between 0 and 1, got {getattr(self, name)}")
        at_least(self, 1, "canonical")
        if len(self.anchors) != 5:
            raise ValueError(f"heads.anchors must have one side for each of the 5 levels, got {len(self.anchors)}")
        most = {"channels": 16_384, "hidden": 65_536, "convolutions": 100, "mask_convolutions": 100}
        most |= {"proposals": 100_000, "sampled": 100_000, "detections": 100_000}
        check_numbers(
            self,
            "heads.",
            anchors=(1e-3, 1e6),
            ratios=(1e-3, 1e3),
            canonical=(1, 1e6),
            **{name: (0, limit) for name, limit in most.items()},
        )


@dataclass(frozen=True, kw_only=True)
class DetectData:
    """Images and annotations."""

    path: str = "shapes"
    """Dataset: a folder with COCO annotations, a COCO file, or "shapes", a synthetic dataset without files."""
    images: Annotated[str | None, optional("PATH")] = None
    """Folder or tar of the images, if data.path is a file or the images are elsewhere."""
    validation: Annotated[str | None, optional("PATH")] = None
    """Dataset to evaluate on; by default the validation split of data.path or, without one, a tenth of the training
    images."""
    validation_images: Annotated[str | None, optional("PATH")] = None
    """Folder or tar of the validation images, if data.validation is a file."""
    masks: Literal["auto", "yes", "no"] = "auto"
    """Whether to train the mask head; auto: if more than half of the annotations have a mask."""
    empty: bool = True
    """Also train on images without objects."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Mean of each channel for normalisation, with pixels in [0, 1]."""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """Standard deviation of each channel for normalisation, with pixels in [0, 1]."""
    workers: Annotated[int | None, optional("N")] = None
    """Worker processes that read images, per training process; by default its share of the cores. 0 reads in the
    training process."""
    cache: Literal["none", "memory"] = "none"
    """memory: decode every image once and keep its pixels in memory; none: decode it every time."""
    max_broken: float = 0.05
    """Stop when more than this fraction of the images is unreadable. Unreadable training images are replaced by others
    and listed in the log."""

    def __post_init__(self) -> None:
        check_reading(self)


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """Random augmentation in training: large-scale jitter and flips."""

    scale: tuple[float, float] = (0.1, 2.0)
    """Range of the random scale: the longer side is resized to --size times this, then cropped to --size."""
    flip: float = 0.5
    """Probability of a horizontal flip."""

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"jitter.scale must be two positive numbers, the smaller one first, got {self.scale}")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"jitter.flip must be between 0 and 1, got {self.flip}")
        check_numbers(self, "jitter.", scale=(1e-3, 100))


@dataclass(frozen=True, kw_only=True)
class DetectConfig(RunConfig):
    """Configuration of a detector and its training."""

    TASK: ClassVar[str] = "detection"
    COMMAND: ClassVar[str] = "detect train"
    RESUMABLE: ClassVar[frozenset[str]] = RunConfig.RESUMABLE | {
        *("data.path", "data.validation", "data.workers", "data.cache", "data.max_broken")
    }
    PER_MACHINE: ClassVar[frozenset[str]] = RunConfig.PER_MACHINE | {
        *("model.pretrained", "data.path", "data.images", "data.validation", "data.validation_images"),
        *("data.workers", "data.cache"),
    }

    recipe: Annotated[str, tyro.conf.Suppress] = "custom"
    """Name of the recipe."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The backbone network."""
    heads: Heads = Heads()
    data: DetectData = DetectData()
    jitter: Jitter = field(default_factory=Jitter)
    size: int = 1024
    """Image size in training and evaluation: the longer side is resized to this many pixels, and images are padded to a
    square. Any number works; multiples of 32 are the most efficient."""
    evaluate_batch: int = 8
    """Batch size of evaluation, per process."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 32, "size")
        at_least(self, 1, "evaluate_batch")
        check_numbers(self, size=(32, LARGEST_IMAGE), evaluate_batch=(1, LARGEST_BATCH))

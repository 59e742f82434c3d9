"""What a detector and its training are, as data."""

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
    """What stands on the backbone: torchvision's feature pyramid, region proposals, box head and mask head."""

    channels: int = 256
    """Of the pyramid and of the convolutions in the heads."""
    hidden: int = 1024
    """Of the box head's fully connected layers."""
    convolutions: int = 0
    """3x3 convolutions in the box head: 4, then one fully connected layer; 0: none, and two of them."""
    mask_convolutions: int = 4
    """3x3 convolutions in the mask head."""
    norm: bool = False
    """Batch norm in pyramid, box head and mask head: for training from scratch."""
    anchors: tuple[float, ...] = (32.0, 64.0, 128.0, 256.0, 512.0)
    """The side of the anchors of each level, in pixels of the canvas: small objects need small ones."""
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Height / width of anchors."""
    canonical: float = 224.0
    """Objects of this side are pooled from the third level, half as large ones from the second."""
    proposals: int = 1000
    """That the region proposals hand on, for each picture."""
    sampled: int = 512
    """Proposals of a picture that the heads are trained on; a quarter of them objects."""
    detections: int = 100
    """The most that are found in a picture. COCO's own number; dense pictures need more. Evaluation counts as many."""
    least_score: float = 0.05
    """Below it nothing is reported."""
    overlap: float = 0.5
    """Of two boxes of one class that overlap more (intersection over union), the better one stays."""

    def __post_init__(self) -> None:
        at_least(self, 1, "channels", "hidden", "mask_convolutions", "proposals", "sampled", "detections")
        at_least(self, 0, "convolutions")
        for name in ("anchors", "ratios"):
            if not getattr(self, name) or min(getattr(self, name)) <= 0:
                raise ValueError(f"heads.{name} are numbers above 0, not {getattr(self, name)}")
        for name in ("least_score", "overlap"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"heads.{name} is between 0 and 1, not {getattr(self, name)}")
        at_least(self, 1, "canonical")
        if len(self.anchors) != 5:
            raise ValueError(f"heads.anchors has one side for each of the 5 levels, not {len(self.anchors)}")
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
    """The pictures."""

    path: str = "shapes"
    """A folder with COCO annotations, a COCO file, or "shapes": a set that is made from a seed."""
    images: Annotated[str | None, optional("PATH")] = None
    """The folder or tar of pictures, if `path` is a file or they are elsewhere."""
    validation: Annotated[str | None, optional("PATH")] = None
    """Pictures to evaluate on, if they are elsewhere; by default those of `path`."""
    validation_images: Annotated[str | None, optional("PATH")] = None
    """The folder or tar of their pictures, if `validation` is a file."""
    masks: Literal["auto", "yes", "no"] = "auto"
    """Whether outlines are learnt; auto: if most of the annotations have one."""
    empty: bool = True
    """Also train on pictures without any object."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Subtracted from each channel of pixels in [0, 1]."""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """What each channel is divided by."""
    workers: Annotated[int | None, optional("N")] = None
    """Processes of each training process that read pictures; by default its share of the cores; 0: none."""
    cache: Literal["none", "memory"] = "none"
    """memory: decode every picture once and keep its pixels."""
    max_broken: float = 0.05
    """The fraction of unreadable pictures that stops the run; below it they are replaced, counted and named."""

    def __post_init__(self) -> None:
        check_reading(self)


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """What is changed at random in training."""

    scale: tuple[float, float] = (0.1, 2.0)
    """The longer side becomes the canvas times a number from here; what is too large is cropped."""
    flip: float = 0.5
    """The probability of a mirror image."""

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"jitter.scale is two positive numbers, the smaller one first, not {self.scale}")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"jitter.flip is between 0 and 1, not {self.flip}")
        check_numbers(self, "jitter.", scale=(1e-3, 100))


@dataclass(frozen=True, kw_only=True)
class DetectConfig(RunConfig):
    """A detector of objects."""

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
    """Where the settings come from."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The backbone."""
    heads: Heads = Heads()
    data: DetectData = DetectData()
    jitter: Jitter = field(default_factory=Jitter)
    size: int = 1024
    """The side of the square canvas, in training and evaluation. Any number works, a multiple of 32 best."""
    evaluate_batch: int = 8
    """Pictures at once in evaluation, in each process."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 32, "size")
        at_least(self, 1, "evaluate_batch")
        check_numbers(self, size=(32, LARGEST_IMAGE), evaluate_batch=(1, LARGEST_BATCH))

"""Settings of data augmentation; `transforms` and `batch_augment` apply them."""

from dataclasses import dataclass
from typing import Any, ClassVar

from lambdanets.options import check_numbers

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")


@dataclass(frozen=True)
class Augment:
    """Data augmentation of training images. The defaults are the paper's 90-epoch setup: random crops and flips.

    Example:
        >>> from lambdanets.data.augment import Augment
        >>> digits = Augment(crop_scale=None, padding=2, flip=0.0)
        >>> strong = Augment(randaugment_layers=2, mixup=0.2, cutmix=1.0)
        >>> digits.mixes, strong.mixes
        (False, True)
    """

    crop_scale: tuple[float, float] | None = (0.08, 1.0)
    """Smallest and largest area of the random crop, as fractions of the image; None: resize the whole image."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest aspect ratio (width / height) of the random crop."""
    padding: int = 0
    """Pad the image with this many black pixels on each side and crop it back to the input size at random; for small
    images."""
    flip: float = 0.5
    """Probability of a horizontal flip; use 0 for digits and text."""
    randaugment_layers: int = 0
    """Number of RandAugment operations per image; 2 in the paper's 350-epoch setup. 0: no RandAugment."""
    randaugment_magnitude: int = 10
    """Magnitude of RandAugment, where 10 rotates by 30 degrees and 15 by 45 degrees."""
    randaugment_probability: float = 1.0
    """Probability of each RandAugment operation: 1 in the reference implementation, 0.5 by default in timm."""
    randaugment_cutout: bool = True
    """Include Cutout in RandAugment, as the reference implementation does; timm's list does not have it."""
    interpolation: str = "bicubic"
    """Interpolation of training images: nearest, bilinear, bicubic or lanczos."""
    color_jitter: float = 0.0
    """Strength s of color jitter: brightness, contrast and saturation change by factors from max(0, 1 - s) to 1 + s. 0:
    off. Color jitter, erasing, mixup and cutmix are applied to whole batches on the training device."""
    erasing: float = 0.0
    """Probability of random erasing, which fills a rectangle of 2 to 33% of the image with the mean colour."""
    mixup: float = 0.0
    """Alpha of mixup: images and labels are mixed with a weight from Beta(alpha, alpha), drawn once per micro-batch. 0:
    off."""
    cutmix: float = 0.0
    """Alpha of cutmix: a rectangle from another image is pasted in, with an area from Beta(alpha, alpha), drawn once
    per micro-batch. 0: off."""
    mix_probability: float = 1.0
    """Probability that mixup or cutmix is applied to a micro-batch."""
    cutmix_probability: float = 0.5
    """Probability of cutmix instead of mixup when both are on."""

    # Behaviour of runs that are older than these fields
    WHEN_ABSENT: ClassVar[dict[str, Any]] = {"randaugment_probability": 0.5, "randaugment_cutout": False}

    def __post_init__(self) -> None:
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(f"interpolation must be one of {', '.join(INTERPOLATIONS)}, got {self.interpolation!r}")
        if self.crop_scale is not None and not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError(
                f"crop_scale must be (smallest, largest) with 0 < smallest <= largest <= 1, got {self.crop_scale}"
            )
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1]:
            raise ValueError(
                f"crop_ratio must be (smallest, largest) with 0 < smallest <= largest, got {self.crop_ratio}"
            )
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip must be between 0 and 1, got {self.flip}")
        for name in ("randaugment_probability", "erasing", "mix_probability", "cutmix_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if min(self.padding, self.randaugment_layers, self.randaugment_magnitude) < 0:
            raise ValueError("padding, randaugment_layers and randaugment_magnitude must not be negative")
        most = {"padding": 1024, "randaugment_layers": 100, "randaugment_magnitude": 100}
        most |= {"color_jitter": 10, "mixup": 1000, "cutmix": 1000}
        check_numbers(self, "augment.", crop_ratio=(1e-3, 1e3), **{name: (0, limit) for name, limit in most.items()})

    @property
    def mixes(self) -> bool:
        """Whether mixup or cutmix is on."""
        return self.mix_probability > 0 and (self.mixup > 0 or self.cutmix > 0)

    @property
    def on_batches(self) -> bool:
        """Whether any augmentation is applied to whole batches."""
        return self.color_jitter > 0 or self.erasing > 0 or self.mixes

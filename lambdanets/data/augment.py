"""How training images are varied, as data: `transforms` does it."""

from dataclasses import dataclass
from typing import Any, ClassVar

from lambdanets.options import check_numbers

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")


@dataclass(frozen=True)
class Augment:
    """How training images are varied. The defaults are the paper's 90-epoch setup: random crops and flips."""

    crop_scale: tuple[float, float] | None = (0.08, 1.0)
    """Area of the random crop, as a part of the image's; None: the whole image, resized."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width / height of the random crop."""
    padding: int = 0
    """For small images: a border of so many black pixels, and a random crop of the input size out of the whole."""
    flip: float = 0.5
    """Chance of a left-right mirror image: 0 for digits and text."""
    randaugment_layers: int = 0
    """RandAugment operations applied to each image; the paper's 350-epoch setup has 2."""
    randaugment_magnitude: int = 10
    """Strength, on the level / 10 scale: 10 rotates by 30 degrees, 15 by 45."""
    randaugment_probability: float = 1.0
    """Probability that a layer is applied. The reference implementation applies every layer; timm's default is 0.5."""
    randaugment_cutout: bool = True
    """Include Cutout, the 16th operation of the reference implementation, which timm's list does not have."""
    interpolation: str = "bicubic"
    color_jitter: float = 0.0
    """Strength s of random changes of brightness, contrast and saturation, with factors from max(0, 1 - s) to 1 + s.
    This and the settings below are applied to whole batches on the training device; 0: off."""
    erasing: float = 0.0
    """Probability of random erasing: a rectangle of 2 to 33% of the image is filled with the mean colour."""
    mixup: float = 0.0
    """Mixup: two images and their labels are mixed in a proportion from Beta(mixup, mixup), one per micro-batch."""
    cutmix: float = 0.0
    """Cutmix: a rectangle of another image replaces its area's share of image and label, drawn from
    Beta(cutmix, cutmix), one per micro-batch."""
    mix_probability: float = 1.0
    """Probability that a micro-batch is mixed at all, where mixup or cutmix is on."""
    cutmix_probability: float = 0.5
    """Probability of cutmix instead of mixup, where both are on."""

    # What runs did before these fields existed.
    WHEN_ABSENT: ClassVar[dict[str, Any]] = {"randaugment_probability": 0.5, "randaugment_cutout": False}

    def __post_init__(self) -> None:
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(f"no interpolation {self.interpolation!r}: there are {', '.join(INTERPOLATIONS)}")
        if self.crop_scale is not None and not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError(f"crop_scale is two numbers, 0 < smallest <= largest <= 1, not {self.crop_scale}")
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1]:
            raise ValueError(f"crop_ratio is two numbers, 0 < smallest <= largest, not {self.crop_ratio}")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip is a chance between 0 and 1, not {self.flip}")
        for name in ("randaugment_probability", "erasing", "mix_probability", "cutmix_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is between 0 and 1, not {getattr(self, name)}")
        if min(self.padding, self.randaugment_layers, self.randaugment_magnitude) < 0:
            raise ValueError("padding, randaugment_layers and randaugment_magnitude are not negative")
        most = {"padding": 1024, "randaugment_layers": 100, "randaugment_magnitude": 100}
        most |= {"color_jitter": 10, "mixup": 1000, "cutmix": 1000}
        check_numbers(self, "augment.", crop_ratio=(1e-3, 1e3), **{name: (0, limit) for name, limit in most.items()})

    @property
    def mixes(self) -> bool:
        """Whether images of a batch are mixed with each other."""
        return self.mix_probability > 0 and (self.mixup > 0 or self.cutmix > 0)

    @property
    def on_batches(self) -> bool:
        """Whether anything is applied to whole batches."""
        return self.color_jitter > 0 or self.erasing > 0 or self.mixes

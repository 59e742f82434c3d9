"""Preprocessing of evaluation images. Weight files store it in their header."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from lambdanets.typed import Bounds, Side, check_fields

Mean = Annotated[float, Bounds(-1e3, 1e3)]
Std = Annotated[float, Bounds(1e-6, 1e3)]
Crop = Annotated[float, Bounds(0.01, 1)]


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing of evaluation images: apply the EXIF orientation, resize the short side to size / crop, crop the
    centre, normalise with (x - mean) / std for pixels in [0, 1].

    Example:
        >>> from lambdanets.data.preprocessing import Preprocessing
        >>> digits = Preprocessing(mean=(0.13,), std=(0.31,), size=28, crop=1.0)
    """

    mean: tuple[Mean, ...] = (0.485, 0.456, 0.406)
    std: tuple[Std, ...] = (0.229, 0.224, 0.225)
    size: Side | tuple[Side, Side] = 224
    crop: Crop = 0.875
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bicubic"
    exif_orientation: bool = True

    # Older weights were trained without the EXIF orientation
    WHEN_ABSENT: ClassVar[dict[str, Any]] = {"exif_orientation": False}

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.mean or len(self.mean) != len(self.std):
            raise ValueError(f"mean and std must have one number for each channel, got {self.mean} and {self.std}")

"""How an image becomes an input of a network, as data. Weights say it in their header."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from lambdanets.typed import Bounds, Side, check_fields

Mean = Annotated[float, Bounds(-1e3, 1e3)]
Std = Annotated[float, Bounds(1e-6, 1e3)]
Crop = Annotated[float, Bounds(0.01, 1)]


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes an input: turn it as its EXIF orientation says, resize the short side to size / crop, crop
    the centre, (x - mean) / std."""

    mean: tuple[Mean, ...] = (0.485, 0.456, 0.406)
    std: tuple[Std, ...] = (0.229, 0.224, 0.225)
    size: Side | tuple[Side, Side] = 224
    crop: Crop = 0.875
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bicubic"
    exif_orientation: bool = True

    # Weights from before this field were trained and used without it.
    WHEN_ABSENT: ClassVar[dict[str, Any]] = {"exif_orientation": False}

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.mean or len(self.mean) != len(self.std):
            raise ValueError(f"mean and std must have one number for each channel, got {self.mean} and {self.std}")

"""What co-training is, as data."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from lambdanets.options import check_numbers, optional
from lambdanets.train.config import TrainConfig

if TYPE_CHECKING:
    from lambdanets.pseudo.cotrain import CoTrain


@dataclass(frozen=True, kw_only=True)
class PseudoData:
    """The pseudo-labelled images."""

    path: Path = Path("pseudo")
    """The folder that `lambdanets pseudo label` wrote."""
    images: Annotated[str | None, optional("PATH")] = None
    """The images themselves, if they are no longer where they were labelled."""
    ratio: float = 1.0
    """Pseudo-labelled images for each labelled one, in every step. batch_size counts both."""
    weight: float = 1.0
    """Of the loss of a pseudo-labelled image; the loss of a step is the sum over all images / batch_size."""
    labelled_weight: float = 1.0
    """Of the loss of a labelled image."""
    soft: bool = False
    """Learn the teacher's probabilities instead of its best class; needs labels made with --soft."""
    epoch: Literal["longer", "labelled", "pseudo"] = "longer"
    """Whose images an epoch goes through once; those of the other kind come round at their own pace. longer: those that
    take more steps, so that an epoch uses all images of both kinds at least once."""

    def __post_init__(self) -> None:
        if self.ratio <= 0:
            raise ValueError(f"pseudo.ratio is more than 0, not {self.ratio}: without pseudo-labels use another recipe")
        check_numbers(self, "pseudo.", ratio=(1e-6, 1e6), weight=(0, 1e6), labelled_weight=(0, 1e6))


@dataclass(frozen=True, kw_only=True)
class CoTrainConfig(TrainConfig):
    """A classifier of images that learns from pseudo-labelled ones as well."""

    TASK: ClassVar[str] = "co-training"
    RESUMABLE: ClassVar[frozenset[str]] = TrainConfig.RESUMABLE | {
        "pseudo.images",
        "pseudo.epoch",  # the number of steps says whether epochs are the same
    }
    PER_MACHINE: ClassVar[frozenset[str]] = TrainConfig.PER_MACHINE | {"pseudo.path", "pseudo.images"}

    pseudo: PseudoData = PseudoData()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.augment.on_batches:
            raise ValueError(
                "co-training has no color_jitter, erasing, mixup and cutmix, which would mix labels of two kinds: set "
                "them to 0"
            )
        if self.data.first_size is not None:
            raise ValueError("co-training has no progressive resizing: leave data.first_size out")

    def make_task(self) -> "CoTrain":
        from lambdanets.pseudo.cotrain import CoTrain

        return CoTrain(self)

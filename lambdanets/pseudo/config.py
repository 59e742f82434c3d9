"""Configurations of co-training and distillation."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from lambdanets.options import check_image_size, check_numbers, optional
from lambdanets.train.config import TrainConfig

if TYPE_CHECKING:
    from lambdanets.pseudo.cotrain import CoTrain
    from lambdanets.pseudo.distill import Distill, Relabelled


@dataclass(frozen=True, kw_only=True)
class PseudoData:
    """The pseudo-labelled images and their part in the loss."""

    path: Path = Path("pseudo")
    """The folder that `lambdanets pseudo label` wrote."""
    images: Annotated[str | None, optional("PATH")] = None
    """The folder or files of the images, if they were moved after labelling; by default where they were labelled."""
    ratio: float = 1.0
    """Number of pseudo-labelled images per labelled image in each batch; batch_size counts both."""
    weight: float = 1.0
    """Weight of the loss of each pseudo-labelled image. The loss of a step is the weighted sum / batch_size."""
    labelled_weight: float = 1.0
    """Weight of the loss of each labelled image."""
    soft: bool = False
    """Train on the teacher's probabilities instead of its top class; needs labels made with --soft."""
    epoch: Literal["longer", "labelled", "pseudo"] = "longer"
    """The images that define an epoch: one pass over the labelled or the pseudo-labelled (pseudo) images. longer:
    whichever takes more steps, so that an epoch uses every image of both kinds at least once."""

    def __post_init__(self) -> None:
        if self.ratio <= 0:
            raise ValueError(
                f"pseudo.ratio must be more than 0, got {self.ratio}: use another recipe without pseudo-labels"
            )
        check_numbers(self, "pseudo.", ratio=(1e-6, 1e6), weight=(0, 1e6), labelled_weight=(0, 1e6))


@dataclass(frozen=True, kw_only=True)
class CoTrainConfig(TrainConfig):
    """Configuration of an image classifier that trains on labelled and pseudo-labelled images."""

    TASK: ClassVar[str] = "co-training"
    RESUMABLE: ClassVar[frozenset[str]] = TrainConfig.RESUMABLE | {
        "pseudo.images",
        "pseudo.epoch",  # a resumed run compares the number of steps instead
    }
    PER_MACHINE: ClassVar[frozenset[str]] = TrainConfig.PER_MACHINE | {"pseudo.path", "pseudo.images"}

    pseudo: PseudoData = PseudoData()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.augment.on_batches:
            raise ValueError(
                "co-training does not support color_jitter, erasing, mixup and cutmix, which would mix labelled and "
                "pseudo-labelled images: set them to 0"
            )
        if self.data.first_size is not None:
            raise ValueError("co-training does not support progressive resizing: remove data.first_size")

    def make_task(self) -> "CoTrain":
        from lambdanets.pseudo.cotrain import CoTrain

        return CoTrain(self)


@dataclass(frozen=True, kw_only=True)
class OnlineTeacher:
    """The network that labels every batch while the student trains."""

    weights: str = "teacher.safetensors"
    """The teacher: a run folder, a .safetensors file, a model folder, `NAME@WEIGHTS`, `timm:NAME@FILE` or
    `torchvision:NAME@FILE`; the probabilities of several, separated by commas, are averaged."""
    class_names: Annotated[str | None, optional("FILE")] = None
    """Class names, for weights that do not store them: a file with one name per line, a dataset, or "imagenet"."""
    size: Annotated[int | None, optional("PIXELS")] = None
    """Resize the student's crops to this size for the teacher; by default the teacher sees the crops as they are."""
    temperature: float = 1.0
    """Divide the logits of teacher and student by this before the softmax."""
    weight: float = 1.0
    """Weight of the teacher's loss for images that have a label; the loss of the label has weight 1 - this. 1 ignores
    all labels. Images without a label always use only the teacher's loss."""

    def __post_init__(self) -> None:
        check_image_size(self.size, "teacher.size")
        check_numbers(self, "teacher.", temperature=(0.01, 100), weight=(0, 1))


@dataclass(frozen=True, kw_only=True)
class DistillConfig(TrainConfig):
    """Configuration of an image classifier that trains on the predictions of a teacher for the same crops."""

    TASK: ClassVar[str] = "distillation"
    PER_MACHINE: ClassVar[frozenset[str]] = TrainConfig.PER_MACHINE | {"teacher.weights", "teacher.class_names"}
    RESUMABLE: ClassVar[frozenset[str]] = TrainConfig.RESUMABLE | {"teacher.weights", "teacher.class_names"}

    teacher: OnlineTeacher = OnlineTeacher()

    def make_task(self) -> "Distill":
        from lambdanets.pseudo.distill import Distill

        return Distill(self)

    def make_evaluated(self, folder: Path) -> "Relabelled":
        """Return a task with the evaluated images of the run in a folder; it needs no teacher."""
        from lambdanets.models.pretrained import read_card
        from lambdanets.pseudo.distill import Relabelled
        from lambdanets.train.inference.trained import weights_in

        return Relabelled(self, read_card(weights_in(folder, "ema")).class_names)

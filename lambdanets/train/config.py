"""Configuration of a training run: everything that `config.json` contains. `lambdanets.typed` reads and writes it."""

import ast
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from lambdanets.data.augment import Augment
from lambdanets.data.order import Remainder
from lambdanets.data.preprocessing import Preprocessing
from lambdanets.models.config import NetworkConfig
from lambdanets.options import LARGEST, check_image_size, check_numbers, optional
from lambdanets.typed import shown

if TYPE_CHECKING:
    from lambdanets.train.classify import Classify

Precision = Literal["float32", "bfloat16", "float16", "float64"]
LARGEST_BATCH = 2**20


MOST_MINUTES = 10_080  # a week


def at_least(config: object, least: int, *names: str) -> None:
    for name in names:
        if not getattr(config, name) >= least:  # nor NaN
            raise ValueError(f"{name} must be at least {least}, got {getattr(config, name)}")


def check_reading(data: Any) -> None:
    """Check the settings that all image datasets share."""
    check_numbers(data, "data.", workers=(0, 1024), max_broken=(0, 1))


# Arguments of `create_model` that have their own option or follow from the data
ELSEWHERE = {
    "features_only": "training sets it",
    "in_chans": "use --data.channels",
    "name": "use --model.name",
    "num_classes": "the number of classes follows from the data",
    "out_indices": "training sets it",
    "pretrained": "use --model.pretrained",
}
LONGEST_OPTION = 1000


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network: a name from `lambdanets models` and changes to its architecture.

    Example:
        >>> from lambdanets.train.config import ModelConfig
        >>> model = ModelConfig(name="resnet50", placement="CCLL", image_size=128, options=("scope=7", "heads=8"))
        >>> model.row().image_size
        128
        >>> model.size
        128
    """

    name: str = "lambda_resnet50"
    """Name of the network; `lambdanets models` lists them."""
    image_size: Annotated[int | None, optional("PIXELS")] = None
    """Image size in pixels for training and evaluation; by default the network's native size."""
    pretrained: Annotated[str | None, optional("WEIGHTS")] = None
    """Start from weights: a safetensors file, a folder that save_pretrained wrote, an id on the hub, or "packaged" for
    those that come with lambdanets."""
    placement: Annotated[str | None, optional("CCLL")] = None
    """One letter per stage: L for lambda layers, C for convolutions; by default the network's own placement."""
    layer: Annotated[str | None, optional("LAYER")] = None
    """Layer type of the L stages: lambda (default), axial_attention and others; docs/layers.md lists them."""
    embedding_std: Annotated[float | Literal["unit"] | None, optional("STD")] = None
    """Standard deviation of the initial position embeddings; by default 1, as in the paper. Short schedules train
    faster with 0.02, or with unit, which gives the position part of each layer's output a variance of 1."""
    drop_rate: float = 0.0
    """Dropout probability before the classifier."""
    drop_path_rate: float = 0.0
    """Stochastic depth rate of the last block; the rate grows linearly from 0 at the first block."""
    batch_norm_momentum: float = 0.1
    """Batch norm momentum as PyTorch defines it (1 - decay). The paper's decay of 0.9999 is 0.0001 here; use it only
    for runs of more than 20,000 steps."""
    freeze: Annotated[str | None, optional("PART")] = None
    """Part of the network to freeze: features (everything except the classifier), stem, or a stage such as layer2,
    which freezes the stem and all stages up to it. Batch norm in frozen parts uses its running statistics."""
    grad_checkpointing: bool = False
    """Use gradient checkpointing: recompute activations in the backward pass, which saves memory and takes longer."""
    options: tuple[str, ...] = ()
    """Other arguments of the network as name=value, for example scope=7 heads=8 se=False."""

    def __post_init__(self) -> None:
        if not 0 < self.batch_norm_momentum <= 1:
            raise ValueError(f"model.batch_norm_momentum must be in (0, 1], got {self.batch_norm_momentum}")
        check_image_size(self.image_size, "model.image_size")
        for word in self.options:
            name, _ = parse_option(word)
            if name in ELSEWHERE:
                raise ValueError(f"model.options cannot contain {name}: {ELSEWHERE[name]}")
        chance = (0, 1 - 1e-6)
        check_numbers(self, "model.", drop_rate=chance, drop_path_rate=chance)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `create_model` other than the name; classes and channels come from the data."""
        given: dict[str, Any] = {"drop_rate": self.drop_rate, "drop_path_rate": self.drop_path_rate}
        for name in ("image_size", "placement", "layer", "embedding_std"):
            if getattr(self, name) is not None:
                given[name] = getattr(self, name)
        return given | dict(parse_option(word) for word in self.options)

    def row(self) -> NetworkConfig:
        """Return the architecture of the network. Raises ValueError for invalid arguments."""
        from lambdanets.models.registry import configure

        try:
            return configure(self.name, **self.arguments())
        except TypeError as error:  # unknown argument
            raise ValueError(f"model.options: {error}") from error

    @property
    def size(self) -> int:
        """Side length of the square images, in pixels."""
        height, width = self.row().image_grid
        if height != width:
            raise ValueError(f"training images are square, but model.options set {height}x{width}")
        return height


def parse_option(word: str) -> tuple[str, Any]:
    """Parse an argument of a network, written as name=value; a value that is not a Python literal stays a string."""
    name, equals, value = word.partition("=")
    if not equals:
        raise ValueError(f"model options must have the form name=value, for example scope=7, got {shown(word)}")
    if len(value) > LONGEST_OPTION:
        raise ValueError(f"the option {name[:40]} has {len(value):,} characters, at most {LONGEST_OPTION} are allowed")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError):
        return name, value
    except (RecursionError, MemoryError):
        raise ValueError(f"the option {name[:40]} is nested too deeply: {value[:40]}...") from None


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The dataset, its preprocessing, and how images are read."""

    path: str = "mnist"
    """Dataset: a folder with one folder per class (or with train/ and val/ inside), .tar shards, a .csv list, idx
    files, or mnist, a set of 5,000 digits that comes with the package."""
    validation: Annotated[str | None, optional("PATH")] = None
    """Validation dataset, if it is not in --data.path."""
    held_out: float = 0.0
    """Fraction of the training images to hold out for model selection and early stopping; the paper uses 0.02."""
    channels: Literal[1, 3] = 3
    """Number of input channels: 3 for RGB, 1 for greyscale."""
    test_size: Annotated[int | None, optional("PIXELS")] = None
    """Image size for evaluation, stored with the weights; by default the training size. A larger size is often more
    accurate. Layers with a global scope do not support it."""
    first_size: Annotated[int | None, optional("PIXELS")] = None
    """Progressive resizing: image size of the first epoch. It grows to model.image_size in multiples of 16. Batches are
    resized on the device, which makes the network faster but not the reading of images."""
    growing: float = 0.75
    """With first_size: fraction of the run during which the image size grows."""
    crop: float = 0.875
    """Crop ratio of evaluation: the short side is resized to size / crop, then the centre is cropped."""
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    """Mean of each channel, for pixels in [0, 1]."""
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    """Standard deviation of each channel, for pixels in [0, 1]."""
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bicubic"
    """Interpolation of evaluation images."""
    exif_orientation: bool = True
    """Apply the EXIF orientation of photographs, in training and evaluation."""
    workers: Annotated[int | None, optional("N")] = None
    """Worker processes that read images, per training process; by default its share of the CPU cores. 0: no workers."""
    cache: Literal["auto", "none", "memory", "device"] = "auto"
    """Where to keep decoded images. device: on the training device, which also augments them; memory: in RAM; none:
    decode them in every epoch. auto: device on a GPU if the images take at most a quarter of its free memory, otherwise
    none. The start of the log shows the choice."""
    max_broken: float = 0.05
    """Stop the run if more than this fraction of the images is unreadable. Unreadable images below this limit are
    replaced and logged."""

    # Behaviour of runs that are older than these fields
    WHEN_ABSENT: ClassVar[dict[str, Any]] = {"exif_orientation": False, "cache": "none"}

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise ValueError(f"data.held_out must be at least 0 and below 1, got {self.held_out}")
        check_image_size(self.test_size, "data.test_size")
        check_image_size(self.first_size, "data.first_size")
        if not 0 < self.growing <= 1:
            raise ValueError(f"data.growing must be in (0, 1], got {self.growing}")
        if not 0 < self.crop <= 1:
            raise ValueError(f"data.crop must be in (0, 1], got {self.crop}")
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise ValueError(
                f"data.mean and data.std must have one number for each of {self.channels} channels, "
                f"got {self.mean} and {self.std}"
            )
        check_reading(self)

    def preprocessing(self, size: int) -> Preprocessing:
        return Preprocessing(self.mean, self.std, size, self.crop, self.interpolation, self.exif_orientation)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimiser. Weight decay is not applied to batch norm parameters and biases."""

    kind: Literal["sgd", "rmsprop", "adamw", "lamb", "muon"] = "sgd"
    """sgd and rmsprop add L2 weight decay to the gradient; adamw uses decoupled weight decay. rmsprop follows
    TensorFlow (epsilon inside the square root). lamb scales the update of each tensor to the norm of its weights and is
    meant for very large batches. muon orthogonalises the updates of weight matrices, at learning rates similar to
    adamw, which updates all other parameters."""
    momentum: float = 0.9
    """Momentum of SGD, RMSProp and Muon, beta1 of AdamW and LAMB; usually 0.95 for Muon."""
    weight_decay: float = 1e-4
    """Weight decay of weights and position embeddings."""
    nesterov: bool = False
    """Use Nesterov momentum (SGD and Muon)."""
    alpha: float = 0.9
    """Decay of the running average of squared gradients: alpha of RMSProp, beta2 of AdamW, LAMB and Muon (usually 0.99
    or more)."""
    eps: float = 1e-3
    """Epsilon of RMSProp, AdamW, LAMB and Muon; usually 1e-8 for AdamW and Muon and 1e-6 for LAMB."""
    layer_decay: float = 1.0
    """Layer-wise learning-rate decay for fine-tuning: the learning rate is multiplied by this factor per block, from
    the classifier (full rate) down to the stem. 1: no decay; usually 0.65 to 0.9."""

    def __post_init__(self) -> None:
        for name in ("momentum", "alpha"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} must be at least 0 and below 1, got {getattr(self, name)}")
        at_least(self, 0, "weight_decay", "eps")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"optimizer.layer_decay must be in (0, 1], got {self.layer_decay}")
        check_numbers(self, "optimizer.")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning-rate schedule: linear warmup, then one of several decays."""

    kind: Literal["cosine", "flat_cosine", "exponential", "drops", "constant"] = "cosine"
    """Decay after the warmup. cosine: to 0; flat_cosine: constant until `flat`, then cosine; exponential: multiply by
    `factor` every `every` epochs; drops: multiply by `factor` at each of `drops`; constant: none."""
    rate: float = 0.1
    """Peak learning rate for a batch of `per_batch` images."""
    per_batch: int = 256
    """Scale the peak learning rate with the batch size: rate * batch_size / per_batch. 0: no scaling."""
    warmup_epochs: float = 5.0
    """Epochs of linear warmup from 0."""
    factor: float = 0.99
    """exponential and drops: factor of each decay."""
    every: float = 3.0
    """exponential: epochs between decays."""
    drops: tuple[float, ...] = (0.9, 0.95, 0.975)
    """drops: when the learning rate decays, as fractions of the run."""
    flat: float = 0.75
    """flat_cosine: when the cosine begins, as a fraction of the run."""

    def __post_init__(self) -> None:
        for name in ("rate", "factor", "every"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"schedule.{name} must be finite and above 0, got {getattr(self, name)}")
        at_least(self, 0, "per_batch", "warmup_epochs")
        if not all(0 < drop < 1 for drop in self.drops):
            raise ValueError(f"schedule.drops must be fractions of the run between 0 and 1, got {self.drops}")
        check_numbers(self, "schedule.", factor=(0, 1), every=(1e-6, LARGEST), flat=(0, 1))

    def peak(self, batch_size: int) -> float:
        return self.rate * batch_size / self.per_batch if self.per_batch else self.rate


@dataclass(frozen=True, kw_only=True)
class Ema:
    """The exponential moving average (EMA) of the weights, which is evaluated and saved."""

    decay: float = 0.9999
    """Decay of the average per step. 0: no averaging."""
    warmup: bool = True
    """Limit the decay to (1 + t) / (10 + t) at step t."""
    horizon: float = 0.1
    """Limit the averaging window, 1 / (1 - decay) steps, to this fraction of the run, so that short runs do not average
    in the initial weights. 0: no limit."""
    recalibrate: int = 0
    """Recompute the batch norm statistics of the averaged weights before each evaluation, over this many training
    batches of each process (for example 100). 0: use the statistics of the raw weights."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"ema.decay must be at least 0 and below 1, got {self.decay}")
        if self.recalibrate and not self.decay:
            raise ValueError("ema.recalibrate needs averaged weights: set ema.decay as well, for example to 0.999")
        check_numbers(self, "ema.", horizon=(0, LARGEST), recalibrate=(0, 1_000_000))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of the training loop that all tasks share. The configuration of each task derives from this class."""

    TASK: ClassVar[str] = "custom"
    """Name of the task in config.json."""
    COMMAND: ClassVar[str] = ""
    """`lambdanets COMMAND resume RUN` resumes a run of this task; "" if no command does."""
    RESUMABLE: ClassVar[frozenset[str]] = frozenset(
        {
            "out",
            "micro_batch",
            "device",
            "compile",
            "capture",
            "channels_last",
            "evaluate_every",
            "log_every",
            "keep_best",
            "logger",
        }
        | {"checkpoint_minutes", "keep", "max_skipped", "timeout_minutes"}
    )
    """Settings that may change when a run resumes: paths, and settings that do not change the result."""
    PER_MACHINE: ClassVar[frozenset[str]] = frozenset({"out", "device", "timeout_minutes"})
    """Settings that may differ between the processes of a run: paths and resources of a machine."""

    out: Path = Path("runs/train")
    """Folder of the run: configuration, log, checkpoints, weights and report."""
    epochs: float = 90.0
    """Number of epochs; fractions are allowed."""
    batch_size: int = 256
    """Global batch size: images per step, over all processes and micro-batches."""
    remainder: Remainder = "drop"
    """What to do with images that do not fill the last batch of an epoch. drop: skip them in this epoch; carry: fill
    the batch with images of the next epoch, so that every epoch uses every image."""
    micro_batch: Annotated[int | None, optional("IMAGES")] = None
    """Images per forward pass of a process; gradients are accumulated over the micro-batches of a step. By default the
    largest size that fits into memory: the first step halves it while memory runs out. Batch norm uses the statistics
    of the micro-batch."""
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    ema: Ema = Ema()
    clip_norm: float = 0.0
    """Clip gradients to this norm; 0 disables clipping."""
    precision: Precision = "float32"
    """Autocast dtype of the computation. Weights stay in float32; float64 uses float64 throughout; float16 uses loss
    scaling."""
    device: Annotated[str | None, optional("DEVICE")] = None
    """Device: cpu or cuda; by default a GPU if there is one."""
    compile: bool = False
    """Use torch.compile: faster steps after a few minutes of compilation at the start."""
    capture: Literal["auto", "on", "off"] = "auto"
    """Record the training step as a CUDA graph and replay it, which removes launch overhead of small networks. on: fail
    if a step cannot be captured; auto: currently the same as off."""
    channels_last: bool = True
    """Use the channels-last memory format."""
    sync_batch_norm: bool = False
    """Compute batch norm statistics over all processes."""
    seed: int = 0
    """Random seed of weights, data order, augmentation and dropout."""
    evaluate_every: int = 1
    """Epochs between evaluations; the end of the run is always evaluated."""
    early_stopping: int = 0
    """Stop after this many evaluations without improvement and keep the best weights. 0: no early stopping."""
    keep_best: bool = False
    """Also write best.safetensors, the weights of the best evaluation. Early stopping implies it."""
    log_every: int = 50
    """Steps between log records."""
    logger: Literal["tensorboard", "wandb", "trackio", "none"] = "tensorboard"
    """Where to send metrics: tensorboard writes files into the folder of the run; wandb and trackio must be installed.
    log.jsonl is always written."""
    checkpoint_minutes: float = 10.0
    """Minutes between checkpoints. A checkpoint is also written on Ctrl-C, on SIGTERM and at the end."""
    keep: int = 2
    """Number of checkpoints to keep."""
    max_skipped: int = 20
    """Stop after this many consecutive steps with a non-finite loss or gradient."""
    timeout_minutes: float = 10.0
    """With several processes: stop if another process does not respond for this many minutes."""

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "evaluate_every", "log_every", "keep", "max_skipped")
        at_least(self, 0, "clip_norm", "checkpoint_minutes", "early_stopping")
        if not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs must be finite and above 0, got {self.epochs}")
        if not 0 < self.timeout_minutes <= MOST_MINUTES:
            raise ValueError(f"timeout_minutes must be above 0 and at most {MOST_MINUTES}, got {self.timeout_minutes}")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ValueError(f"micro_batch must be at least 1, got {self.micro_batch}")
        check_numbers(
            self,
            epochs=(0, 1_000_000),
            batch_size=(1, LARGEST_BATCH),
            micro_batch=(1, LARGEST_BATCH),
            log_every=(1, 1_000_000),  # memory and checkpoints hold the skipped steps since the last log record
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """Configuration of image classification training. Recipes return it; `lambdanets.train.loop.fit` takes it.

    The fields of `RunConfig` are part of it. All fields are options of `lambdanets train`.

    Example:
        >>> from dataclasses import replace
        >>> from lambdanets.recipes import imagenette
        >>> config = imagenette()
        >>> config = replace(config, epochs=60.0, data=replace(config.data, path="pets"))
        >>> config.schedule.peak(config.batch_size)
        0.1
    """

    TASK: ClassVar[str] = "classification"
    COMMAND: ClassVar[str] = "train"
    RESUMABLE: ClassVar[frozenset[str]] = RunConfig.RESUMABLE | {
        *("data.path", "data.validation", "data.workers", "data.cache", "data.max_broken")
    }
    PER_MACHINE: ClassVar[frozenset[str]] = RunConfig.PER_MACHINE | {
        *("model.pretrained", "data.path", "data.validation", "data.workers", "data.cache")
    }

    recipe: Annotated[str, tyro.conf.Suppress] = "custom"
    """Name of the recipe."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    augment: Augment = field(default_factory=Augment)
    label_smoothing: float = 0.1
    """Label smoothing: this fraction of the target is spread evenly over all classes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}")

    def make_task(self) -> "Classify":
        """Return the task of this configuration. Opens the dataset."""
        from lambdanets.train.classify import Classify

        return Classify(self)

    def make_evaluated(self, folder: Path) -> "Classify":
        """Return a task with the evaluated images of the run in a folder."""
        return TrainConfig.make_task(self)

"""What a run does, as data: everything that `config.json` holds. Written and read by `lambdanets.typed`."""

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
            raise ValueError(f"{name} is at least {least}, not {getattr(config, name)}")


def check_reading(data: Any) -> None:
    """What all configurations of images have."""
    check_numbers(data, "data.", workers=(0, 1024), max_broken=(0, 1))


# Arguments of `create_model` that have an option of their own, or follow from the data
ELSEWHERE = {
    "features_only": "training decides it",
    "in_chans": "the channels are those of the data, --data.channels",
    "name": "use --model.name",
    "num_classes": "the classes are those of the data",
    "out_indices": "training decides it",
    "pretrained": "use --model.pretrained",
}
LONGEST_OPTION = 1000


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network: a name of `lambdanets models` and what to change in it."""

    name: str = "lambda_resnet50"
    """One of `lambdanets models`."""
    image_size: Annotated[int | None, optional("PIXELS")] = None
    """The size of the images, in training and evaluation; by default the network's own."""
    pretrained: Annotated[str | None, optional("WEIGHTS")] = None
    """Start from weights: a safetensors file, a folder that save_pretrained wrote, or an id on the hub."""
    placement: Annotated[str | None, optional("CCLL")] = None
    """Which stages have lambda layers (L) and which convolutions (C); by default the network's own."""
    layer: Annotated[str | None, optional("LAYER")] = None
    """What stands where the placement says L: lambda (the default), axial_attention, ..."""
    embedding_std: Annotated[float | Literal["unit"] | None, optional("STD")] = None
    """Standard deviation of new position embeddings, by default the paper's 1; short schedules learn faster with 0.02,
    or with unit, which gives the position part of each layer's output a variance of 1."""
    drop_rate: float = 0.0
    """Dropout before the classifier."""
    drop_path_rate: float = 0.0
    """Stochastic depth of the last block; it grows linearly from 0 in the first."""
    batch_norm_momentum: float = 0.1
    """Torch's: 1 - decay. The paper's decay 0.9999 is 0.0001, and only for more than 20,000 steps."""
    freeze: Annotated[str | None, optional("PART")] = None
    """Parameters that are not trained: features (everything but the classifier), stem, or the stem and all stages up to
    this one (layer1 to layer4 in ResNets). Batch norm in these parts uses its running statistics."""
    grad_checkpointing: bool = False
    """Keep only the input of each block and compute the rest again: less memory, slower."""
    options: tuple[str, ...] = ()
    """Any other argument of the network, as name=value: scope=7 heads=8 scope=(7,7,23,23) se=False ..."""

    def __post_init__(self) -> None:
        if not 0 < self.batch_norm_momentum <= 1:
            raise ValueError(f"model.batch_norm_momentum is in (0, 1], not {self.batch_norm_momentum}")
        check_image_size(self.image_size, "model.image_size")
        for word in self.options:
            name, _ = parse_option(word)
            if name in ELSEWHERE:
                raise ValueError(f"model.options cannot have {name}: {ELSEWHERE[name]}")
        chance = (0, 1 - 1e-6)
        check_numbers(self, "model.", drop_rate=chance, drop_path_rate=chance)

    def arguments(self) -> dict[str, Any]:
        """What `create_model` takes beside the name; classes and channels come from the data."""
        given: dict[str, Any] = {"drop_rate": self.drop_rate, "drop_path_rate": self.drop_path_rate}
        for name in ("image_size", "placement", "layer", "embedding_std"):
            if getattr(self, name) is not None:
                given[name] = getattr(self, name)
        return given | dict(parse_option(word) for word in self.options)

    def row(self) -> NetworkConfig:
        """The network as data, its arguments checked."""
        from lambdanets.models.registry import configure

        try:
            return configure(self.name, **self.arguments())
        except TypeError as error:  # an argument that it does not have
            raise ValueError(f"model.options: {error}") from error

    @property
    def size(self) -> int:
        """Pixels of a side."""
        height, width = self.row().image_grid
        if height != width:
            raise ValueError(f"training images are square, but model.options ask for {height}x{width}")
        return height


def parse_option(word: str) -> tuple[str, Any]:
    """An argument of a network from a command line; what is no Python value is a text."""
    name, equals, value = word.partition("=")
    if not equals:
        raise ValueError(f"options of a network are name=value, for example scope=7, not {shown(word)}")
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
    """The images."""

    path: str = "mnist"
    """A folder of class folders (or with train/ and val/ inside), .tar shards, a .csv list, idx files, or "mnist"."""
    validation: Annotated[str | None, optional("PATH")] = None
    """Validation images, if they are elsewhere."""
    held_out: float = 0.0
    """The fraction of the training images that is kept for choosing and early stopping; the paper's is 0.02."""
    channels: Literal[1, 3] = 3
    """1 keeps grey images grey."""
    test_size: Annotated[int | None, optional("PIXELS")] = None
    """The size of images in evaluation, and in the preprocessing that weights are stored with; by default that of
    training. A larger one often scores better; layers with a global scope cannot have it."""
    first_size: Annotated[int | None, optional("PIXELS")] = None
    """Progressive resizing: the size of training images in the first epoch. It grows to model.image_size in multiples
    of 16. Batches are made smaller on the device, which saves the time of the network and not that of reading."""
    growing: float = 0.75
    """With first_size: the fraction of the run in which images grow."""
    crop: float = 0.875
    """Evaluation resizes the short side to size / crop and cuts out the centre."""
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    """Subtracted from each channel of pixels in [0, 1]."""
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    """What each channel is divided by."""
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bicubic"
    """For resizing."""
    exif_orientation: bool = True
    """Turn photographs as their EXIF orientation says, in training and evaluation."""
    workers: Annotated[int | None, optional("N")] = None
    """Processes of each training process that read images; by default its share of the cores; 0: none."""
    cache: Literal["auto", "none", "memory", "device"] = "auto"
    """device: decode every image once, keep its pixels on the training device, and augment batches there. memory: keep
    them in this machine's memory; none: decode each time; workers augment. auto: device on a GPU, where the images take
    at most a quarter of its free memory; else none. The log says which."""
    max_broken: float = 0.05
    """The fraction of unreadable images that stops the run; below it they are replaced, counted and named."""

    # What runs did before these fields existed.
    WHEN_ABSENT: ClassVar[dict[str, Any]] = {"exif_orientation": False, "cache": "none"}

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise ValueError(f"data.held_out is a fraction, at least 0 and below 1, not {self.held_out}")
        check_image_size(self.test_size, "data.test_size")
        check_image_size(self.first_size, "data.first_size")
        if not 0 < self.growing <= 1:
            raise ValueError(f"data.growing is in (0, 1], not {self.growing}")
        if not 0 < self.crop <= 1:
            raise ValueError(f"data.crop is in (0, 1], not {self.crop}")
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise ValueError(
                f"data.mean {self.mean} and data.std {self.std}: one number for each of {self.channels} channels"
            )
        check_reading(self)

    def preprocessing(self, size: int) -> Preprocessing:
        return Preprocessing(self.mean, self.std, size, self.crop, self.interpolation, self.exif_orientation)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How a gradient becomes a step. Weight decay is L2 in the gradient, and spares batch norm and biases."""

    kind: Literal["sgd", "rmsprop", "adamw", "lamb", "muon"] = "sgd"
    """rmsprop is TensorFlow's: epsilon inside the root, squares that start at 1. adamw uses decoupled weight decay.
    lamb scales the step of each tensor to the norm of its weights: for very large batches. muon orthogonalises the
    steps of kernels and projections, at learning rates like those of adamw, which moves the rest."""
    momentum: float = 0.9
    """Of all kinds; usually 0.95 for Muon."""
    weight_decay: float = 1e-4
    """Position embeddings decay too."""
    nesterov: bool = False
    """SGD and Muon."""
    alpha: float = 0.9
    """RMSProp, AdamW, LAMB and Muon: decay of the mean of squares; except for RMSProp usually 0.99 or more."""
    eps: float = 1e-3
    """RMSProp, AdamW, LAMB and Muon; usually 1e-8 for AdamW and Muon and 1e-6 for LAMB."""
    layer_decay: float = 1.0
    """Layer-wise learning rates, for fine-tuning: each block learns at this fraction of the rate of the next one, the
    classifier at the full rate. 1: all at the same rate; usually 0.65 to 0.9."""

    def __post_init__(self) -> None:
        for name in ("momentum", "alpha"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} is at least 0 and below 1, not {getattr(self, name)}")
        at_least(self, 0, "weight_decay", "eps")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"optimizer.layer_decay is more than 0 and at most 1, not {self.layer_decay}")
        check_numbers(self, "optimizer.")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate of a step."""

    kind: Literal["cosine", "flat_cosine", "exponential", "drops", "constant"] = "cosine"
    """After the warmup: down to 0 by a cosine (flat_cosine: constant until `flat`, then the cosine); times `factor`
    every `every` epochs, or at `drops`; or constant."""
    rate: float = 0.1
    """The peak, for a batch of `per_batch`."""
    per_batch: int = 256
    """The peak is rate * batch_size / per_batch (the paper's 0.1 B / 256); 0: it is `rate` for every batch size."""
    warmup_epochs: float = 5.0
    """Linear from 0."""
    factor: float = 0.99
    """exponential and drops."""
    every: float = 3.0
    """exponential: epochs."""
    drops: tuple[float, ...] = (0.9, 0.95, 0.975)
    """drops: fractions of the run."""
    flat: float = 0.75
    """flat_cosine: fraction of the run after which the rate falls."""

    def __post_init__(self) -> None:
        for name in ("rate", "factor", "every"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"schedule.{name} is more than 0, not {getattr(self, name)}")
        at_least(self, 0, "per_batch", "warmup_epochs")
        if not all(0 < drop < 1 for drop in self.drops):
            raise ValueError(f"schedule.drops are between 0 and 1, fractions of the run, not {self.drops}")
        check_numbers(self, "schedule.", factor=(0, 1), every=(1e-6, LARGEST), flat=(0, 1))

    def peak(self, batch_size: int) -> float:
        return self.rate * batch_size / self.per_batch if self.per_batch else self.rate


@dataclass(frozen=True, kw_only=True)
class Ema:
    """The moving average of the weights that is evaluated and kept."""

    decay: float = 0.9999
    """0: no average."""
    warmup: bool = True
    """The decay of step t is at most (1 + t) / (10 + t)."""
    horizon: float = 0.1
    """1 / (1 - decay) is at most this fraction of the run, or the average would still hold its random start."""
    recalibrate: int = 0
    """Before each evaluation, recompute the running statistics of batch norm for the averaged weights over this many
    training (micro-)batches of each process, for example 100. 0: use those of the weights that are trained."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"ema.decay is at least 0 and below 1, not {self.decay}")
        if self.recalibrate and not self.decay:
            raise ValueError("ema.recalibrate is for averaged weights: set ema.decay as well, for example to 0.999")
        check_numbers(self, "ema.", horizon=(0, LARGEST), recalibrate=(0, 1_000_000))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What the loop needs to know, whatever the task. The configuration of a task derives from this class."""

    TASK: ClassVar[str] = "custom"
    """The key of the task: what config.json says under "task"."""
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
    """Settings that may differ when a run resumes: where things are, and how they are computed or shown."""
    PER_MACHINE: ClassVar[frozenset[str]] = frozenset({"out", "device", "timeout_minutes"})
    """Settings that may differ between the processes of a run: places and resources of a machine."""

    out: Path = Path("runs/train")
    """The folder of the run: configuration, log, checkpoints, weights, report."""
    epochs: float = 90.0
    """Over the training images; fractions too."""
    batch_size: int = 256
    """Images of a step, over all processes and micro-batches."""
    remainder: Remainder = "drop"
    """Images that do not fill the last step of an epoch. drop: they are left out of this epoch (another order leaves
    out others); carry: the step is filled up with the first images of the next epoch, so every epoch uses all."""
    micro_batch: Annotated[int | None, optional("IMAGES")] = None
    """Images that a process takes at once; by default as many as fit: halved on the first step while memory ends.
    The gradients of a step are summed up. Batch norm sees micro-batches."""
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    ema: Ema = Ema()
    clip_norm: float = 0.0
    """Gradients with a larger norm are made as small; 0: none are."""
    precision: Precision = "float32"
    """Of the arithmetic; weights stay in float32 (float64 for that). float16 scales the loss."""
    device: Annotated[str | None, optional("DEVICE")] = None
    """cpu or cuda; by default a GPU if there is one."""
    compile: bool = False
    """torch.compile: minutes at the start, faster steps."""
    capture: Literal["auto", "on", "off"] = "auto"
    """Record a whole training step as a CUDA graph and replay it: for small networks, whose launches take longer than
    their computation. auto: off, until it has been measured; on: an error where it is not possible."""
    channels_last: bool = True
    """Images in memory as GPUs like them."""
    sync_batch_norm: bool = False
    """Batch statistics over all processes."""
    seed: int = 0
    """Of everything: weights, order, augmentation, dropout."""
    evaluate_every: int = 1
    """Epochs; the last one always."""
    early_stopping: int = 0
    """Stop after so many evaluations without a better score, and keep the best weights; 0: keep the last."""
    keep_best: bool = False
    """Write best.safetensors, the weights of the best evaluation; early stopping always does."""
    log_every: int = 50
    """Steps."""
    logger: Literal["tensorboard", "wandb", "trackio", "none"] = "tensorboard"
    """Where curves are drawn: tensorboard writes files into the folder of the run, wandb and trackio are libraries that
    you install and sign in to. log.jsonl is written in any case."""
    checkpoint_minutes: float = 10.0
    """Minutes between checkpoints; there is also one on SIGTERM and at the end."""
    keep: int = 2
    """Checkpoints."""
    max_skipped: int = 20
    """Stop after this many consecutive steps with a non-finite gradient."""
    timeout_minutes: float = 10.0
    """With several processes: stop after waiting this long for another one."""

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "evaluate_every", "log_every", "keep", "max_skipped")
        at_least(self, 0, "clip_norm", "checkpoint_minutes", "early_stopping")
        if not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs is more than 0, not {self.epochs}")
        if not 0 < self.timeout_minutes <= MOST_MINUTES:
            raise ValueError(f"timeout_minutes must be above 0 and at most {MOST_MINUTES}, got {self.timeout_minutes}")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ValueError(f"micro_batch is at least 1, not {self.micro_batch}")
        check_numbers(
            self,
            epochs=(0, 1_000_000),
            batch_size=(1, LARGEST_BATCH),
            micro_batch=(1, LARGEST_BATCH),
            log_every=(1, 1_000_000),  # which steps were skipped since the log is kept in memory and in checkpoints
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """A classifier of images."""

    TASK: ClassVar[str] = "classification"
    COMMAND: ClassVar[str] = "train"
    RESUMABLE: ClassVar[frozenset[str]] = RunConfig.RESUMABLE | {
        *("data.path", "data.validation", "data.workers", "data.cache", "data.max_broken")
    }
    PER_MACHINE: ClassVar[frozenset[str]] = RunConfig.PER_MACHINE | {
        *("model.pretrained", "data.path", "data.validation", "data.workers", "data.cache")
    }

    recipe: Annotated[str, tyro.conf.Suppress] = "custom"
    """Where the settings come from."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    augment: Augment = field(default_factory=Augment)
    label_smoothing: float = 0.1
    """The target is 1 - this for the class, the rest for all classes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing is at least 0 and below 1, not {self.label_smoothing}")

    def make_task(self) -> "Classify":
        """The task that this is the configuration of; it opens the data."""
        from lambdanets.train.classify import Classify

        return Classify(self)

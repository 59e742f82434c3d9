"""Rules that choose the settings of `lambdanets train FOLDER` from the dataset and the machine.

Nothing here reads an image or runs a network: `probe` measures what the rules need. docs/training.md lists the rules.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lambdanets.data.augment import Augment
from lambdanets.data.preprocessing import Preprocessing
from lambdanets.data.split import OWN_HELD_OUT
from lambdanets.report.show import percent, rounded, some
from lambdanets.train.config import DataConfig, Ema, ModelConfig, Optimizer, Schedule, TrainConfig
from lambdanets.typed import from_json, to_json

RECIPE = "own images"
SMALL_SIDE = 40  # images up to this size keep their resolution in the first layers
FEW = 1000  # up to this many images a fifth is held out, otherwise a tenth
IMBALANCE = 3.0  # ratio of largest to smallest class that triggers a warning
MOST_CACHED = 2 * 2**30  # bytes of pixels that may be kept in memory on a CPU
LARGE = 1_000_000  # images with more pixels are kept at a reduced size,
REDUCED = 70_000  # with about this many pixels: 128 / sqrt(0.35) on the short side, 3:2
LOG_SECONDS, MOST_LOGGED = 5.0, 500  # seconds between records of the log, and at most this many steps
EVALUATIONS = 10  # per run
EVALUATED = 0.4  # time per image: evaluation relative to training
SIDED = {"left", "right", "links", "rechts"}  # class names with these words rule out horizontal flips


@dataclass(frozen=True)
class Facts:
    """Properties of the dataset that the rules use."""

    path: str
    class_sizes: tuple[tuple[str, int], ...]  # labelled training images of each class
    short_side: int  # pixels, the median of a sample
    pixels: int  # per image, the median of the sample
    grey: bool = False
    mean: float = 0.5  # of grey images, in [0, 1]
    std: float = 0.25
    validation: int = 0  # labelled validation images

    @property
    def images(self) -> int:
        return sum(count for _, count in self.class_sizes)


@dataclass(frozen=True)
class Machine:
    """Properties of the machine that the rules use."""

    device: Literal["cpu", "cuda"]
    name: str = ""
    cores: int = 1
    memory: int = 2**34  # free bytes of main memory


@dataclass(frozen=True)
class Start:
    """Trained weights to start from.

    Attributes:
        where: a value of `model.pretrained`.
        name: the network.
        arguments: fields of the network that differ from its row, without classes, channels, size and dropout.
        preprocessing: what the weights were trained with.
        resizable: whether the network takes other sizes of images.
        about: accuracy of the weights, for the printed reasons.
    """

    where: str
    name: str
    arguments: Mapping[str, Any]
    preprocessing: Preprocessing
    resizable: bool = True
    about: str = ""

    @property
    def size(self) -> int:
        size = self.preprocessing.size
        return size if isinstance(size, int) else min(size)


@dataclass(frozen=True)
class Reason:
    """A choice and its reason."""

    setting: str
    choice: str
    why: str

    def __str__(self) -> str:
        return f"{self.setting:<16}{self.choice}: {self.why}"


@dataclass(frozen=True)
class Plan:
    """The chosen configuration, the reasons, and the expected training time in seconds."""

    config: TrainConfig
    reasons: tuple[Reason, ...]
    seconds: float


@dataclass(frozen=True)
class Candidate:
    """A timed configuration: training images per second, and total seconds."""

    config: TrainConfig
    rate: float
    seconds: float


@dataclass(frozen=True)
class Effort:
    """How long to train on a device.

    Attributes:
        views: training samples over all epochs.
        least, most: limits of the number of epochs.
        minutes: time budget for up to `FEW` images; for more images in proportion, up to `most_minutes`.
    """

    views: int
    least: float
    most: float
    minutes: float
    most_minutes: float


EFFORT = {
    "cpu": Effort(views=32_000, least=20, most=150, minutes=8, most_minutes=60),
    "cuda": Effort(views=750_000, least=40, most=300, minutes=30, most_minutes=240),
}
SHORTEST = 5.0  # smallest number of epochs
# The same from trained weights, which need fewer epochs.
FINE_TUNING = {
    "cpu": Effort(views=8_000, least=5, most=30, minutes=8, most_minutes=60),
    "cuda": Effort(views=150_000, least=10, most=60, minutes=30, most_minutes=240),
}
# Settings that the rules choose; the rest have the defaults of TrainConfig, `out` is `new_folder`
CHOSEN = frozenset(
    {
        *("epochs", "batch_size", "remainder", "precision", "evaluate_every", "log_every", "ema.decay"),
        *(f"model.{name}" for name in ("name", "image_size", "pretrained", "placement", "embedding_std")),
        *(f"model.{name}" for name in ("drop_path_rate", "freeze", "options")),
        *(f"data.{name}" for name in ("held_out", "channels", "crop", "mean", "std", "interpolation")),
        *(f"data.{name}" for name in ("exif_orientation", "cache")),
        *(f"augment.{name}" for name in ("crop_scale", "padding", "flip", "color_jitter", "mixup", "cutmix")),
        *(f"optimizer.{name}" for name in ("kind", "momentum", "weight_decay", "nesterov", "alpha", "eps")),
        *("optimizer.layer_decay", "schedule.rate", "schedule.per_batch", "schedule.warmup_epochs"),
    }
)
FROZEN = "features"  # `model.freeze`: everything but the classifier
LAYER_DECAY = 0.75  # `optimizer.layer_decay` where all layers are trained
SMALLEST_FINE_TUNED = 96  # pixels

Speed = Callable[[TrainConfig], float]


def make_plan(
    facts: Facts,
    machine: Machine,
    speed: Speed,
    given: Mapping[str, Any] | None = None,
    minutes: float | None = None,
    start: Start | None = None,
) -> Plan:
    """Choose all settings.

    Args:
        facts: properties of the dataset.
        machine: properties of the machine.
        speed: measures the training images per second of a configuration, including reading. It is called for one
            candidate after the other until one is fast enough.
        given: settings that the user set, by their dotted names, as in {"model.image_size": 64}.
        minutes: time budget; by default it depends on the machine and the number of images.
        start: trained weights to start from; None for random ones.
    """
    given = dict(given or {})
    effort = (EFFORT if start is None else FINE_TUNING)[machine.device]
    if minutes is None:
        minutes = min(effort.minutes * max(1.0, facts.images / FEW), effort.most_minutes)
        allowed = f"the default for {some(facts.images, 'image', 'images')} on a {kind_of(machine)} (set --minutes)"
    else:
        allowed = "set by you"
    base = base_config(facts, machine)
    base = with_settings(base if start is None else as_trained(base, start), given)
    trained = facts.images - held_out_of(facts, base.data.held_out)
    wanted = given.get("epochs") or min(max(effort.views / max(trained, 1), effort.least), effort.most)
    evaluated = facts.validation or facts.images - trained
    considered: list[Candidate] = []
    for model in networks(facts, machine, given) if start is None else fine_tuned(start, machine, given):
        config = with_settings(replace(base, model=model), given)
        if start is not None:
            config = with_settings(replace(config, optimizer=fine_tuning(config)), given)
        config = with_settings(replace(config, batch_size=batch_size(trained, machine), epochs=float(wanted)), given)
        config = with_settings(replace(config, schedule=schedule_of(config, machine)), given)
        rate = speed(config)
        share = 1.0 if config.model.freeze == FROZEN else EVALUATED  # a frozen network has little to do backwards
        seconds = (wanted * trained + (EVALUATIONS + 2) * share * evaluated) / rate
        considered.append(Candidate(config, rate, seconds))
        if seconds <= 60 * minutes:
            break
    *slower, chosen = considered
    config, rate, seconds = chosen.config, chosen.rate, chosen.seconds
    if seconds > 60 * minutes and "epochs" not in given:
        epochs = max(SHORTEST, float(math.floor(wanted * 60 * minutes / seconds)))
        seconds *= epochs / wanted
        config = replace(config, epochs=epochs)
    config = with_settings(paced(config, trained, rate), given)
    reasons = (
        *(
            about_network(facts, machine, config, slower, given)
            if start is None
            else about_start(start, config, slower)
        ),
        *about_held_out(facts, config, trained),
        *about_classes(facts),
        Reason("augmentation", augmentation_of(config), why_augmentation(facts)),
        Reason(
            "optimiser",
            f"{config.optimizer.kind}, batch size {config.batch_size}, peak learning rate "
            f"{config.schedule.peak(config.batch_size):.3g}",
            f"suits short runs with this batch size; label smoothing {config.label_smoothing:g}, weight decay "
            f"{config.optimizer.weight_decay:g}",
        ),
        *about_reading(facts, config),
        Reason(
            "epochs",
            f"{config.epochs:.3g}",
            given_or(given, "epochs", why_epochs(config.epochs, wanted, trained, rate)),
        ),
        Reason("time", f"about {rounded(seconds)}", why_time(config, seconds, minutes, allowed, given)),
    )
    return Plan(config, reasons, seconds)


# Rules, one function each


def networks(facts: Facts, machine: Machine, given: Mapping[str, Any]) -> list[ModelConfig]:
    """Return the candidate networks, best first."""
    size = given.get("model.image_size")
    if "model.name" in given:
        return [ModelConfig(name=given["model.name"], image_size=size)]
    cpu = machine.device == "cpu"
    if facts.short_side <= SMALL_SIDE:
        narrow = ("widths=(8,16,32,64)", "depths=(1,1,1,1)") if cpu else ()
        model = ModelConfig(name="lambda_resnet_tiny", embedding_std="unit", options=narrow)
        sides = (max(16, 4 * math.ceil(facts.short_side / 4)),)
    elif cpu:
        narrow = ("widths=(32,64,128,256)", "depths=(1,1,1,1)")
        model = ModelConfig(name="resnet26_d", placement="CCLL", embedding_std="unit", options=narrow)
        largest = max(64, 32 * math.ceil(facts.short_side / 32))
        sides = tuple(side for side in (128, 96, 64) if side <= largest)
    else:
        model = ModelConfig(name="resnet50_d", placement="CCLL", embedding_std="unit", drop_path_rate=0.1)
        sides = (128,)
    return [replace(model, image_size=side) for side in ((size,) if size else sides)]


def why_network(facts: Facts, machine: Machine) -> str:
    why = "lambda layers in the last two stages"
    if facts.short_side <= SMALL_SIDE:
        why += "; the first layers keep the resolution of small images"
    return f"{why}; narrow and shallow for training on a CPU" if machine.device == "cpu" else why


def base_config(facts: Facts, machine: Machine) -> TrainConfig:
    """Return the settings that depend only on the dataset and the device."""
    cpu = machine.device == "cpu"
    fraction = 0.0 if facts.validation else 0.2 if facts.images <= FEW else 0.1
    small = facts.short_side <= SMALL_SIDE
    data = DataConfig(path=facts.path, held_out=fraction, cache=cache_of(facts, machine), crop=1.0 if small else 0.875)
    if facts.grey:
        data = replace(data, channels=1, mean=(facts.mean,), std=(facts.std,))
    return TrainConfig(
        recipe=RECIPE,
        data=data,
        augment=augment_of(facts, machine),
        optimizer=Optimizer(kind="adamw", weight_decay=0.05, alpha=0.99, eps=1e-8)
        if cpu
        else Optimizer(momentum=0.9, weight_decay=5e-4, nesterov=True),
        ema=Ema(decay=0.99 if cpu else 0.999),
        remainder="carry",
        precision="float32" if cpu else "bfloat16",
    )


def cache_of(facts: Facts, machine: Machine) -> Literal["auto", "none", "memory", "device"]:
    """Choose where decoded images are kept. On a CPU large photos are reduced once, since decoding them in every epoch
    takes longer than training."""
    if machine.device == "cuda":
        return "auto"
    large = facts.pixels > LARGE
    room = min(MOST_CACHED, machine.memory // 4)
    if facts.images * (REDUCED if large else facts.pixels) * 3 > room:
        return "none"
    return "device" if large else "memory"


def augment_of(facts: Facts, machine: Machine) -> Augment:
    """Choose shifts for small images and crops for photos; on a GPU, which runs more epochs, also mixup and cutmix."""
    flip = 0.5 if mirrored(facts) else 0.0
    if facts.short_side <= SMALL_SIDE:
        return Augment(crop_scale=None, padding=max(1, facts.short_side // 12), flip=flip)
    if machine.device == "cpu":
        return Augment(crop_scale=(0.35, 1.0), flip=flip)
    return Augment(crop_scale=(0.25, 1.0), flip=flip, color_jitter=0.3, mixup=0.2, cutmix=1.0)


def batch_size(trained: int, machine: Machine) -> int:
    """Return 32 on a CPU or 128 on a GPU; less for few images."""
    most = 32 if machine.device == "cpu" else 128
    return max(min(4, trained), min(most, 2 ** math.floor(math.log2(max(trained, 8) / 4))))


def fine_tuned(start: Start, machine: Machine, given: Mapping[str, Any]) -> list[ModelConfig]:
    """Return the candidates that start from trained weights, best first: all layers are trained, or the classifier
    alone, which takes a CPU a third of the time."""
    options = tuple(f"{name}={value!r}" for name, value in start.arguments.items())
    model = ModelConfig(name=start.name, image_size=start.size, pretrained=start.where, options=options)
    if machine.device == "cuda" or "model.freeze" in given:
        return [model]
    found = [model, replace(model, freeze=FROZEN)]
    smaller = range(start.size // 32 * 32, SMALLEST_FINE_TUNED - 1, -32) if start.resizable else ()
    sizes = [size for size in smaller if size < start.size] if "model.image_size" not in given else []
    return found + [replace(model, freeze=FROZEN, image_size=size) for size in sizes]


def as_trained(config: TrainConfig, start: Start) -> TrainConfig:
    """Set the preprocessing that the weights were trained with."""
    chosen = start.preprocessing
    data = replace(
        config.data,
        channels=1 if len(chosen.mean) == 1 else 3,
        mean=chosen.mean,
        std=chosen.std,
        crop=chosen.crop,
        interpolation=chosen.interpolation,
        exif_orientation=chosen.exif_orientation,
    )
    return replace(config, data=data)


def fine_tuning(config: TrainConfig) -> Optimizer:
    """Return AdamW; where all layers are trained, with smaller rates for those further from the classifier."""
    decay = 1.0 if config.model.freeze == FROZEN else LAYER_DECAY
    return Optimizer(kind="adamw", weight_decay=0.05, alpha=0.99, eps=1e-8, layer_decay=decay)


def schedule_of(config: TrainConfig, machine: Machine) -> Schedule:
    """Return a cosine schedule with a short warmup; rates for AdamW at batch size 32 (CPU) and SGD at 128 (GPU).

    Fine-tuning on a CPU has the rate of training from scratch; on a GPU, where it takes more steps, an eighth of
    AdamW's rate if all layers are trained.
    """
    rate = 0.004 * math.sqrt(config.batch_size / 32) if machine.device == "cpu" else 0.4 * config.batch_size / 128
    if config.model.pretrained is not None and config.optimizer.kind == "adamw":
        small = machine.device == "cuda" and config.model.freeze != FROZEN
        rate = (0.0005 if small else 0.004) * math.sqrt(config.batch_size / 32)
    return Schedule(kind="cosine", rate=float(f"{rate:.3g}"), per_batch=0, warmup_epochs=min(5.0, config.epochs / 10))


def paced(config: TrainConfig, trained: int, rate: float) -> TrainConfig:
    """Set the log interval to a few seconds, and the evaluation interval."""
    step = config.batch_size / rate
    total = config.epochs * trained / config.batch_size
    log_every = max(1, min(round(LOG_SECONDS / step), MOST_LOGGED, math.floor(total / 20) or 1))
    warmup = min(config.schedule.warmup_epochs, config.epochs / 10)
    return replace(
        config,
        log_every=log_every,
        evaluate_every=max(1, round(config.epochs / EVALUATIONS)),
        schedule=replace(config.schedule, warmup_epochs=warmup),
    )


def mirrored(facts: Facts) -> bool:
    """Return whether horizontal flips keep the class: not for characters, nor for class names with left or right."""
    names = [name for name, _ in facts.class_sizes]
    characters = all(len(name) == 1 for name in names)
    words = {word for name in names for word in name.lower().replace("-", " ").replace("_", " ").split()}
    return not characters and not words & SIDED


# Sentences


def given_or(given: Mapping[str, Any], name: str, why: str) -> str:
    return "set by you" if name in given else why


def kind_of(machine: Machine) -> str:
    return "CPU" if machine.device == "cpu" else "GPU"


def network_of(model: ModelConfig) -> str:
    return " ".join(filter(None, [model.name, model.placement or "", *model.options]))


def about_network(
    facts: Facts, machine: Machine, config: TrainConfig, slower: list[Candidate], given: Mapping[str, Any]
) -> list[Reason]:
    return [
        Reason("network", network_of(config.model), given_or(given, "model.name", why_network(facts, machine))),
        Reason("image size", f"{config.model.size} px", given_or(given, "model.image_size", why_size(facts, slower))),
    ]


def about_start(start: Start, config: TrainConfig, slower: list[Candidate]) -> list[Reason]:
    """Return the reasons for the weights, the trained layers and the image size."""
    frozen = config.model.freeze == FROZEN
    took = f"all layers would take {rounded(slower[0].seconds)}" if slower else "set by you"
    trained = (
        Reason("trained", "the classifier alone", f"{took}; its rate is that of a new network")
        if frozen
        else Reason("trained", "all layers", about_rates(config))
    )
    size = config.model.size
    return [
        Reason("network", start.name, "the network of the weights"),
        Reason("weights", start.where, f"{start.about or 'trained'}; --from-scratch starts from random weights"),
        trained,
        Reason("image size", f"{size} px", "as trained" if size == start.size else f"instead of {start.size} px"),
    ]


def about_rates(config: TrainConfig) -> str:
    decay = config.optimizer.layer_decay
    return (
        "at one learning rate" if decay == 1 else f"learning rate times {decay:g} per block, from the classifier down"
    )


def why_size(facts: Facts, slower: list[Candidate]) -> str:
    if slower:
        return "; ".join(f"{one.config.model.size} px would take {rounded(one.seconds)}" for one in slower)
    return (
        f"the short side of the images is {facts.short_side} px" if facts.short_side <= 128 else "fits the time budget"
    )


def held_out_of(facts: Facts, fraction: float) -> int:
    """Return how many training images `data.split.held_out` holds out."""
    fraction = fraction or (0.0 if facts.validation else OWN_HELD_OUT)
    return sum(max(int(fraction > 0 and count > 1), round(fraction * count)) for _, count in facts.class_sizes)


def about_held_out(facts: Facts, config: TrainConfig, trained: int) -> list[Reason]:
    if facts.validation and not config.data.held_out:
        return [Reason("validation", some(facts.validation, "image", "images"), "the validation split of the dataset")]
    held = facts.images - trained
    share = percent(held / max(facts.images, 1), 0)
    why = f"{share} of each class, not used for training, the same images in every run"
    if not facts.validation:
        why += "; the dataset has no validation split"
    return [Reason("validation", f"{some(held, 'image', 'images')} held out", why)]


def about_classes(facts: Facts) -> list[Reason]:
    filled = [(count, name) for name, count in facts.class_sizes if count]
    (least, rare), (most, common) = min(filled), max(filled)
    if most < IMBALANCE * least:
        return []
    why = (
        "accuracy favours large classes, so the mean over classes is reported too; more images of small classes help "
        "most"
    )
    return [Reason("classes", f"{common!r} has {most:,} images and {rare!r} {least:,}", why)]


def about_reading(facts: Facts, config: TrainConfig) -> list[Reason]:
    if config.data.cache != "device":
        return []
    why = f"images of {facts.pixels / 1e6:.0f} million pixels take longer to decode than to train on"
    return [Reason("reading", "decode once, at a reduced size", why)]


def augmentation_of(config: TrainConfig) -> str:
    augment = config.augment
    crops = f"crops from {augment.crop_scale[0]:.0%} of the image" if augment.crop_scale else ""
    shifts = f"shifts of up to {augment.padding} px" if augment.padding else ""
    mirror = "horizontal flips" if augment.flip else ""
    jitter = f"colour jitter {augment.color_jitter:g}" if augment.color_jitter else ""
    mixing = "mixup and cutmix" if augment.mixup and augment.cutmix else ""
    return ", ".join(filter(None, [crops, shifts, mirror, jitter, mixing])) or "none"


def why_augmentation(facts: Facts) -> str:
    if not mirrored(facts):
        return "no flips, because classes are single characters or contain left or right (enable: --augment.flip 0.5)"
    return "reduces overfitting; if left and right matter, use --augment.flip 0"


def why_epochs(epochs: float, wanted: float, trained: int, rate: float) -> str:
    shown = f"{some(round(epochs * trained), 'training sample', 'training samples')} at {rate:,.0f} images/s"
    return f"{shown}; limited by the time, {wanted:.0f} would be better" if epochs < 0.9 * wanted else shown


def why_time(config: TrainConfig, seconds: float, minutes: float, allowed: str, given: Mapping[str, Any]) -> str:
    longer = seconds > 60 * minutes
    limit = f"{'more than' if longer else 'at most'} {minutes:g} min, {allowed}"
    if "epochs" not in given:
        return limit
    epochs = f"{config.epochs:g} {'epoch' if config.epochs == 1 else 'epochs'}, as set"
    return f"{epochs}; {limit}" if longer else epochs


# Settings by their dotted names


def with_settings(config: TrainConfig, settings: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration with some settings changed. Raises ValueError for unknown settings and invalid
    values."""
    data = to_json(config)
    for name, value in settings.items():
        *groups, last = name.split(".")
        place = data
        for group in groups:
            if not isinstance(place.get(group), dict):
                raise ValueError(f"unknown setting {name}: `lambdanets train digits --help` lists all settings")
            place = place[group]
        place[last] = to_json(value)
    return from_json(TrainConfig, data)


def names_of(config: Any, prefix: str = "") -> list[str]:
    """Return the dotted names of all settings."""
    found = []
    for f in fields(config):
        value = getattr(config, f.name)
        found += names_of(value, f"{prefix}{f.name}.") if is_dataclass(value) else [f"{prefix}{f.name}"]
    return found


def new_folder(data: str, again: bool = False) -> Path:
    """Return the folder of a run on this dataset: runs/pets, runs/pets-2, ...; a new one unless `again`."""
    name = Path(data).expanduser().resolve().name.partition(".")[0]
    plain = re.sub(r"\W+", "-", name).strip("-") or "images"
    folder, number = Path("runs") / plain, 2
    while folder.exists() and not again:
        folder, number = Path("runs") / f"{plain}-{number}", number + 1
    return folder

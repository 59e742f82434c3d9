"""Learning to predict the next byte, as a task of the training loop; weights that say what they are."""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from lambdanets.data import order
from lambdanets.experiments.language.corpus import PYTHON, Corpus, read_corpus
from lambdanets.experiments.language.network import BYTES, ByteModel, ByteModelConfig
from lambdanets.files import whole_path
from lambdanets.models.pretrained import KEY
from lambdanets.models.stored import load_exactly, read_description_of, within_size_of
from lambdanets.options import check_numbers, optional
from lambdanets.runs import RAW_WEIGHTS, WEIGHTS
from lambdanets.train.config import Ema, Optimizer, RunConfig, Schedule
from lambdanets.train.distributed import World
from lambdanets.train.task import Outcome, Share, Task
from lambdanets.typed import from_json, to_json

LANGUAGE_KEY = f"{KEY}_language"  # of weights, in their header
LARGEST_LENGTH = 2**20  # bytes of a sequence
REGION = 4096  # bytes of validation text in a row, so that sequences of any length up to this see the same bytes


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(RunConfig):
    """A language model over bytes; epochs and batches count sequences of `length` bytes."""

    TASK: ClassVar[str] = "language"
    COMMAND: ClassVar[str] = "experiments language train"
    PER_MACHINE: ClassVar[frozenset[str]] = RunConfig.PER_MACHINE | {"text"}

    out: Path = Path("runs/language")
    """The folder of the run: configuration, log, checkpoints, weights."""
    model: ByteModelConfig = field(default_factory=ByteModelConfig)
    text: str = PYTHON
    """python: the standard library's source, on every machine; or a text file, or a folder of them."""
    length: int = 256
    """Bytes of a training sequence."""
    evaluated: int = 131_072
    """Bytes of the validation text that an evaluation predicts; 0: all."""
    epochs: float = 1.0
    """Over the training text; fractions too."""
    batch_size: int = 8
    """Sequences of a step, over all processes and micro-batches."""
    optimizer: Optimizer = field(
        default_factory=lambda: Optimizer(kind="adamw", momentum=0.9, alpha=0.99, eps=1e-8, weight_decay=0.1)
    )
    schedule: Schedule = field(
        default_factory=lambda: Schedule(kind="cosine", rate=4e-3, per_batch=0, warmup_epochs=0.03)
    )
    ema: Ema = field(default_factory=lambda: Ema(decay=0.99))
    clip_norm: float = 1.0
    """Gradients with a larger norm are made as small; 0: none are."""
    micro_batch: Annotated[int | None, optional("SEQUENCES")] = None
    """Sequences that a process takes at once; by default as many as fit: halved on the first step while memory ends.
    The gradients of a step are summed up."""
    channels_last: Annotated[bool, tyro.conf.Suppress] = False  # of images
    sync_batch_norm: Annotated[bool, tyro.conf.Suppress] = False  # there is none

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 1:
            raise ValueError(f"length is at least 1, not {self.length}")
        if self.evaluated < 0:
            raise ValueError(f"evaluated is at least 0, not {self.evaluated}")
        check_numbers(self, length=(1, LARGEST_LENGTH))


class Language(Task):
    """The next byte of a text."""

    score = "top1"

    def __init__(self, config: LanguageConfig, corpus: Corpus | None = None) -> None:
        self.config = config
        self.corpus = corpus or read_corpus(config.text)
        self.examples = (
            len(self.corpus.training) - 1
        ) // config.length - 1  # so many fit at any offset below a sequence
        if self.examples < 1:
            raise ValueError(
                f"{len(self.corpus.training)} bytes to learn from are too few for sequences of {config.length}: "
                f"use a smaller --length or more text"
            )
        self.regions = regions(self.corpus.validation, config.length, config.evaluated)

    def model(self) -> ByteModel:
        return ByteModel(self.config.model)

    def batches(self, epoch: int, first_step: int, share: Share) -> Iterator[Tensor]:
        """Sequences [B, length + 1]; each epoch cuts the text at other places."""
        length, seed = self.config.length, self.config.seed
        epochs = share.epochs(self.examples)
        first, end = epochs.first(epoch) + first_step, epochs.first(epoch + 1)
        batches = epochs.tickets(seed, first * share.parts, share.micro_batch, share.rank, share.world)
        for batch in itertools.islice(batches, (end - first) * share.parts):
            chosen = np.array([sequence * length + order.mix(seed, at) % length for at, _, sequence in batch])
            batch_BN = torch.from_numpy(self.corpus.training[chosen[:, None] + np.arange(length + 1)])
            yield batch_BN.pin_memory() if torch.cuda.is_available() else batch_BN  # copied beside the step before

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        text_BN = batch.long()
        scores_BNC, wanted_BN = model(text_BN[:, :-1]), text_BN[:, 1:]
        loss = F.cross_entropy(scores_BNC.flatten(0, 1).float(), wanted_BN.flatten())
        right = (scores_BNC.argmax(2) == wanted_BN).double().mean(1).sum()
        return Outcome(loss, {"top1": right}, len(text_BN))

    def evaluate(self, model: nn.Module, world: World, final: bool) -> dict[str, dict[str, float]]:
        return {"validation": evaluate(model, self.regions, self.config.length, world)}

    def describe(self) -> dict[str, Any]:
        return {"unit": f"sequences of {self.config.length} bytes", **self.corpus.describe()}

    def identity(self) -> dict[str, Any]:
        return {"bytes": len(self.corpus.training), "text": self.corpus.digest}

    def save(self, folder: Path, moment: Literal["start", "end"], models: dict[str, nn.Module], scores: Any) -> None:
        if moment == "start":
            return
        for name, model in models.items():
            raw = name == "raw" and "ema" in models
            self.save_weights(model, folder / (RAW_WEIGHTS if raw else WEIGHTS), scores[name])

    def save_weights(self, model: nn.Module, path: Path, scores: dict[str, dict[str, float]]) -> None:
        about = About(
            model=self.config.model,
            text=self.corpus.describe(),
            metrics=scores["validation"],
            recipe=to_json(self.config),
        )
        save_language(model, path, about)


def regions(text: np.ndarray, length: int, most: int = 0) -> Tensor:
    """Stretches [R, region + 1] from all over a text, `most` bytes or all; sequences of `length` divide them."""
    region = min(max(REGION // length, 1), (len(text) - 1) // length) * length
    if region < 1:
        raise ValueError(f"{len(text)} bytes of validation text are too few for sequences of {length}: more text")
    count = (len(text) - 1) // region
    kept = min(count, max(most // region, 1)) if most else count
    starts = np.arange(kept) * count // kept * region
    return torch.from_numpy(text[starts[:, None] + np.arange(region + 1)])


@torch.no_grad()
def evaluate(model: nn.Module, regions_RN: Tensor, length: int, world: World) -> dict[str, float]:
    """Every byte of the regions, each predicted from those before it in its sequence of `length`."""
    inputs, wanted = (part.reshape(-1, length) for part in (regions_RN[:, :-1], regions_RN[:, 1:]))
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)
    batch = max(1, REGION // length)
    mine = zip(
        inputs[world.rank :: world.size].split(batch), wanted[world.rank :: world.size].split(batch), strict=True
    )
    for text_BN, next_BN in mine:
        text_BN, next_BN = text_BN.to(world.device).long(), next_BN.to(world.device).long()
        scores = model(text_BN).flatten(0, 1).float()
        loss = F.cross_entropy(scores, next_BN.flatten(), reduction="sum")
        right = (scores.argmax(1) == next_BN.flatten()).sum()
        sums += torch.stack([loss.double(), right.double(), torch.full_like(loss, next_BN.numel()).double()])
    loss, right, count = world.sum_(sums).tolist()
    return {"loss": loss / count, "bits_per_byte": loss / count / math.log(2), "top1": right / count, "examples": count}


def bigram_bits(corpus: Corpus, regions_RN: Tensor) -> float:
    """Bits per byte of counted pairs, smoothed by counted bytes: what a model has to beat."""
    pairs = corpus.training[:-1].astype(np.int64) * BYTES + corpus.training[1:]
    counts = np.bincount(pairs, minlength=BYTES * BYTES).reshape(BYTES, BYTES).astype(np.float64)
    single = (counts.sum(0) + 1) / (counts.sum() + BYTES)
    chances = (counts + single) / (counts.sum(1, keepdims=True) + 1)
    text = regions_RN.numpy()
    return float(-np.log2(chances[text[:, :-1], text[:, 1:]]).mean())


# Weights --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class About:
    """What weights say about themselves."""

    model: ByteModelConfig
    text: dict[str, Any]
    metrics: dict[str, float] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)


def save_language(model: nn.Module, path: Path, about: About) -> Path:
    from safetensors.torch import save_model

    with whole_path(path) as part:
        save_model(model, str(part), metadata={"format": "pt", LANGUAGE_KEY: json.dumps(to_json(about))})
    return path


def load_language(what: str) -> tuple[ByteModel, About]:
    """The model of a run folder or of a weights file, ready to generate, on the CPU."""
    path = Path(what).expanduser()
    if path.is_dir():
        path = path / WEIGHTS
        if not path.is_file():
            raise FileNotFoundError(
                f"{what} has no {WEIGHTS}: they are written when a run ends. "
                "`lambdanets experiments language train` makes one"
            )
    if not path.is_file():
        raise FileNotFoundError(f"{what} is neither the folder of a run nor a .safetensors file")
    data = read_description_of(path, LANGUAGE_KEY)
    if data is None:
        raise ValueError(f"{path} holds no language model: `lambdanets experiments language train` makes one")
    try:
        about = from_json(About, data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    with within_size_of(path):
        model = ByteModel(about.model)
    load_exactly(model, path)
    return model.ready(), about

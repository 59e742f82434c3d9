"""Language modelling as a task of the training loop, and the weights files of language models."""

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

LANGUAGE_KEY = f"{KEY}_language"  # key in the header of a weights file
LARGEST_LENGTH = 2**20  # maximum sequence length in bytes
REGION = 4096  # contiguous bytes of validation text: all sequence lengths up to this are evaluated on the same bytes


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(RunConfig):
    """Configuration of a byte-level language model; epochs and batches count sequences of `length` bytes."""

    TASK: ClassVar[str] = "language"
    COMMAND: ClassVar[str] = "experiments language train"
    PER_MACHINE: ClassVar[frozenset[str]] = RunConfig.PER_MACHINE | {"text"}

    out: Path = Path("runs/language")
    """Folder of the run: configuration, log, checkpoints and weights."""
    model: ByteModelConfig = field(default_factory=ByteModelConfig)
    text: str = PYTHON
    """Text to train on: python (the source code of the standard library), a text file, or a folder of text files."""
    length: int = 256
    """Length of the training sequences in bytes."""
    evaluated: int = 131_072
    """Number of bytes of the validation text to evaluate on; 0: all."""
    epochs: float = 1.0
    """Number of epochs over the training text; fractions are allowed."""
    batch_size: int = 8
    """Global batch size: sequences per step, over all processes and micro-batches."""
    optimizer: Optimizer = field(
        default_factory=lambda: Optimizer(kind="adamw", momentum=0.9, alpha=0.99, eps=1e-8, weight_decay=0.1)
    )
    schedule: Schedule = field(
        default_factory=lambda: Schedule(kind="cosine", rate=4e-3, per_batch=0, warmup_epochs=0.03)
    )
    ema: Ema = field(default_factory=lambda: Ema(decay=0.99))
    clip_norm: float = 1.0
    """Clip gradients to this norm; 0 disables clipping."""
    micro_batch: Annotated[int | None, optional("SEQUENCES")] = None
    """Sequences per forward pass of a process; gradients are accumulated over the micro-batches of a step. By default
    the largest size that fits into memory: the first step halves it while memory runs out."""
    channels_last: Annotated[bool, tyro.conf.Suppress] = False  # only for images
    sync_batch_norm: Annotated[bool, tyro.conf.Suppress] = False  # the network has no batch norm

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 1:
            raise ValueError(f"length must be at least 1, got {self.length}")
        if self.evaluated < 0:
            raise ValueError(f"evaluated must be at least 0, got {self.evaluated}")
        check_numbers(self, length=(1, LARGEST_LENGTH))


class Language(Task):
    """Task that trains a model to predict the next byte."""

    score = "top1"

    def __init__(self, config: LanguageConfig, corpus: Corpus | None = None) -> None:
        self.config = config
        self.corpus = corpus or read_corpus(config.text)
        self.examples = (
            len(self.corpus.training) - 1
        ) // config.length - 1  # sequences that fit at any offset below `length`
        if self.examples < 1:
            raise ValueError(
                f"{len(self.corpus.training)} bytes of training text are too few for sequences of {config.length}: use "
                f"a smaller --length or more text"
            )
        self.regions = regions(self.corpus.validation, config.length, config.evaluated)

    def model(self) -> ByteModel:
        return ByteModel(self.config.model)

    def batches(self, epoch: int, first_step: int, share: Share) -> Iterator[Tensor]:
        """Yield sequences [B, length + 1]; each epoch divides the text at other offsets."""
        length, seed = self.config.length, self.config.seed
        epochs = share.epochs(self.examples)
        first, end = epochs.first(epoch) + first_step, epochs.first(epoch + 1)
        batches = epochs.tickets(seed, first * share.parts, share.micro_batch, share.rank, share.world)
        for batch in itertools.islice(batches, (end - first) * share.parts):
            chosen = np.array([sequence * length + order.mix(seed, at) % length for at, _, sequence in batch])
            batch_BN = torch.from_numpy(self.corpus.training[chosen[:, None] + np.arange(length + 1)])
            yield batch_BN.pin_memory() if torch.cuda.is_available() else batch_BN  # copied during the previous step

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
    """Return regions [R, region + 1] spread over a text, `most` bytes or all; `length` divides region."""
    region = min(max(REGION // length, 1), (len(text) - 1) // length) * length
    if region < 1:
        raise ValueError(
            f"{len(text)} bytes of validation text are too few for sequences of {length}: use a "
            f"smaller --length or more text"
        )
    count = (len(text) - 1) // region
    kept = min(count, max(most // region, 1)) if most else count
    starts = np.arange(kept) * count // kept * region
    return torch.from_numpy(text[starts[:, None] + np.arange(region + 1)])


@torch.no_grad()
def evaluate(model: nn.Module, regions_RN: Tensor, length: int, world: World) -> dict[str, float]:
    """Return loss, bits per byte and accuracy on all bytes of the regions, in sequences of `length` bytes."""
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
    """Return the bits per byte of a smoothed bigram model, a simple baseline."""
    pairs = corpus.training[:-1].astype(np.int64) * BYTES + corpus.training[1:]
    counts = np.bincount(pairs, minlength=BYTES * BYTES).reshape(BYTES, BYTES).astype(np.float64)
    single = (counts.sum(0) + 1) / (counts.sum() + BYTES)
    chances = (counts + single) / (counts.sum(1, keepdims=True) + 1)
    text = regions_RN.numpy()
    return float(-np.log2(chances[text[:, :-1], text[:, 1:]]).mean())


# Weights --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class About:
    """The description of a language model in the header of its weights file."""

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
    """Load the model of a run folder or a weights file on the CPU, ready to generate."""
    path = Path(what).expanduser()
    if path.is_dir():
        path = path / WEIGHTS
        if not path.is_file():
            raise FileNotFoundError(
                f"{what} has no {WEIGHTS}, which is written at the end of a run: it must be a folder of "
                "`lambdanets experiments language train`"
            )
    if not path.is_file():
        raise FileNotFoundError(f"{what} is neither a run folder nor a .safetensors file")
    data = read_description_of(path, LANGUAGE_KEY)
    if data is None:
        raise ValueError(
            f"{path} is not a language model: it must be a file that `lambdanets experiments language train` wrote"
        )
    try:
        about = from_json(About, data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    with within_size_of(path):
        model = ByteModel(about.model)
    load_exactly(model, path)
    return model.ready(), about

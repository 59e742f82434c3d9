"""Weights of a detector: a safetensors file with its configuration in the header."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from lambdanets import __version__
from lambdanets.data.preprocessing import Preprocessing
from lambdanets.detect.config import DetectConfig, Heads
from lambdanets.detect.network import Detector, make_detector
from lambdanets.detect.scenes import Category
from lambdanets.files import whole_path
from lambdanets.models.pretrained import KEY
from lambdanets.models.stored import load_exactly, read_description_of, within_size_of
from lambdanets.runs import RUN_WEIGHTS
from lambdanets.train.config import ModelConfig
from lambdanets.typed import LARGEST_IMAGE, Bounds, from_json, to_json

DETECTOR_KEY = f"{KEY}_detector"  # key in the header of a weights file


@dataclass(frozen=True, kw_only=True)
class About:
    """The description of a detector in the header of its weights file.

    Attributes:
        model: the backbone.
        heads: feature pyramid, region proposals and heads.
        categories: the classes.
        masks: whether the detector predicts masks.
        size: the image size of training.
        mean: mean of each channel, with pixels in [0, 1].
        std: standard deviation of each channel.
        metrics: scores of the final evaluation.
        recipe: the configuration of the run.
        version: the version of lambdanets that wrote the file.
    """

    model: ModelConfig
    heads: Heads
    categories: tuple[Category, ...]
    masks: bool
    size: Annotated[int, Bounds(32, LARGEST_IMAGE)]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    metrics: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    version: str = __version__

    @property
    def preprocessing(self) -> Preprocessing:
        """Size, mean and standard deviation of the images."""
        return Preprocessing(mean=self.mean, std=self.std, size=self.size, crop=1.0)

    def build(self) -> Detector:
        """Build the detector with new weights."""
        return make_detector(
            self.model,
            self.heads,
            len(self.categories),
            masks=self.masks,
            size=self.size,
            preprocessing=self.preprocessing,
        )


def about(config: DetectConfig, categories: tuple[Category, ...], masks: bool, metrics: dict[str, Any]) -> About:
    """Return the description of the detector that a run trains."""
    return About(
        model=replace(config.model, pretrained=None),
        heads=config.heads,
        categories=categories,
        masks=masks,
        size=config.size,
        mean=config.data.mean,
        std=config.data.std,
        metrics=metrics,
        recipe=to_json(config),
    )


def save_detector(detector: Detector, path: Path, card: About) -> Path:
    """Write weights and description to a safetensors file and return its path."""
    from safetensors.torch import save_model

    with whole_path(path) as part:
        save_model(detector, str(part), metadata={"format": "pt", DETECTOR_KEY: json.dumps(to_json(card))})
    return path


def find_weights(what: str, weights: str = "ema") -> Path:
    """Return the weights file of a run folder, or the path itself if it is a file."""
    path = Path(what).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"{what} is neither a run folder nor a .safetensors file")
    wanted = path / RUN_WEIGHTS[weights]
    if wanted.is_file():
        return wanted
    there = [name for name in RUN_WEIGHTS.values() if (path / name).is_file()]
    if there:
        raise FileNotFoundError(f"{path} has no {wanted.name}, only {', '.join(there)}: use another value of --weights")
    raise FileNotFoundError(
        f"{path} has no weights yet: they are written after each evaluation (--evaluate-every) and at the end. Resume "
        f"the run with `lambdanets detect train resume {path}`"
    )


def read_about(path: Path) -> About:
    """Read the description in the header of a weights file."""
    data = read_description_of(path, DETECTOR_KEY)
    if data is None:
        raise ValueError(f"{path} is not a detector: it must be a file that `lambdanets detect train` wrote")
    try:
        card = from_json(About, data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if card.model.pretrained is not None:  # a file must not make us load another one
        raise ValueError(f"{path}: model.pretrained must be null in a weights file")
    return card


def load_detector(path: Path) -> tuple[Detector, About]:
    """Load a detector and its description; the detector is in evaluation mode on the CPU."""
    card = read_about(path)
    with within_size_of(path):
        detector = card.build()
    load_exactly(detector, path)
    return detector.eval(), card

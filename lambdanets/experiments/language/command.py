"""`lambdanets experiments language`: train a language model of lambda layers, and generate text."""

import sys
from dataclasses import dataclass, field
from typing import Annotated, cast

import tyro

from lambdanets.experiments.language.task import Language, LanguageConfig, load_language
from lambdanets.options import check_numbers
from lambdanets.runs import read_config
from lambdanets.train.command import RunFolder, train_task


@dataclass(frozen=True)
class ResumeLanguage(RunFolder):
    """Resume a run from its newest complete checkpoint, with its own configuration."""

    def config(self) -> LanguageConfig:
        return cast(LanguageConfig, read_config(self.run, LanguageConfig.COMMAND))


@dataclass(frozen=True, kw_only=True)
class TrainLanguage:
    """Train a language model: `lambdanets experiments language train start --out RUN`, then any setting.

    By default the model trains on the source code of Python's standard library, for a few minutes on one CPU core.
    `--model.kind attention` trains the baseline.
    """

    settings: Annotated[
        Annotated[LanguageConfig, tyro.conf.subcommand("start")]
        | Annotated[ResumeLanguage, tyro.conf.subcommand("resume")],
        tyro.conf.arg(name=""),
    ] = field(default_factory=LanguageConfig)
    """A new run, or a run to resume."""

    def run(self) -> int:
        again = isinstance(self.settings, ResumeLanguage)
        config = self.settings.config() if isinstance(self.settings, ResumeLanguage) else self.settings
        return train_task(Language(config), config, again, None, None)


@dataclass(frozen=True, kw_only=True)
class GenerateText:
    """Generate text with a trained model. With lambda layers the memory does not grow with the length."""

    run_folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder or a .safetensors file."""
    prompt: str = ""
    """The text to continue; by default the beginning of a file."""
    count: int = 500
    """Number of bytes to generate."""
    temperature: float = 0.7
    """Sampling temperature: 1 samples from the model's probabilities, lower values prefer likely bytes, 0 always takes
    the most likely byte."""
    seed: int = 0
    """Random seed of sampling."""

    def run(self) -> int:
        check_numbers(self, "--", count=(0, 10**9), temperature=(0, 1e6))
        model, _ = load_language(self.run_folder)
        sys.stdout.write(self.prompt)
        prompt = b"\0" + self.prompt.encode()
        for byte in model.generate(prompt, self.count, temperature=self.temperature, seed=self.seed):
            sys.stdout.flush()
            sys.stdout.buffer.write(bytes([byte]))
            sys.stdout.buffer.flush()
        print()
        return 0


@dataclass(frozen=True)
class LanguageCommand:
    """Train a byte-level language model of lambda layers or softmax attention, and generate text."""

    what: Annotated[
        Annotated[TrainLanguage, tyro.conf.subcommand("train")]
        | Annotated[GenerateText, tyro.conf.subcommand("generate")],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> int:
        return self.what.run()

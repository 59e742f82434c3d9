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
    """Go on with a run, by its own configuration, from its newest whole checkpoint."""

    def config(self) -> LanguageConfig:
        return cast(LanguageConfig, read_config(self.run, LanguageConfig.COMMAND))


@dataclass(frozen=True, kw_only=True)
class TrainLanguage:
    """Train a language model: `lambdanets experiments language train start --out RUN`, then any setting.

    Without settings it learns to write like Python's standard library, in some minutes of one CPU core.
    `--model.kind attention` trains the twin.
    """

    settings: Annotated[
        Annotated[LanguageConfig, tyro.conf.subcommand("start")]
        | Annotated[ResumeLanguage, tyro.conf.subcommand("resume")],
        tyro.conf.arg(name=""),
    ] = field(default_factory=LanguageConfig)
    """A new run, or one to go on with."""

    def run(self) -> int:
        again = isinstance(self.settings, ResumeLanguage)
        config = self.settings.config() if isinstance(self.settings, ResumeLanguage) else self.settings
        return train_task(Language(config), config, again, None, None)


@dataclass(frozen=True, kw_only=True)
class GenerateText:
    """Let a trained model write on, byte by byte, in memory that does not grow (with lambda layers)."""

    run_folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of a run, or a weights file."""
    prompt: str = ""
    """What it goes on from; by default the beginning of a file."""
    count: int = 500
    """Bytes."""
    temperature: float = 0.7
    """1 draws as learnt, less is more careful, 0 takes the likeliest byte."""
    seed: int = 0
    """Another seed, another text."""

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
    """Text, byte by byte: a causal language model of lambda layers, and its twin of softmax attention."""

    what: Annotated[
        Annotated[TrainLanguage, tyro.conf.subcommand("train")]
        | Annotated[GenerateText, tyro.conf.subcommand("generate")],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> int:
        return self.what.run()

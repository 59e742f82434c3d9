"""The command line: parse, call, print. A command is a frozen dataclass of options with `run() -> exit status`."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from lambdanets import __version__
from lambdanets.bench.engine import BenchEngine
from lambdanets.bench.kernels import BenchKernels
from lambdanets.bench.layers import BenchLayer, BenchOp
from lambdanets.bench.networks import BenchNetwork
from lambdanets.bench.plot import BenchPlot
from lambdanets.convert.command import Convert
from lambdanets.data.command import Data
from lambdanets.data.strings import printable
from lambdanets.data.workers import loss_of_worker
from lambdanets.detect.command import detect_command
from lambdanets.experiments.compare import Compare
from lambdanets.experiments.language.command import LanguageCommand
from lambdanets.experiments.reproduce.command import Reproduce
from lambdanets.experiments.rounds.command import rounds_command
from lambdanets.experiments.webdemo.command import Demo
from lambdanets.export.command import Export
from lambdanets.files import FULL
from lambdanets.models.command import Models
from lambdanets.pseudo.command import PseudoLabel, PseudoSelect
from lambdanets.report.command import Report
from lambdanets.selftest import Selftest
from lambdanets.train.command import train_command
from lambdanets.train.inference.command import Evaluate, Predict
from lambdanets.view.command import View


@dataclass(frozen=True)
class Tour:
    """A short tour of the lambda layer: variants, shapes, which backend runs and why, position heat maps."""

    output: Path = Path("runs/tour")
    """The folder for pictures."""

    def run(self) -> int:
        from lambdanets.tour import run  # draws with matplotlib, which other commands do not need

        run(self.output)
        return 0


@dataclass(frozen=True)
class Digits:
    """What `make demo` runs: a small LambdaResNet and its convolutional twin learn digits, and are compared."""

    output: Path = Path("runs/demo")
    """The folder for both runs; with a number if it is there already."""

    def run(self) -> int:
        from lambdanets.digits import run

        return run(self.output)


@dataclass(frozen=True)
class Bench:
    """How fast, beside other layers, in one run."""

    what: Annotated[
        Annotated[BenchOp, tyro.conf.subcommand("op")]
        | Annotated[BenchLayer, tyro.conf.subcommand("layer")]
        | Annotated[BenchKernels, tyro.conf.subcommand("kernels")]
        | Annotated[BenchNetwork, tyro.conf.subcommand("network")]
        | Annotated[BenchEngine, tyro.conf.subcommand("engine")]
        | Annotated[BenchPlot, tyro.conf.subcommand("plot")],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> int:
        return self.what.run()


COMMANDS = {
    "bench": Bench,
    "compare": Compare,
    "convert": Convert,
    "data": Data,
    "demo": Demo,
    "detect": detect_command(),
    "digits": Digits,
    "evaluate": Evaluate,
    "export": Export,
    "language": LanguageCommand,
    "models": Models,
    "predict": Predict,
    "pseudo-label": PseudoLabel,
    "pseudo-rounds": rounds_command(),
    "pseudo-select": PseudoSelect,
    "report": Report,
    "reproduce": Reproduce,
    "selftest": Selftest,
    "tour": Tour,
    "train": train_command(),
    "view": View,
}

LONGEST = 4_000  # characters of an error
OUT_OF_MEMORY = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|Storage size .* overflowed")
EXTRAS = {"timm": "bench", "safetensors": "hub", "huggingface_hub": "hub"}  # which brings a package, if not `train`


def parse(arguments: Sequence[str]) -> Any:
    """The command that a command line asks for, not run yet."""
    return tyro.extras.subcommand_cli_from_dict(
        COMMANDS
        | {
            "train": train_command(arguments),
            "detect": detect_command(arguments),
            "pseudo-rounds": rounds_command(arguments),
        },
        prog="lambdanets",
        description="LambdaNetworks in PyTorch. `lambdanets COMMAND --help` explains a command; also: --version.",
        args=arguments or ["--help"],
        config=(tyro.conf.CascadeSubcommandArgs,),  # options of `train` may follow the recipe
    )


def sentence(error: Exception) -> str:
    """The message of an error on one line, printable and of bounded length: it may quote what a file holds."""
    text = printable(" ".join(str(error).split()))
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1000]} ... {text[-1000:]}"
    full = isinstance(error, OSError) and error.errno in FULL
    return f"{text}. Free some space and run the command again" if full else text


def loss_of_memory(error: BaseException) -> str | None:
    """What to tell the user if an error means that memory ran out; otherwise None."""
    text = " ".join(str(error).split())
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not OUT_OF_MEMORY.search(text):
        return None
    said = f" ({printable(text[:200])})" if text else ""
    return f"memory ran out{said}: use smaller images or batches, a smaller network, or a machine with more memory"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status (2: the input was refused, with a sentence on stderr)."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"lambdanets {__version__}")
        return 0
    try:
        return parse(arguments).run()
    except BrokenPipeError:  # `| head` has read enough; what is left to print goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:  # refused input: the sentence is for the user, the traceback is not
        print(f"lambdanets: {sentence(error)}", file=sys.stderr)
        return 2
    except (RuntimeError, MemoryError) as error:
        loss = loss_of_worker(error) or loss_of_memory(error)
        if loss is None:
            raise
        print(f"lambdanets: {loss}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "lambdanets"):
            raise  # ours to mend
        print(
            f"lambdanets: this needs {package}: pip install 'lambdanets[{EXTRAS.get(package, 'train')}]'",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

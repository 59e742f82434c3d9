"""The command line: find the command, parse its options, run it.

A command is a frozen dataclass of options whose `run()` returns the exit status, or a function that returns such a
dataclass for the given arguments (where the help depends on them). Its module is imported only when the command is
called. The folder `experiments` is optional: commands whose module is not installed are omitted.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from typing import Any

import torch

from lambdanets import __version__
from lambdanets.data.strings import printable
from lambdanets.data.workers import loss_of_worker
from lambdanets.files import FULL


@dataclass(frozen=True)
class Command:
    """A command: its line in the help, its module below `lambdanets`, and the name of its class in that module."""

    summary: str
    module: str
    name: str

    @property
    def installed(self) -> bool:
        if not self.module.startswith("experiments."):  # only experiments may be missing
            return True
        return (Path(__file__).parent / self.module.replace(".", "/")).with_suffix(".py").is_file()

    def options(self, words: Sequence[str]) -> type:
        """Return the dataclass of the command's options."""
        found = getattr(import_module(f"lambdanets.{self.module}"), self.name)
        return found if isinstance(found, type) else found(words)


GROUPS = {
    "Train and use networks": {
        "train": Command(
            "train on a folder of images or with a recipe, or resume a run", "train.command", "train_command"
        ),
        "evaluate": Command(
            "measure accuracy (total and per class) and speed on labelled images", "train.inference.command", "Evaluate"
        ),
        "predict": Command("print the most likely classes of images", "train.inference.command", "predict_command"),
        "export": Command(
            "export a network to ONNX, OpenVINO, torch.export, AOTInductor or the hub", "export.command", "Export"
        ),
        "report": Command("write the HTML report of a training run", "report.command", "Report"),
        "view": Command("show which pixels of an image each lambda layer uses", "view.command", "View"),
        "demo": Command("train two small networks on included digits and compare them", "demo", "Demo"),
    },
    "Detection and pseudo-labels": {
        "detect": Command("train and use Mask R-CNN with lambda backbones", "detect.command", "detect_command"),
        "pseudo": Command(
            "label images with a trained network and select among the labels", "pseudo.command", "Pseudo"
        ),
    },
    "Models and data": {
        "models": Command(
            "list all networks with parameters, FLOPs and published accuracy", "models.command", "Models"
        ),
        "convert": Command("convert weights of other implementations", "convert.command", "Convert"),
        "data": Command("pack images into shards, check them, or measure reading speed", "data.command", "Data"),
    },
    "Speed and correctness": {
        "bench": Command("measure speed and memory of the operation, layers and networks", "bench.command", "Bench"),
        "reproduce": Command("reproduce the paper's tables and figures", "experiments.reproduce.command", "Reproduce"),
        "selftest": Command(
            "check every implementation against the paper's equations on this machine", "selftest.run", "Selftest"
        ),
    },
}
EXPERIMENTS = {
    "compare": Command(
        "compare networks over several seeds, each tuned with the same budget", "experiments.compare", "Compare"
    ),
    "language": Command(
        "train a byte-level language model with lambda layers or softmax attention",
        "experiments.language.command",
        "LanguageCommand",
    ),
    "rounds": Command(
        "run iterated self-training: each student is the next teacher", "experiments.rounds.command", "rounds_command"
    ),
    "webdemo": Command(
        "open a web page that classifies pictures and shows which pixels each layer uses",
        "experiments.webdemo.command",
        "WebDemo",
    ),
}
GROUP = "experiments"
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
MOVED = {
    "bench engine": "`python benchmarks/loop_overhead.py`, in the repository",
    "bench plot": "`python benchmarks/plot_results.py`, in the repository",
    "compare": "`lambdanets experiments compare`",
    "detect bench": "`python benchmarks/detector_step.py`, in the repository",
    "digits": "`lambdanets demo`",
    "experiments language compare": "`python benchmarks/language_models.py`, in the repository",
    "language": "`lambdanets experiments language`",
    "pseudo-label": "`lambdanets pseudo label`",
    "pseudo-rounds": "`lambdanets experiments rounds`",
    "pseudo-select": "`lambdanets pseudo select`",
    "tour": "`lambdanets demo`",
    "train demo": "`lambdanets demo`; its recipe alone is `lambdanets train digits`",
}
DEMO_OPTIONS = ("-h", "--help", "--output")

LONGEST = 4_000  # characters of an error message
OUT_OF_MEMORY = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|Storage size .* overflowed")
PARAGRAPH_LINE = re.compile(r"(?<!\n)\n(?!\n|- )")  # a line break inside a paragraph
EXTRAS = {"timm": "bench", "safetensors": "hub", "huggingface_hub": "hub"}  # the extra of a package; default `train`


def parse(arguments: Sequence[str]) -> Any:
    """Return the command of a command line, with its options, ready to run."""
    words = list(arguments)
    check_moved(words)
    commands, experiments, path = installed(COMMANDS), installed(EXPERIMENTS), []
    if words[:1] == [GROUP] and experiments:
        commands, path = experiments, [GROUP]
    name, *options = words[len(path) :] or ["--help"]
    if name in ("-h", "--help"):
        print(help_of_experiments() if path else help_of_all())
        raise SystemExit(0)
    if name not in commands:
        there = [*commands, GROUP] if experiments and not path else list(commands)
        close = get_close_matches(name, there)
        hint = f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(there)}"
        raise ValueError(f"unknown {'experiment' if path else 'command'} {name!r}: {hint}")
    import tyro

    join_help_lines()
    return tyro.cli(
        commands[name].options(words),
        prog=" ".join(["lambdanets", *path, name]),
        args=options,
        config=(tyro.conf.CascadeSubcommandArgs,),  # allows options of `train` after the recipe
    )


def join_help_lines() -> None:
    """Join the lines of each paragraph of attribute docstrings: tyro keeps line breaks before indented lines."""
    from docstring_parser import attrdoc

    def value_of(node: Any) -> Any:
        return PARAGRAPH_LINE.sub(" ", cleandoc(node.value)) if isinstance(node.value, str) else node.value

    attrdoc.ast_get_constant_value = value_of


def installed(commands: Mapping[str, Command]) -> dict[str, Command]:
    return {name: command for name, command in commands.items() if command.installed}


def check_moved(words: list[str]) -> None:
    """Raise a ValueError with the new name if a command has been renamed."""
    for old in (" ".join(words[:length]) for length in (1, 2, 3)):
        if old in MOVED:
            raise ValueError(f"`lambdanets {old}` is now {MOVED[old]}")
    if words[:1] == ["demo"] and words[1:] and words[1].partition("=")[0] not in DEMO_OPTIONS:
        raise ValueError("`lambdanets demo` only takes --output; its web page is now `lambdanets experiments webdemo`")


def help_of_all() -> str:
    lines = [
        "usage: lambdanets COMMAND ...",
        "",
        "LambdaNetworks in PyTorch. `lambdanets COMMAND --help` describes a command, `lambdanets --version` prints the",
        "version. Start with `lambdanets demo`: it takes two minutes on a CPU and downloads nothing.",
    ]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:", *listing(installed(group))]
    if experiments := installed(EXPERIMENTS):
        lines += ["", "Experiments:", f"  {GROUP:<12} {', '.join(experiments)}"]
    return "\n".join(lines)


def help_of_experiments() -> str:
    lines = [
        f"usage: lambdanets {GROUP} COMMAND ...",
        "",
        f"Experiments with the library. `lambdanets {GROUP} COMMAND --help` describes a command.",
        "",
    ]
    return "\n".join([*lines, *listing(installed(EXPERIMENTS))])


def listing(commands: Mapping[str, Command]) -> list[str]:
    return [f"  {name:<12} {command.summary}" for name, command in commands.items()]


def sentence(error: Exception) -> str:
    """Return an error's message as one printable line of bounded length, since it may quote the contents of a file."""
    text = printable(" ".join(str(error).split()))
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1000]} ... {text[-1000:]}"
    full = isinstance(error, OSError) and error.errno in FULL
    return f"{text}. Free some space and run the command again" if full else text


def loss_of_memory(error: BaseException) -> str | None:
    """Return a message for the user if the error means that memory ran out, otherwise None."""
    text = " ".join(str(error).split())
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not OUT_OF_MEMORY.search(text):
        return None
    said = f" ({printable(text[:200])})" if text else ""
    return f"memory ran out{said}: use smaller images or batches, a smaller network, or a machine with more memory"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; 2 means that the input was refused with a message on stderr."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"lambdanets {__version__}")
        return 0
    try:
        return parse(arguments).run()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe: discard the remaining output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:  # refused input: print the message without a traceback
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
            raise  # a bug of this package
        print(
            f"lambdanets: this needs {package}: pip install 'lambdanets[{EXTRAS.get(package, 'train')}]'",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

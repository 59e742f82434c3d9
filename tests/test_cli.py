"""The command line: help, versions, refusals. Commands themselves are tested where they live."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lambdanets import __version__, cli
from lambdanets.cli import COMMANDS, EXPERIMENTS, GROUPS, MOVED, main

EXTRA_PACKAGES = [
    *("PIL", "timm", "torchvision", "matplotlib", "safetensors", "huggingface_hub", "tensorboard", "webdataset"),
    *("mlxtend", "imagehash", "scipy", "faster_coco_eval", "gradio", "onnx", "onnxscript", "onnxruntime"),
]


def stopped(arguments, capsys):
    """Exit status, stdout and stderr of a command line that the parser ends."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


EVERY_COMMAND = [[name] for name in COMMANDS] + [["experiments", name] for name in EXPERIMENTS]


@pytest.mark.parametrize("command", [*EVERY_COMMAND, *(["bench", what] for what in ("op", "layer", "kernels"))])
def test_help_explains_every_option(command, capsys):
    code, out, _ = stopped([*command, "--help"], capsys)
    assert code == 0
    assert f"usage: lambdanets {' '.join(command)} " in out
    assert "None" not in out  # a default that says nothing


def test_help_shows_commands_in_groups(capsys):
    code, out, _ = stopped(["--help"], capsys)
    assert code == 0
    lines = out.splitlines()
    for title, commands in GROUPS.items():
        start = lines.index(f"{title}:") + 1
        assert [line.split()[0] for line in lines[start : start + len(commands)]] == list(commands)
    assert "  experiments  compare, language, rounds, webdemo" in lines
    assert len(COMMANDS) + 1 <= 16
    assert all(len(line) <= 110 for line in lines)


def test_help_shows_the_experiments(capsys):
    code, out, _ = stopped(["experiments"], capsys)
    assert code == 0
    assert all(f"\n  {name} " in out for name in EXPERIMENTS)


@pytest.mark.parametrize("old", MOVED)
def test_old_names_say_where_they_moved(old, capsys):
    assert main([*old.split(), "--anything", "else"]) == 2
    err = capsys.readouterr().err
    assert err == f"lambdanets: `lambdanets {old}` is now {MOVED[old]}\n"
    for new in re.findall(r"`lambdanets ([^`]+)`", MOVED[old]):
        assert stopped([*new.split(), "--help"], capsys)[0] == 0


@pytest.mark.parametrize("words", ["runs/pets", "--host 0.0.0.0", "--no-browser"])
def test_the_old_web_page_says_where_it_moved(words, capsys):
    assert main(["demo", *words.split()]) == 2
    assert "`lambdanets experiments webdemo`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trane"], "unknown command 'trane': did you mean train?"),
        (["zzz"], "unknown command 'zzz': choose from train, "),
        (["experiments", "langage"], "unknown experiment 'langage': did you mean language?"),
        (["--colour"], "unknown command '--colour'"),
    ],
)
def test_unknown_commands_are_refused(words, said, capsys):
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_without_a_command_shows_help(capsys):
    code, out, _ = stopped([], capsys)
    assert code == 0
    assert "selftest" in out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lambdanets {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["selftest", "--backend", "magic"], ["magic", "gemm", "conv", "fft"]),
        (["selftest", "--device", "toaster"], ["toaster", "cpu"]),
        (["bench", "op", "--device", "cpu", "--shapes", "32x32"], ["32x32", "HEIGHTxWIDTHxCHANNELS"]),
        (["bench", "layer", "--device", "cpu", "--scopes", "wide"], ["wide", "global"]),
        (["bench", "layer", "--device", "cpu", "--shapes", "8x8x30"], ["8x8x30", "--heads 4"]),
    ],
)
def test_refusals_are_one_sentence(arguments, words, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("lambdanets: ")
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words)


def test_a_refusal_is_printable_and_bounded(tmp_path, capsys):
    """It may quote what a file holds."""
    (tmp_path / "config.json").write_text(json.dumps({"\x1b[31m" + "x" * 100_000: 1}))
    assert main(["train", "resume", str(tmp_path)]) == 2
    err = capsys.readouterr().err.removesuffix("\n")
    assert err.isprintable()
    assert len(err) < 4_100
    assert "unknown key \\x1b[31mxxx" in err


class Running:
    """A command that calls a function."""

    def __init__(self, function):
        self.function = function

    def run(self):
        self.function()
        return 0


def raised(error):
    raise error


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: torch.empty(2**50), "memory ran out (.*can't allocate memory.*): use smaller images or batches"),
        (lambda: torch.empty(10**9, 10**9, 16), "memory ran out (Storage size .* overflowed"),
        (lambda: np.empty(2**50), "memory ran out (Unable to allocate 8.00 PiB"),
        (lambda: raised(MemoryError()), "memory ran out: use smaller"),
        (lambda: raised(torch.OutOfMemoryError("CUDA out of memory.")), "memory ran out (CUDA out of memory.): use"),
        (
            lambda: Path("/dev/full").write_text("x"),
            "No space left on device. Free some space and run the command again",
        ),
    ],
)
def test_memory_and_disks_that_are_full_are_sentences(function, words, monkeypatch, capsys):
    monkeypatch.setattr(cli, "parse", lambda _: Running(function))
    assert main(["anything"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(re.escape(words).replace(r"\.\*", ".*"), err)


def test_an_error_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(cli, "parse", lambda _: Running(lambda: torch.zeros(2) + torch.zeros(3)))
    with pytest.raises(RuntimeError, match="must match"):
        main(["anything"])


def test_an_unknown_option_is_refused(capsys):
    code, _, err = stopped(["selftest", "--nonsense"], capsys)
    assert code == 2
    assert "nonsense" in err


def test_python_m_gives_the_exit_status():
    done = subprocess.run(
        [sys.executable, "-m", "lambdanets", "selftest", "--backend", "magic"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_reader_that_has_enough_is_no_error():
    command = f"{sys.executable} -u -m lambdanets models --help | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["--help"], 0, ""),
        (["models", "lambda_resnet50"], 0, ""),
        (["reproduce", "memory"], 0, ""),
        (
            ["reproduce", "extra-data", "--no-measure", "--device", "cpu"],
            2,
            "this needs timm: pip install 'lambdanets[bench]'",
        ),
        (["view", "resnet50", "a.png"], 2, "pip install 'lambdanets[train]'"),
    ],
)
def test_without_what_only_extras_bring(words, status, sentence, tmp_path):
    """Whoever has torch, numpy, rich and tyro, the plain install, can use what needs no more."""
    code = (
        f"import sys; sys.modules |= dict.fromkeys({EXTRA_PACKAGES})\n"
        f"from lambdanets.cli import main; sys.exit(main({words}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert "Traceback" not in done.stderr
    assert (done.returncode, sentence in done.stderr) == (status, True)


def test_lines_of_option_help_are_joined(monkeypatch, capsys):
    """Wherever the lines of a docstring end in the source."""
    monkeypatch.setenv("COLUMNS", "2000")
    with pytest.raises(SystemExit):
        main(["train", "digits", "--help"])
    out = capsys.readouterr().out
    for start, end in (
        ("--find-rate", "find_rate.json and find_rate.svg into --out"),
        ("--data.cache", "shows the choice"),
    ):
        line = next(line for line in out[out.index(start) :].splitlines() if end in line)
        assert line.lstrip("│ ")[0].isupper() or start in line

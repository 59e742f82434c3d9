"""The layout of the package: the core works without the experiments, and recipes are only recipes."""

import ast
import importlib
import inspect
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lambdanets
from lambdanets import recipes
from lambdanets.train.config import RunConfig

PACKAGE = Path(lambdanets.__file__).parent
FLOORS = (  # each imports only those before it
    *("typed", "files", "runs", "machine", "options", "tables", "ops", "layers", "data", "models", "selftest"),
    *("report", "train", "pseudo", "detect", "view", "export", "convert", "recipes", "bench", "experiments"),
)
COMMANDS = ("command.py", "cli.py")  # parse and call, and may import any floor but the experiments
EXPERIMENTS = ("compare", "language", "reproduce", "rounds", "webdemo")

# What must work after an experiment was deleted: the help, the help of every command, and a command that runs.
PROGRAM = """
import contextlib, io, sys
from lambdanets.cli import COMMANDS, EXPERIMENTS, GROUP, installed, main

def said(*words, status=0):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            ended = main(words)
        except SystemExit as error:
            ended = error.code
    assert ended == status, (words, ended, out.getvalue())
    return out.getvalue()

listed = [line.split()[0] for line in said("--help").splitlines() if line.startswith("  ")]
assert listed == [*installed(COMMANDS), *([GROUP] if installed(EXPERIMENTS) else [])], listed
assert "76.9 at 224" in said("models", "resnet50")
for name in sys.argv[1:]:
    assert name not in listed + said("--help").partition("Experiments:")[2].replace(",", "").split()
    said(*([name] if name in COMMANDS else [GROUP, name]), status=2)
for name in installed(COMMANDS):
    if not installed(EXPERIMENTS):
        assert f"usage: lambdanets {name} " in said(name, "--help")
"""


def imported(path: Path) -> set[str]:
    """The modules that a file imports, also within functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.relative_to(PACKAGE.parent).parts[: -node.level]) if node.level else ""
            found |= {".".join(filter(None, (package, node.module, one.name))) for one in node.names}
    return found


def floor_of(place: Path) -> str:
    return place.parts[0].removesuffix(".py")


def test_no_floor_imports_one_above_it():
    found = []
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE)
        if floor_of(place) not in FLOORS or place.name in COMMANDS:
            continue
        above = FLOORS[FLOORS.index(floor_of(place)) + 1 :]
        names = {name.split(".")[1] for name in imported(path) if name.startswith("lambdanets.")}
        found += [f"{place} imports {name}" for name in names if name in above]
    assert not found


def experiments_in(path: Path) -> set[str]:
    """The experiments that a file imports."""
    names = [name.split(".") for name in imported(path)]
    return {".".join(name[2:3]) for name in names if name[:2] == ["lambdanets", "experiments"]}


def test_the_core_does_not_import_experiments():
    core = [path for path in PACKAGE.rglob("*.py") if "experiments" not in path.relative_to(PACKAGE).parts]
    assert len(core) > 100
    assert not [path for path in core if experiments_in(path)]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_do_not_import_each_other(name: str):
    folder = PACKAGE / "experiments"
    files = [folder / f"{name}.py"] if (folder / f"{name}.py").is_file() else [*(folder / name).rglob("*.py")]
    assert files
    assert all(experiments_in(path) <= {name} for path in files)


@pytest.mark.parametrize("name", [*EXPERIMENTS, "all"])
def test_experiments_can_be_removed(name: str, tmp_path: Path):
    shutil.copytree(PACKAGE, tmp_path / "lambdanets", ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "lambdanets" / "experiments"
    if name == "all":
        shutil.rmtree(folder)
    elif (folder / name).is_dir():
        shutil.rmtree(folder / name)
    else:
        (folder / f"{name}.py").unlink()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *(EXPERIMENTS if name == "all" else [name])],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [one.name for one in pkgutil.iter_modules(recipes.__path__)])
def test_recipes_are_functions_that_return_configurations(name: str):
    module = importlib.import_module(f"lambdanets.recipes.{name}")
    functions = [one for one in vars(module).values() if inspect.isfunction(one) and one.__module__ == module.__name__]
    assert functions
    assert all(issubclass(inspect.signature(function).return_annotation, RunConfig) for function in functions)
    assert not {"rich", "tyro"} & {one.partition(".")[0] for one in imported(Path(str(module.__file__)))}

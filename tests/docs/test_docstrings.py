"""The reference documents every name: docstrings have a first sentence, and their examples run."""

import doctest
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

API = Path(__file__).resolve().parents[2] / "docs" / "api"
DIRECTIVE = re.compile(r"^\.\. (currentmodule|auto\w+):: (\S+)((?:\n +:.*)*)", re.MULTILINE)
MEMBERS = re.compile(r":members: (.+)")

# Packages for whose `__all__` an example is required in every docstring
WITH_EXAMPLES = (
    "lambdanets",
    "lambdanets.convert",
    "lambdanets.experiments.reproduce",
    "lambdanets.layers",
    "lambdanets.models",
    "lambdanets.ops",
)
# Packages of which every function in the reference must have an example
WITH_FUNCTION_EXAMPLES = (
    *("lambdanets.accelerate.", "lambdanets.data.", "lambdanets.detect.", "lambdanets.experiments."),
    *("lambdanets.export.", "lambdanets.models.", "lambdanets.pseudo.", "lambdanets.recipes.", "lambdanets.train."),
)
# Packages for whose `__all__` every argument must be documented
WITH_ARGUMENTS = ("lambdanets.convert", "lambdanets.experiments.reproduce", "lambdanets.layers", "lambdanets.ops")
ARGUMENT = re.compile(r"^    (\w+(?:, \w+)*): ", re.MULTILINE)
# Exceptions: constants, a union of types, and results that depend on the machine
WITHOUT_EXAMPLE = {
    "lambdanets.convert.FORMATS",
    "lambdanets.detect.draw.draw",
    "lambdanets.detect.precision.available",
    "lambdanets.experiments.reproduce.DETECTION",
    "lambdanets.experiments.reproduce.ROWS",
    "lambdanets.experiments.reproduce.TABLES",
    "lambdanets.models.LAYERS",
    "lambdanets.models.ROWS",
    "lambdanets.ops.Positions",
}


def listed() -> dict[str, Any]:
    """Return the objects that the pages of the reference list, by qualified name."""
    found = {}
    for page in sorted(API.glob("*.md")):
        module = ""
        for kind, name, options in DIRECTIVE.findall(page.read_text()):
            if kind == "currentmodule":
                module = name
            elif kind == "automodule":
                module = name
                owner = importlib.import_module(name)
                members = MEMBERS.search(options)
                names = members[1].split(", ") if members else getattr(owner, "__all__", [])
                found |= {f"{name}.{one.strip()}": getattr(owner, one.strip()) for one in names}
            elif kind != "autodata":
                name = name if name.startswith("lambdanets.") else f"{module}.{name}"
                owner, _, last = name.rpartition(".")
                found[name] = getattr(importlib.import_module(owner), last)
    return found


def exported() -> dict[str, Any]:
    """Return the objects whose docstrings must have an example, by qualified name."""
    names = [(package, name) for package in WITH_EXAMPLES for name in importlib.import_module(package).__all__]
    found = {f"{package}.{name}": getattr(importlib.import_module(package), name) for package, name in names}
    functions = {name: one for name, one in listed().items() if inspect.isfunction(one)}
    found |= {name: one for name, one in functions.items() if name.startswith(WITH_FUNCTION_EXAMPLES)}
    return {name: one for name, one in found.items() if name not in WITHOUT_EXAMPLE}


PUBLIC = {name: one for name, one in (listed() | exported()).items() if inspect.isclass(one) or callable(one)}
DOCUMENTED = {name: inspect.getdoc(one) or "" for name, one in PUBLIC.items()}


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_start_with_a_sentence(name: str):
    first = DOCUMENTED[name].partition("\n\n")[0]
    assert first, f"{name} has no docstring"
    assert re.match(r"[A-Z`\[]|torch|timm", first), first
    assert first.endswith((".", ":")), first
    assert not first.startswith(PUBLIC[name].__name__ + "("), f"dataclasses generate this one: {first}"


@pytest.mark.parametrize("name", [name for name in exported() if name.rpartition(".")[0] in WITH_ARGUMENTS])
def test_every_argument_is_documented(name: str):
    one = PUBLIC[name]
    arguments = list(inspect.signature(one.__init__ if inspect.isclass(one) else one).parameters)
    _, _, sections = DOCUMENTED[name].partition("\n\nA")  # Args or Attributes
    listed = {each for names in ARGUMENT.findall(sections) for each in names.split(", ")}
    assert set(arguments) - {"self"} <= listed


@pytest.mark.parametrize("name", exported())
def test_exported_names_have_an_example(name: str):
    assert ">>> " in DOCUMENTED[name]


@pytest.mark.parametrize("name", [name for name in PUBLIC if ">>> " in DOCUMENTED[name]])
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    example = doctest.DocTestParser().get_doctest(DOCUMENTED[name], {}, name, None, 0)
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert result.attempted, name
    assert not result.failed, "".join(said)


def test_pages_of_the_reference_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "some.md").write_text(
        ".. currentmodule:: lambdanets.ops\n\n.. autoclass:: Dense\n   :members:\n\n"
        ".. automodule:: lambdanets.ops.positions\n   :members: Axis, Kept\n"
    )
    monkeypatch.setitem(globals(), "API", tmp_path)
    assert list(listed()) == ["lambdanets.ops.Dense", "lambdanets.ops.positions.Axis", "lambdanets.ops.positions.Kept"]

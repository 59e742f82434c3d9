"""`import lambdanets` stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import lambdanets

HEAVY = ["torchvision", "timm", "triton", "matplotlib", "tyro", "lambda_networks", "einops", "rich"]


def test_import_loads_nothing_heavy():
    code = f"import sys, lambdanets; print([name for name in {HEAVY} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert loaded.strip() == "[]"


def test_public_names_are_there():
    from lambdanets import layers, ops

    for module in (lambdanets, layers, ops):
        assert all(hasattr(module, name) for name in module.__all__)
    assert lambdanets.__version__


PACKAGE = Path(lambdanets.__file__).parent
FLOORS = (  # each imports only those before it
    *(
        "typed",
        "files",
        "runs",
        "machine",
        "options",
        "tables",
        "ops",
        "layers",
        "data",
        "models",
        "selftest",
        "report",
        "train",
    ),
    *("pseudo", "detect", "view", "export", "convert", "recipes", "bench", "experiments"),
)
COMMANDS = ("command.py", "cli.py")  # parse and call, and may import any floor but the experiments


def imports(path: Path):
    """The parts of the package that a file imports, also inside of functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module] if node.module != "lambdanets" else [f"lambdanets.{one.name}" for one in node.names]
        elif isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("lambdanets."))


def floor_of(place: Path) -> str:
    return place.parts[0].removesuffix(".py")


def test_no_floor_imports_one_above_it():
    found = []
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE)
        if floor_of(place) not in FLOORS or place.name in COMMANDS or place.parts == ("detect", "bench.py"):
            continue
        above = FLOORS[FLOORS.index(floor_of(place)) + 1 :]
        found += [f"{place} imports {name}" for name in imports(path) if name in above]
    assert not found


def test_the_core_does_not_import_experiments():
    """Only the command line does, so that any of them can be removed."""
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE)
        assert floor_of(place) in ("experiments", "cli", "commands") or "experiments" not in imports(path), place
